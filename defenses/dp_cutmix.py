"""DP-CutMixSL: noised patches of several clients' smashed data, put together by the server.

Per step a mixer deals the N patches of a group to its clients, each patch to one of them. Client
i clips its smashed data s_i to [0, Delta], keeps its own patches, adds noise (Eq. 1) and noises
its label (Eq. 2); the server sums the group's uploads and weighs the labels with lambda_i
(Eq. 3). The rivals of its Table 1 are in `cutmix.py`;
clip, noise and ledger, which they share, are in `noised_smashed.py`.

Where the paper contradicts itself or is silent: noise goes on all values as in Eq. 1 and Alg. 1
(`noise="b3"`: only on the client's patches, as in B.3 and Fig. 1). The whole group is summed,
not pairs (Eq. 3), since only the group's masks cover all patches. Sizes are rounded by largest
remainder, and lambda_i in the labels is the share of patches that client i really got. Smashed
data is clipped, which the paper assumes away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from bench.api import Client, Facts, Message, Mixture, Part, Party, Stage, Strength
from bench.toolkit.patches import patch_map
from bench.toolkit.settings import Limits, check_number
from defenses.mixer import MIXER, PATCHES, Deal, GroupMixing, Mixer, deal_patches, mixtures

Noise = Literal["eq1", "b3"]


@dataclass(kw_only=True, eq=False)
class DPCutMix(GroupMixing):
    """Patch masks from a mixer, noise on smashed data and labels, sum at the server.

    Args:
        patches: N; tokens [B, N, D] or a sqrt(N) x sqrt(N) grid of a map.
        group: Clients mixed together, at most N and at most the clients that step together;
            taken in roster order, a last smaller group is mixed among itself.
        clip: Delta, width of the interval [low, low + clip] to which smashed data is clipped;
            inf: not clipped, nothing is proven.
        smashed_std: Std of the noise on smashed data; 0 and 0 is plain CutMix.
        label_std: Std of the noise on labels.
        low: Lower end of the interval.
        noise: "eq1" on all values (the mixture carries a whole group's), "b3" on the client's
            own patches only.
        mixing: "uniform", or "dirichlet": Dirichlet-multinomial sizes of concentration alpha,
            except that no client in company gets every patch.
        alpha: See `mixing`.
        smashed_size: Values of one sample's smashed data, for the ledger.

    Source: DP-CutMixSL, Algorithm 1, Eqs. 1-3.
    """

    strength = Strength(setting="smashed_std", weak=1e-3, strong=10.0)
    source = "DP-CutMixSL, Algorithm 1"
    patches: Annotated[int, Limits("of one sample's smashed data", least=1)]
    noise: Noise = "eq1"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("group", self.group, "a patch for each client", least=1, most=self.patches)

    @property
    def variant(self) -> str:
        return self.noise if self.smashed_std else ""

    # --- mixer: lambda ~ Dir(alpha), masks M_i ------------------------------------------------
    def third_parties(self, seed: int) -> Mapping[str, Party]:
        return {MIXER: Mixer(seed=seed, group=self.group, kind=PATCHES, deal=self.deal())}

    def deal(self) -> Deal:
        return partial(deal_patches, self.patches, mixing=self.mixing, alpha=self.alpha)

    # --- client: mask, noise ------------------------------------------------------------------
    def hear(self, when: Stage, client: Client, heard: Sequence[Message]) -> None:
        if when == "step":
            client.plan.pop(PATCHES, None)
        for message in heard:
            if message.sender == MIXER and message.kind == PATCHES:
                client.plan[PATCHES] = message.parts[PATCHES].values

    def smashed(self, q: Tensor, client: Client) -> Part:
        """Eq. 1: M_i * s_i + N_s. Without noise elsewhere, only the client's own patches are on
        the wire: the server has the masks."""
        own = patch_map(client.plan[PATCHES], q)
        masked = torch.where(own, self.clip_smashed(q), 0.0)
        noised = self.add_noise(masked, client)
        if (self.noise == "eq1" and self.smashed_std) or bool(client.plan[PATCHES].all()):
            return Part(values=noised)
        return Part(values=torch.where(own, noised, 0.0), present=own)

    # --- server: sum --------------------------------------------------------------------------
    def mix(self, uploads: Mapping[str, Part], heard: Sequence[Message]) -> list[Mixture] | None:
        """Eq. 3: the masks are disjoint, so a group's uploads are summed as they are, and labels
        (where they stay with the clients, losses) with the weights lambda_i."""
        return mixtures(uploads, heard, kind=PATCHES, share=lambda smashed, _: smashed)

    # --- what is proven -----------------------------------------------------------------------
    def bound(self, *, smashed: float, label: float) -> float:
        ratio = 1 / self.group
        return ratio * (smashed + ratio * label) / 2

    def worst_share(self, facts: Facts) -> float:
        """Of random sizes only "all patches" is excluded, for a client in company."""
        smallest = self.smallest_group(facts)
        if smallest == 1:
            return 1.0
        if self.mixing == "uniform":
            return -(-self.patches // smallest) / self.patches
        return (self.patches - 1) / self.patches

    def smallest_group(self, facts: Facts) -> int:
        """Clients of the smallest group that any step may have."""
        # A round of fewer clients than a group is refused (see `together`); a step is not, where
        # clients with fewer samples have done theirs.
        most = max(self.group, facts.sampled)
        least = min(most, facts.fewest or most)
        first = least % self.group or self.group
        # From `first` on, rosters leave over more and more, until a full group, then one client.
        return 1 if most - least > self.group - first else first

    def mix_noises(self) -> float:
        """All of a group's noises meet in every value (Eq. 1), or one does (B.3)."""
        return self.group if self.noise == "eq1" else 1
