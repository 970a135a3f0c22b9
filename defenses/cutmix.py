"""DP-CutMixSL's rivals: DP-SL and DP-MixSL with noise, CutMix, Cutout and Mixup without.

Where nothing is clipped or noised, nothing is proven: the server sees every upload before it is
mixed, and the masks.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from bench.api import Client, Facts, Message, Mixture, Part, Party, Strength
from bench.toolkit.patches import count_positions
from defenses import mixer
from defenses.dp_cutmix import DPCutMix
from defenses.noised_smashed import NoisedSmashed

_NO_NOISE: dict[str, Any] = {"clip": math.inf, "smashed_std": 0.0, "label_std": 0.0}


class DPSL(NoisedSmashed):
    """Clip smashed data, noise it and the labels; no mixing. Settings: see `NoisedSmashed`.

    Source: DP-CutMixSL, Eqs. 4, 8, 9.
    """

    strength = Strength(setting="smashed_std", weak=1e-3, strong=10.0)
    source = "DP-CutMixSL, Appendix B.1 (DP-SL)"

    def bound(self, *, smashed: float, label: float) -> float:
        return (smashed + label) / 2


class DPMixSL(mixer.GroupMixing):
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

    strength = Strength(setting="smashed_std", weak=1e-3, strong=10.0)
    source = "DP-CutMixSL, Appendix B.2 (DP-MixSL)"

    def third_parties(self, seed: int) -> Mapping[str, Party]:
        deal = partial(mixer.deal_ratios, mixing=self.mixing, alpha=self.alpha)
        return {mixer.MIXER: mixer.Mixer(seed=seed, group=self.group, kind=mixer.RATIOS, deal=deal)}

    def mix(self, uploads: Mapping[str, Part], heard: Sequence[Message]) -> list[Mixture] | None:
        """Eq. 15: lambda_i s_i."""
        return mixer.mixtures(
            uploads, heard, kind=mixer.RATIOS, share=lambda smashed, ratio: ratio * smashed
        )

    def bound(self, *, smashed: float, label: float) -> float:
        return (1 / self.group) ** 2 * (smashed + label) / 2

    def mix_noises(self) -> float:
        """E[sum lambda_i^2]."""
        if self.mixing == "uniform":
            return 1 / self.group
        return (self.alpha + 1) / (self.group * self.alpha + 1)


class CutMix(DPCutMix):
    """DP-CutMixSL without clip and noise: CutMixSL. Settings: see `DPCutMix`."""

    zero_strength = MappingProxyType[str, Any]({"group": 1})
    strength = None  # type: ignore[assignment]  # it adds no noise
    source = "DP-CutMixSL, Sec. 2 (CutMixSL)"

    def __init__(
        self, *, patches: int, group: int, mixing: mixer.Mixing = "uniform", alpha: float = 1.0
    ) -> None:
        super().__init__(patches=patches, group=group, mixing=mixing, alpha=alpha, **_NO_NOISE)


class VanillaCutMix(CutMix):
    """CutMix by bounding boxes on the smashed data's positions, whatever the size of a patch.

    Client i's label is weighed with the share of positions that it kept in the end. As in the
    other rows, every step is mixed; Yun et al. mix a share of them.

    Args:
        positions: A square number; tokens N of [B, N, D], row by row, or pixels H * H of a map
            [B, C, H, H].
        group: Clients mixed together; one gets the grid, each further one pastes a box over what
            is there (see `deal_boxes`; more than a pair is ours).
        mixing: "uniform" lambda = 1 / group, or "dirichlet" with concentration alpha: for a pair
            Yun et al.'s Beta(alpha, alpha), of which they take alpha = 1.
        alpha: See `mixing`.

    Source: Yun et al., arXiv:1905.04899, on smashed data: "SL w. Vanilla CutMix".
    """

    source = "DP-CutMixSL, Table 1 (SL w. Vanilla CutMix), after Yun et al. 2019"

    def __init__(
        self, *, positions: int, group: int, mixing: mixer.Mixing = "uniform", alpha: float = 1.0
    ) -> None:
        if positions < 1 or math.isqrt(positions) ** 2 != positions:
            raise ValueError(
                f"positions must be a square number >= 1 (tokens or pixels of the smashed data), "
                f"got {positions}."
            )
        super().__init__(patches=positions, group=group, mixing=mixing, alpha=alpha)

    def deal(self) -> mixer.Deal:
        return partial(mixer.deal_boxes, self.patches, mixing=self.mixing, alpha=self.alpha)

    def smashed(self, q: Tensor, client: Client) -> Part:
        if (there := count_positions(q)) != self.patches:
            raise ValueError(
                f"positions must be {there}, those of the smashed data {list(q.shape)}, "
                f"got {self.patches}."
            )
        return super().smashed(q, client)

    def worst_share(self, facts: Facts) -> float:
        """All but what the least box keeps in a corner. Of equal ratios the first box pasted has
        half the grid, and the others may lie inside it."""
        if self.smallest_group(facts) == 1:
            return 1.0
        width = mixer.box_side(math.isqrt(self.patches), 1 / 2) if self.mixing == "uniform" else 1
        return 1 - (-(-width // 2)) ** 2 / self.patches


class Cutout(CutMix):
    """The uploads of CutMix, each run on its own: no partner fills the blank patches.

    A client keeps about one in `group` patches. Settings: see `DPCutMix`.
    Source: DP-CutMixSL, Sec. 2 (Cutout smashed data), after DeVries and Taylor 2017.
    """

    owns = frozenset()
    source = "DP-CutMixSL, Sec. 2 (Cutout smashed data)"

    def mix(self, uploads: Mapping[str, Part], heard: Sequence[Message]) -> list[Mixture] | None:
        return None


class Mixup(DPMixSL):
    """DP-MixSL without clip and noise. Settings: see `DPMixSL`."""

    zero_strength = MappingProxyType[str, Any]({"group": 1})
    strength = None  # type: ignore[assignment]  # it adds no noise
    source = "DP-CutMixSL, Table 1 (SL w. Mixup), after Zhang et al. 2017"

    def __init__(self, *, group: int, mixing: mixer.Mixing = "uniform", alpha: float = 1.0) -> None:
        super().__init__(group=group, mixing=mixing, alpha=alpha, **_NO_NOISE)
