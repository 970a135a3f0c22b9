"""FedML-HE: the parameters most sensitive to the labels are encrypted, the rest is sent plain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from bench.api import (
    EVERYONE,
    Client,
    Encrypted,
    Event,
    Facts,
    Local,
    Loss,
    Message,
    Part,
    Party,
    Sealed,
    Stage,
    State,
    Strength,
    Unprotected,
)
from bench.toolkit.per_sample import per_sample_gradients
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import cut_like
from defenses import ckks
from defenses.encrypted_zone import CIPHERTEXT, KEY_SERVER, MASK, EncryptedZone, KeyHolder, Masks

_SMALL = 16.0
"""Divides the maps, so that those of many clients add up within the ciphertexts' range."""
_MAP, _CLIENTS = "sensitivity", "@clients"


def ranks(values: State, share: float) -> dict[str, Tensor]:
    """int64 by name: 1 for the largest value over all names, 2 for the next, ... and 0 beyond the
    `share` of coordinates that are listed; ties go to the first."""
    flat = torch.cat([v.flatten() for v in values.values()])
    places = torch.arange(1, len(flat) + 1, device=flat.device)
    places[round(share * len(flat)) :] = 0
    order = torch.empty_like(places)
    order[flat.argsort(descending=True, stable=True)] = places
    return cut_like(order, values)


def largest(values: State, share: float) -> dict[str, Tensor]:
    """Mask of the `share` of coordinates with the largest values, as `ranks` lists them."""
    return {n: r > 0 for n, r in ranks(values, share).items()}


class MapHolder(KeyHolder):
    """The key server of FedML-HE: opens the sum of the clients' sensitivity maps once, and tells
    everyone which coordinates are encrypted."""

    def __init__(self, parameters: ckks.Parameters, share: float) -> None:
        super().__init__(parameters)
        self.share = share
        self.roster: list[str] = []
        self.maps: dict[str, Message] = {}
        self.mask: Mapping[str, Tensor] = {}

    def begin(self, when: Stage, roster: Sequence[str], round: int, step: int) -> list[Message]:
        self.roster, self.maps = list(roster), {}
        announced = [self._announcement(round)] if self.mask and when == "round" else []
        return announced + super().begin(when, roster, round, step)

    def reply(self, message: Message) -> list[Message]:
        if message.kind != _MAP:
            return super().reply(message)
        self.maps = {**self.maps, message.sender: message}
        if self.mask or set(self.maps) != set(self.roster):
            return []
        boxes = [m.sealed[CIPHERTEXT].box for m in self.maps.values()]
        shapes = {n: s.covers for n, s in message.sealed.items() if n != CIPHERTEXT}
        added = ckks.add(boxes, self.keys.public_context)
        total = self.keys.decrypt(added, length=sum(c.numel() for c in shapes.values()))
        self.mask = largest(cut_like(total, shapes), self.share)
        return [self._announcement(message.round)]

    def _announcement(self, round: int) -> Message:
        parts = {n: Part(values=m, bits=1) for n, m in self.mask.items()}
        parts[_CLIENTS] = Part(values=torch.tensor([len(self.roster)]), bits=32)
        return Message(kind=MASK, sender=KEY_SERVER, receiver=EVERYONE, round=round, parts=parts)


@dataclass(kw_only=True, eq=False)
class FedMLHE(EncryptedZone):
    """Encrypts a common mask of the parameters most sensitive to the labels, no others.

    The sensitivity of a parameter is the mean over a client's samples of |d/dy (d loss / dw)|, y
    being the true class's entry of the label: for cross entropy the absolute gradient on the
    sample. The clients' maps, each over its largest value, are sent encrypted in the first round,
    and the mask of the largest sums holds from then on.

    Args:
        share: Of the parameters, that are encrypted, in [0, 1]; the rest is sent as it is.
        parameters: See `EncryptedZone`.

    Departures: the key server adds the maps (there, the aggregation server adds ciphertexts);
    under split protocols the update's absolute value stands for the map.
    Source: Jin et al., arXiv:2303.10837, Sec. 2.4.
    """

    forms_model = "clients"
    strength = Strength(setting="share", weak=0.01, strong=1.0)
    source = "Jin et al., arXiv:2303.10837 (FedML-HE)"
    share: Annotated[float, Limits("of parameters, encrypted", least=0, most=1)] = 0.1

    def third_parties(self, seed: int) -> Mapping[str, Party]:
        return {KEY_SERVER: MapHolder(self._ckks, self.share)}

    def inspects(self, client: Client) -> bool:
        return "encrypted" not in client.plan

    def inspect(self, loss: Loss, variables: State, x: Tensor, y: Tensor) -> State:
        each = per_sample_gradients(loss, variables, x, y)
        return {n: g.abs().sum(dim=0) for n, g in each.items()}

    def say(self, when: Stage, client: Client, local: Local | None, round: int) -> list[Message]:
        if when != "upload" or "encrypted" in client.plan:
            return []
        assert local is not None
        scores = client.memory.get("inspected") or {n: g.abs() for n, g in local.grad_sum.items()}
        flat = torch.cat([scores[n].flatten() for n in local.broadcast]).double()
        sealed = {
            n: Sealed(n_bytes=0, covers=torch.ones_like(v, dtype=torch.bool))
            for n, v in local.broadcast.items()
        }
        # A map is at most 1, and small nearly everywhere: one client's range is enough.
        scaled = flat / flat.max().clamp_min(1e-300) / _SMALL
        sealed[CIPHERTEXT] = self._seal(scaled, client, clients=1)
        return [
            Message(kind=_MAP, sender=client.id, receiver=KEY_SERVER, round=round, sealed=sealed)
        ]

    def hear(self, when: Stage, client: Client, heard: Sequence[Message]) -> None:
        super().hear("round", client, heard)  # the public key
        for message in heard:
            if message.kind == MASK:
                # The key server works on the CPU, wherever the clients train.
                told = {n: p.values.to(client.y.device) for n, p in message.parts.items()}
                client.plan["company"] = int(told.pop(_CLIENTS))
                client.plan["encrypted"] = told

    def agree(self, masks: Sequence[Masks]) -> Masks:
        return {n: m for n, m in masks[0].items() if n != _CLIENTS}

    def keep_for_rehearsal(self, mask: Masks) -> dict[str, Any]:
        return {}

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (
            Encrypted(what="each client's values in the encrypted zone"),
            Unprotected(what="all other values", why="they are sent without noise"),
        )
