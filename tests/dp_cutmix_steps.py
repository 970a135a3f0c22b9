"""DP-CutMixSL and its rivals: one step as the protocol plays it, and shapes to play it with."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.contract.defense import Client, Defense, Mixture
from bench.contract.messages import SERVER, Message, Part
from bench.protocols.wire import Wire
from bench.seeding import generator
from defenses.dp_cutmix import DPCutMix

ROSTER = ("client-0", "client-1", "client-2", "client-3", "client-4")

CLASSES = 3


class Step:
    """Mixer, clients and server of one step, over a real wire.

    q: client id -> smashed data. What the server runs is in `mixtures` (None: each its own),
    `leaves` are the uploads as the server's leaf tensors, `parts` as the clients made them.
    """

    def __init__(
        self, defense: Defense, q: dict[str, Tensor], *, share_labels: bool = True, seed: int = 0
    ) -> None:
        roster = list(q)
        batch = len(q[roster[0]])
        self.clients = {
            i: Client(id=i, x=torch.zeros(1), y=torch.zeros(1), rng={"defense": generator(seed, i)})
            for i in roster
        }
        parties = defense.third_parties(seed)
        self.wire = Wire(parties, roster)
        for party in parties.values():
            self.wire.send(party.begin("step", roster, 3, 7))
        self.heard = {i: self.wire.collect(i) for i in roster}
        self.parts, self.labels = {}, {}
        for place, (i, client) in enumerate(self.clients.items()):
            defense.hear("step", client, self.heard[i])
            self.parts[i] = defense.smashed(q[i], client)
            y = torch.zeros(batch, CLASSES)
            y[:, place % CLASSES] = 1
            self.labels[i] = defense.labels(y, client)
            if share_labels:
                self.wire.send([self._message("labels", i, Part(values=self.labels[i]))])
        self.leaves = {
            i: replace(p, values=p.values.detach().clone().requires_grad_())
            for i, p in self.parts.items()
        }
        self.to_server = self.wire.collect(SERVER)
        self.mixtures = defense.mix(self.leaves, self.to_server)

    @staticmethod
    def _message(kind: str, sender: str, part: Part) -> Message:
        return Message(
            kind=kind, sender=sender, receiver=SERVER, round=3, step=7, parts={kind: part}
        )

    @property
    def mixed(self) -> list[Mixture]:
        assert self.mixtures is not None
        return self.mixtures

    def mask(self, client: str) -> Tensor:
        return self.clients[client].plan["patches"]


def tokens(clients: int, *, batch: int = 2, patches: int = 6, width: int = 4) -> dict[str, Tensor]:
    """Activations in [0.05, 0.95], different for every client."""
    rng = generator(0, "tokens")
    return {
        i: torch.rand(batch, patches, width, generator=rng) * 0.9 + 0.05 for i in ROSTER[:clients]
    }


def plain(**changes: Any) -> DPCutMix:
    given: dict[str, Any] = {
        "patches": 6,
        "group": 3,
        "clip": 1.0,
        "smashed_std": 0.0,
        "label_std": 0.0,
    }
    return DPCutMix(**given | changes)
