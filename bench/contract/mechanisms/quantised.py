"""Values sent in few bits: rounded to a grid that each tensor's own values span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bench.contract.mechanisms.base import TINY, Base, Mechanism, Prepared
from bench.contract.mechanisms.rounding import SOFTNESS, rounded
from bench.contract.mechanisms.sparse import SOFTEST, outside

Rounding = Literal["qsgd", "sign", "int8", "stochastic"]


@dataclass(frozen=True, kw_only=True)
class Quantised(Mechanism):
    """Every value of a tensor is sent as one of a grid's, whose ends its own values tell.

    The tensors of rows [P, ...] are those of the broadcast values; without any, a row is one.

    Attributes:
        how: `qsgd`, a sign and one of 2^(bits - 1) - 1 steps up to the largest magnitude, rounded
            at random so that the mean is right; `stochastic`, one of 2^bits - 1 steps from the
            least to the largest value, rounded alike; `int8`, the nearest of 2^(bits - 1) - 1
            steps to either side; `sign`, the sign times the mean magnitude.
        bits: Of one value on the wire.
    """

    how: Rounding
    bits: int

    @property
    def random(self) -> bool:
        return self.how in ("qsgd", "stochastic")

    @property
    def tells_interval(self) -> bool:  # type: ignore[override]
        return not self.random

    @property
    def vague(self) -> bool:  # type: ignore[override]
        return self.how == "sign"

    @property
    def anneals(self) -> bool:  # type: ignore[override]
        return self.how == "sign"

    @property
    def steps(self) -> int:
        """Of the grid, from 0 or from its lower end."""
        return 2**self.bits - 1 if self.how == "stochastic" else max(1, 2 ** (self.bits - 1) - 1)

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        wide = values.double()
        low, step = self._grids(wide, base)
        if self.how == "sign":
            return torch.where(wide < 0, -step, step).to(values)
        place = (wide - low) / step.clamp_min(TINY)
        if self.random:
            drawn = torch.rand(place.shape, generator=rng, dtype=torch.float64)
            place = place.floor() + (drawn < place - place.floor())
        place = place.round().clamp(0 if self.how == "stochastic" else -self.steps, self.steps)
        return (low + place * step).to(values)

    def _grids(self, values: Tensor, base: Base) -> tuple[Tensor, Tensor]:
        """(where the grid is 0, its step) for every value of rows, from noise-free values or from
        what was seen of them, which tells the same: the ends of a grid are on it."""
        sizes = [values[0].numel()]
        if isinstance(base, Mapping):
            sizes = [v.numel() for v in base.values()]
        lows, steps = [], []
        for piece in values.flatten(1).split(sizes, dim=1):
            low = torch.zeros_like(piece[:, :1])
            if piece.shape[1] == 0:
                step = low
            elif self.how == "sign":
                step = piece.abs().mean(dim=1, keepdim=True)
            elif self.how == "stochastic":
                low = piece.amin(dim=1, keepdim=True)
                step = (piece.amax(dim=1, keepdim=True) - low) / self.steps
            else:
                step = piece.abs().amax(dim=1, keepdim=True) / self.steps
            lows.append(low.expand_as(piece))
            steps.append(step.expand_as(piece))
        return torch.cat(lows, dim=1).view_as(values), torch.cat(steps, dim=1).view_as(values)

    def softness(self, heat: float = 0.0) -> float:
        return SOFTEST ** (1 - heat) if self.how == "sign" else SOFTNESS

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        """The chance of what was seen where it is random; of `int8` the squared distance to the
        interval that is rounded to it; of `sign` the chance of the sign beside logistic noise of
        `softness` times the mean magnitude, since a sign alone is right for ever smaller values.
        """
        step = self._grids(seen, base)[1]
        if self.how == "int8":
            return Prepared(outside, (seen - step / 2, seen + step / 2))
        if self.how == "sign":
            return Prepared(partial(_sign, softness=softness), (seen.sign(), step.clamp_min(TINY)))
        return Prepared(partial(rounded, softness=softness), (seen, step.clamp_min(TINY)))


def _sign(sent: Tensor, sign: Tensor, size: Tensor, *, softness: float) -> tuple[Tensor, Tensor]:
    if softness == 0:
        wrong = (sent * sign < 0).to(sent)
        return torch.where(wrong > 0, torch.inf, 0.0), torch.zeros_like(sent)
    scale = softness * size
    away = sent * sign / scale
    return -logsigmoid(away), -torch.sigmoid(-away) * sign / scale
