"""Values rounded to a grid at random, up or down, so that their mean is right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.contract.mechanisms.base import Base, Mechanism, Prepared

SOFTNESS = 0.1
"""Of a law of grids, in units of a grid's step."""


@dataclass(frozen=True, kw_only=True)
class FixedPoint(Mechanism):
    """Values cut to [-clip, clip] and rounded at random to multiples of a step above -clip.

    Attributes:
        clip: Largest magnitude.
        step: Distance of neighbouring values.
    """

    clip: float
    step: float

    def apply(self, values: Tensor) -> Tensor:
        return values.clamp(-self.clip, self.clip)

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        place = (self.apply(values).double() + self.clip) / self.step
        up = torch.rand(place.shape, generator=rng, dtype=torch.float64) < place - place.floor()
        return ((place.floor() + up) * self.step - self.clip).to(values)

    def softness(self, heat: float = 0.0) -> float:
        return SOFTNESS

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        step = torch.full_like(seen, self.step)
        return Prepared(partial(rounded, softness=softness), (seen, step))

    def gradient_variance(
        self, estimate: Tensor, *, base: Tensor, step: float, decided: bool = False
    ) -> Tensor | float:
        return self.spread * (1.0 if self.of == "gradient" else 1 / step) ** 2

    @property
    def spread(self) -> float:
        return self.step**2 / 6


def rounded(sent: Tensor, seen: Tensor, step: Tensor, *, softness: float) -> tuple[Tensor, Tensor]:
    """-log of 1 - |sent - seen| / step, the chance that a value is rounded to what was seen.

    softness: within which of the end of its step the loss goes on along its tangent, and its tip
    is rounded, so that a descent can follow; 0: it is infinite beyond.
    """
    rest = (sent - seen) / step
    if softness == 0:
        away = rest.abs()
        inside = (1 - away).clamp_min(0)
        return -inside.log(), torch.where(away < 1, rest.sign() / (inside * step), 0.0)
    away = (rest.square() + softness**2).sqrt()
    inside = (1 + softness - away).clamp_min(softness)  # 1 at the tip
    excess = (away - 1).clamp_min(0)
    return -inside.log() + excess / softness, rest / (away * inside * step)
