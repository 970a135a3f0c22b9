"""SelectiveShield: encrypt what all find sensitive, keep what only some do, noise the rest.

A round, from top to bottom of `SelectiveShield`: score the parameters by Fisher information and
mark those above tau (Eq. 12-14), negotiate the zones from everybody's masks (Eq. 16), encrypt what
a share rho of the clients marked, keep what else a client marked (Eq. 17), noise the rest
(Eq. 18-21), aggregate (Eq. 23-26). Messages, keys and ciphertexts are in `encrypted_zone.py` and
`ckks.py`; each client's own values are put back where it kept them (Eq. 27) by the protocol, in
`Federation._begin_at` of `bench/protocols/federation.py`.

Where the paper contradicts itself: Eq. 12 is the square of the mean gradient, Eq. 3 the mean of
the squares, Algorithm 1 scores the update (`score`); Eq. 21's noise has std C sigma sqrt(|K|),
which hardly any reading of its accuracy bears (`noise_scale`); Eq. 26 divides by |K| where only
some clients sent a coordinate (`average`); eta_g = 1 is FedAvg, not |K| as it says.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from bench.api import (
    Client,
    Clip,
    Encrypted,
    Event,
    Facts,
    Gaussian,
    GaussianNoise,
    Local,
    Loss,
    Mechanism,
    Message,
    Part,
    Round,
    Server,
    State,
    Strength,
    Unprotected,
    Withheld,
)
from bench.privacy.ledger import gaussian_epsilon
from bench.toolkit.per_sample import per_sample_gradients
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import clip, gaussian_like, showing
from defenses.encrypted_zone import GAIN, MINE, EncryptedZone, Masks

Score = Literal["eq12", "eq3", "update"]
NoiseScale = Literal["times_K", "plain", "div_K"]
Average = Literal["count", "all"]
UpdateFrom = Literal["broadcast", "start"]
TOLERANCE = 1e-9
"""Slack of rho: .1 * 30 > 3 in floating point."""


def list_setting(name: str, value: float | list[float]) -> tuple[float, ...]:
    """A setting that is one for all clients, or a list dealt to them in turn, as a tuple."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not values:
        raise ValueError(f"{name} must be a number or a list of at least one, got an empty list.")
    return values


