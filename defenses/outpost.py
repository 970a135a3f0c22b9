"""Outpost: gradients pruned and noised by how widely weights spread, in most steps."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import torch
from torch import Tensor

from bench.api import (
    Base,
    Client,
    Defense,
    Event,
    Facts,
    Local,
    Mechanism,
    Message,
    Prepared,
    State,
    Strength,
    Unprotected,
    as_row,
    sizes_of,
)
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import change_uploads, cut_like, replace_values

_MANY = 100
"""Values of which the zeros tell whether an upload was perturbed."""
_EXACT = 1e-3
"""Noise that stands for none, in units of an upload's root mean square."""
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class PrunedNoise(Mechanism):
    """A gradient is sent as it is or, by chance, pruned and with noise on its largest values.

    Each tensor's values of least magnitude become 0; of all values those of largest magnitude, so
    pruned or not, get N(0, s^2), where s is `noise` times the variance of the tensor's broadcast
    weights, or times 1 if that is less.

    Attributes:
        chance: That a gradient is perturbed.
        prune: Percentage of each tensor's values that become 0.
        noised: Percentage of all values that get noise.
        noise: See above.
    """

    chance: float
    prune: float
    noised: float
    noise: float
    anneals = True

    def perturb(self, values: Tensor, rng: torch.Generator, weights: State) -> Tensor:
        """What is sent for rows [P, ...]; no `sample`, since a row's values share its chance."""
        size = values.abs()
        std = self._stds(weights, values)
        pieces = size.split(sizes_of(weights, values), dim=1)
        ranks = [p.argsort(dim=1).argsort(dim=1) / p.shape[1] for p in pieces]
        kept = torch.cat(ranks, dim=1) >= self.prune / 100
        loud = size.argsort(dim=1).argsort(dim=1) >= (1 - self.noised / 100) * size.shape[1]
        draws = torch.randn(values.shape, generator=rng, dtype=values.dtype)
        perturbed = torch.where(kept, values, 0.0) + torch.where(loud, std * draws, 0.0)
        coin = torch.rand(len(values), 1, generator=rng, dtype=values.dtype) < self.chance
        return torch.where(coin, perturbed, values)

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        """Of an upload that was perturbed, which many zeros tell, a value that was sent is exact,
        noised or nothing but noise, and one that was not is at most as large as its tensor's least
        that was kept. One that was not perturbed is exact.

        softness: Noise that stands for none, in units of the upload's root mean square.
        """
        sizes, stds = sizes_of(base, seen), self._stds(base, seen)
        flat = seen.reshape(-1, len(stds))
        rms = flat.square().mean(dim=1, keepdim=True).sqrt().clamp_min(_TINY)
        exact, std = (softness * rms).expand_as(flat), stds.clamp_min(_TINY).expand_as(flat)
        least = [self._least(p).expand_as(p) for p in flat.abs().split(sizes, dim=1)]
        bound, calm = torch.maximum(torch.cat(least, dim=1), std), self._calm(flat == 0)
        std, bound = (torch.where(calm, exact, s) for s in (std, bound))
        return Prepared(_mixture, (seen, *(t.reshape(seen.shape) for t in (exact, std, bound))))

    def softness(self, heat: float = 0.0) -> float:
        return _EXACT ** (1 - heat)

    def _least(self, size: Tensor) -> Tensor:
        """About the least magnitude [P, 1] of a tensor that was kept, by those that were sent."""
        kept = max(1, round((1 - self.prune / 100) * size.shape[1]))
        return size.topk(kept, dim=1).values[:, -1:]

    def gradient_variance(
        self, estimate: Tensor, *, base: Tensor, step: float, decided: bool = False
    ) -> Tensor:
        zero = estimate == 0
        calm = self._calm(zero.flatten(1)).view(-1, *[1] * (zero.ndim - 1))
        noise = torch.where(zero, estimate.square().mean(), self._std(base).square())
        return torch.where(calm, 0.0, noise)

    def _calm(self, zero: Tensor) -> Tensor:
        """Whether rows [P, D] with these zeros were sent as they are, bool [P, 1]."""
        least = (self.prune - self.noised) / 100
        few = zero.to(torch.float32).mean(dim=1, keepdim=True) < 0.9 * least
        return few & (zero.shape[1] >= _MANY)

    def _stds(self, base: Base, like: Tensor) -> Tensor:
        """Of every value of a row of `like`."""
        row = as_row(base, like, lambda v: self._std(v).expand(v.numel()))
        if row is None:
            raise ValueError("the noise follows from the broadcast values, but got none.")
        return row.to(like)

    def _std(self, weights: Tensor) -> Tensor:
        return self.noise * weights.var().clamp(max=1).nan_to_num()


def _mixture(
    sent: Tensor, seen: Tensor, exact: Tensor, std: Tensor, bound: Tensor
) -> tuple[Tensor, Tensor]:
    rest = sent - seen
    pairs = ((rest, exact), (rest, std), (seen, std))
    each = [-(r / s).square() / 2 - s.log() for r, s in pairs]
    total = torch.logaddexp(torch.logaddexp(each[0], each[1]), each[2])
    slope = sum((e - total).exp() * rest / s**2 for e, s in zip(each, (exact, std), strict=False))
    unsent = seen == 0
    loss = torch.where(unsent, (sent / bound).square() / 2, -total)
    return loss, torch.where(unsent, sent / bound**2, slope)


@dataclass(kw_only=True, eq=False)
class Outpost(Defense):
    """Prunes a gradient and adds noise to its largest values, with a chance that falls by step.

    Args:
        beta: The first step of a client is perturbed with probability 1 / (1 + beta), >= 0.
        prune: Percentage of each tensor's values that become 0, in [0, 100).
        noised: Percentage of all values that get noise, those of largest Fisher information.
        noise: Noise's std over the variance of a tensor's weights, or over 1 if that is less.

    Departures: the Fisher information of a weight is its squared gradient. The mean gradient of
    several local steps is perturbed once, as a first step's.
    Source: Wang et al., INFOCOM 2023 (Outpost), with its released defaults and order: what is
    pruned can be noised.
    """

    strength = Strength(setting="noise", weak=1e-3, strong=100.0)
    zero_strength = MappingProxyType({"prune": 0.0, "noise": 0.0})
    source = "Wang et al., INFOCOM 2023 (Outpost)"
    beta: Annotated[float, Limits("decay of the chance by step", least=0)] = 0.125
    prune: Annotated[float, Limits("percentage of values", least=0, below=100)] = 80.0
    noised: Annotated[float, Limits("percentage of values", least=0, most=100)] = 40.0
    noise: Annotated[float, Limits("over the weights' variance", least=0)] = 0.8

    @property
    def law(self) -> PrunedNoise:
        return PrunedNoise(
            of="gradient",
            chance=1 / (1 + self.beta),
            prune=self.prune,
            noised=self.noised,
            noise=self.noise,
        )

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        def perturb(gradient: Message) -> Message:
            plain = {n: p.values for n, p in gradient.parts.items()}
            row = torch.cat([v.flatten() for v in plain.values()])[None].cpu()
            base = {n: local.broadcast[n] for n in plain}
            sent = self.law.perturb(row, client.rng["defense"], base)[0]
            return replace_values(gradient, cut_like(sent, plain))

        return change_uploads(messages, "gradient", local, perturb)

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (self.law,)

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (
            Unprotected(what="gradients that are not perturbed", why="chance spares some whole"),
            Unprotected(what="values that are kept", why="no sensitivity is bounded"),
        )
