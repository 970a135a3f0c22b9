"""DP-CutMixSL's rivals with noise: DP-SL, noise alone, and DP-MixSL, whose server sums
lambda_i s_i."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from bench.api import FloatOrInf, Message, Mixture, Part, Party, Strength
from defenses.mixer import MIXER, RATIOS, GroupMixing, Mixer, Mixing, deal_ratios, mixtures
from defenses.noised_smashed import NoisedSmashed


class DPSL(NoisedSmashed):
    """Clip smashed data, noise it and the labels; no mixing. Settings: see `NoisedSmashed`.

    Source: DP-CutMixSL, Eqs. 4, 8, 9.
    """

    strength: Strength | None = Strength(setting="smashed_std", weak=1e-3, strong=10.0)
    source = "DP-CutMixSL, Appendix B.1 (DP-SL)"

    def bound(self, *, smashed: float, label: float) -> float:
        return (smashed + label) / 2


class DPMixSL(GroupMixing):
    """Noise on smashed data and labels; the server mixes a group's by Mixup.

    Eq. 5's amplification does not hold against the server, which sees every upload before mixing,
    nor for the mixture, whose noise is scaled with it.

    Args:
        group: Clients mixed together.
        clip: See `NoisedSmashed`, as smashed_std, label_std, low and smashed_size.
        mixing: "uniform" lambda = 1 / group, or "dirichlet" with concentration alpha.
        alpha: See `mixing`.

    Source: DP-CutMixSL, Eqs. 5, 15.
    """

    strength: Strength | None = Strength(setting="smashed_std", weak=1e-3, strong=10.0)
    source = "DP-CutMixSL, Appendix B.2 (DP-MixSL)"

    def __init__(
        self,
        *,
        group: int,
        clip: FloatOrInf,
        smashed_std: float,
        label_std: float,
        low: float = 0.0,
        mixing: Mixing = "uniform",
        alpha: float = 1.0,
        smashed_size: int | None = None,
    ) -> None:
        super().__init__(
            clip=clip,
            low=low,
            smashed_std=smashed_std,
            label_std=label_std,
            smashed_size=smashed_size,
        )
        self.mixes(group=group, mixing=mixing, alpha=alpha)

    def third_parties(self, seed: int) -> Mapping[str, Party]:
        deal = partial(deal_ratios, mixing=self.mixing, alpha=self.alpha)
        return {MIXER: Mixer(seed=seed, group=self.group, kind=RATIOS, deal=deal)}

    def mix(self, uploads: Mapping[str, Part], heard: Sequence[Message]) -> list[Mixture] | None:
        """Eq. 15: lambda_i s_i."""
        return mixtures(uploads, heard, kind=RATIOS, share=lambda smashed, ratio: ratio * smashed)

    def bound(self, *, smashed: float, label: float) -> float:
        return (1 / self.group) ** 2 * (smashed + label) / 2

    def mixed_noises(self) -> float:
        """E[sum lambda_i^2]."""
        if self.mixing == "uniform":
            return 1 / self.group
        return (self.alpha + 1) / (self.group * self.alpha + 1)
