"""Random signs and magnitude factors."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.contract.mechanisms.base import Base, Law, Mechanism, Prepared

_LEAST_SPREAD = 1e-3
"""Least relative spread of a magnitude in the smoothed likelihood."""
_SOFTNESS = {"weights": (1e-2, 1e-4)}
_SOFTNESS_OF_STEPS = 1.0, 1e-2
"""(most, least) softness. Weights are known but for a small step, so that less tells them."""
_ROUNDING = 1e-6
"""Relative rounding of a float32 magnitude."""


@dataclass(frozen=True, kw_only=True)
class SignPerturbation(Mechanism):
    """v -> |v| t with v's sign kept or flipped; t ~ U[low, high], and 0 stays 0.

    Attributes:
        keep: Probability that the sign is kept.
        low: Least magnitude factor.
        high: Largest magnitude factor.
        bound: Values were clipped one by one to [-bound, bound] before; None: not clipped.
    """

    keep: float
    low: float
    high: float
    bound: float | None = None
    anneals = True
    faithful = False

    @property
    def random(self) -> bool:
        return self.keep < 1 or self.low < self.high

    @property
    def proof(self) -> tuple[str, float] | None:
        return "RandomisedResponse", self.keep

    @property
    def mean_scale(self) -> float:
        """Mean of t."""
        return (self.low + self.high) / 2

    @property
    def relative_std(self) -> float:
        """Standard deviation of t over its mean."""
        return (self.high - self.low) / 12**0.5 / self.mean_scale

    def apply(self, values: Tensor) -> Tensor:
        return values if self.bound is None else values.clamp(-self.bound, self.bound)

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        kept = torch.rand(values.shape, generator=rng, dtype=values.dtype)
        place = torch.rand(values.shape, generator=rng, dtype=values.dtype)
        factor = self.low + (self.high - self.low) * place
        values = self.apply(values)
        return torch.where(kept < self.keep, values, -values) * factor

    def softness(self, heat: float = 0.0) -> float:
        most, least = _SOFTNESS.get(self.of, _SOFTNESS_OF_STEPS)
        return least * (most / least) ** heat

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        """The true law lets |seen| be anything in [low, high] times the magnitude.

        softness: above 0 logistic noise is taken to have been added to what was sent, so that the
        edges are smooth, in units of the row's root mean square magnitude; and a thousandth of
        each value's own beside it, so that the objective is smooth where t is constant.
        """
        if softness == 0:
            law = partial(_uniform, keep=self.keep, low=self.low, high=self.high)
            return Prepared(self._of_clipped(law), (seen,))
        magnitude = seen.abs() / self.mean_scale
        rms = magnitude.flatten(1).square().mean(dim=1).sqrt()
        added = softness * rms.view(-1, *[1] * (seen.dim() - 1))
        wide = (magnitude * _LEAST_SPREAD).square() + added.square()
        inverse = 1 / (self.mean_scale * wide.sqrt()).clamp_min(1e-12)
        law = partial(_smear, keep=self.keep, low=self.low, high=self.high)
        return Prepared(self._of_clipped(law), (inverse, seen * inverse))

    def _of_clipped(self, law: Law) -> Law:
        if self.bound is None:
            return law

        def clip(sent: Tensor, *seen: Tensor) -> tuple[Tensor, Tensor]:
            inner = self.apply(sent)
            loss, slope = law(inner, *seen)
            return loss, torch.where(inner == sent, slope, 0.0)

        return clip

    def estimate(self, seen: Tensor, *, base: Tensor | None = None) -> Tensor:
        """Unbiased of updates and gradients. Of weights, the sign of the broadcast ones, which
        differ from the trained ones by a small step, and the magnitude over its mean factor."""
        if self.of != "weights":
            return seen / (self.mean_scale * (2 * self.keep - 1))
        if base is None:
            raise ValueError("signs of weights are estimated from the broadcast weights.")
        return base.sign() * seen.abs() / self.mean_scale

    def candidates(self, estimate: Tensor, *, base: Tensor, step: float) -> tuple[Tensor, ...]:
        if self.of != "weights":
            # The estimate is 1 / (2p - 1) too long, which unbiases a mean of signs; here each
            # sign is decided, so the plain length is wanted.
            plain = estimate * (2 * self.keep - 1)
            return plain, -plain
        # The estimate gives a weight the sign of its broadcast w; else it is -w', and
        # (-w' - w) = -(w' - w) - 2 w.
        return estimate, -estimate - 2 * base / -step

    def gradient_variance(
        self, estimate: Tensor, *, base: Tensor, step: float, decided: bool = False
    ) -> Tensor | float:
        if self.of == "weights":
            return (base * self.relative_std * (1 / step)).square()
        # The estimate is v times a factor of mean m and mean square m2 (m = 1 once the sign is
        # known, else 2p - 1); v^2 is on average estimate^2 / m2.
        least = 1.0 if decided else (2 * self.keep - 1) ** 2
        return estimate.square() * (1 - least / (1 + self.relative_std**2))


def _smear(
    sent: Tensor, inverse: Tensor, seen: Tensor, *, keep: float, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """-log of the mixture of both signs of (F((s - a v) / h) - F((s - b v) / h)) / ((b - a) v / h),
    F the logistic distribution, [a, b] the factor's interval; sent = v, inverse = 1 / h and
    seen = s / h. A value whose sign is known from elsewhere (a weight near its broadcast) picks
    its own branch."""
    way = torch.where(sent < 0, -1.0, 1.0).to(sent)
    length = sent.abs() * inverse
    kept, by_kept = _window(length, seen * way, low, high)
    level = math.log(keep)
    if keep >= 1:  # to rounding: only one branch is left
        return kept - level, by_kept * way * inverse
    flipped, by_flipped = _window(length, -seen * way, low, high)
    odds = flipped - kept + level - math.log1p(-keep)  # of the sign being kept
    share = torch.sigmoid(odds)
    loss = kept - level - softplus(-odds)
    return loss, (share * by_kept + (1 - share) * by_flipped) * way * inverse


def _window(length: Tensor, seen: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(loss, its derivative by length) of one branch of `_smear`, all in units of h."""
    up, down = low * length - seen, seen - high * length
    loss = softplus(up) + softplus(down)
    slope = low * torch.sigmoid(up) - high * torch.sigmoid(down)
    if low == high:
        return loss, slope
    width = ((high - low) * length).clamp_min(1e-6)
    share = -torch.expm1(-width)
    loss = loss + width.log() - share.log()
    # 1 / width - 1 / expm1(width), which is 1/2 - width / 12 near 0
    by_width = torch.where(width > 1e-2, 1 / width - (1 - share) / share, 0.5 - width / 12)
    return loss, slope + (high - low) * by_width


def _uniform(
    sent: Tensor, seen: Tensor, *, keep: float, low: float, high: float
) -> tuple[Tensor, Tensor]:
    size, length = sent.abs(), seen.abs()
    possible = (length >= low * size * (1 - _ROUNDING)) & (length <= high * size * (1 + _ROUNDING))
    same = torch.where(sent * seen >= 0, keep, 1 - keep).to(sent).log()
    if low == high:
        return torch.where(possible, -same, math.inf), torch.zeros_like(sent)
    spread = (size * (high - low)).log()
    loss = torch.where(possible, spread - same, math.inf)
    slope = torch.where(possible, 1 / sent, 0.0)
    silent = (sent == 0) & (seen == 0)
    return torch.where(silent, 0.0, loss), torch.where(silent, 0.0, slope)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) by one sigmoid and one log, half the time of the library's on a CPU."""
    return x.clamp_min(0) - torch.sigmoid(x.abs()).log()
