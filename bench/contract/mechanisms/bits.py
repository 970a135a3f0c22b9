"""Bits drawn from trained probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.contract.mechanisms.base import TINY, Mechanism, Prepared, squared_distance
from bench.contract.mechanisms.signs import softplus


@dataclass(frozen=True, kw_only=True)
class BernoulliMask(Mechanism):
    """Each value sent is a fresh Bernoulli(sigmoid(score)) bit, score being the trained variable.

    Attributes:
        clip: c; training began from broadcast probabilities clipped to [c, 1 - c].
        sampled: False where the probability itself is sent in place of the bit.
    """

    clip: float
    sampled: bool = True
    faithful = False
    scores = True

    @property
    def random(self) -> bool:
        return self.sampled

    @property
    def discrete(self) -> bool:
        return self.sampled

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Tensor | None = None) -> Tensor:
        theta = torch.sigmoid(values)
        if not self.sampled:
            return theta
        return (torch.rand(values.shape, generator=rng, dtype=values.dtype) < theta).to(values)

    def prepared(
        self, seen: Tensor, softness: float = 0.0, *, base: Tensor | None = None
    ) -> Prepared:
        """-log P(bit) as a function of the score, smooth already. Of probabilities, the squared
        distance of the scores behind them (see `read`)."""
        return Prepared(_bernoulli, (seen,)) if self.sampled else squared_distance(seen)

    def estimate(self, seen: Tensor, *, base: Tensor | None = None) -> Tensor:
        """Scores to first order around the broadcast theta, unbiased to that order, if very
        noisy."""
        if base is None:
            raise ValueError("scores are estimated around the broadcast probabilities.")
        theta = self._clipped(base)
        return torch.logit(theta) + (seen - theta) / (theta * (1 - theta))

    def gradient(self, seen: Tensor, *, base: Tensor, step: float) -> Tensor:
        """As `estimate`: (theta - bit) / theta' is the scores' step."""
        theta = self._clipped(base)
        return (theta - seen) / (theta * (1 - theta) * step)

    def gradient_variance(
        self, estimate: Tensor, *, base: Tensor, step: float, decided: bool = False
    ) -> Tensor | float:
        theta = self._clipped(base)
        return 1 / (theta * (1 - theta)) / step**2

    def signal_share(
        self,
        *,
        square: float,
        coordinates: int,
        gradient_square: float,
        base: Mapping[str, Tensor],
        step: float,
    ) -> float:
        variance = 0.0
        for value in base.values():
            theta = self._clipped(value.double())
            variance += float((1 / (theta * (1 - theta))).sum()) / step**2
        return 1 - variance / max(gradient_square, TINY)

    def received(self, base: Tensor) -> Tensor:
        return torch.logit(self._clipped(base))

    def read(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Scores behind probabilities; one that was rounded to 0 or 1 tells none."""
        inside = (sent > 0) & (sent < 1)
        return torch.where(inside, torch.logit(sent), sent), inside | sent.isnan()

    def _clipped(self, base: Tensor) -> Tensor:
        return base.clamp(self.clip, 1 - self.clip)


def _bernoulli(sent: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    return softplus(sent) - seen * sent, torch.sigmoid(sent) - seen
