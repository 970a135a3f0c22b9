"""Clipped Gaussian and Laplace noise on each client's update: the plain baselines."""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

import torch
from torch import Tensor

from bench.api import (
    Client,
    Clip,
    Defense,
    Event,
    Facts,
    Gaussian,
    GaussianNoise,
    Laplace,
    LaplaceNoise,
    Local,
    Mechanism,
    Message,
    Strength,
)
from bench.privacy.gaussian import classic_gaussian_std
from bench.privacy.ledger import gaussian_epsilon
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import change_uploads, clip, gaussian_like, laplace_like, replace_values


@dataclass(kw_only=True, eq=False)
class _ClippedNoise(Defense):
    """Clip the update to `clip_norm` in the norm of `order`, add noise to every coordinate.

    Args:
        noise_multiplier: Noise parameter (std or scale) over clip_norm, >= 0.
        clip_norm: Norm of one client's update, > 0.
    """

    order = 2
    strength = Strength(setting="noise_multiplier", weak=1e-4, strong=10.0)
    zero_strength = MappingProxyType({"noise_multiplier": 0.0, "clip_norm": 1e9})

    noise_multiplier: Annotated[float, Limits("noise over clip_norm", least=0)]
    clip_norm: Annotated[float, Limits("L2 norm of one client's update", above=0)]

    @property
    def level(self) -> float:
        """The noise's std (Gaussian) or scale (Laplace) per coordinate."""
        return self.noise_multiplier * self.clip_norm

    def _noise(self, values: Tensor, rng: torch.Generator) -> Tensor:
        raise TypeError("a subclass names its noise")

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        def add_noise(update: Message) -> Message:
            parts = clip(update.parts, norm=self.clip_norm, order=self.order)
            rng = client.rng["defense"]
            values = {n: p.values + self._noise(p.values, rng) for n, p in parts.items()}
            return replace_values(update, values)

        return change_uploads(messages, "update", local, add_noise)


class GaussianUpdate(_ClippedNoise):
    """N(0, (noise_multiplier * clip_norm)^2) on the update clipped to L2 norm clip_norm.

    Source: client-level Gaussian mechanism of McMahan et al., arXiv:1710.06963, applied by the
    client (local model), so that the server sees every noised upload.
    """

    source = "McMahan et al., arXiv:1710.06963, noise added by the client"

    def _noise(self, values: Tensor, rng: torch.Generator) -> Tensor:
        return gaussian_like(values, std=self.level, rng=rng)

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (Clip(of="update", norm=self.clip_norm), GaussianNoise(of="update", std=self.level))

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """As usually stated: adding or removing one client, sensitivity clip_norm."""
        epsilon = gaussian_epsilon(
            noise_multiplier=self.noise_multiplier, steps=facts.releases, delta=facts.delta
        )
        return epsilon, facts.delta, "client"

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Replacing one record moves a clipped update by up to 2 clip_norm."""
        norm, count = self.clip_norm, facts.releases
        event = Gaussian(
            sensitivity=2 * norm, std=self.level, unit="record", count=count, largest=norm
        )
        return (event,)

    def constants(self, facts: Facts) -> dict[str, float | str]:
        return {"noise_std": self.level, "noise_norm_rms": self.level * facts.parameters**0.5}


@dataclass(kw_only=True, eq=False)
class LaplaceUpdate(_ClippedNoise):
    """Laplace(noise_multiplier * clip_norm) on the update clipped to L1 norm clip_norm.

    Source: Dwork, McSherry, Nissim, Smith 2006, applied by the client to its update.
    """

    order = 1
    source = "Dwork et al. 2006, noise added by the client"
    clip_norm: Annotated[float, Limits("L1 norm of one client's update", above=0)]

    def _noise(self, values: Tensor, rng: torch.Generator) -> Tensor:
        return laplace_like(values, scale=self.level, rng=rng)

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (
            Clip(of="update", norm=self.clip_norm, order=1),
            LaplaceNoise(of="update", scale=self.level),
        )

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """As usually stated: adding or removing one client, sensitivity clip_norm."""
        per_round = 1 / self.noise_multiplier if self.noise_multiplier else float("inf")
        return per_round * facts.releases if facts.releases else 0.0, 0.0, "client"

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Replacing one record moves a clipped update by up to 2 clip_norm in L1."""
        moves, count = 2 * self.clip_norm, facts.releases
        return (Laplace(sensitivity=moves, scale=self.level, unit="record", count=count),)

    def constants(self, facts: Facts) -> dict[str, float | str]:
        return {"noise_scale": self.level, "noise_std": self.level * 2**0.5}


@dataclass(kw_only=True, eq=False)
class LocalDP(GaussianUpdate):
    """Flower's LocalDpMod: noise for an epsilon at a sensitivity that its user gives.

    A clipped update moves by up to 2 clip_norm, whatever sensitivity is given, which the proof goes
    by.

    Args:
        clip_norm: L2 norm of one client's update, > 0.
        sensitivity: What the noise is made for, > 0.
        epsilon: Of one upload as claimed, > 0.
        delta: Likewise, in (0, 1).

    Source: `LocalDpMod` of Flower, whose noise has the std of Dwork, Roth 2014, Theorem 3.22.
    """

    source = "Flower, LocalDpMod; Dwork, Roth 2014, Theorem 3.22"
    strength = Strength(setting="epsilon", weak=1e9, strong=1e-3)
    zero_strength = MappingProxyType({"sensitivity": 1e-300, "clip_norm": 1e9})

    noise_multiplier: float = field(init=False, default=0.0)
    sensitivity: Annotated[float, Limits("L2 norm that one client moves", above=0)]
    epsilon: Annotated[float, Limits("of one upload", above=0)]
    delta: Annotated[float, Limits("of one upload", above=0, below=1)] = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        level = classic_gaussian_std(
            sensitivity=self.sensitivity, epsilon=self.epsilon, delta=self.delta
        )
        self.noise_multiplier = level / self.clip_norm

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """As configured, for one upload, however many there are."""
        return self.epsilon, self.delta, "client"
