"""DP-FedAvg, with noise at the clients, who do not trust the server, or at an aggregator."""

import math
from dataclasses import dataclass
from typing import Annotated

from bench.api import Event, Facts, Gaussian
from bench.privacy.ledger import sampled_gaussian_epsilon, subsampled_gaussian_epsilon
from bench.toolkit.settings import Limits
from defenses.aggregator import CentralNoise
from defenses.noise import GaussianUpdate


@dataclass(kw_only=True, eq=False)
class DPFedAvg(GaussianUpdate):
    """Client updates clipped to L2 norm clip_norm, with Gaussian noise that protects their sum.

    The original server adds the noise once and sees updates without any; against that server
    nothing would be proven. Here the proof is for the noise of one upload.

    Args:
        noise_multiplier: Std of the sum's noise over clip_norm, >= 0.
        clip_norm: L2 norm of one client's update, > 0.
        shared_by: Clients of a round that bear the noise together, each with a std of
            noise_multiplier clip_norm / sqrt(shared_by); 1 gives each upload the whole noise.

    Source: Geyer, Klein, Nabi, arXiv:1712.07557; McMahan et al., arXiv:1710.06963.
    """

    source = "Geyer et al., arXiv:1712.07557, noise shared by the clients"
    shared_by: Annotated[int, Limits("clients of a round", least=1)] = 1

    @property
    def level(self) -> float:
        return self.noise_multiplier * self.clip_norm / math.sqrt(self.shared_by)

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """For the model, against those who see no upload: adding or removing one client's update,
        with amplification by the sampling of clients. A round of fewer clients than `shared_by`
        has less noise; of more, the claim takes no credit."""
        present = min(1.0, facts.sampled / self.shared_by)
        epsilon = subsampled_gaussian_epsilon(
            noise_multiplier=self.noise_multiplier * math.sqrt(present),
            rate=facts.participation,
            steps=facts.rounds,
            delta=facts.delta,
        )
        return epsilon, facts.delta, "client"


@dataclass(kw_only=True, eq=False)
class CentralDPFedAvg(CentralNoise):
    """DP-FedAvg as deployed: every round's sum has noise of its own, and the clip may adapt.

    Args:
        quantile: Share of the updates that the clip, told to all before each round, is led to leave
            as they are. How many it left has noise too, for which the sum has a little more. None:
            the clip stays clip_norm.

    Source: McMahan et al., arXiv:1710.06963; Andrew et al., arXiv:1905.03871 (adaptive clip, with
    its rate of 0.2 and noise of a twentieth of the clients on the count).
    """

    source = "McMahan et al., arXiv:1710.06963; Andrew et al., arXiv:1905.03871"
    quantile: Annotated[  # type: ignore[misc]
        float | None, Limits("share of the updates", above=0, below=1)
    ] = None

    @property
    def std(self) -> float:
        """Of the sum of updates, so that it and the count together have noise_multiplier."""
        if self.quantile is None or not self.noise_multiplier:
            return self.noise_multiplier
        counted = (2 * self.count_std) ** -2
        return float((self.noise_multiplier**-2 - counted) ** -0.5)

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """For the model, against those who do not know who takes part: adding or removing one
        client, with amplification by Poisson sampling."""
        return self._sampled(facts, replaced=False), facts.delta, "client"

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Replacing one client moves the clipped sum by up to 2 clip_norm, and the count beside it:
        as a sum that moves a little more."""
        moves = 2 * self.clip_norm
        if self.noise_multiplier:
            moves *= self.std / self.noise_multiplier
        std = self.std * self.clip_norm
        return (Gaussian(sensitivity=moves, std=std, unit="client", count=facts.releases),)

    def constants(self, facts: Facts) -> dict[str, float | str]:
        return {
            **super().constants(facts),
            "eps_client_added_who_takes_part_secret": self._sampled(facts, replaced=False),
            "eps_client_replaced_who_takes_part_secret": self._sampled(facts, replaced=True),
        }

    def _sampled(self, facts: Facts, *, replaced: bool) -> float:
        return sampled_gaussian_epsilon(
            noise_multiplier=self.noise_multiplier,
            rate=facts.participation,
            steps=facts.rounds,
            delta=facts.delta,
            replaced=replaced,
        )
