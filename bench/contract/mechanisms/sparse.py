"""Of every upload only the largest values are sent; that a value was not sent bounds it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bench.contract.mechanisms.base import Base, Mechanism, Prepared

RESIDUAL = 0.5
"""Standard deviation of what earlier rounds left, in units of the least value that was sent.
Residuals are what was too small to be sent, so that none is above 1 and most are far below."""


@dataclass(frozen=True, kw_only=True)
class Sparsified(Mechanism):
    """Only the values of largest magnitude are sent, each cut to an interval; the others are 0.

    What was seen of rows [P, ...] is 0 where nothing was sent. The least magnitude of a row that
    was sent uncut bounds those that were not sent.

    Attributes:
        clip: Largest magnitude that is sent, None: any.
        residual: Whether what earlier rounds did not send was added before.
    """

    clip: float | None = None
    residual: bool = False
    tells_interval = True
    reads_absent = True

    @property
    def random(self) -> bool:
        """With a residual, which only the client knows, equal values are sent differently."""
        return self.residual

    @property
    def remembers(self) -> bool:
        return self.residual

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        if self.residual:
            return super().sample(values, rng, base=base)
        return values if self.clip is None else values.clamp(-self.clip, self.clip)

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        """The squared distance to the interval that a value lies in: itself where it was sent,
        what exceeds the clip where it was cut, and all that is small enough where it was not.
        With a residual, its likelihood."""
        size = seen.abs()
        sent = size > 0
        # float32 rounds what is sent, and a round trip through weights rounds it once more.
        cut = size >= (math.inf if self.clip is None else self.clip * (1 - 1e-5))
        # Of values that all were cut, none tells from which size on they were sent.
        least = torch.where(sent & ~cut, size, torch.inf).flatten(1).amin(dim=1)
        bound = least.view(-1, *[1] * (seen.ndim - 1)).expand_as(seen)
        low = torch.where(sent, torch.where(cut & (seen < 0), -torch.inf, seen), -bound)
        high = torch.where(sent, torch.where(cut & (seen > 0), torch.inf, seen), bound)
        if not self.residual:
            return Prepared(_outside, (low, high))
        std = torch.where(bound.isinf(), 1.0, RESIDUAL * bound)
        return Prepared(_with_residual, (low, high, std))


def _outside(sent: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    rest = sent - sent.clamp(low, high)
    return rest.square(), 2 * rest


def _with_residual(sent: Tensor, low: Tensor, high: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Of values known to lie in [low, high] after normal noise: its density where both are one,
    else the chance of the interval, by logistic noise of the same variance, whose tails do not
    underflow."""
    rest = (sent - low) / std
    known = low == high
    scale = std * (math.sqrt(3) / math.pi)
    up, down = (sent - low) / scale, (sent - high) / scale
    loss = -logsigmoid(up) - logsigmoid(-down)
    slope = (torch.sigmoid(down) - torch.sigmoid(-up)) / scale
    return torch.where(known, rest.square() / 2, loss), torch.where(known, rest / std, slope)
