"""SPM: symmetric partition mechanism, sign perturbation of every uploaded weight.

Per value v != 0: keep its sign with probability E/(E+1), else flip it (E = e^epsilon); upload
|v| * t with t in [1, C]; v = 0 stays 0. The server divides by the number of uploads.

Where the paper contradicts itself, this follows Algorithm 2, read with t uniform on [1, C]
(its interval notation and Eq. 4; the text also says "two fixed values {1, C}").
"""

import math
from dataclasses import dataclass
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
    RandomisedResponse,
    SignPerturbation,
    Strength,
    Unprotected,
)
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import change_uploads, replace_values, uniform_like

Variant = Literal["printed", "unbiased", "sign_rr"]
Target = Literal["weights", "gradient"]


def keep_probability(epsilon: float) -> float:
    """E/(E+1), Algorithm 2's threshold."""
    return 1 / (1 + math.exp(-epsilon))


def scale_range(epsilon: float, variant: Variant) -> tuple[float, float]:
    """[low, high] of the magnitude factor t.

    printed: [1, C], C = (E+1)/(E-1) (Eq. 3); its mean is E/(E+1), not 1 as Theorem 1 claims.
    unbiased: [1, C'], C' = (E+3)/(E-1), which makes the mean 1. sign_rr: t = C, plain
    randomised response on the sign, unbiased with less variance.
    """
    wide = (1 + math.exp(-epsilon)) / -math.expm1(-epsilon)
    match variant:
        case "printed":
            return 1.0, wide
        case "unbiased":
            return 1.0, (1 + 3 * math.exp(-epsilon)) / -math.expm1(-epsilon)
        case "sign_rr":
            return wide, wide


def perturb(
    values: Tensor, u_sign: Tensor, u_scale: Tensor, *, epsilon: float, variant: Variant
) -> Tensor:
    """Algorithm 2 with given uniforms in [0, 1): sign kept iff u_sign < E/(E+1),
    t = low + (high - low) * u_scale."""
    low, high = scale_range(epsilon, variant)
    keep = torch.where(u_sign < keep_probability(epsilon), 1.0, -1.0).to(values)
    return values * keep * (low + (high - low) * u_scale)


@dataclass(kw_only=True, eq=False)
class SPM(Defense):
    """Sign perturbation of the upload.

    Args:
        epsilon: Privacy budget of one sign, in (0, 700].
        variant: See `scale_range`.
        target: What is perturbed, `weights` (Algorithm 2) or `gradient` (Sec. 5.2.4's attack
            experiment).

    Source: SPM-FL, Algorithm 2, Theorems 1-3.
    """

    strength = Strength(setting="epsilon", weak=700.0, strong=0.01)
    source = "SPM-FL, Algorithm 2"
    epsilon: Annotated[float, Limits("budget of one sign", above=0, most=700)]
    variant: Variant = "printed"
    target: Target = "weights"

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        def perturb_values(values: Tensor) -> Tensor:
            u_sign, u_scale = (uniform_like(values, rng=client.rng["defense"]) for _ in range(2))
            return perturb(values, u_sign, u_scale, epsilon=self.epsilon, variant=self.variant)

        def upload(plain: Message) -> Message:
            values = {n: perturb_values(p.values) for n, p in plain.parts.items()}
            return replace_values(plain, values)

        return change_uploads(messages, self.target, local, upload)

    def mechanisms(self) -> tuple[Mechanism, ...]:
        low, high = scale_range(self.epsilon, self.variant)
        keep = keep_probability(self.epsilon)
        return (SignPerturbation(of=self.target, keep=keep, low=low, high=high),)

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """Theorem 2: epsilon-LDP "for uploaded parameters", proven for one sign only."""
        return self.epsilon, 0.0, "coordinate"

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return signs_alone(self.epsilon, facts, range_="[low |v|, high |v|]")

    def constants(self, facts: Facts) -> dict[str, float | str]:
        _, high = scale_range(self.epsilon, self.variant)
        mean, variance = moments(self.epsilon, self.variant)
        return {
            "C": high,
            "keep_probability": keep_probability(self.epsilon),
            "bias_factor": mean,
            "variance_factor": variance,
            "growth_per_round": growth(self.epsilon, self.variant, facts.sampled),
            "eps_signs_one_round": self.epsilon * facts.parameters,
            "eps_signs_all_rounds": self.epsilon * facts.parameters * facts.releases,
            "magnitude": "no DP",
        }


def moments(epsilon: float, variant: Variant) -> tuple[float, float]:
    """Mean and variance of the factor that multiplies a value (sign and magnitude)."""
    low, high = scale_range(epsilon, variant)
    mean = (2 * keep_probability(epsilon) - 1) * (low + high) / 2
    square = (low * low + low * high + high * high) / 3
    return mean, square - mean * mean


def growth(epsilon: float, variant: Variant, uploads: int) -> float:
    """E[w_next^2] / w^2 after averaging `uploads` equal weights, without training.

    The noise is multiplicative: above 1, the weights grow every round.
    """
    mean, variance = moments(epsilon, variant)
    return mean * mean + variance / uploads


def signs_alone(epsilon: float, facts: Facts, *, range_: str) -> tuple[Event, ...]:
    """Signs compose over coordinates and rounds; magnitudes have no protection at all. range_:
    where an uploaded magnitude lies."""
    return (
        RandomisedResponse(
            epsilon=epsilon,
            coordinates=facts.parameters,
            covers="signs",
            unit="record",
            count=facts.releases,
        ),
        Unprotected(
            what="the magnitude of every uploaded value",
            why=f"|upload| lies in {range_}, so values whose ranges do not "
            "overlap are told apart with certainty",
        ),
    )
