"""SelectiveShield: encrypt what all find sensitive, keep what only some do, noise the rest.

A round: every client scores its parameters by Fisher information and marks those above tau
(Eq. 12-14). The clients exchange the masks in plain sight: what a share rho of them marked is
encrypted (Eq. 16), what else a client marked stays with it (Eq. 17), and the rest is clipped
and noised (Eq. 18, 20, 21). The server sums, the key server opens the encrypted sum (Eq. 23-26),
and each client puts its own values back where it kept them (Eq. 27).

Where the paper contradicts itself: Eq. 12 is the square of the mean gradient, Eq. 3 the mean of
the squares, Algorithm 1 scores the update (`score`); Eq. 21's noise has std C sigma sqrt(|K|),
which hardly any reading of its accuracy bears (`noise_scale`); Eq. 26 divides by |K| where only
some clients sent a coordinate (`average`); eta_g = 1 is FedAvg, not |K| as it says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

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
    Part,
    Round,
    State,
    Unprotected,
    Withheld,
)
from bench.toolkit.per_sample import per_sample_gradients
from bench.toolkit.vectors import clip, gaussian_like
from defenses import selective_shield_claims as claims
from defenses.encrypted_zone import GAIN, EncryptedZone, Masks

Score = Literal["eq12", "eq3", "update"]
NoiseScale = Literal["times_K", "plain", "div_K"]
TOLERANCE = 1e-9
"""Slack of rho: .1 * 30 > 3 in floating point."""


def fisher_scores(sums: State, *, samples: int, score: Score) -> dict[str, Tensor]:
    """Fisher information per parameter. sums: over `samples` samples, of the gradients (eq12,
    squared here after the mean) or of their squares (eq3, the mean taken here)."""
    if score == "eq3":
        return {n: v / samples for n, v in sums.items()}
    return {n: (v / samples).square() for n, v in sums.items()}


def normalised_by_layer(scores: State) -> dict[str, Tensor]:
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
    return {n: v > tau for n, v in normalised_by_layer(scores).items()}


def consensus(masks: Sequence[Masks], *, rho: float) -> dict[str, Tensor]:
    """Eq. 16: coordinates that at least a share rho of the masks marks."""
    return {
        n: torch.stack([m[n] for m in masks]).double().mean(dim=0) >= rho - TOLERANCE
        for n in masks[0]
    }


class SelectiveShield(EncryptedZone):
    """Three zones per client: encrypted, personal, noised.

    tau: threshold of the normalised scores in [0, 1]; rho: share of clients that must agree, in
    [0, 1] (0 encrypts everything). score: `eq12`, `eq3` or `update` (Algorithm 1: the squared
    mean gradient of the local training). Under split protocols a client cannot compute the loss
    of its data alone, so `update` is what is used. noise_multiplier: sigma, clip_norm: C, of the
    noised zone's update. noise_scale: its std is C sigma times sqrt(|K|) (`times_K`, Eq. 21 as
    printed), 1 (`plain`) or 1/sqrt(|K|) (`div_K`), |K| being the clients of the round. average:
    sums of the noised zone by `count`, the clients that sent the coordinate, or `all`, |K|
    (Eq. 26 as printed). parameters: see `EncryptedZone`. public_masks: whether the ledger may
    take the masks for public: granted, not true of masks that are computed from the data.
    Source: SelectiveShield, Algorithm 1, Eq. 12-27.
    """

    source = "SelectiveShield, Algorithm 1"

    def __init__(
        self,
        *,
        tau: float = 0.3,
        rho: float = 1.0,
        score: Score = "eq12",
        noise_multiplier: float = 1.0,
        clip_norm: float = 1.0,
        noise_scale: NoiseScale = "times_K",
        average: Literal["count", "all"] = "count",
        parameters: str = "additive",
        public_masks: bool = False,
    ) -> None:
        super().__init__(parameters=parameters)
        for name, value in (("tau", tau), ("rho", rho)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {value}.")
        if score not in ("eq12", "eq3", "update"):
            raise ValueError(f"score must be eq12, eq3 or update, got '{score}'.")
        if not noise_multiplier >= 0:
            raise ValueError(f"noise_multiplier must be >= 0 (sigma), got {noise_multiplier}.")
        if not clip_norm > 0:
            raise ValueError(
                f"clip_norm must be > 0 (L2 norm of the noised zone's update), got {clip_norm}."
            )
        if noise_scale not in ("times_K", "plain", "div_K"):
            raise ValueError(f"noise_scale must be times_K, plain or div_K, got '{noise_scale}'.")
        if average not in ("count", "all"):
            raise ValueError(f"average must be count or all, got '{average}'.")
        self.tau, self.rho, self.score = tau, rho, score
        self.noise_multiplier, self.clip_norm = noise_multiplier, clip_norm
        self.noise_scale, self.average, self.public_masks = noise_scale, average, public_masks

    @property
    def variant(self) -> str:
        printed = self.noise_scale == "times_K" and self.average == "all"
        return "printed" if printed else "corrected"

    def std(self, clients: int) -> float:
        """The noise's standard deviation per coordinate in a round of so many clients."""
        power = {"times_K": 0.5, "plain": 0.0, "div_K": -0.5}[self.noise_scale]
        return self.clip_norm * self.noise_multiplier * max(1, clients) ** power

    # --- zones --------------------------------------------------------------------------------
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
        sums = client.memory.get("inspected")
        if self.score == "update" or not sums:
            scores = fisher_scores(local.grad_sum, samples=local.steps, score="eq12")
        else:
            held = {n: sums[n] for n in local.broadcast}
            scores = fisher_scores(held, samples=len(client.y), score=self.score)
        return sensitive(scores, tau=self.tau)

    def agree(self, masks: Sequence[Masks]) -> Masks:
        return consensus(masks, rho=self.rho)

    def withheld(self, name: str, mask: Masks) -> Tensor:
        return mask[name]

    def show(self, parts: Mapping[str, Part], client: Client) -> dict[str, Part]:
        """The noised zone: clipped as one vector (Eq. 20) and noised (Eq. 21)."""
        if not any(bool(p.presence().any()) for p in parts.values()):
            return dict(parts)
        std, rng = self.std(client.plan["company"]), client.rng["defense"]
        out = {}
        for name, part in clip(parts, norm=self.clip_norm).items():
            noised = part.values + gaussian_like(part.values, std=std, rng=rng)
            out[name] = Part(values=torch.where(part.presence(), noised, 0.0), present=part.present)
        return out

    def rehearsed(self, mask: Masks) -> dict[str, Any]:
        return {} if self.score == "update" else super().rehearsed(mask)

    def divisor(self, present: Tensor) -> Tensor:
        if self.average == "all":
            return torch.full_like(present[0], len(present), dtype=torch.int64)
        return super().divisor(present)

    # --- what is known and what is proven -------------------------------------------------------
    def mechanisms(self) -> tuple[Mechanism, ...]:
        return self.mechanisms_in(Round())

    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        return (
            Clip(of="update", norm=self.clip_norm),
            GaussianNoise(of="update", std=self.std(round.clients)),
        )

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Replacing one record moves the clipped values by up to 2C; which coordinates they are,
        and the exact sum of the encrypted ones, are not noised at all."""
        events: list[Event] = [
            Gaussian(
                sensitivity=2 * self.clip_norm, std=self.std(facts.sampled), unit="record",
                count=facts.releases,
            ),
            Encrypted(what="each client's values in the encrypted zone"),
            Withheld(what="the personal zone"),
        ]  # fmt: skip
        if not self.public_masks:
            events.append(
                Unprotected(
                    what="the masks",
                    why="they are computed from the data, sent in plain sight, and show in which "
                    "coordinates are absent: one record can flip them",
                )
            )
        if facts.broadcast:
            events.append(
                Unprotected(
                    what="the sum of the encrypted zone",
                    why="the new model shows it without noise",
                )
            )
        return tuple(events)

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """Eq. 22 over all rounds by Lemma 2, at the best order."""
        epsilon = claims.claimed_epsilon(
            sigma=self.noise_multiplier, rounds=facts.releases, delta=facts.delta
        )
        return epsilon, facts.delta, "record"

    def constants(self, facts: Facts) -> dict[str, float | str]:
        std = self.std(facts.sampled)
        return {
            "noise_std": std,
            "noise_norm_rms": std * math.sqrt(facts.parameters),
            "noise_std_of_mean": std / math.sqrt(facts.sampled),
            "sensitivity_replace": 2 * self.clip_norm,
            "ckks_security_bits": float(self._ckks.security_bits),
            "ckks_resolution": self._ckks.resolution / GAIN,
        }
