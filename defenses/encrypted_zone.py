"""What defenses share that send a part of every update as CKKS ciphertexts.

Three parties: clients, who hold the public key; the aggregation server (the protocol's server),
who adds ciphertexts and cannot open them; and the key holder, who opens sums. In SelectiveShield
that is a key server, which forms the new model and sends it to the clients (Sec. 4.5). In FedML-HE
(arXiv:2303.10837, Sec. 2.3) and MaskCrypt the clients have the private key: each decrypts the sum
that the server returns. In none of them does the server learn the sum of the encrypted part, nor
two consecutive models, whose difference would tell it.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bench.api import (
    EVERYONE,
    FORMER,
    SERVER,
    UPLOAD_KINDS,
    Client,
    Defense,
    Local,
    Message,
    Part,
    Party,
    Sealed,
    Server,
    Stage,
    State,
)
from bench.toolkit.vectors import change_uploads, showing
from defenses import ckks

KEY_SERVER = "key_server"
MASK, CIPHERTEXT = "mask", "ciphertext"
_PUBLIC_KEY, _OPEN, _SUM = "public_key", "open", "sum"
_KEY, MINE = "encrypted_zone.key", "encrypted_zone.mask"
Masks = Mapping[str, Tensor]
GAIN = 64.0
"""What values are multiplied by before they are encrypted: updates are far below 1, the
ciphertexts' grid is made for sums up to hundreds."""
_MOST_LOST = 0.01
"""Of an update's norm, before a warning."""


class KeyHolder(Party):
    """Makes the key pair, gives the public key to each client once, opens sums for whoever forms
    the model: a key server for itself, or, where clients hold the private key, each of them.

    That it opens nothing but sums, and does not collude with the server, is assumed.
    """

    def __init__(self, parameters: ckks.Parameters) -> None:
        self.keys = ckks.KeyServer(parameters)
        self.told: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeyHolder":
        twin = copy.copy(self)  # keys never change
        twin.told = set(self.told)
        return twin

    def begin(self, when: Stage, roster: Sequence[str], round: int, step: int) -> list[Message]:
        if when != "round":
            return []
        new = [client for client in roster if client not in self.told]
        self.told.update(new)
        return [self._public_key(client, round) for client in new]

    def reply(self, message: Message) -> list[Message]:
        if message.kind == _PUBLIC_KEY:
            return [self._public_key(message.sender, message.round)]
        if message.kind != _OPEN:
            return []
        sealed = message.sealed[CIPHERTEXT]
        values = self.keys.decrypt(sealed.box, length=int(sealed.covers.sum())) / GAIN
        opened = {_SUM: Part(values=values, bits=64)}
        answer = replace(message, kind=_SUM, sender=KEY_SERVER, receiver=FORMER, sealed={})
        return [answer.with_parts(opened)]

    def _public_key(self, receiver: str, round: int) -> Message:
        box = self.keys.public_context
        message = Message(kind=_PUBLIC_KEY, sender=KEY_SERVER, receiver=receiver, round=round)
        return replace(message, sealed={_PUBLIC_KEY: Sealed(n_bytes=len(box), box=box)})


