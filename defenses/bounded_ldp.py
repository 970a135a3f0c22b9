"""Local DP per uploaded value on a bounded interval: the mechanisms that SPM-FL compares with.

Each maps v in [-1, 1] to an unbiased random value, v being an uploaded value after clipping to
a public interval [centre - radius, centre + radius]. Clipping is the only bias: a value outside
is released around the nearer end. NaN counts as 0, so that it is as hidden as any other value.

E = e^epsilon throughout. Probabilities are those of float64 uniforms, exact to 2^-53: ratios
hold up to epsilon of about 36, beyond which a release cannot be told from a deterministic one.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from bench.api import (
    Client,
    Defense,
    Event,
    Facts,
    Local,
    Mechanism,
    Message,
    Piecewise,
    RandomisedResponse,
    Round,
    SignPerturbation,
    Strength,
    TwoPoint,
)
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import change_uploads, replace_values, sparse, uniform_like
from defenses.spm import keep_probability, moments, perturb, scale_range, signs_alone

Target = Literal["update", "gradient", "weights"]
Dimensions = Literal["each", "sampled"]


# --- the mechanisms, on [-1, 1] -------------------------------------------------------------


def duchi(v: Tensor, u: Tensor, *, epsilon: float) -> Tensor:
    """+-(E+1)/(E-1), with the plus sign iff u < P(+) = ((E-1) v + E + 1) / (2E + 2).

    v in [-1, 1], u uniform in [0, 1), of one shape. P(+) is 1/2 + v/2 tanh(epsilon/2).
    """
    slope = math.tanh(epsilon / 2)
    plus = u < 0.5 + v * (slope / 2)
    return torch.where(plus, 1 / slope, -1 / slope).to(v)


def piecewise_shape(epsilon: float) -> tuple[float, float, float]:
    """(C, width, near): outputs lie in [-C, C]; with probability `near` in a window of `width`
    around the value, C - 1 wide, else in the rest, C + 1 wide; uniform in each.

    C = (e^{eps/2}+1)/(e^{eps/2}-1), near = e^{eps/2}/(e^{eps/2}+1); the density is E times as
    high in the window as outside.
    """
    small = math.exp(-epsilon / 2)
    rest = -math.expm1(-epsilon / 2)
    return (1 + small) / rest, 2 * small / rest, 1 / (1 + small)


def piecewise(v: Tensor, u_near: Tensor, u_place: Tensor, *, epsilon: float) -> Tensor:
    """Piecewise mechanism: in the window [l(v), l(v) + C - 1] iff u_near < near.

    v in [-1, 1], u_near and u_place uniform in [0, 1), of one shape. l(v) = (C+1)/2 v - (C-1)/2.
    """
    edge, width, near = piecewise_shape(epsilon)
    left = (edge + 1) / 2 * v - width / 2
    inside = left + width * u_place
    outside = (edge + 1) * u_place - edge
    outside = torch.where(outside < left, outside, outside + width)
    return torch.where(u_near < near, inside, outside).clamp(-edge, edge)


def count_sampled_dimensions(epsilon: float, size: int) -> int:
    """k = max(1, min(d, floor(epsilon / 2.5))), how many of d = `size` values are sent."""
    return max(1, min(size, math.floor(epsilon / 2.5)))


# --- the defenses ---------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class BoundedLDP(Defense):
    """Release every value of the upload by itself, with `epsilon` each.

    Args:
        epsilon: Budget of one value, in (0, 700].
        bound: Values are clipped to [-bound, bound], in the target's own scale; > 0.
        target: What is clipped and perturbed: update, gradient or weights.
    """

    strength = Strength(setting="epsilon", weak=700.0, strong=0.01)

    epsilon: Annotated[float, Limits("budget of one value", above=0, most=700)]
    bound: Annotated[float, Limits("largest value of one upload", above=0)]
    target: Target = "update"

    def _release(self, v: Tensor, rng: torch.Generator) -> Tensor:
        """v in [-1, 1], float64, to its random unbiased value."""
        raise TypeError("a subclass names its mechanism")

    def _range(self, broadcast: Tensor) -> tuple[float, float]:
        """(centre, radius) of one tensor, from what is public: its broadcast weights."""
        return 0.0, self.bound

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        def release(plain: Message) -> Message:
            values = {}
            for name, part in plain.parts.items():
                centre, radius = self._range(local.broadcast[name])
                v = ((part.values.double() - centre) / radius).clamp(-1, 1).nan_to_num(nan=0.0)
                drawn = self._release(v, client.rng["defense"])
                values[name] = (centre + radius * drawn).to(part.values)
            return replace_values(plain, values)

        return change_uploads(messages, self.target, local, release)

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """As usually stated: one release of one value."""
        return self.epsilon, 0.0, "coordinate"

    def divide_budget(self, size: int) -> tuple[int, float]:
        """How many of so many values are sent, and with what epsilon each."""
        return size, self.epsilon

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Replacing one record may change every value that is sent, whichever these are."""
        count, one = self.divide_budget(facts.parameters)
        event = RandomisedResponse(
            epsilon=one, coordinates=count, unit="record", covers="values", count=facts.releases
        )
        return (event,)

    def constants(self, facts: Facts) -> dict[str, float | str]:
        """The std is of what is sent for a value at the centre of its range."""
        count, one = self.divide_budget(facts.parameters)
        (law,) = self.mechanisms_in(Round(parameters=facts.parameters))
        return {
            "noise_std": math.sqrt(law.variance),
            "values_sent": float(count),
            "eps_one_round": one * count,
        }


