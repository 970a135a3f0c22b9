"""DP-FedAvg with noise at the clients, who do not trust the server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from bench.api import Facts
from bench.privacy.ledger import subsampled_gaussian_epsilon
from bench.toolkit.settings import Limits
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