@dataclass(kw_only=True, eq=False)
class SelectiveShield(EncryptedZone):
    """Three zones per client: encrypted, personal, noised.

    Args:
        tau: Threshold of the normalised scores, in [0, 1]; a list is dealt to clients in turn
            (Eq. 14 has one per client).
        rho: Share of clients that must agree, in [0, 1]; 0 encrypts everything.
        score: `eq12`, `eq3` or `update` (Algorithm 1: the squared mean gradient of the local
            training). Under split protocols a client cannot compute the loss of its data alone,
            so `update` is what is used.
        noise_multiplier: sigma, >= 0.
        clip_norm: C, L2 norm of the noised zone's update, > 0; a list is dealt to clients in turn
            (Sec. 4.4 has one per client).
        noise_scale: The noise's std is C sigma times sqrt(|K|) (`times_K`, Eq. 21 as printed),
            1 (`plain`) or 1/sqrt(|K|) (`div_K`), |K| being the clients of the round.
        average: Sums of the noised zone by `count`, the clients that sent the coordinate, or
            `all`, |K| (Eq. 26 as printed).
        update_from: What an update is measured from: `broadcast`, the received model, so that a
            coordinate that was personal before brings the client's offset with it; `start`, where
            its training began (Algorithm 1 as printed: LocalTrain(theta_n^{t-1}, D_n)).
        parameters: See `EncryptedZone`.
        public_masks: Whether the ledger may take the masks for public: granted, not true of
            masks that are computed from the data.

    Source: SelectiveShield, Algorithm 1, Eq. 12-27.
    """

    forms_model = "key_server"
    strength = Strength(setting="noise_multiplier", weak=1e-4, strong=10.0)
    source = "SelectiveShield, Algorithm 1"
    tau: Annotated[float | list[float], Limits(least=0, most=1)] = 0.3
    rho: Annotated[float, Limits(least=0, most=1)] = 1.0
    score: Score = "eq12"
    noise_multiplier: Annotated[float, Limits("sigma", least=0)] = 1.0
    clip_norm: Annotated[
        float | list[float], Limits("L2 norm of the noised zone's update", above=0)
    ] = 1.0
    noise_scale: NoiseScale = "times_K"
    average: Average = "count"
    update_from: UpdateFrom = "broadcast"
    public_masks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.taus = list_setting("tau", self.tau)
        self.clips = list_setting("clip_norm", self.clip_norm)
        self._norm = max(self.clips)  # epsilon is the same for all, since noise is in units of it
        self.cycle = math.lcm(len(self.taus), len(self.clips))

    @property
    def variant(self) -> str:
        printed = self.noise_scale == "times_K" and self.average == "all"
        return "printed" if printed else "corrected"

    # --- score ----------------------------------------------------------------------------------
    def inspects(self, client: Client) -> bool:
        return self.score != "update" and "mask" not in client.plan

    def inspect(self, loss: Loss, variables: State, x: Tensor, y: Tensor) -> State:
        """Sums for Fisher scores: of gradients (eq12) or of squared per-sample ones (eq3)."""
        if self.score == "update":
            return {}
        if self.score == "eq12":
            return {n: len(x) * g for n, g in torch.func.grad(loss)(variables, x, y).items()}

        each = per_sample_gradients(loss, variables, x, y)
        return {n: g.square().sum(dim=0) for n, g in each.items()}

    def propose(self, client: Client, local: Local) -> Masks:
        """Eq. 12-14: the client's mask, which `say` sends to everyone."""
        sums = client.memory.get("inspected")
        if self.score == "update" or not sums:
            scores = fisher_scores(local.grad_sum, samples=local.steps, score="eq12")
        else:
            held = {n: sums[n] for n in local.broadcast}
            scores = fisher_scores(held, samples=len(client.y), score=self.score)
        return sensitive(scores, tau=self.taus[client.number % len(self.taus)])

    # --- negotiate ------------------------------------------------------------------------------
    def agree(self, masks: Sequence[Masks]) -> Masks:
        """Eq. 16, by every client alike from the masks that `hear` has collected."""
        return consensus(masks, rho=self.rho)

    # --- encrypt, keep, noise -------------------------------------------------------------------
    def measure(self, update: Message, local: Local) -> Message:
        """The update, measured from what `update_from` says."""
        if self.update_from == "broadcast":
            return update
        offset = {n: local.start[n] - local.broadcast[n] for n in update.parts}
        moved = {n: replace(p, values=p.values - offset[n]) for n, p in update.parts.items()}
        return update.with_parts(moved)

    def protect(self, update: Message, client: Client) -> Message:
        """What of an update is sent, in three zones."""
        zone = client.plan["encrypted"]
        mine = client.memory.get(MINE, zone)
        sealed = self.seal(update, zone, client)  # Eq. 19
        shown = {n: showing(p, ~(zone[n] | mine[n])) for n, p in update.parts.items()}  # Eq. 17, 18
        return replace(update, parts=self.add_noise(shown, client), sealed=sealed)

    def add_noise(self, parts: Mapping[str, Part], client: Client) -> dict[str, Part]:
        """The noised zone: clipped as one vector (Eq. 20) and noised (Eq. 21)."""
        if not any(bool(p.presence().any()) for p in parts.values()):
            return dict(parts)
        norm, rng = self.clips[client.number % len(self.clips)], client.rng["defense"]
        std, out = self.std(client.plan["company"], norm), {}
        for name, part in clip(parts, norm=norm).items():
            noised = part.values + gaussian_like(part.values, std=std, rng=rng)
            out[name] = Part(values=torch.where(part.presence(), noised, 0.0), present=part.present)
        return out

    def std(self, clients: int, norm: float) -> float:
        """The noise's standard deviation per coordinate, of a client with this clip norm in a round
        of so many clients."""
        power = {"times_K": 0.5, "plain": 0.0, "div_K": -0.5}[self.noise_scale]
        return norm * self.noise_multiplier * max(1, clients) ** power

    # --- aggregate ------------------------------------------------------------------------------
    def aggregate(self, server: Server, messages: Sequence[Message]) -> State:
        """The server adds ciphertexts (Eq. 23) and noised values (Eq. 24); the key server opens the
        former's sum (Eq. 25) and moves the model by the mean, eta_g = 1 (Eq. 26)."""
        return self.move(server, messages, over=self.average)

    def keep_for_rehearsal(self, mask: Masks) -> dict[str, Any]:
        return {} if self.score == "update" else super().keep_for_rehearsal(mask)

    # --- what is known and what is proven -------------------------------------------------------
    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        norm = self.clips[0]
        std = self.std(round.clients, norm)
        return (Clip(of="update", norm=norm), GaussianNoise(of="update", std=std))

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Replacing one record moves the clipped values by up to 2C; which coordinates they are,
        and the exact sum of the encrypted ones, are not noised at all."""
        moves, std = 2 * self._norm, self.std(facts.sampled, self._norm)
        events: list[Event] = [
            Gaussian(sensitivity=moves, std=std, unit="record", count=facts.releases),
            Encrypted(what="each client's values in the encrypted zone"),
            Withheld(what="the personal zone"),
        ]
        if not self.public_masks:
            why = (
                "they are computed from the data, sent in plain sight, and show in which "
                "coordinates are absent: one record can flip them"
            )
            events.append(Unprotected(what="the masks", why=why))
        if facts.broadcast:
            why = "the new model shows it without noise"
            events.append(Unprotected(what="the sum of the encrypted zone", why=why))
        return tuple(events)

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """Eq. 22 over all rounds by Lemma 2, at the best order."""
        epsilon = gaussian_epsilon(
            noise_multiplier=self.noise_multiplier, steps=facts.releases, delta=facts.delta
        )
        return epsilon, facts.delta, "record"

    def constants(self, facts: Facts) -> dict[str, float | str]:
        std = self.std(facts.sampled, self._norm)
        return {
            "noise_std": std,
            "noise_norm_rms": std * math.sqrt(facts.parameters),
            "noise_std_of_mean": std / math.sqrt(facts.sampled),
            "ckks_resolution": self._ckks.resolution / GAIN,
        }


def fisher_scores(sums: State, *, samples: int, score: Score) -> dict[str, Tensor]:
    """Fisher information per parameter. sums: over `samples` samples, of the gradients (eq12,
    squared here after the mean) or of their squares (eq3, the mean taken here)."""
    if score == "eq3":
        return {n: v / samples for n, v in sums.items()}
    return {n: (v / samples).square() for n, v in sums.items()}


def normalise_by_layer(scores: State) -> dict[str, Tensor]:
    """Eq. 13: scores of each layer (weight and bias together) moved to [0, 1]; 0 in a layer whose
    scores are all alike, where Eq. 13 is 0/0."""
    out = {}
    for layer in dict.fromkeys(n.rpartition(".")[0] for n in scores):
        mine = {n: v for n, v in scores.items() if n.rpartition(".")[0] == layer}
        low = min(float(v.min()) for v in mine.values())
        high = max(float(v.max()) for v in mine.values())
        for name, value in mine.items():
            out[name] = (value - low) / (high - low) if high > low else torch.zeros_like(value)
    return out


def sensitive(scores: State, *, tau: float) -> dict[str, Tensor]:
    """Eq. 14: the mask of normalised scores strictly above tau."""
    return {n: v > tau for n, v in normalise_by_layer(scores).items()}


def consensus(masks: Sequence[Masks], *, rho: float) -> dict[str, Tensor]:
    """Eq. 16: coordinates that at least a share rho of the masks marks."""
    return {
        n: torch.stack([m[n] for m in masks]).double().mean(dim=0) >= rho - TOLERANCE
        for n in masks[0]
    }
