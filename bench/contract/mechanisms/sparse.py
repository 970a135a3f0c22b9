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

SOFTEST = 1e-3
"""Noise that stands for none where a descent ends, in the same unit; it begins with 1."""


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
    vague = True
    anneals = True
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

    def softness(self, heat: float = 0.0) -> float:
        return SOFTEST ** (1 - heat)

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        """Which values can have become what was seen: the value itself where it was sent, all
        beyond where it was cut, all small enough ones where it was not sent.

        softness: Normal noise of so many times the least magnitude that was sent is taken to
            stand beside exact values, and logistic noise beside intervals; 0: the squared distance
            to the interval. With a residual, its likelihood, whatever the softness.
        """
        size = seen.abs()
        sent = size > 0
        # float32 rounds what is sent, and a round trip through weights rounds it once more.
        cut = size >= (math.inf if self.clip is None else self.clip * (1 - 1e-5))

        def least(which: Tensor) -> Tensor:
            smallest = torch.where(which, size, torch.inf).flatten(1).amin(dim=1)
            return smallest.view(-1, *[1] * (seen.ndim - 1)).expand_as(seen)

        # Of values that all were cut, none tells from which size on they were sent.
        bound = least(sent & ~cut)
        low = torch.where(sent, torch.where(cut & (seen < 0), -torch.inf, seen), -bound)
        high = torch.where(sent, torch.where(cut & (seen > 0), torch.inf, seen), bound)
        if softness == 0 and not self.residual:
            return Prepared(outside, (low, high))
        unit = least(sent)
        unit = torch.where(unit.isinf(), 1.0, unit)  # nothing was sent, and nothing compares
        return Prepared(_noised, (low, high, unit * (RESIDUAL if self.residual else softness)))


def outside(sent: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distance to the interval [low, high], and its derivative."""
    rest = sent - sent.clamp(low, high)
    return rest.square(), 2 * rest


def _noised(sent: Tensor, low: Tensor, high: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
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
