"""Secure aggregation: the server reads the sum of the clients' updates, and no single one.

Every two clients agree on a mask that one adds and the other subtracts, so that the masks cancel in
the sum. Every client adds a mask of its own besides, which is only taken off the sum of those whose
uploads arrived.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from bench.api import (
    EVERYONE,
    SERVER,
    SUM,
    UPLOAD_KINDS,
    Client,
    Defense,
    Event,
    Facts,
    FixedPoint,
    Local,
    Mechanism,
    Message,
    Part,
    Party,
    Sealed,
    Server,
    Stage,
    State,
    Summed,
    as_kind,
)
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import change_uploads, showing, sparse

MODULUS = 2**32
"""Of masked values, which are whole numbers of 32 bits."""
MASKED, HOLDERS = "masked", "share_holders"
"""Name of an upload's masked vector, and of the third party that holds the secrets' shares."""
_KEY, _SHARES, _UNMASK = "public_key", "shares", "unmask"
"""Kinds of messages."""
_SECRET, _SEED = "secret_key", "seed"
_DROPS, _LONE = "drops", "lone"
_BYTES = 32
"""Of secret keys and seeds."""
_PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DD"
    "EF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F"
    "83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
_GENERATOR = 2
"""The 2048-bit group of RFC 3526, in which clients agree on seeds (Diffie and Hellman)."""
_PUBLIC_BYTES = 256


# --- arithmetic -------------------------------------------------------------------------------


def mask_of(seed: bytes, length: int) -> Tensor:
    """Whole numbers int64 [length], uniform on 0 ... MODULUS - 1, by SHAKE-256 of a seed."""
    stream = bytearray(hashlib.shake_256(seed).digest(4 * length))
    return torch.frombuffer(stream, dtype=torch.uint32).long() if length else torch.zeros(0).long()


def public_key(secret: bytes) -> int:
    return pow(_GENERATOR, int.from_bytes(secret, "big"), _PRIME)


def agree_on_seed(secret: bytes, other: int) -> bytes:
    """The seed that two clients share, from one's secret and the other's public key."""
    shared = pow(other, int.from_bytes(secret, "big"), _PRIME)
    return hashlib.sha256(shared.to_bytes(_PUBLIC_BYTES, "big")).digest()


def pair_mask(me: str, other: str, seed: bytes, length: int) -> Tensor:
    """What the client `me` adds for its pair with `other`; the other adds the negative."""
    sign = 1 if me < other else -1
    return sign * mask_of(seed, length)


# --- who holds what ---------------------------------------------------------------------------


class ShareHolders(Party):
    """Stands for the clients that hold shares of each other's secrets.

    It tells the server the seeds of those whose upload arrived and the secret keys of the others,
    never both of one client, and nothing if too few uploads arrived for the shares to suffice.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.held: dict[str, Mapping[str, bytes]] = {}

    def begin(self, when: Stage, roster: Sequence[str], round: int, step: int) -> list[Message]:
        if when == "round":
            self.held = {}
        return []

    def reply(self, message: Message) -> list[Message]:
        if message.kind == _SHARES:
            self.held = {**self.held, message.sender: message.sealed[_SHARES].box}
            return []
        arrived = {name for name in message.parts if name in self.held}
        if message.kind != _UNMASK or len(arrived) < uploads_needed(self.threshold, len(self.held)):
            return []
        parts = {}
        for name, box in self.held.items():
            told = _SEED if name in arrived else _SECRET
            parts[f"{name} {told}"] = _bytes_part(box[told])
        self.held = {}  # a second question would tell the other secrets
        return [replace(message, sender=HOLDERS, receiver=message.sender, parts=parts)]


def uploads_needed(threshold: float, clients: int) -> int:
    """Uploads of so many clients that must arrive, at least one."""
    return max(1, math.ceil(threshold * clients))


def _bytes_part(value: bytes) -> Part:
    return Part(values=torch.frombuffer(bytearray(value), dtype=torch.uint8), bits=8)


def _bytes_of(part: Part) -> bytes:
    return bytes(part.values.tolist())


