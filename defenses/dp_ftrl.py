"""DP-FTRL: noise that is shared between rounds by a tree, so that no sampling need be secret."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from bench.api import Client, Event, Facts, Gaussian, Party
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import gaussian_like
from defenses.aggregator import AGGREGATOR, Aggregator, CentralNoise

_ROUNDS = "rounds"


@dataclass(kw_only=True, eq=False)
class TreeAggregator(Aggregator):
    """Gives the sum of a pass's rounds the noise of the nodes of a binary tree that cover them, so
    that a round's sum has what one prefix has more than the one before.

    Attributes:
        period: Rounds of a pass, after which a new tree begins.
        nodes: The noise of each level's present node.
    """

    period: int
    nodes: list[Tensor] = field(default_factory=list)

    def noise(self, like: Tensor, round: int) -> Tensor:
        level = closed_levels(round % self.period)
        if round % self.period == 0:
            self.nodes = [torch.zeros_like(like)] * self.period.bit_length()
        new = gaussian_like(like, std=self.std, rng=self.rng)
        change = new - torch.stack([*self.nodes[:level], torch.zeros_like(like)]).sum(dim=0)
        self.nodes[: level + 1] = [*[torch.zeros_like(like)] * level, new]
        return change


def closed_levels(number: int) -> int:
    """How many nodes of a pass's tree the new one of a round, from 0, takes the place of."""
    return ((number + 1) & -(number + 1)).bit_length() - 1


@dataclass(kw_only=True, eq=False)
class DPFTRL(CentralNoise):
    """Clipped updates whose sums over the rounds of a pass have the noise of a binary tree.

    Clients take part in a fixed order, each in one round of every pass. So noise need not be that
    of a round's own sum: a client's update is in one node of each level of the tree, N(0,
    (noise_multiplier clip_norm)^2) each, and a prefix of a pass in few nodes.

    Args:
        period: Rounds of a pass; the clients are dealt to them in turn.

    Departures: the tree is the plain one, without Honaker's estimate, and begins anew with every
    pass. The model moves by every round's noised sum, which is FTRL without regularisation from
    the first model; momentum is the protocol's `server_momentum`.
    Source: Kairouz et al., arXiv:2103.00039 (Algorithm 1, tree restarts of its appendix).
    """

    owns = frozenset({"aggregate", "joins"})
    source = "Kairouz et al., arXiv:2103.00039"
    period: Annotated[int, Limits("rounds of a pass", least=1)]

    def third_parties(self, seed: int) -> Mapping[str, Party]:
        return {AGGREGATOR: self._make(TreeAggregator, seed, period=self.period)}

    def joins(self, client: Client, sampled: bool) -> bool:
        """In the round of a pass whose turn the client is, whoever was sampled."""
        number = client.memory.get(_ROUNDS, 0)
        client.memory[_ROUNDS] = number + 1
        return number % self.period == client.number % self.period

    def spread(self, round: int) -> float:
        return math.sqrt(1 + closed_levels(round % self.period))

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        """Against all who see every model: adding or removing one client, who is in at most
        `period.bit_length()` nodes of a pass."""
        return float(self.constants(facts)["eps_client_added"]), facts.delta, "client"

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Replacing a client moves each node that its updates are in by up to 2 clip_norm."""
        nodes = self.period.bit_length() * min(facts.releases, -(-facts.rounds // self.period))
        moves, std = 2 * self.clip_norm, self.std * self.clip_norm
        return (Gaussian(sensitivity=moves, std=std, unit="client", count=nodes),)