class Duchi(BoundedLDP):
    """Two-point mechanism on every value clipped to [-bound, bound].

    Even for large epsilon a value is rounded at random to one of the ends.
    Source: Duchi, Jordan, Wainwright, arXiv:1302.3203 and JASA 2018, in one dimension.
    """

    source = "Duchi, Jordan, Wainwright, arXiv:1302.3203"

    def _release(self, v: Tensor, rng: torch.Generator) -> Tensor:
        return duchi(v, uniform_like(v, rng=rng), epsilon=self.epsilon)

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (TwoPoint(of=self.target, epsilon=self.epsilon, radius=self.bound),)


@dataclass(kw_only=True, eq=False)
class PMPiecewise(BoundedLDP):
    """Piecewise mechanism (PM) on values clipped to [-bound, bound].

    Args:
        epsilon: Budget of one value, or with sampled dimensions of the whole upload, in (0, 700].
        bound: Values are clipped to [-bound, bound], in the target's own scale; > 0.
        target: What is clipped and perturbed: update, gradient or weights.
        dimensions: `each`, every value is released by itself, as SPM-FL compares; `sampled`, PM's
            own form for d values: k = max(1, min(d, floor(epsilon / 2.5))) of them, drawn
            uniformly without replacement, are released with epsilon / k each and sent times
            d / k, the others are 0. So it needs a target whose zeros mean that nothing moved.

    Source: Wang et al., ICDE 2019, arXiv:1907.00782, Algorithms 2 (each) and 4 (sampled).
    """

    source = "Wang et al., arXiv:1907.00782, Algorithms 2 and 4"
    dimensions: Dimensions = "each"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dimensions == "sampled" and self.target == "weights":
            raise ValueError(
                "target must be update or gradient with dimensions = 'sampled', got 'weights': "
                "nearly all weights would be sent as 0."
            )

    def divide_budget(self, size: int) -> tuple[int, float]:
        if self.dimensions == "each":
            return super().divide_budget(size)
        count = count_sampled_dimensions(self.epsilon, size)
        return count, self.epsilon / count

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        if self.dimensions == "each":
            return super().upload(messages, local, client)
        rng = client.rng["defense"]
        return change_uploads(messages, self.target, local, lambda m: self._sample(m, rng))

    def _sample(self, plain: Message, rng: torch.Generator) -> Message:
        """Algorithm 4. Its zeros are told by where they are alone."""
        sizes = [p.values.numel() for p in plain.parts.values()]
        size = sum(sizes)
        count, one = self.divide_budget(size)
        chosen = torch.zeros(size, dtype=torch.bool)
        chosen[torch.randperm(size, generator=rng)[:count]] = True
        parts = {}
        for (name, part), where in zip(plain.parts.items(), chosen.split(sizes), strict=True):
            sent = where.view(part.values.shape).to(part.values.device)
            v = (part.values[sent].double() / self.bound).clamp(-1, 1).nan_to_num(nan=0.0)
            u_near, u_place = uniform_like(v, rng=rng), uniform_like(v, rng=rng)
            released = piecewise(v, u_near, u_place, epsilon=one)
            values = torch.zeros_like(part.values)
            values[sent] = (self.bound * size / count * released).to(values)
            parts[name] = sparse(replace(part, values=values, bits=max(part.bits, 32)), sent)
        return plain.with_parts(parts)

    def _release(self, v: Tensor, rng: torch.Generator) -> Tensor:
        u_near, u_place = uniform_like(v, rng=rng), uniform_like(v, rng=rng)
        return piecewise(v, u_near, u_place, epsilon=self.epsilon)

    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        """Of values that are sent; which ones are is drawn whatever they are."""
        count, one = self.divide_budget(round.parameters)
        scale = round.parameters / count
        return (Piecewise(of=self.target, epsilon=one, radius=self.bound, scale=scale),)

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """Sampled: epsilon for all that a client sends, and as often as it sends."""
        if self.dimensions == "each":
            return super().claim(facts)
        return self.epsilon * facts.releases, 0.0, "client"


class PNPM(BoundedLDP):
    """PNPM as SPM-FL quotes it: random sign and magnitude factor with the variance it prints.

    From SPM-FL: the variance 4 (E + 1/3) / (E-1)^2 w^2 (Appendix, proof of Lemma 1) and that the
    boundaries of the perturbation domain "are set based on empirical data" (Table 1). Ours: the
    mechanism itself, the sign kept with probability E/(E+1) and a factor uniform on
    [1, (E+3)/(E-1)], which is unbiased and has just this variance; and the clipping to
    [-bound, bound]. The original (Ren et al., J. Electron. Inf. Technol. 2023) may differ.
    Magnitudes are not hidden, and 0 stays 0.
    """

    source = "Ren et al. 2023 as quoted by SPM-FL, Lemma A1"

    def _release(self, v: Tensor, rng: torch.Generator) -> Tensor:
        u_sign, u_scale = uniform_like(v, rng=rng), uniform_like(v, rng=rng)
        return perturb(v, u_sign, u_scale, epsilon=self.epsilon, variant="unbiased")

    def mechanisms(self) -> tuple[Mechanism, ...]:
        low, high = scale_range(self.epsilon, "unbiased")
        keep = keep_probability(self.epsilon)
        return (SignPerturbation(of=self.target, keep=keep, low=low, high=high, bound=self.bound),)

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return signs_alone(self.epsilon, facts, range_="[|v|, C' |v|]")

    def constants(self, facts: Facts) -> dict[str, float | str]:
        """The noise is multiplicative: its std is given for a value at the bound."""
        at_bound = self.bound * math.sqrt(moments(self.epsilon, "unbiased")[1])
        return {**super().constants(facts), "noise_std": at_bound, "magnitude": "no DP"}
