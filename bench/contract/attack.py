"""An attack: it gets what a curious server saw (`Seen`) and a `Context`, never the private data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from bench.contract.defense import Defense
from bench.contract.messages import UPLOAD_KINDS, Kind, Message, State
from bench.contract.network import NetworkView


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Everything that the observing party holds after the observed round, and nothing else.

    protocol: its name. labels: "private" or "shared". party: who observes. network: registry
    name, settings, input shape and number of classes. initial, const: first state and public
    constants. buffers: normalisation statistics of public data, for eval mode. before, after:
    state broadcast before and after the round. server: the server's own variables before each step
    (split protocols). messages: those addressed to the party or to all, and what it computed and
    sent (features and gradients of a split protocol's server).
    clients: ids of the observed clients, in the order of every stacked tensor. known: what the
    threat grants (batch, local_steps, lr, mode, aux, labels, ...), the defense's name, public
    settings and mechanisms. All tensors are detached copies.
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

    def of(self, client: str, kind: str) -> tuple[Message, ...]:
        """Messages of one client and kind, in wire order."""
        return tuple(m for m in self.messages if m.sender == client and m.kind == kind)

    def stack(
        self, kind: str, clients: Sequence[str], step: int = 0
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Values and presence of one message per client: two dicts of [V, ...] tensors.

        Clients whose message has other names or shapes do not stack: ValueError names them.
        """
        rows = []
        for client in clients:
            found = [m for m in self.of(client, kind) if m.step == step]
            if len(found) != 1:
                raise ValueError(
                    f"expected one '{kind}' message of client '{client}' at step {step}, "
                    f"got {len(found)}."
                )
            rows.append(found[0].parts)
        names = list(rows[0]) if rows else []
        for client, parts in zip(clients, rows, strict=True):
            if list(parts) != names:
                raise ValueError(f"client '{client}' sent other tensors than '{clients[0]}'.")
        values = {n: torch.stack([p[n].values for p in rows]) for n in names}
        present = {n: torch.stack([p[n].presence() for p in rows]) for n in names}
        return values, present

    def upload_kind(self) -> Kind | None:
        """Kind of the observed clients' uploads, or None if there is none."""
        for kind in UPLOAD_KINDS:
            if self.clients and self.of(self.clients[0], kind):
                return kind
        return None


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an attack may use besides `seen`.

    rng: the attack's generator (its own stream). device. budget: gradient evaluations allowed
    per start of a problem. aux_x [N, ...], aux_y [N]: public data disjoint from every
    client's. network, defense: rebuilt from public settings. shadow(x, y[, before]):
    one round of the deployed defense on public data [V, N, ...] from the seen state (or another
    one, `before`) with fresh secrets, as a `Seen`. progress(fraction) may be called at will.
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


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """An attack's answer for V victims with K samples each and C classes.

    images: float [V, K, ...] in [0, 1] (tabular: standardised features). labels: int64 [V, K],
    the label of each image. label_counts: int64 [V, C]. loss: the attack's own objective [V].
    failed: bool [V], victims on which it produced nothing usable. evaluations: gradient
    evaluations spent, summed over problems. notes: what a reader must know, e.g. visible rows.
    """

    images: Tensor | None = None
    labels: Tensor | None = None
    label_counts: Tensor | None = None
    loss: Tensor | None = None
    failed: Tensor | None = None
    evaluations: int = 0
    notes: tuple[str, ...] = ()


class Attack:
    """Base class of an attack. Settings are keyword arguments, checked in `__init__`."""

    recovers: frozenset[str] = frozenset()
    """Any of: images, labels (per image), counts (label counts of the batch)."""
    is_floor: bool = False
    """True for an attack that uses no message: it is shown beside the others, never ranked."""
    source: str = ""

    def applies(self, seen: Seen) -> str | None:
        """None if the attack can run on what was seen, else one clause that says why not."""
        return None

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        """Reconstruct every victim of `seen.clients` in one batch."""
        raise TypeError(f"{type(self).__name__} must define run(seen, ctx).")
