"""NVFlare's privacy filter by the sparse vector technique."""

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from torch import Tensor

from bench.api import (
    Client,
    Defense,
    Event,
    Facts,
    Laplace,
    LaplaceNoise,
    Local,
    Mechanism,
    Message,
    Prepared,
    RandomisedResponse,
    Round,
    Strength,
    Unprotected,
)
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import change_uploads, cut_like, laplace_like, sparse, uniform_like


@dataclass(frozen=True, kw_only=True)
class ClippedLaplace(Mechanism):
    """Values clipped to +-limit, then Laplace noise, of those that were sent.

    Attributes:
        scale: Of the noise.
        limit: Largest magnitude of a value before the noise.
    """

    scale: float
    limit: float

    @property
    def spread(self) -> float:
        return 2 * self.scale**2

    @property
    def proof(self) -> tuple[str, float] | None:
        return "Laplace", self.scale

    def apply(self, values: Tensor) -> Tensor:
        return values.clamp(-self.limit, self.limit)

    def sample(self, values: Tensor, rng: torch.Generator, *, base: object = None) -> Tensor:
        return self.apply(values) + laplace_like(values, scale=self.scale, rng=rng)

    def softness(self, heat: float = 0.0) -> float:
        return 0.1

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: object = None) -> Prepared:
        return LaplaceNoise(of=self.of, scale=self.scale).prepared(seen, softness)


