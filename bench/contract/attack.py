"""An attack: it gets what a curious server saw (`Seen`) and a `Context`, never the private data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from bench.contract.defense import Defense
from bench.contract.messages import UPLOAD_KINDS, Kind, Message, State
from bench.contract.network import NetworkView


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Everything that the observing party holds after the observed rounds, and nothing else.

    One round is a release. The fields are those of the last one, and `earlier` has the others, so
    that an attack that knows nothing of several releases reads the last. The victims' samples are
    the same in all. All tensors are detached copies.

    Attributes:
        protocol: Name of the protocol.
        party: Who observes.
        network: The network's name, settings, input shape and number of classes.
        initial: The parameters at the start of the run.
        const: Public constants.
        before: The state that was broadcast before the round.
        after: The state after the round, or None where the party does not learn it.
        messages: Those addressed to the party or to all, and what it computed and sent itself
            (features and gradients of a split protocol's server).
        clients: Ids of the observed clients, in the order of every stacked tensor.
        known: What the threat grants (batch, local_steps, lr, mode, aux, labels, ...), and the
            defense's name, public settings and mechanisms.
        buffers: Normalisation statistics of public data, for eval mode.
        labels: Whether clients keep their labels or share them with the server.
        server: The server's own variables before each step (split protocols).
        earlier: The releases before this one, oldest first; each has none before it. The order of
            the samples of a batch is another in each.
    """

    protocol: str
    party: str
    network: Mapping[str, Any]
    initial: State
    const: State
    before: State
    after: State | None
    messages: tuple[Message, ...]
    clients: tuple[str, ...]
    known: Mapping[str, Any]
    buffers: State = field(default_factory=dict)
    labels: Literal["private", "shared"] = "private"
    server: tuple[State, ...] = ()
    earlier: tuple[Seen, ...] = ()

    @property
    def releases(self) -> tuple[Seen, ...]:
        """Every observed round by itself, oldest first."""
        return (*self.earlier, replace(self, earlier=()) if self.earlier else self)

    def of(self, client: str, kind: str) -> tuple[Message, ...]:
        """The messages of one client and kind, in wire order."""
        return tuple(m for m in self.messages if m.sender == client and m.kind == kind)

    def stack(
        self, kind: str, clients: Sequence[str], step: int = 0
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Stack one message per client.

        Args:
            kind: The kind of message.
            clients: Ids of V clients.
            step: The step that it was sent in.

        Returns:
            Two dicts of [V, ...] tensors by name: values, and which of them are present.

        Raises:
            ValueError: If a client sent no such message, or other tensors than the first.
        """
        rows = []
        for client in clients:
            sent = [m for m in self.of(client, kind) if m.step == step]
            if len(sent) != 1:
                raise ValueError(
                    f"expected one '{kind}' message of client '{client}' at step {step}, "
                    f"got {len(sent)}."
                )
            rows.append(sent[0].parts)
        names = list(rows[0]) if rows else []
        for client, parts in zip(clients, rows, strict=True):
            if list(parts) != names:
                raise ValueError(f"client '{client}' sent other tensors than '{clients[0]}'.")
        values = {n: torch.stack([p[n].values for p in rows]) for n in names}
        present = {n: torch.stack([p[n].presence() for p in rows]) for n in names}
        return values, present

    def upload_kind(self) -> Kind | None:
        """The kind of the observed clients' uploads, or None if there is none."""
        for kind in UPLOAD_KINDS:
            if self.clients and self.of(self.clients[0], kind):
                return kind
        return None


T = TypeVar("T")


class Shared(Protocol):
    """Keeps what several attacks on one observation need: see `Context.once`."""

    def __call__(
        self, ctx: Context, key: tuple[str | int, ...], make: Callable[[Context], T]
    ) -> T: ...


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an attack may use besides what was seen.

    Attributes:
        rng: The attack's own random stream.
        device: Where to compute.
        budget: Gradient evaluations allowed per start of a problem.
        aux_x: Public samples [N, ...] that are disjoint from every client's.
        aux_y: Their labels, int64 [N].
        network: The network, built from its public settings.
        defense: The defense, built from its public settings.
        shadow: `shadow(x, y[, before][, release=...])` plays one round of the deployed defense on
            public data [V, N, ...], with fresh secrets, from the state of a release (the last one
            unless given) or from `before`, and returns it as a `Seen`.
        progress: May be called with a fraction in [0, 1] at will.
        shared: Behind `once`; None where nothing is shared.
    """

    rng: torch.Generator
    device: torch.device
    budget: int
    aux_x: Tensor
    aux_y: Tensor
    network: NetworkView
    defense: Defense
    shadow: Callable[..., Seen]
    progress: Callable[[float], None] = lambda fraction: None
    shared: Shared | None = None

    def once(self, key: tuple[str | int, ...], make: Callable[[Context], T]) -> T:
        """What `make` gives, made by one of the attacks on this observation for all of them.

        So that it is the same whoever asks first, `make` gets a context whose `rng` and `shadow`
        draw from a stream of the observation and the key, with no budget, and must use no other.
        What it gives must not be changed by who uses it.

        Args:
            key: Names what is made, with all settings that it depends on.
            make: Makes it.
        """
        return make(self) if self.shared is None else self.shared(self, key, make)


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """An attack's answer for V victims with K samples each and C classes.

    Attributes:
        images: Float [V, K, ...] in [0, 1]; of tabular data, standardised features.
        labels: The label of each image, int64 [V, K].
        label_counts: Samples of each class, int64 [V, C].
        loss: The attack's own objective [V].
        failed: Bool [V], the victims for whom it produced nothing usable.
        evaluations: Gradient evaluations spent, summed over problems.
        notes: What a reader must know, such as the number of visible rows.
    """

    images: Tensor | None = None
    labels: Tensor | None = None
    label_counts: Tensor | None = None
    loss: Tensor | None = None
    failed: Tensor | None = None
    evaluations: int = 0
    notes: tuple[str, ...] = ()


class Judge:
    """Base class of the one judge of all attacks' answers.

    An attacker who has several answers must choose without the truth; so must a table that says
    what an attacker gets.
    """

    def losses(self, seen: Seen, ctx: Context, answer: Reconstruction) -> Tensor | None:
        """How badly an answer explains what was seen.

        Args:
            seen: What the server saw.
            ctx: What else an attacker has.
            answer: An attack's answer.

        Returns:
            [V], the less the better, comparable between the answers to one `seen`; None where
            what was seen tells nothing of an answer.
        """
        raise TypeError(f"{type(self).__name__} must define losses(seen, ctx, answer).")

    def unexplained(self, seen: Seen, ctx: Context, answer: Reconstruction) -> Tensor | None:
        """How much of what was seen an answer does not reproduce.

        Args:
            seen: What the server saw.
            ctx: What else an attacker has.
            answer: An attack's answer.

        Returns:
            [V], squared distance as a share of the square of what was seen; None where it cannot
            be told, such as under noise.
        """
        return None


class Attack:
    """Base class of an attack.

    Its settings are keyword arguments of its constructor, which raises ValueError for a value out
    of range.
    """

    recovers: frozenset[str] = frozenset()
    """What it answers with: images, labels (of each image), counts (of the batch's labels)."""
    is_floor: bool = False
    """True for an attack that uses no message: it is shown beside the others, never ranked."""
    reads: Literal["last", "all"] = "last"
    """Which releases it reads. One that reads the last alone gets no others, and a note says so."""
    source: str = ""

    def applies(self, seen: Seen) -> str | None:
        """None if the attack can run on what was seen, else one clause that says why not."""
        return None

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        """Reconstruct the samples of every client in `seen.clients`.

        Args:
            seen: What the server saw.
            ctx: What else the attack may use.
        """
        raise TypeError(f"{type(self).__name__} must define run(seen, ctx).")
