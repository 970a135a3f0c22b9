"""DP-CutMixSL's mixer: who contributes what to a group's mixture, told anew in every step.

Three ways to deal: ratios (Mixup), random patches (DP-CutMixSL), and boxes (CutMix as Yun et al.
have it). Each gives one row per client of a group, and the rows add up to one everywhere.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import torch
from scipy.special import gammaincinv
from torch import Tensor

from bench.api import SERVER, Facts, Message, Mixture, Part, Party, Stage
from bench.toolkit.settings import Limits
from defenses.noised_smashed import NoisedSmashed

Mixing = Literal["uniform", "dirichlet"]
MIXER = "mixer"
PATCHES: Final = "patches"
RATIOS: Final = "ratios"


Deal = Callable[..., Tensor]
"""Draws one row per client of a group from `clients` and `rng`: ratios [clients], or masks bool
[clients, patches]."""


# --- dealing --------------------------------------------------------------------------------


def dirichlet(alpha: float, size: int, *, rng: torch.Generator) -> Tensor:
    """Symmetric Dirichlet(alpha) of `size` ratios, float64: normalised gammas by inverse CDF."""
    uniform = torch.rand(size, generator=rng, dtype=torch.float64)
    gammas = torch.from_numpy(gammaincinv(alpha, uniform.numpy())).clamp_min(1e-300)
    return gammas / gammas.sum()


def deal_ratios(clients: int, *, mixing: Mixing, alpha: float, rng: torch.Generator) -> Tensor:
    """Ratios float64 [clients] that add up to 1: equal (uniform), or Dirichlet(alpha)."""
    if mixing == "uniform":
        return torch.full((clients,), 1 / clients, dtype=torch.float64)
    return dirichlet(alpha, clients, rng=rng)


def deal_patches(
    patches: int, clients: int, *, mixing: Mixing, alpha: float, rng: torch.Generator
) -> Tensor:
    """Masks bool [clients, patches] in which every patch belongs to exactly one client.

    uniform: largest-remainder sizes, of which the first clients get the extra one: the paper's
    [lambda N] leaves open how to round, and floor, round and ceiling all miss the total for most
    numbers of clients, which its "no blank patches" excludes. dirichlet: sizes are
    Dirichlet-multinomial; should one of several clients get everything, a patch drawn at random
    goes to another one, since a client that sends all its patches is not mixed at all. Which
    patches is uniform in both.
    """
    if mixing == "uniform":
        share, extra = divmod(patches, clients)
        sizes = torch.tensor([share + (i < extra) for i in range(clients)])
        owner = torch.arange(clients).repeat_interleave(sizes)
        owner = owner[torch.randperm(patches, generator=rng)]
    else:
        ratios = dirichlet(alpha, clients, rng=rng)
        owner = torch.multinomial(ratios, patches, replacement=True, generator=rng)
        if clients > 1 and bool((owner == owner[0]).all()):
            given = torch.randint(patches, (1,), generator=rng)
            shift = torch.randint(1, clients, (1,), generator=rng)
            owner[given] = (owner[given] + shift) % clients
    return torch.arange(clients)[:, None] == owner


def deal_boxes(
    positions: int, clients: int, *, mixing: Mixing, alpha: float, rng: torch.Generator
) -> Tensor:
    """Masks bool [clients, positions] of boxes on a square grid, row by row; each position
    belongs to exactly one client.

    In an order drawn at random the first client gets the grid, and each later one pastes a box
    over it, whose share of the grid is its ratio among those so far: for a pair lambda is the
    first's ratio, and the box has 1 - lambda. The box's side is rounded, its centre is uniform
    over the grid, and it is clipped at the borders. More than a pair, the random order (by which
    each client's expected share is 1 / clients) and the limits of `box_side` are ours.
    Source: Yun et al., arXiv:1905.04899, Eqs. 1 and 2.
    """
    side = math.isqrt(positions)
    order = torch.randperm(clients, generator=rng).tolist()
    ratios = deal_ratios(clients, mixing=mixing, alpha=alpha, rng=rng)
    areas = (ratios / ratios.cumsum(0)).tolist()
    owner = torch.full((side, side), order[0])
    for client, area in zip(order[1:], areas[1:], strict=True):
        width = box_side(side, area)
        rows, columns = (
            slice(max(0, start), start + width)
            for start in (torch.randint(side, (2,), generator=rng) - width // 2).tolist()
        )
        owner[rows, columns] = client
    return torch.arange(clients)[:, None] == owner.flatten()


def box_side(side: int, area: float) -> int:
    """Side of a box with about `area` (a share) of a grid of side x side positions.

    At least 1 and, if the grid has more, less than `side`: a client whose company gets nothing
    is not mixed at all.
    """
    nearest = math.floor(side * math.sqrt(area) + 0.5 + 1e-9)  # ties upwards, by exact areas
    return min(max(1, nearest), max(1, side - 1))


# --- the party ------------------------------------------------------------------------------


class Mixer(Party):
    """Third party that decides, per step and group of clients, who contributes what.

    Groups are taken in roster order; the last one may be smaller, and so may all where clients
    have done their steps. kind: PATCHES, where it sends each client its mask and the server each
    group's masks (1 bit per patch); or RATIOS, where only the server hears, each group's ratios.
    """

    def __init__(
        self, *, seed: int, group: int, kind: Literal["patches", "ratios"], deal: Deal
    ) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.group, self.kind, self.deal = group, kind, deal

    def begin(self, when: Stage, roster: Sequence[str], round: int, step: int) -> list[Message]:
        if when != "step" or not roster:
            return []
        out = []
        for first in range(0, len(roster), self.group):
            members = roster[first : first + self.group]
            parts = self._parts(members)
            told = Message(kind=self.kind, sender=MIXER, receiver=SERVER, round=round, step=step)
            out.append(told.with_parts(parts))
            for member in members if self.kind == PATCHES else ():
                out.append(replace(told, receiver=member, parts={PATCHES: parts[member]}))
        return out

    def _parts(self, members: Sequence[str]) -> dict[str, Part]:
        rows = self.deal(len(members), rng=self.rng)
        if self.kind == PATCHES:
            return {m: Part(values=mask, bits=1) for m, mask in zip(members, rows, strict=True)}
        return {m: Part(values=ratio) for m, ratio in zip(members, rows.float(), strict=True)}


# --- the server -----------------------------------------------------------------------------


def mixtures(
    uploads: Mapping[str, Part],
    heard: Sequence[Message],
    *,
    kind: str,
    share: Callable[[Tensor, float], Tensor],
) -> list[Mixture]:
    """One mixture per group of the mixer's messages of this kind: the sum of share(s_i, lambda_i);
    lambda_i weighs client i's label, or, where labels stay with the clients, its loss."""
    labels = {m.sender: m.parts["labels"].values for m in heard if m.kind == "labels"}
    out = []
    for plan in (m for m in heard if m.sender == MIXER and m.kind == kind):
        ratio = {i: float(part.values.double().mean()) for i, part in plan.parts.items()}
        sent = {i: torch.where(uploads[i].presence(), uploads[i].values, 0.0) for i in ratio}
        smashed = [share(sent[i], r) for i, r in ratio.items()]
        targets = [r * labels[i] for i, r in ratio.items()] if labels else []
        mixture = Mixture(
            smashed=reduce(torch.add, smashed),
            cut="",  # left to the protocol
            targets=reduce(torch.add, targets) if targets else None,
            members=list(ratio.items()),
        )
        out.append(mixture)
    return out


@dataclass(kw_only=True, eq=False)
class GroupMixing(NoisedSmashed):
    """Base of defenses that mix a group's noised smashed data into one batch of the server.

    Args:
        group: Clients mixed together.
        mixing: `uniform`, or `dirichlet` with concentration alpha.
        alpha: In [0.01, 1e6].
    """

    owns = frozenset({"mix"})
    zero_strength = MappingProxyType[str, Any](
        {"group": 1, "clip": math.inf, "smashed_std": 0.0, "label_std": 0.0}
    )
    group: Annotated[int, Limits("clients mixed together", least=1)]
    mixing: Mixing = "uniform"
    alpha: Annotated[float, Limits("concentration of dirichlet mixing", least=0.01, most=10**6)] = (
        1.0
    )

    @property
    def together(self) -> int:  # type: ignore[override]
        return self.group

    def mix_noises(self) -> float:
        """Variance of the noise in a full group's mixture over that in one upload."""
        raise TypeError(f"{type(self).__name__} must define mixed_noises().")

    def constants(self, facts: Facts) -> dict[str, float | str]:
        std = self.smashed_std * self.mix_noises() ** 0.5
        return super().constants(facts) | {"mixed_noise_std": std}