@dataclass(kw_only=True, eq=False)
class EncryptedZone(Defense):
    """Base: clients agree on coordinates to encrypt (`agree`) from the masks that each proposes
    (`propose`) in plain sight, and `protect` their updates.

    The server adds ciphertexts, and whoever forms the model opens the sum and divides it by the
    number of clients.

    Args:
        parameters: Of CKKS, `additive` (`ckks.ADDITIVE`) or `standard` (`ckks.STANDARD`).
    """

    owns = frozenset({"aggregate"})
    parameters: Literal["additive", "standard"] = "additive"

    # --- what a subclass says -------------------------------------------------------------------
    def propose(self, client: Client, local: Local) -> Masks:
        """Coordinates that the client wants encrypted, bool by name."""
        raise TypeError(f"{type(self).__name__} must define propose(client, local).")

    def proposal_parts(self, proposal: Masks) -> dict[str, Part]:
        """A proposal on the wire."""
        return {n: Part(values=m, bits=1) for n, m in proposal.items()}

    def agree(self, masks: Sequence[Masks]) -> Masks:
        """The coordinates that all encrypt, from the clients' masks."""
        raise TypeError(f"{type(self).__name__} must define agree(masks).")

    # --- the protocol ---------------------------------------------------------------------------
    @property
    def _ckks(self) -> ckks.Parameters:
        return ckks.ADDITIVE if self.parameters == "additive" else ckks.STANDARD

    def third_parties(self, seed: int) -> Mapping[str, Party]:
        return {KEY_SERVER: KeyHolder(self._ckks)}

    def say(self, when: Stage, client: Client, local: Local | None, round: int) -> list[Message]:
        if when != "upload":
            return []
        assert local is not None
        given = client.plan.get("mask")
        mask = self.propose(client, local) if given is None else given
        client.memory[MINE] = mask
        parts = self.proposal_parts(mask)
        return [Message(kind=MASK, sender=client.id, receiver=EVERYONE, round=round, parts=parts)]

    def hear(self, when: Stage, client: Client, heard: Sequence[Message]) -> None:
        for message in heard:
            if message.kind == _PUBLIC_KEY:
                client.memory[_KEY] = message.sealed[_PUBLIC_KEY].box
        if when != "upload" or "pinned" in client.plan:
            return
        masks = _proposals(heard, {client.id: client.memory[MINE]})
        client.plan["encrypted"] = self.agree(masks)
        client.plan["company"] = len(masks)

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        return change_uploads(
            messages, "update", local, lambda m: self.protect(self.measure(m, local), client)
        )

    def measure(self, update: Message, local: Local) -> Message:
        """The update that is protected and sent."""
        return update

    def protect(self, update: Message, client: Client) -> Message:
        """What of an update is sent: the encrypted zone sealed, all else as it is."""
        zone = client.plan["encrypted"]
        shown = {n: showing(p, ~zone[n]) for n, p in update.parts.items()}
        return replace(update, parts=shown, sealed=self.seal(update, zone, client))

    def seal(self, update: Message, zone: Masks, client: Client) -> dict[str, Sealed]:
        """The update's values in the zone, as ciphertexts."""
        hidden = {n: p.told() & zone[n] for n, p in update.parts.items()}
        sealed = {n: Sealed(n_bytes=0, covers=h) for n, h in hidden.items() if bool(h.any())}
        if sealed:
            values = torch.cat([update.parts[n].values[hidden[n]] for n in sealed])
            sealed[CIPHERTEXT] = self._seal(values, client, clients=client.plan["company"])
        return sealed

    def _seal(self, values: Tensor, client: Client, *, clients: int) -> Sealed:
        covers = torch.ones(len(values), dtype=torch.bool)
        if "pinned" in client.plan:  # an attacker's rehearsal: nobody will open it
            return Sealed(n_bytes=0, covers=covers)
        within = _within(GAIN * values.double().cpu(), self._ckks, clients)
        lost = (ckks.round_values(within, self._ckks) - within).norm()
        if lost > _MOST_LOST * within.norm():
            warnings.warn(
                f"rounding to the ciphertexts' grid of {self._ckks.resolution / GAIN:.1g} takes "
                f"more than {_MOST_LOST:.0%} of an update, since its values are so small: the "
                "run's figures are of the rounded update. A larger learning rate, or parameters = "
                '"standard", keeps more of it.',
                stacklevel=2,
            )
        box = ckks.encrypt(within, client.memory[_KEY])
        return Sealed(n_bytes=sum(map(len, box)), covers=covers, box=box)

    def public_plans(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """The zone that was agreed, and every client's mask."""
        masks = _proposals(messages)
        if not masks:
            return ()
        shared = {"encrypted": self.agree(masks), "company": len(masks), "pinned": True}
        return [{**shared, **self.keep_for_rehearsal(mask)} for mask in masks]

    def keep_for_rehearsal(self, mask: Masks) -> dict[str, Any]:
        """What of a client's mask an attacker's rehearsal keeps: all, where it comes from more
        data than the rehearsed batch."""
        return {"mask": mask}

    # --- server -------------------------------------------------------------------------------
    def aggregate(self, server: Server, messages: Sequence[Message]) -> State:
        return self.move(server, messages, over="count")

    def move(
        self, server: Server, messages: Sequence[Message], *, over: Literal["count", "all"]
    ) -> State:
        """The state plus, per coordinate, the mean update: of what was sent in the open the sum
        over the clients that sent it (`count`) or all clients; of the encrypted zone the opened
        sum over all clients."""
        uploads = [m for m in messages if m.kind in UPLOAD_KINDS]
        state = {**server.state, **(server.trained or {})}
        sent = {n for m in uploads for n in m.parts}
        new = {n: v if n in sent else state[n] for n, v in server.state.items()}
        for name in sent:
            parts = [m.parts[name] for m in uploads if name in m.parts]
            present = torch.stack([p.presence() for p in parts])
            total = torch.stack([p.values for p in parts]).where(present, 0.0).sum(dim=0)
            count = present.sum(dim=0).clamp_min(1)
            new[name] = new[name] + total / (len(parts) if over == "all" else count)
        for name, values in self._open(server, uploads).items():
            covers = next(m.sealed[name].covers for m in uploads if name in m.sealed)
            total = torch.zeros_like(new[name])
            total[covers] = values.to(total)
            new[name] = new[name] + total / len(uploads)
        return new

    def _open(self, server: Server, uploads: Sequence[Message]) -> dict[str, Tensor]:
        """Sums of the encrypted coordinates by name; empty where nothing was encrypted."""
        boxes = [m.sealed[CIPHERTEXT].box for m in uploads if CIPHERTEXT in m.sealed]
        if not boxes or any(box is None for box in boxes):
            return {}
        assert server.ask is not None
        number = uploads[0].round
        question = Message(kind=_PUBLIC_KEY, sender=SERVER, receiver=KEY_SERVER, round=number)
        (key,) = server.ask(question)
        added = ckks.add(boxes, key.sealed[_PUBLIC_KEY].box)
        covers = {n: s.covers for n, s in uploads[0].sealed.items() if n != CIPHERTEXT}
        length = sum(int(c.sum()) for c in covers.values())
        sealed = Sealed(
            n_bytes=sum(map(len, added)), covers=torch.ones(length, dtype=torch.bool), box=added
        )
        returned = replace(question, sealed={CIPHERTEXT: sealed})
        if self.forms_model == "clients":
            for message in uploads:
                server.ask(replace(returned, kind=_SUM, receiver=message.sender))
        (answer,) = server.ask(replace(returned, kind=_OPEN))
        pieces = answer.parts[_SUM].values.split([int(c.sum()) for c in covers.values()])
        return dict(zip(covers, pieces, strict=True))


def _within(values: Tensor, parameters: ckks.Parameters, clients: int) -> Tensor:
    """Values [n] whose sum over so many clients fits the ciphertexts: cut to the range, and, in a
    ciphertext of too large a root mean square, to the range over the clients. As in any
    fixed-point code; a training that gets there has diverged."""
    limit, slots = parameters.max_magnitude, parameters.slots
    cut = values.nan_to_num(nan=limit).clamp(-limit, limit)
    rows = torch.nn.functional.pad(cut, (0, -len(cut) % slots)).view(-1, slots)
    large = rows.square().mean(dim=1, keepdim=True).sqrt() > limit / clients
    rows = torch.where(large, rows.clamp(-limit / clients, limit / clients), rows)
    return rows.flatten()[: len(values)]


def _proposals(messages: Sequence[Message], own: Mapping[str, Masks] | None = None) -> list[Masks]:
    """What was proposed, and by a client itself, in the order of the clients' names: what is agreed
    may depend on it."""
    sent = {m.sender: {n: p.values for n, p in m.parts.items()} for m in messages if m.kind == MASK}
    return [mask for _, mask in sorted({**sent, **(own or {})}.items())]
