"""Bits drawn from trained probabilities."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.contract.mechanisms.base import TINY, Base, Mechanism, Prepared, squared_distance
from bench.contract.mechanisms.signs import softplus

_NORMALS = (
    (0.061614410095116694, 0.32146330168924997),
    (0.37600595934489434, 0.4759332080852525),
    (0.4571707320302046, 0.7000469005051342),
    (0.10520889852978432, 1.024736252638218),
)
"""(weight, slope) of normal distribution functions whose sum is sigmoid within 5e-6, so that the
mean of sigmoid over normal noise has a closed form (Monahan and Stefanski 1992). Fitted to the
least largest error."""


@dataclass(frozen=True, kw_only=True)
class BernoulliMask(Mechanism):
    """Each value sent is a fresh Bernoulli(sigmoid(score)) bit, score being the trained variable.

    Attributes:
        clip: c; training began from broadcast probabilities clipped to [c, 1 - c].
        sampled: False where the probability itself is sent in place of the bit.
        score_std: Of normal noise on every score before its probability is taken.
        theta_std: Of normal noise on every probability, which is then clipped to [c, 1 - c].
        theta_clipped: Whether probabilities are clipped to [c, 1 - c] before that noise too.

    Raises:
        ValueError: For noise on scores and on probabilities together.
    """

    clip: float
    sampled: bool = True
    score_std: float = 0.0
    theta_std: float = 0.0
    theta_clipped: bool = False
    faithful = False
    scores = True

    def __post_init__(self) -> None:
        # The mean of a clipped probability under both noises has no closed form here.
        if self.score_std and self.theta_std:
            raise ValueError(
                f"score_std = {self.score_std} and theta_std = {self.theta_std}: "
                "noise stands on scores or on probabilities, not on both."
            )

    @property
    def random(self) -> bool:
        return self.sampled

    @property
    def proof(self) -> tuple[str, float] | None:
        return ("Gaussian", self.theta_std) if self.theta_std else None

    @property
    def noised(self) -> bool:
        """Whether noise comes before the draw."""
        return self.score_std > 0 or self.theta_std > 0

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        if self.score_std:
            noise = torch.randn(values.shape, generator=rng, dtype=values.dtype)
            values = values + self.score_std * noise
        theta = torch.sigmoid(values)
        if self.theta_std:
            theta = self._clip(theta) if self.theta_clipped else theta
            noise = torch.randn(values.shape, generator=rng, dtype=values.dtype)
            theta = self._clip(theta + self.theta_std * noise)
        if not self.sampled:
            return theta
        return (torch.rand(values.shape, generator=rng, dtype=values.dtype) < theta).to(values)

    def after_training(self) -> Mechanism:
        return replace(self, score_std=0.0)

    def chance(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of a 1, and its derivative by the score."""
        if self.score_std:
            chance, slope = torch.zeros_like(scores), torch.zeros_like(scores)
            for weight, steepness in _NORMALS:
                inner = steepness / math.hypot(1, steepness * self.score_std)
                chance = chance + weight * torch.special.ndtr(inner * scores)
                slope = slope + weight * inner * _normal_density(inner * scores)
        else:
            chance = torch.sigmoid(scores)
            slope = chance * (1 - chance)
        if not self.theta_std:
            return chance, slope
        theta, inside = chance, torch.ones_like(chance)
        if self.theta_clipped:
            theta = self._clip(chance)
            inside = (theta == chance).to(chance)
        # The mean of a clipped normal variable, in float64: strong noise leaves a small rest of
        # large terms.
        up, down = ((theta.double() - edge) / self.theta_std for edge in (self.clip, 1 - self.clip))
        mean = self.clip + self.theta_std * (_mean_above_0(up) - _mean_above_0(down))
        likely = torch.special.ndtr(up) - torch.special.ndtr(down)
        return mean.to(scores), likely.to(scores) * inside * slope

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        """-log P(bit) as a function of the score, smooth already. Of probabilities, the squared
        distance of the scores behind them (see `read`)."""
        if not self.sampled:
            return squared_distance(seen)
        return Prepared(self._misfit_under_noise if self.noised else _bernoulli, (seen,))

    def _misfit_under_noise(self, sent: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        chance, slope = self.chance(sent)
        likely = torch.where(seen > 0.5, chance, 1 - chance).clamp_min(TINY)
        return -likely.log(), torch.where(seen > 0.5, -slope, slope) / likely

    def estimate(self, seen: Tensor, *, base: Tensor | None = None) -> Tensor:
        """Scores to first order around the broadcast theta, unbiased to that order, if very
        noisy."""
        if base is None:
            raise ValueError("scores are estimated around the broadcast probabilities.")
        return self.received(base) - self.gradient(seen, base=base, step=1.0)

    def gradient(self, seen: Tensor, *, base: Tensor, step: float) -> Tensor:
        """As `estimate`: (theta - bit) / theta' is the scores' step."""
        chance, slope = self._expect(base)
        return (chance - seen) / (slope * step)

    def gradient_variance(
        self, estimate: Tensor, *, base: Tensor, step: float, decided: bool = False
    ) -> Tensor | float:
        return self._spread(base) / step**2

    def _expect(self, base: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of a 1, and its derivative by the score, where nothing was learnt."""
        if self.noised:
            return self.chance(self.received(base))
        theta = self._clip(base)
        return theta, theta * (1 - theta)

    def _spread(self, base: Tensor) -> Tensor:
        """Variance of the scores' estimate where nothing was learnt."""
        chance, slope = self._expect(base)
        return chance * (1 - chance) / slope.square() if self.noised else 1 / slope

    def received(self, base: Tensor) -> Tensor:
        return torch.logit(self._clip(base))

    def read(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Scores behind probabilities; one that was rounded to 0 or 1 tells none."""
        inside = (sent > 0) & (sent < 1)
        return torch.where(inside, torch.logit(sent), sent), inside | sent.isnan()

    def _clip(self, base: Tensor) -> Tensor:
        return base.clamp(self.clip, 1 - self.clip)


def _bernoulli(sent: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    return softplus(sent) - seen * sent, torch.sigmoid(sent) - seen


def _normal_density(z: Tensor) -> Tensor:
    return (-z.square() / 2).exp() / math.sqrt(2 * math.pi)


def _mean_above_0(z: Tensor) -> Tensor:
    """E max(z + N(0, 1), 0)."""
    return z * torch.special.ndtr(z) + _normal_density(z)
