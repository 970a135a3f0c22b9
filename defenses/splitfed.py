"""PM-SFL's rivals under split-federated learning: SplitFed with DP noise, and with plain masks."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from torch import Tensor

from bench.api import (
    BernoulliMask,
    Client,
    Clip,
    Defense,
    Event,
    Facts,
    Laplace,
    LaplaceNoise,
    Local,
    Mechanism,
    Message,
    Part,
    Round,
    Strength,
    Unprotected,
)
from bench.privacy.gaussian import classic_gaussian_std
from bench.privacy.ledger import record_epsilon
from bench.toolkit.settings import Limits, check_number
from bench.toolkit.vectors import clip_rows_l1, laplace_like
from defenses.noise import GaussianUpdate, LaplaceUpdate
from defenses.pm_sfl import PMSFL

UpdateNoise = Literal["gaussian", "laplace"]
Sends = Literal["probabilities", "bits"]


@dataclass(kw_only=True, eq=False)
class SplitFedDP(Defense):
    """Laplace noise on smashed data and noise on the update, each of a budget of its own.

    Args:
        epsilon: Budget of one sample's smashed data in one step, > 0.
        smashed_clip: L1 norm of one sample's smashed data; Laplace scale 2 smashed_clip / epsilon.
        update_clip: Norm of one client's update, L2 or L1 by its noise.
        delta: Of the update's Gaussian noise, in (0, 1).
        update_noise: `gaussian`, std 2 update_clip sqrt(2 ln(1.25 / delta)) / update_epsilon
            (proven for update_epsilon <= 1; the ledger accounts exactly), or `laplace`, scale
            2 update_clip / update_epsilon.
        update_epsilon: Budget of one update, > 0; None: the same as epsilon, with which it then
            moves.

    PM-SFL says only that noise goes on what clients send, with epsilon = 0.1 in all; its Fig. 2
    fixes 5 for updates and varies that of smashed data from 5 to 0.1. Labels sent in the clear
    (shared labels) and the losses' gradients by the features (private labels) stay as they are,
    so nothing is proven for a record; `eps_given_labels` is what would be if labels were public
    and shared, for layers that treat samples one by one.
    Source: Thapa et al., arXiv:2004.12088 (noise on the client's model, PixelDP's Laplace layer
    on smashed data), applied by the client; PM-SFL, Sec. 6.2.
    """

    requires = frozenset({"smashed"})
    strength = Strength(setting="epsilon", weak=1e6, strong=0.01)
    source = "Thapa et al., arXiv:2004.12088, as in PM-SFL, Sec. 6.2 (SplitFed-DP)"

    epsilon: float
    smashed_clip: Annotated[float, Limits("L1 norm of one sample's smashed data", above=0)]
    update_clip: Annotated[float, Limits("norm of one client's update", above=0)]
    delta: Annotated[float, Limits(above=0, below=1)] = 1e-5
    update_noise: UpdateNoise = "gaussian"
    update_epsilon: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.epsilon if self.update_epsilon is None else self.update_epsilon
        for name, budget in (("epsilon", self.epsilon), ("update_epsilon", own)):
            check_number(name, budget, "budget of one release", above=0)
            if math.isinf(100 / budget):
                raise ValueError(
                    f"{name} must leave the noise finite (budget of one release), got {budget}."
                )
        self.largest_epsilon = max(self.epsilon, own)
        self.update: GaussianUpdate | LaplaceUpdate
        if self.update_noise == "gaussian":
            multiplier = classic_gaussian_std(sensitivity=2, epsilon=own, delta=self.delta)
            self.update = GaussianUpdate(noise_multiplier=multiplier, clip_norm=self.update_clip)
        else:
            self.update = LaplaceUpdate(noise_multiplier=2 / own, clip_norm=self.update_clip)

    @property
    def smashed_scale(self) -> float:
        """Laplace scale per value of the smashed data."""
        return 2 * self.smashed_clip / self.epsilon

    def smashed(self, q: Tensor, client: Client) -> Part:
        clipped = clip_rows_l1(q, norm=self.smashed_clip)
        rng = client.rng["defense"]
        return Part(values=clipped + laplace_like(q.detach(), scale=self.smashed_scale, rng=rng))

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        return self.update.upload(messages, local, client)

    # --- what is known and what is proven -------------------------------------------------------
    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (
            Clip(of="smashed", norm=self.smashed_clip, order=1),
            LaplaceNoise(of="smashed", scale=self.smashed_scale),
            *self.update.mechanisms(),
        )

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """The larger of the stated budgets, which counts one release of one of the two."""
        delta = self.delta if isinstance(self.update, GaussianUpdate) else 0.0
        return self.largest_epsilon, delta, "record"

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (
            *self._noise_events(facts),
            Unprotected(
                what="the labels, or the losses' gradients by the features",
                why="they go to the server without noise",
            ),
        )

    def _noise_events(self, facts: Facts) -> tuple[Event, ...]:
        """Smashed data and updates over the run, replacing one record in every round's steps.

        A round's first step sends one sample's smashed data of it. From then on it has moved
        the client's layers, unnoised, and with them every sample of the later batches.
        """
        samples = 1 + (facts.local_steps - 1) * min(facts.batch, facts.records)
        moves, scale, count = 2 * self.smashed_clip, self.smashed_scale, facts.releases * samples
        smashed = Laplace(sensitivity=moves, scale=scale, unit="record", count=count)
        return (smashed, *self.update.guarantee(facts))

    def constants(self, facts: Facts) -> dict[str, float | str]:
        return {
            "update_noise_std": self.update.constants(facts)["noise_std"],
            "eps_given_labels": record_epsilon(self._noise_events(facts), facts.delta),
        }


@dataclass(kw_only=True, eq=False)
class SplitFedPM(PMSFL):
    """Probabilistic masks without personal ones, adaptive splitting or noise: plain SplitFed.

    Of layers that only some clients hold, their mean counts alone (no Eq. 8).

    Args:
        clip: See `PMSFL`, of which this is the case personal = 0.
        variant: See `PMSFL`.
        lr_scale: See `PMSFL`.
        optimizer: See `PMSFL`.
        masks: See `PMSFL`.
        sends: `probabilities`, as the paper says of this baseline (32 bits each), or `bits`,
            PM-SFL's fresh masks.

    Source: PM-SFL, Sec. 6.2.
    """

    source = "PM-SFL, Sec. 6.2 (SplitFed-PM)"
    personal: float = field(init=False, default=0.0)
    agreement_rounds: int = field(init=False, default=0)
    growth_rounds: int = field(init=False, default=1)
    sends: Sends = "probabilities"

    def _send(self, part: Part, theta: Tensor, client: Client) -> Part:
        if self.sends == "bits":
            return super()._send(part, theta, client)
        return replace(part, values=theta)

    def _clients_weight(self, holders: int, joined: int) -> float:
        return float(holders > 0)

    def bits(self, round: Round) -> BernoulliMask:
        return replace(super().bits(round), sampled=self.sends == "bits")

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        if self.sends == "bits":
            return super().guarantee(facts)
        return (
            Unprotected(
                what="the uploaded probabilities",
                why="they are a deterministic function of the data, given the masks of training",
            ),
            *self.of_head(facts),
        )

    def constants(self, facts: Facts) -> dict[str, float | str]:
        about_bits = ("eq6_bound", "collapse_probability_at_0.9")
        bits = self.sends == "bits"
        return {k: v for k, v in super().constants(facts).items() if bits or k not in about_bits}