@dataclass(kw_only=True, eq=False)
class SecureAggregation(Defense):
    """The server reads the sum of all updates that arrived, which masks hide one by one.

    Values are cut to [-clip, clip], rounded at random to one of so many levels, and masked modulo
    2^32. The sum of the masked vectors is that of the rounded updates; the server takes its mean.

    Args:
        clip: Largest magnitude of an update's value, > 0.
        levels: Steps between -clip and clip, >= 1.
        dropout: Chance that a client drops out after the masks are agreed, in [0, 1). The observed
            clients never do: the server attacks those whose uploads arrived.
        threshold: Share of the round's clients whose uploads must arrive, in (0, 1]. With fewer
            the masks stay on, and the round leaves the model as it is.

    Departures: shares of the secrets are not split, one third party holds them and answers as
    enough clients would; the server is honest about who dropped out; all clients are each other's
    neighbours, as in Bonawitz et al., where SecAgg+ gives each a few.
    Source: Bonawitz et al., CCS 2017; the encoding and its defaults of Flower's SecAgg+, after
    Bell et al., CCS 2020.
    """

    owns = frozenset({"aggregate", "joins"})
    only_sums = True
    strength = None  # how many clients take part is the protocol's, and nothing else hides more
    zero_strength = None  # the server's view differs at any setting
    source = "Bonawitz et al., CCS 2017 (SecAgg); Bell et al., CCS 2020 (SecAgg+)"
    clip: Annotated[float, Limits("largest value of an update", above=0)] = 8.0
    levels: Annotated[int, Limits(least=1, below=MODULUS)] = 2**22
    dropout: Annotated[float, Limits("chance of a client", least=0, below=1)] = 0.0
    threshold: Annotated[float, Limits("share of clients", above=0, most=1)] = 0.5

    # --- real numbers as whole ones, from 0 for -clip to `levels` for clip ------------------------
    @property
    def step(self) -> float:
        """Distance of neighbouring values."""
        return 2 * self.clip / self.levels

    def encode(self, values: Tensor, rng: torch.Generator) -> Tensor:
        """Whole numbers int64 [N] of values [N], rounded up or down so that the mean is right."""
        place = (values.double().cpu().clamp(-self.clip, self.clip) + self.clip) / self.step
        below = place.floor()
        up = torch.rand(place.shape, generator=rng, dtype=torch.float64) < place - below
        return (below + up).long().clamp(0, self.levels)

    def decode(self, total: Tensor, count: int) -> Tensor:
        """The sum float64 [N] of `count` vectors from the sum of their whole numbers int64 [N]."""
        return total.double() * self.step - count * self.clip

    def third_parties(self, seed: int) -> Mapping[str, Party]:
        return {HOLDERS: ShareHolders(self.threshold)}

    # --- client -------------------------------------------------------------------------------
    def joins(self, client: Client, sampled: bool) -> bool:
        if sampled and self.dropout:
            drawn = torch.rand((), generator=client.rng["joins"])
            client.memory[_DROPS] = bool(drawn < self.dropout)
        return sampled

    def say(self, when: Stage, client: Client, local: Local | None, round: int) -> list[Message]:
        """The public key to everyone, and what the share holders keep."""
        if when != "upload" or _LONE in client.plan:
            return []
        secret, seed = (_draw_bytes(client.rng["defense"]) for _ in range(2))
        client.memory[_SECRET], client.memory[_SEED] = secret, seed
        key = public_key(secret).to_bytes(_PUBLIC_BYTES, "big")
        shares = Sealed(n_bytes=2 * _BYTES, box={_SECRET: secret, _SEED: seed})
        told = Message(kind=_KEY, sender=client.id, receiver=EVERYONE, round=round)
        kept = Message(kind=_SHARES, sender=client.id, receiver=HOLDERS, round=round)
        kept = replace(kept, sealed={_SHARES: shares})
        return [told.with_parts({_KEY: _bytes_part(key)}), kept]

    def hear(self, when: Stage, client: Client, heard: Sequence[Message]) -> None:
        if when == "upload" and _LONE not in client.plan:
            client.plan[_KEY] = _keys(heard)

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        if _LONE in client.plan:  # an attacker's rehearsal: the sum of one client
            return messages
        dropped = client.memory.pop(_DROPS, False)
        return change_uploads(messages, "update", local, lambda m: self.mask(m, client, dropped))

    def mask(self, update: Message, client: Client, dropped: bool) -> Message:
        """The update with its values under masks; of a client that dropped out nothing."""
        if dropped:  # no byte arrives, and the client keeps nothing of its own
            nothing = torch.tensor(False)
            lost = {n: Part(values=p.values) for n, p in update.parts.items()}
            return update.with_parts({n: sparse(p, nothing) for n, p in lost.items()})
        covers = {n: p.told() for n, p in update.parts.items()}
        values = torch.cat([p.values[covers[n]] for n, p in update.parts.items()])
        total = self.encode(values, client.rng["defense"])
        total = total + mask_of(client.memory[_SEED], len(total))
        for other, key in client.plan[_KEY].items():
            seed = agree_on_seed(client.memory[_SECRET], key)
            total = total + pair_mask(client.id, other, seed, len(total))
        box = (total % MODULUS).numpy().astype("<u4").tobytes()
        sealed = {n: Sealed(n_bytes=0, covers=c) for n, c in covers.items()}
        every = torch.ones(len(values), dtype=torch.bool)
        sealed[MASKED] = Sealed(n_bytes=len(box), covers=every, box=box)
        hidden = {n: showing(p, torch.tensor(False)) for n, p in update.parts.items()}
        return replace(update, parts=hidden, sealed=sealed)

    def public_plans(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """An attacker rehearses the sum with one client, whom nobody masks."""
        return ({_LONE: True},)

    # --- server -------------------------------------------------------------------------------
    def aggregate(self, server: Server, messages: Sequence[Message]) -> State:
        uploads = [m for m in messages if m.kind in UPLOAD_KINDS]
        arrived = {m.sender: m for m in uploads if MASKED in m.sealed}
        state = {**server.state, **(server.trained or {})}
        state = {n: state[n] for n in server.state}
        if not arrived:
            return self._rehearse(state, uploads, server)
        mean = self._mean(server, arrived, _keys(messages))
        if mean is None:
            return state
        assert server.ask is not None
        first = next(iter(arrived.values()))
        noted = replace(first, sender=SUM, receiver=SERVER, sealed={})
        server.ask(noted.with_parts({n: Part(values=v) for n, v in mean.items()}))
        return {**state, **{n: server.state[n] + v for n, v in mean.items()}}

    def _rehearse(self, state: State, uploads: Sequence[Message], server: Server) -> State:
        """Of updates that nobody masked; without any, of a round in which all dropped out."""
        model = dict(state)
        updates = [as_kind(m, "update", base=server.state, lr=server.lr).parts for m in uploads]
        for name in model:
            if values := [parts[name].values for parts in updates if name in parts]:
                model[name] = server.state[name] + torch.stack(values).mean(dim=0)
        return model

    def _mean(
        self, server: Server, arrived: Mapping[str, Message], keys: Mapping[str, int]
    ) -> dict[str, Tensor] | None:
        """The mean update of the clients whose uploads arrived; None where the masks stay on."""
        assert server.ask is not None
        first = next(iter(arrived.values()))
        covers = {n: s.covers for n, s in first.sealed.items() if n != MASKED}
        length = sum(int(c.sum()) for c in covers.values())
        if len(arrived) * self.levels >= MODULUS:
            raise ValueError(
                f"levels must be < {MODULUS // len(arrived)} for the sum of {len(arrived)} clients "
                f"to stay below 2^32, got {self.levels}."
            )
        who = {name: Part(values=torch.zeros(0), bits=1) for name in arrived}
        question = Message(kind=_UNMASK, sender=SERVER, receiver=HOLDERS, round=first.round)
        answers = server.ask(question.with_parts(who))
        if not answers:
            return None
        told = {n: _bytes_of(p) for n, p in answers[0].parts.items()}
        total = torch.zeros(length, dtype=torch.int64)
        for name, message in arrived.items():
            box = bytearray(message.sealed[MASKED].box)
            total += torch.frombuffer(box, dtype=torch.uint32).long()
            total -= mask_of(told[f"{name} {_SEED}"], length)
        for lost in set(keys) - set(arrived):
            secret = told[f"{lost} {_SECRET}"]
            for name in arrived:  # whose mask for the pair found no partner
                total -= pair_mask(name, lost, agree_on_seed(secret, keys[name]), length)
        mean = self.decode(total % MODULUS, len(arrived)) / len(arrived)
        tensors = {}
        pieces = mean.split([int(c.sum()) for c in covers.values()])
        for (name, where), piece in zip(covers.items(), pieces, strict=True):
            tensors[name] = torch.zeros_like(server.state[name])
            tensors[name][where] = piece.to(tensors[name])
        return tensors

    # --- what is known and proven -------------------------------------------------------------
    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (FixedPoint(of="update", clip=self.clip, step=self.step),)

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Where clients can drop out, as few may be summed as unmask a sum."""
        clients = facts.sampled
        return (
            Summed(
                what="the clients' updates",
                fewest=uploads_needed(self.threshold, clients) if self.dropout else clients,
                most=clients,
                values=facts.parameters,
                clip=self.clip,
                step=self.step,
            ),
        )


def _draw_bytes(rng: torch.Generator) -> bytes:
    return bytes(torch.randint(256, (_BYTES,), generator=rng).tolist())


def _keys(messages: Sequence[Message]) -> dict[str, int]:
    """Public keys by the clients that sent them."""
    sent = {m.sender: m.parts[_KEY] for m in messages if m.kind == _KEY}
    return {name: int.from_bytes(_bytes_of(key), "big") for name, key in sent.items()}
