"""DP-SGD: per-sample gradients clipped and noised in every local step."""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import torch
from torch import Tensor

from bench.api import (
    Defense,
    Event,
    Facts,
    Gaussian,
    GaussianNoise,
    Loss,
    Mechanism,
    Round,
    State,
    Strength,
)
from bench.privacy.ledger import subsampled_gaussian_epsilon
from bench.toolkit.per_sample import clipped_to, per_sample_gradients
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import gaussian_like

_NOISE = "noise."


@dataclass(kw_only=True, eq=False)
class DPSGD(Defense):
    """Every step: mean of per-sample gradients clipped to L2 norm clip_norm, plus Gaussian noise.

    The clip and noise are those of opacus' optimizer; its module hooks do not see vmapped clients,
    its accountant is used for the claim.

    Args:
        noise_multiplier: The noise's std on the sum of a batch over clip_norm, >= 0.
        clip_norm: L2 norm of one sample's gradient, > 0.

    Departure: batches are cut from shuffled epochs, not Poisson-sampled as the accountant
    supposes; the proof therefore counts how often a record can be used, without amplification.
    Source: Abadi et al., arXiv:1607.00133, Algorithm 1.
    """

    owns = frozenset({"gradient"})
    strength = Strength(setting="noise_multiplier", weak=1e-4, strong=10.0)
    source = "Abadi et al., arXiv:1607.00133"
    zero_strength = MappingProxyType({"noise_multiplier": 0.0, "clip_norm": 1e9})
    noise_multiplier: Annotated[float, Limits("noise over clip_norm", least=0)]
    clip_norm: Annotated[float, Limits("L2 norm of one sample's gradient", above=0)]

    def draw(self, variables: State, const: State, rng: torch.Generator) -> State:
        return {_NOISE + n: gaussian_like(v, std=1.0, rng=rng) for n, v in variables.items()}

    def gradient(self, loss: Loss, variables: State, x: Tensor, y: Tensor, draw: State) -> State:
        each = per_sample_gradients(loss, variables, x, y)
        mean, lengths = clipped_to(each, norm=self.clip_norm)
        std = self.noise_multiplier * self.clip_norm / len(lengths)
        return {n: g + std * draw[_NOISE + n] if draw else g for n, g in mean.items()}

    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        """The mean of a round's noised gradients. That samples were clipped is in `gradient`,
        which attackers are given."""
        std = self.noise_multiplier * self.clip_norm / round.batch / math.sqrt(round.local_steps)
        return (GaussianNoise(of="gradient", std=std),)

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """Subsampled Gaussian for adding or removing a record, sampled at batch / records."""
        epsilon = subsampled_gaussian_epsilon(
            noise_multiplier=self.noise_multiplier,
            rate=min(1.0, facts.batch / facts.records),
            steps=facts.releases * facts.local_steps,
            delta=facts.delta,
        )
        return epsilon, facts.delta, "record"

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Replacing a record moves the clipped sum of each batch it is in by up to 2 clip_norm."""
        moves, std = 2 * self.clip_norm, self.noise_multiplier * self.clip_norm
        uses = uses_of_a_record(facts)
        return (Gaussian(sensitivity=moves, std=std, unit="record", count=uses),)

    def constants(self, facts: Facts) -> dict[str, float | str]:
        return {"uses_of_a_record": float(uses_of_a_record(facts))}


def uses_of_a_record(facts: Facts) -> int:
    """Most batches that one record can be in over the run: epochs are shuffled whole, so that it
    is in each once, and the run may begin and end within one."""
    steps = facts.releases * facts.local_steps
    epochs = steps * min(facts.batch, facts.records) / facts.records
    return min(steps, math.ceil(epochs) + 1) if steps else 0
