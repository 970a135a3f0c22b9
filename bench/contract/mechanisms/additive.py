"""Noise of mean 0 that is added to every value, whatever the value, and the mean of several
clients' values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.contract.mechanisms.base import Base, Mechanism, Prepared


@dataclass(frozen=True, kw_only=True)
class NoiseFree(Mechanism):
    """The deterministic part of a mechanism.

    Attributes:
        each: The mechanism as a table (`Mechanism.to_dict`).
    """

    each: dict[str, Any]
    random = False

    def apply(self, values: Tensor) -> Tensor:
        return Mechanism.from_dict(self.each).apply(values)


@dataclass(frozen=True, kw_only=True)
class Averaged(Mechanism):
    """The mean over clients of what a mechanism made of each one's values, whose law is not known.

    Attributes:
        each: The mechanism's name.
    """

    each: str


def average(mechanisms: Sequence[Mechanism], count: int) -> list[Mechanism]:
    """What is so of the mean of `count` clients' values that mechanisms acted on independently.

    What scales whole rows still does so with each client's. Noise of mean 0 is nearly normal
    (central limit), where it has no law of its own for a mean, and several noises of one kind of
    upload are one. Of anything else no law is told, so that attacks that need one refuse it.
    """
    means: list[Mechanism] = []
    noises: dict[str, list[Mechanism]] = {}
    for mechanism in mechanisms:
        if mechanism.faithful and mechanism.random and mechanism.spread > 0:
            noises.setdefault(mechanism.of, []).append(mechanism)
            if mechanism.clips and count > 1:
                means.append(NoiseFree(of=mechanism.of, each=mechanism.to_dict()))
        elif count == 1 or mechanism.shrinkage(torch.zeros(1, 1)) is not None:
            means.append(mechanism)
        elif mechanism.random or mechanism.tells_interval:
            means.append(Averaged(of=mechanism.of, each=type(mechanism).__name__))
    for same in noises.values():
        own = same[0] if count == 1 else same[0].of_mean(count)
        if len(same) == 1 and own is not None:
            means.append(own)
            continue
        spread = sum(m.spread for m in same) / count
        means.append(GaussianNoise(of=same[0].of, std=math.sqrt(spread)))
    return means


@dataclass(frozen=True, kw_only=True)
class _Gaussian(Mechanism):
    """N(0, std^2) per value, smooth already: softness changes nothing."""

    std: float

    @property
    def random(self) -> bool:
        return self.std > 0

    @property
    def variance(self) -> float:
        return self.std**2

    @property
    def proof(self) -> tuple[str, float] | None:
        return "Gaussian", self.std

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        noise = torch.randn(values.shape, generator=rng, dtype=values.dtype)
        return self.apply(values) + self.std * noise

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        if not self.random:
            return super().prepared(seen, softness, base=base)
        return Prepared(partial(_normal, variance=self.variance), (seen,))


def _normal_of_weighed(sent: Tensor, seen: Tensor, *, precision: float) -> tuple[Tensor, Tensor]:
    """As `_normal`, rounded as the weighed squared distance of noise-free smashed data is."""
    rest = sent - seen
    weighed = rest * precision
    return weighed * rest, 2 * weighed


def _normal(sent: Tensor, seen: Tensor, *, variance: float) -> tuple[Tensor, Tensor]:
    rest = (sent - seen) / variance
    return rest.square() * (variance / 2), rest


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(_Gaussian):
    """Independent N(0, std^2) per coordinate.

    Attributes:
        std: Standard deviation.
    """


@dataclass(frozen=True, kw_only=True)
class LabelNoise(_Gaussian):
    """N(0, std^2) on every entry of a soft label.

    Attributes:
        std: Standard deviation.
    """


@dataclass(frozen=True, kw_only=True)
class SmashedNoise(_Gaussian):
    """Activations clipped value by value, then N(0, std^2) per value sent.

    Attributes:
        std: Standard deviation.
        low: Least value after the clip, None: not clipped.
        high: Largest value after the clip, None: not clipped.
    """

    low: float | None = None
    high: float | None = None

    def apply(self, values: Tensor) -> Tensor:
        open_ = self.low is None and self.high is None
        return values if open_ else values.clamp(self.low, self.high)

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        if not self.random:
            return super().prepared(seen, softness, base=base)
        return Prepared(partial(_normal_of_weighed, precision=1 / (2 * self.variance)), (seen,))


@dataclass(frozen=True, kw_only=True)
class LaplaceNoise(Mechanism):
    """Independent Laplace(scale) per coordinate.

    Attributes:
        scale: Mean of the noise's absolute value.
    """

    scale: float

    @property
    def random(self) -> bool:
        return self.scale > 0

    @property
    def variance(self) -> float:
        return 2 * self.scale**2

    @property
    def proof(self) -> tuple[str, float] | None:
        return "Laplace", self.scale

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        # The difference of two exponential draws.
        wide = torch.empty(2, *values.shape, dtype=torch.float64)
        one, two = (part.exponential_(generator=rng) for part in wide)
        return values + (self.scale * (one - two)).to(values)

    def softness(self, heat: float = 0.0) -> float:
        return 0.1

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        """softness: in units of the scale, within which the tip of |r| / scale is rounded so
        that L-BFGS can follow."""
        if not self.random:
            return super().prepared(seen, softness, base=base)
        return Prepared(partial(_laplace, scale=self.scale, softness=softness), (seen,))


def _laplace(sent: Tensor, seen: Tensor, *, scale: float, softness: float) -> tuple[Tensor, Tensor]:
    rest, soft = sent - seen, softness * scale
    if soft == 0:
        return rest.abs() / scale, rest.sign() / scale
    length = (rest.square() + soft**2).sqrt()
    return (length - soft) / scale, rest / (length * scale)
