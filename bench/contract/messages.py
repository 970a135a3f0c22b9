"""What parties send each other: messages, their parts, and the kinds of an upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

State = Mapping[str, Tensor]
"""Named tensors: trained variables, network weights, or one client's update."""
Stage = Literal["round", "step", "upload"]
Kind = Literal["weights", "update", "gradient"]
Absent = Literal["kept", "zero"]
SERVER = "server"
EVERYONE = "all"
FORMER = "model_former"
"""Receiver of what only the party learns that forms the new model, where that is not the server:
the key server, or every client for itself (see `Defense.forms_model`). It is not traffic."""
SUM = "sum"
"""Sender of the mean update that the server reads where it gets no client's own."""
UPLOAD_KINDS: tuple[Kind, ...] = ("weights", "update", "gradient")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor on the wire.

    A receiver never reads a value that is not present. Where the client keeps the others, one that
    cannot derive `present` must be sent it as a message of its own, since the pattern costs bytes
    and carries information. Where the others are zero, the part brings the pattern with it.

    Attributes:
        values: A tensor of any shape.
        present: A bool tensor of the same shape, or None if every coordinate is sent.
        bits: The wire size of one value.
        absent: What is so of a coordinate that is not sent: `kept`, the client withholds it and
            goes on with its own value; `zero`, its update (or gradient, or activation) is 0.
        grids: Of how many grids of 2^bits values those sent are. A receiver must be sent them too.
    """

    values: Tensor
    present: Tensor | None = None
    bits: int = 32
    absent: Absent = "kept"
    grids: int = 1

    @property
    def n_bytes(self) -> int:
        """Bytes of the values and, where the absent ones are zero, of the positions: a bit for
        every coordinate or, if that is less, a list of those that are sent, or of the others."""
        if self.present is None:
            return -(-self.values.numel() * self.bits // 8)
        sent, every = int(self.present.sum()), self.values.numel()
        if self.absent == "kept":
            return -(-sent * self.bits // 8)
        index_bits = (every - 1).bit_length() if every else 0
        positions = min(every, min(sent, every - sent) * index_bits)
        return -(-(sent * self.bits + positions) // 8)

    def presence(self) -> Tensor:
        """Bool tensor of the values' shape: True where a value was sent."""
        if self.present is not None:
            return self.present
        return torch.ones_like(self.values, dtype=torch.bool)

    def told(self) -> Tensor:
        """Bool tensor of the values' shape: True where the receiver learns the value, sent or 0."""
        if self.absent == "zero":
            return torch.ones_like(self.values, dtype=torch.bool)
        return self.presence()


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """Ciphertext on the wire: its size and the coordinates it covers are public, `box` is not.

    Attributes:
        n_bytes: Its size.
        covers: A bool tensor of the coordinates that it stands for, empty where of none.
        box: Whatever the key holder can open; the wire's log drops it.
    """

    n_bytes: int
    covers: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    box: Any = None


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one party sends another. Addressing alone decides who sees it.

    Attributes:
        kind: What it holds, such as "update" or "smashed".
        sender: Id of a client or third party, or `SERVER`.
        receiver: The same, or `EVERYONE`.
        round: The round, from 0.
        step: The step of the round, from 0.
        local_steps: Gradient steps behind an upload; a public header.
        parts: Tensors by name.
        sealed: Ciphertexts by name.
    """

    kind: str
    sender: str
    receiver: str
    round: int
    step: int = 0
    local_steps: int = 1
    parts: Mapping[str, Part] = field(default_factory=dict)
    sealed: Mapping[str, Sealed] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Bytes of one copy; a message to everyone costs this once per receiver."""
        return sum(p.n_bytes for p in self.parts.values()) + sum(
            s.n_bytes for s in self.sealed.values()
        )

    def with_parts(self, parts: Mapping[str, Part]) -> Message:
        return replace(self, parts=dict(parts))


def as_kind(message: Message, kind: Kind, *, base: State, lr: float) -> Message:
    """Express an upload as end weights, as an update (end - base) or as a mean gradient.

    The gradient is (base - end) / (lr * local_steps), so all three describe one local training.
    Presence, wire width and what absence means are kept.

    Args:
        message: The upload.
        kind: What to express it as.
        base: The state that was broadcast.
        lr: The learning rate of the local training.

    Raises:
        ValueError: If either kind is no upload.
    """
    if message.kind not in UPLOAD_KINDS or kind not in UPLOAD_KINDS:
        raise ValueError(
            f"an upload is one of {', '.join(UPLOAD_KINDS)}, got '{message.kind}' -> '{kind}'."
        )
    if message.kind == kind:
        return message
    scale = -lr * message.local_steps
    parts = {}
    for name, part in message.parts.items():
        values = part.values
        if message.kind == "weights":
            values = values - base[name]
        elif message.kind == "gradient":
            values = values * scale
        if kind == "weights":
            values = values + base[name]
        elif kind == "gradient":
            values = values / scale
        parts[name] = replace(part, values=values)
    return replace(message, kind=kind, parts=parts)


def detached(state: State) -> dict[str, Tensor]:
    """A detached copy, which shares neither graph nor storage with the original."""
    return {k: v.detach().clone() for k, v in state.items()}