@dataclass(frozen=True, kw_only=True)
class CensoredLaplace(ClippedLaplace):
    """Laplace noise on values that were sent, then a clip of both together to +-limit."""

    faithful = False
    proof = None

    def apply(self, values: Tensor) -> Tensor:
        return values

    def sample(self, values: Tensor, rng: torch.Generator, *, base: object = None) -> Tensor:
        return super().sample(values, rng).clamp(-self.limit, self.limit)

    def estimate(self, seen: Tensor, *, base: Tensor | None = None) -> Tensor:
        """The clip leaves a share of a small value in the mean."""
        return seen / -math.expm1(-self.limit / self.scale)

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: object = None) -> Prepared:
        """The density of what was not cut, softened as that of `LaplaceNoise`; of what was cut
        the chance that value and noise lie beyond the limit."""
        noise = LaplaceNoise(of=self.of, scale=self.scale)

        def misfit(sent: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
            loss, slope = noise.misfit(sent, seen, softness)
            cut = seen.abs() >= self.limit * (1 - 1e-5)  # which float32 rounds
            away = (self.limit - sent * seen.sign()) / self.scale
            tail = away.clamp_max(0).exp() / 2
            beyond = away.clamp_min(0) - torch.log1p(-tail)
            pull = -seen.sign() * tail / (1 - tail) / self.scale
            return torch.where(cut, beyond, loss), torch.where(cut, pull, slope)

        return Prepared(misfit, (seen,))


@dataclass(kw_only=True, eq=False)
class SparseVector(Defense):
    """NVFlare's SVTPrivacy: sends a share of the values, drawn of those above a noised threshold.

    Up to NVFlare 2.7 a value is noised and then clipped, so that nothing bounds what is noised, and
    nothing is proven. Since 2.8 it is clipped first: the noise on count values is an epsilon of
    count * noise_var. NVFlare counts the choice as `epsilon`, as if it ended with the last of
    count accepted values. It draws count of all that passes over the values accept, up to N, each
    of which costs query / count: threshold + query * N / count.

    Args:
        fraction: Share of the values that is drawn, in (0, 1].
        epsilon: Budget of the threshold, or with clip = before of threshold and choice, > 0.
        noise_var: Epsilon of the noise on one value, > 0.
        gamma: Largest magnitude of an update's value over its local steps, > 0.
        tau: Threshold, likewise, >= 0.
        replace: Whether values are drawn with replacement, so that fewer are sent.
        clip: after the noise (NVFlare 2.2 to 2.7) or before it (2.8), with that version's budgets.

    Departures: a tensor without dimensions is noised as others are, not sent as it is. In how many
    passes a value is first accepted is drawn at once; NVFlare may never end with little noise.
    Source: NVFlare, app_common/filters/svt_privacy.py; Li et al., arXiv:1910.00962; Lyu, Su, Li,
    arXiv:1603.01699, whose proof holds of all values that are accepted.
    """

    strength = Strength(setting="noise_var", weak=1e6, strong=1e-3)
    zero_strength = MappingProxyType(
        {"fraction": 1.0, "noise_var": 1e12, "gamma": 1e3, "replace": False}
    )
    source = "NVFlare's SVTPrivacy, after Li et al., arXiv:1910.00962"
    fraction: Annotated[float, Limits("share of values drawn", above=0, most=1)] = 0.1
    epsilon: Annotated[float, Limits("of threshold and choice", above=0)] = 0.1
    noise_var: Annotated[float, Limits("epsilon of one value's noise", above=0)] = 0.1
    gamma: Annotated[float, Limits("largest value of an update per step", above=0)] = 1e-5
    tau: Annotated[float, Limits("threshold of a value per step", least=0)] = 1e-6
    replace: bool = True
    clip: Literal["after", "before"] = "after"

    def _budgets(self, values: int) -> tuple[int, float, float]:
        """How many of so many values are drawn; epsilon of the threshold and of the choice."""
        count = min(values, math.ceil(values * self.fraction))
        ratio = (2 * count) ** (2 / 3)
        threshold = self.epsilon / (1 if self.clip == "after" else 1 + ratio)
        return count, threshold, threshold * ratio

    def _law(self, steps: int) -> ClippedLaplace | CensoredLaplace:
        """Of the values that are sent; nothing is known of others, drawn nearly at random."""
        law = ClippedLaplace if self.clip == "before" else CensoredLaplace
        scale, limit = 2 * self.gamma / self.noise_var * steps, self.gamma * steps
        return law(of="update", scale=scale, limit=limit)

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        rng = client.rng["defense"]
        return change_uploads(messages, "update", local, lambda m: self._filter(m, rng))

    def _filter(self, update: Message, rng: torch.Generator) -> Message:
        """The update with the values that are drawn, clipped and noised."""
        parts = {n: p for n, p in update.parts.items() if bool(p.presence().any())}
        if not parts:
            return update
        like = {n: p.values for n, p in parts.items()}
        values = torch.cat([v.double().flatten() for v in like.values()])
        chosen = cut_like(self._choose(values / update.local_steps, rng), like)
        noised = cut_like(self._law(update.local_steps).sample(values, rng), like)
        for name, part in parts.items():
            new = replace(part, values=noised[name].to(part.values), bits=max(part.bits, 32))
            parts[name] = sparse(new, chosen[name])
        return update.with_parts({**update.parts, **parts})

    def _choose(self, values: Tensor, rng: torch.Generator) -> Tensor:
        """Bool [N]: which values of one local step are sent."""
        count, threshold, query = self._budgets(len(values))
        sensitivity = self.gamma * (2 if self.clip == "after" else 1)
        scale = max(2 * count * sensitivity / query, 1e-300)
        noise = laplace_like(values.new_zeros(()), scale=query / threshold / (2 * count), rng=rng)
        away = noise + (self.tau - values.abs().clamp_max(self.gamma)) / scale
        # A value stays below the noised threshold in a pass with a probability of exp(-rate).
        missed = -torch.log1p(-away.clamp(0, 700).neg().exp() / 2)
        rate = torch.where(away > 0, missed, math.log(2) - away)
        passes = (-torch.log1p(-uniform_like(values, rng=rng)) / rate).ceil()
        accepted = (passes <= passes.kthvalue(count).values).nonzero()[:, 0]
        chance = uniform_like(accepted.to(values), rng=rng)
        some = (chance[:count] * len(accepted)).long() if self.replace else chance.argsort()[:count]
        return torch.zeros_like(values, dtype=torch.bool).index_fill_(0, accepted[some], True)

    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        return (self._law(round.local_steps),)

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """The budgets of threshold, choice and noise, added up over values and uploads."""
        count, threshold, query = self._budgets(facts.parameters)
        return facts.releases * (threshold + query + count * self.noise_var), 0.0, "client"

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        if self.clip == "after":
            return (Unprotected(what="every value sent", why="noise is added before the clip"),)
        count, threshold, query = self._budgets(facts.parameters)
        law, n = self._law(facts.local_steps), facts.releases
        epsilon, moved = threshold + query * facts.parameters / count, 2 * law.limit * count
        return (
            RandomisedResponse(
                epsilon=epsilon, coordinates=1, covers="choice of values", unit="record", count=n
            ),
            Laplace(sensitivity=moved, scale=law.scale, unit="record", count=n),
        )
