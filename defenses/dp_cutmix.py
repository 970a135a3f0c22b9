"""DP-CutMixSL: noised patches of several clients' smashed data, put together by the server.

Per step a mixer deals the N patches of a group to its clients, each patch to one of them. Client
i clips its smashed data s_i to [0, Delta], keeps its own patches, adds noise (Eq. 1) and noises
its label (Eq. 2); the server sums the group's uploads and weighs the labels with lambda_i
(Eq. 3). The paper's rivals with noise are here too: DP-SL (noise alone) and DP-MixSL (the server
sums lambda_i s_i); those without are in `cutmix.py`.

Where the paper contradicts itself or is silent: noise goes on all values as in Eq. 1 and Alg. 1
(`noise="b3"`: only on the client's patches, as in B.3 and Fig. 1). The whole group is summed,
not pairs (Eq. 3), since only the group's masks cover all patches. Sizes are rounded by largest
remainder, and lambda_i in the labels is the share of patches that client i really got. Smashed
data is clipped, which the paper assumes away.

Against the server only the noise and the number of patches protect. What is proven is for given
client-held layers that treat samples one by one (no batch statistics in training).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from bench.api import (
    Client,
    Defense,
    Event,
    Facts,
    Gaussian,
    LabelNoise,
    Mechanism,
    Message,
    Mixture,
    Part,
    Party,
    SmashedNoise,
    Stage,
    Unprotected,
)
from bench.toolkit.patches import patch_map
from bench.toolkit.vectors import gaussian_like
from defenses import dp_cutmix_claims as claims
from defenses.mixer import (
    MIXER,
    PATCHES,
    RATIOS,
    Deal,
    Mixer,
    Mixing,
    deal_patches,
    deal_ratios,
)

# --- clients --------------------------------------------------------------------------------


class DPSL(Defense):
    """Clip smashed data, noise it and the labels; no mixing. The base of DPMixSL and DPCutMix.

    clip: Delta, width of the interval [low, low + clip] to which every value of the smashed data
    is clipped; inf: not clipped, and nothing is proven. low: 0 in the paper; -clip / 2 keeps the
    sign of activations that have one, at the same sensitivity. smashed_std, label_std: std of
    the noise, 0 for none. smashed_size: values of one sample's smashed data (D_s), which the
    ledger needs.
    Source: DP-CutMixSL, Eqs. 4, 8, 9.
    """

    requires = frozenset({"smashed"})
    source = "DP-CutMixSL, Appendix B.1 (DP-SL)"
    zero_strength: Mapping[str, Any] | None = MappingProxyType(
        {"clip": math.inf, "smashed_std": 0.0, "label_std": 0.0}
    )
    method: claims.Method = "sl"
    group = 1

    def __init__(
        self,
        *,
        clip: float,
        smashed_std: float,
        label_std: float,
        low: float = 0.0,
        smashed_size: int | None = None,
    ) -> None:
        if not clip > 0:
            raise ValueError(
                f"clip must be > 0 (width of the interval of one smashed value), got {clip}."
            )
        if not math.isfinite(low):
            raise ValueError(f"low must be finite (lower end of the interval), got {low}.")
        for name, std in (("smashed_std", smashed_std), ("label_std", label_std)):
            if not 0 <= std < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite (std of the noise), got {std}.")
        if smashed_size is not None and smashed_size < 1:
            raise ValueError(
                f"smashed_size must be >= 1 (values of one sample's smashed data), "
                f"got {smashed_size}."
            )
        self.clip, self.low, self.smashed_size = clip, low, smashed_size
        self.smashed_std, self.label_std = smashed_std, label_std

    def smashed(self, q: Tensor, client: Client) -> Part:
        return Part(values=self._noised(self._clipped(q), client))

    def labels(self, y: Tensor, client: Client) -> Tensor:
        if self.label_std == 0:
            return y
        return y + gaussian_like(y, std=self.label_std, rng=client.rng["defense"])

    def _clipped(self, q: Tensor) -> Tensor:
        if self.smashed_size is not None and q[0].numel() != self.smashed_size:
            raise ValueError(
                f"smashed_size must be {q[0].numel()}, the values of one sample of the smashed "
                f"data {list(q.shape)}, got {self.smashed_size}."
            )
        return q if math.isinf(self.clip) else q.clamp(self.low, self.low + self.clip)

    def _noised(self, values: Tensor, client: Client) -> Tensor:
        if self.smashed_std == 0:
            return values
        return values + gaussian_like(values, std=self.smashed_std, rng=client.rng["defense"])

    # --- what is known and what is proven -----------------------------------------------------
    def mechanisms(self) -> tuple[Mechanism, ...]:
        out: list[Mechanism] = []
        clipped = not math.isinf(self.clip)
        if clipped or self.smashed_std:
            low, high = (self.low, self.low + self.clip) if clipped else (None, None)
            out.append(SmashedNoise(of="smashed", std=self.smashed_std, low=low, high=high))
        if self.label_std:
            out.append(LabelNoise(of="labels", std=self.label_std))
        return tuple(out)

    def worst_share(self, facts: Facts) -> float:
        """Largest share of its smashed data that a client sends in one upload."""
        return 1.0

    def claim(self, facts: Facts) -> tuple[float, float, str] | None:
        """Eq. 4, 5 or 6 for one upload at the best alpha, with D_s = smashed_size (where it is
        not set, the paper's 20) and D_y = 10; None without a clip or without any noise, where
        the paper claims nothing."""
        if math.isinf(self.clip) or self.smashed_std == self.label_std == 0:
            return None
        slope = self._printed(self.smashed_size or claims.PAPER_SMASHED_SIZE)
        return claims.best_epsilon(slope, facts.delta)[0], facts.delta, "record"

    def _printed(self, smashed_size: int) -> float:
        return claims.printed_slope(
            self.method,
            ratio=1 / self.group,
            smashed=claims.signal(self.clip**2 * smashed_size, self.smashed_std),
            label=claims.signal(claims.PAPER_LABEL_SIZE, self.label_std),
        )

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Smashed data and labels of one record over all its uploads, as the server sees them,
        given the client-held layers.

        The paper leaves those out: the client trains them on the raw samples, uploads them
        without noise, and passes all its later smashed data through them.
        """
        count = record_uploads(facts)
        events: list[Event] = []
        if (why := self._no_proof()) is not None:
            events.append(Unprotected(what="the smashed data", why=why))
        else:
            assert self.smashed_size is not None
            width = self.clip * math.sqrt(self.worst_share(facts) * self.smashed_size)
            events.append(
                Gaussian(sensitivity=width, std=self.smashed_std, unit="record", count=count)
            )
        if self.label_std == 0:
            events.append(Unprotected(what="the labels", why="they carry no noise"))
        else:
            length = math.sqrt(claims.ONE_HOT)
            events.append(
                Gaussian(sensitivity=length, std=self.label_std, unit="record", count=count)
            )
        events.append(
            Unprotected(
                what="the update of the client-held layers",
                why="it is computed from the raw samples and sent without noise, and it moves the "
                "later smashed data of the client's other samples",
            )
        )
        return tuple(events)

    def _no_proof(self) -> str | None:
        if self.smashed_std == 0:
            return "it carries no noise"
        if math.isinf(self.clip):
            return "without a clip one record may move it without bound"
        if self.smashed_size is None:
            return "smashed_size is not set, so how far one record moves it is not known"
        return None

    def constants(self, facts: Facts) -> dict[str, float | str]:
        """Epsilons are at the run's delta and best alpha; rdp2 is the Renyi divergence of order
        2 of one upload, as in the paper's figures."""
        count = record_uploads(facts)
        out: dict[str, float | str] = {
            "lambda_printed": 1 / self.group,
            "worst_share_of_values": self.worst_share(facts),
            "uploads_of_one_record": count,
            "client_held_layers": "no DP",
        }
        if self.claim(facts) is not None:
            printed = self._printed(claims.PAPER_SMASHED_SIZE)
            out["rdp2_printed_paper_size"] = 2 * printed
            out["eps_printed_paper_size"] = claims.best_epsilon(printed, facts.delta)[0]
        if self._no_proof() is None and self.label_std > 0:
            assert self.smashed_size is not None
            slope = claims.server_slope(
                share=self.worst_share(facts),
                smashed=claims.signal(self.clip**2 * self.smashed_size, self.smashed_std),
                label=claims.signal(claims.ONE_HOT, self.label_std),
            )
            printed = self._printed(self.smashed_size)
            out["rdp2_printed"] = 2 * printed
            out["rdp2_server"] = 2 * slope
            out["eps_printed_one_upload"] = claims.best_epsilon(printed, facts.delta)[0]
            out["eps_server_one_upload"] = claims.best_epsilon(slope, facts.delta)[0]
            out["eps_server_all_uploads"] = claims.best_epsilon(slope * count, facts.delta)[0]
        return out


def record_uploads(facts: Facts) -> int:
    """Most uploads of one record over the run: once per pass over the client's data."""
    steps = facts.releases * facts.local_steps
    return -(-steps * min(facts.batch, facts.records) // facts.records)


# --- mixing ---------------------------------------------------------------------------------


class _Mixing(DPSL):
    """A group's smashed data becomes one batch of the server."""

    owns = frozenset({"mix"})
    zero_strength = MappingProxyType(
        {"group": 1, "clip": math.inf, "smashed_std": 0.0, "label_std": 0.0}
    )
    plan_kind: Literal["patches", "ratios"] = RATIOS
    patches: int | None = None
    dealt = "patches"
    """What masks are dealt over; the setting that counts it."""

    def __init__(
        self,
        *,
        group: int,
        clip: float,
        smashed_std: float,
        label_std: float,
        low: float = 0.0,
        mixing: Mixing = "uniform",
        alpha: float = 1.0,
        smashed_size: int | None = None,
    ) -> None:
        super().__init__(
            clip=clip, low=low, smashed_std=smashed_std, label_std=label_std,
            smashed_size=smashed_size,
        )  # fmt: skip
        most = math.inf if self.patches is None else self.patches
        if not 1 <= group <= most:
            limit = "" if self.patches is None else f" and <= {self.dealt} ({self.patches})"
            raise ValueError(f"group must be >= 1{limit} (clients mixed together), got {group}.")
        if mixing not in ("uniform", "dirichlet"):
            raise ValueError(f"mixing must be uniform or dirichlet, got '{mixing}'.")
        if not 0.01 <= alpha <= 1e6:
            raise ValueError(
                f"alpha must lie in [0.01, 1e6] (concentration of dirichlet mixing), got {alpha}."
            )
        self.group, self.mixing, self.alpha = group, mixing, alpha

    @property
    def together(self) -> int:  # type: ignore[override]
        return self.group

    def third_parties(self, seed: int) -> Mapping[str, Party]:
        return {MIXER: Mixer(seed=seed, group=self.group, kind=self.plan_kind, deal=self._deal())}

    def _deal(self) -> Deal:
        return partial(deal_ratios, mixing=self.mixing, alpha=self.alpha)

    def mix(self, uploads: Mapping[str, Part], heard: Sequence[Message]) -> list[Mixture] | None:
        """One mixture per group of the mixer's messages; lambda_i weighs client i's label, or,
        where labels stay with the clients, its loss. `cut` is left to the protocol."""
        labels = {m.sender: m.parts["labels"].values for m in heard if m.kind == "labels"}
        plans = [m for m in heard if m.sender == MIXER and m.kind == self.plan_kind]
        out = []
        for plan in plans:
            ratio = {i: float(part.values.double().mean()) for i, part in plan.parts.items()}
            smashed = [self._share(sent(uploads[i]), r) for i, r in ratio.items()]
            targets = [r * labels[i] for i, r in ratio.items()] if labels else []
            out.append(
                Mixture(
                    smashed=reduce(torch.add, smashed),
                    cut="",
                    targets=reduce(torch.add, targets) if targets else None,
                    members=list(ratio.items()),
                )
            )
        return out

    def _share(self, values: Tensor, ratio: float) -> Tensor:
        """Mixup: lambda_i s_i (Eq. 15)."""
        return ratio * values

    def constants(self, facts: Facts) -> dict[str, float | str]:
        noises = self.mixed_noises()
        return super().constants(facts) | {"mixed_noise_std": self.smashed_std * noises**0.5}

    def mixed_noises(self) -> float:
        """Variance of the noise in a full group's mixture over that in one upload, mean over the
        ratios: E[sum lambda_i^2]."""
        if self.mixing == "uniform":
            return 1 / self.group
        return (self.alpha + 1) / (self.group * self.alpha + 1)


def sent(part: Part) -> Tensor:
    """A part's values, 0 where nothing was sent."""
    if part.present is None:
        return part.values
    return torch.where(part.present, part.values, 0.0)


class DPMixSL(_Mixing):
    """Noise on smashed data and labels; the server mixes a group's by Mixup.

    mixing: "uniform" lambda = 1 / group, or "dirichlet" with concentration alpha. The others:
    see `DPCutMix`. Eq. 5's amplification does not hold against the server, which sees every
    upload before mixing, nor for the mixture, whose noise is scaled with it.
    Source: DP-CutMixSL, Eqs. 5, 15.
    """

    source = "DP-CutMixSL, Appendix B.2 (DP-MixSL)"
    method: claims.Method = "mix"


class DPCutMix(_Mixing):
    """Patch masks from a mixer, noise on smashed data and labels, sum at the server.

    patches: N; tokens [B, N, D] or a sqrt(N) x sqrt(N) grid of a map. group: clients mixed
    together, at most N and at most the clients that step together; taken in roster order, a last
    smaller group is mixed among itself. clip: Delta, width of the interval [low, low + clip] to
    which smashed data is clipped; inf: not clipped, nothing is proven. noise: "eq1" on all
    values (the mixture carries a whole group's), "b3" on the client's own patches only.
    smashed_std, label_std: std of the noise; 0 and 0 is plain CutMix. mixing: "uniform", or
    "dirichlet": Dirichlet-multinomial sizes of concentration alpha, except that no client in
    company gets every patch. smashed_size: values of one sample's smashed data, for the ledger.
    Source: DP-CutMixSL, Algorithm 1, Eqs. 1-3.
    """

    source = "DP-CutMixSL, Algorithm 1"
    method: claims.Method = "cutmix"
    plan_kind = PATCHES
    patches: int

    def __init__(
        self,
        *,
        patches: int,
        group: int,
        clip: float,
        smashed_std: float,
        label_std: float,
        low: float = 0.0,
        noise: Literal["eq1", "b3"] = "eq1",
        mixing: Mixing = "uniform",
        alpha: float = 1.0,
        smashed_size: int | None = None,
    ) -> None:
        if patches < 1:
            raise ValueError(f"patches must be >= 1 (of one sample's smashed data), got {patches}.")
        if noise not in ("eq1", "b3"):
            raise ValueError(f"noise must be eq1 (on all values) or b3 (masked), got '{noise}'.")
        self.patches, self.noise = patches, noise
        super().__init__(
            group=group, clip=clip, low=low, smashed_std=smashed_std, label_std=label_std,
            mixing=mixing, alpha=alpha, smashed_size=smashed_size,
        )  # fmt: skip

    @property
    def variant(self) -> str:
        return self.noise if self.smashed_std else ""

    def hear(self, when: Stage, client: Client, heard: Sequence[Message]) -> None:
        if when == "step":
            client.plan.pop(PATCHES, None)
        for message in heard:
            if message.sender == MIXER and message.kind == PATCHES:
                client.plan[PATCHES] = message.parts[PATCHES].values

    def smashed(self, q: Tensor, client: Client) -> Part:
        """Eq. 1. Without noise elsewhere, only the client's own patches are on the wire: the
        server has the masks."""
        if PATCHES not in client.plan:
            raise ValueError(f"client '{client.id}' heard of no patches from the mixer this step.")
        own = patch_map(client.plan[PATCHES], q)
        masked = torch.where(own, self._clipped(q), 0.0)
        noised = self._noised(masked, client)
        if (self.noise == "eq1" and self.smashed_std) or bool(client.plan[PATCHES].all()):
            return Part(values=noised)
        return Part(values=torch.where(own, noised, 0.0), present=own)

    def _deal(self) -> Deal:
        return partial(deal_patches, self.patches, mixing=self.mixing, alpha=self.alpha)

    def _share(self, values: Tensor, ratio: float) -> Tensor:
        """CutMix: the masks are disjoint, so uploads are summed as they are (Eq. 3)."""
        return values

    def worst_share(self, facts: Facts) -> float:
        return claims.worst_share(
            patches=self.patches, smallest=self._smallest_group(facts),
            even=self.mixing == "uniform",
        )  # fmt: skip

    def _smallest_group(self, facts: Facts) -> int:
        # A round of fewer clients than a group is refused (see `together`); a step is not, where
        # clients with fewer samples have done theirs.
        most = max(self.group, facts.sampled)
        least = min(most, facts.fewest or most)
        return min(roster % self.group or self.group for roster in range(least, most + 1))

    def mixed_noises(self) -> float:
        """All of a group's noises meet in every value (Eq. 1), or one does (B.3)."""
        return self.group if self.noise == "eq1" else 1
