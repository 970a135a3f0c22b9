"""DP-CutMixSL without noise, and the rivals of its Table 1: CutMix by boxes, Cutout, Mixup.

Nothing is clipped or noised, so nothing is proven for them: the server sees every upload before it
is mixed, and the masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from torch import Tensor

from bench.api import Client, Facts, Message, Mixture, Part
from bench.toolkit.patches import count_positions
from defenses.dp_cutmix import DPCutMix
from defenses.dp_cutmix_rivals import DPMixSL
from defenses.mixer import Deal, Mixing, box_side, deal_boxes


class CutMix(DPCutMix):
    """DP-CutMixSL without clip and noise: CutMixSL. Settings: see `DPCutMix`."""

    zero_strength = MappingProxyType({"group": 1})

    strength = None  # it adds no noise
    source = "DP-CutMixSL, Sec. 2 (CutMixSL)"

    def __init__(
        self, *, patches: int, group: int, mixing: Mixing = "uniform", alpha: float = 1.0
    ) -> None:
        super().__init__(
            patches=patches,
            group=group,
            mixing=mixing,
            alpha=alpha,
            clip=math.inf,
            smashed_std=0.0,
            label_std=0.0,
        )


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
    dealt = "positions"

    def __init__(
        self, *, positions: int, group: int, mixing: Mixing = "uniform", alpha: float = 1.0
    ) -> None:
        if positions < 1 or math.isqrt(positions) ** 2 != positions:
            raise ValueError(
                f"positions must be a square number >= 1 (tokens or pixels of the smashed data), "
                f"got {positions}."
            )
        super().__init__(patches=positions, group=group, mixing=mixing, alpha=alpha)

    def deal(self) -> Deal:
        return partial(deal_boxes, self.patches, mixing=self.mixing, alpha=self.alpha)

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
        width = box_side(math.isqrt(self.patches), 1 / 2) if self.mixing == "uniform" else 1
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

    zero_strength = MappingProxyType({"group": 1})

    strength = None  # it adds no noise
    source = "DP-CutMixSL, Table 1 (SL w. Mixup), after Zhang et al. 2017"

    def __init__(self, *, group: int, mixing: Mixing = "uniform", alpha: float = 1.0) -> None:
        super().__init__(
            group=group, mixing=mixing, alpha=alpha, clip=math.inf, smashed_std=0.0, label_std=0.0
        )
