"""Contracts between leakbench and its plugins.

A defense is a `Defense`: hooks where something leaves a client or is decided, each with an
identity default. An attack is an `Attack`: it gets what a curious server saw (`Seen`) and a
`Context`, never the private data. `docs/architecture.md` says how each published defense
sits on these hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from bench.privacy.events import Event, Facts, Mechanism, Round

State = Mapping[str, Tensor]
"""Named tensors: trained variables, network weights, or one client's update."""

Stage = Literal["round", "step", "upload"]
Kind = Literal["weights", "update", "gradient"]
SERVER = "server"
EVERYONE = "all"
UPLOAD_KINDS: tuple[Kind, ...] = ("weights", "update", "gradient")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor on the wire.

    values: any shape. present: bool of the same shape, or None if every coordinate is sent;
    a value that is not present is never read by a receiver. bits: wire size of one value.
    A receiver that cannot derive `present` must be sent it as a message of its own, since
    the pattern costs bytes and carries information.
    """

    values: Tensor
    present: Tensor | None = None
    bits: int = 32

    @property
    def n_bytes(self) -> int:
        sent = self.values.numel() if self.present is None else int(self.present.sum())
        return -(-sent * self.bits // 8)

    def presence(self) -> Tensor:
        """Bool tensor of the values' shape: True where a value was sent."""
        if self.present is not None:
            return self.present
        return torch.ones_like(self.values, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """Ciphertext on the wire: its size and the coordinates it covers are public, `box` is not.

    covers: bool tensor. box: whatever the key holder can open; the wire log drops it.
    """

    n_bytes: int
    covers: Tensor
    box: Any = None


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one party sends another. Addressing alone decides who sees it."""

    kind: str
    sender: str
    receiver: str
    round: int
    step: int = 0
    local_steps: int = 1
    """Gradient steps behind an upload; a public header."""
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


@dataclass(frozen=True, kw_only=True)
class Local:
    """Result of one client's local training.

    broadcast: variables as received. start: where training began (differs from `broadcast` in
    coordinates that the client kept). end: where it ended. const: what is not trained.
    grad_sum: sum of the steps' gradients, accumulated rather than taken from end - start, which
    would round it. lr: learning rate; steps: gradient steps taken.
    """

    broadcast: State
    start: State
    end: State
    const: State
    grad_sum: State
    lr: float
    steps: int


class Loss(Protocol):
    """Mean training loss of a batch: x [B, ...], y soft labels [B, C] -> scalar.

    Under split protocols x and y are tuples of what the client's two parts need. outputs: of
    every stage that the client holds, [B, ...] by name in the order of the pass, the head's
    logits only where the whole network is the client's. targets: the soft labels in y. realize:
    variables -> network weights of the step.
    """

    @property
    def realize(self) -> Callable[[State], State]: ...

    def __call__(self, variables: State, x: Tensor, y: Tensor) -> Tensor: ...

    def outputs(self, variables: State, x: Tensor) -> Mapping[str, Tensor]: ...

    def targets(self, y: Tensor) -> Tensor: ...


@dataclass(kw_only=True)
class Client:
    """One client as its own defense hooks see it.

    x: [N, ...] samples, y: int64 [N]. rng: named `torch.Generator` streams ("joins", "batch",
    "defense"), so that using one never moves another. memory: the defense's own notes, kept
    across rounds. plan: set by `hear` from messages alone. own, kept: variables after the last
    local training and which of their coordinates were withheld at the last upload; the protocol
    keeps the withheld ones in place of the broadcast. cut: cut point under split protocols.
    """

    id: str
    x: Tensor
    y: Tensor
    rng: Mapping[str, torch.Generator]
    cut: str | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    own: State | None = None
    kept: Mapping[str, Tensor] | None = None
    loss: Loss | None = None
    """The training loss, for hooks that score the client's own data (Fisher information)."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server as `aggregate` sees it.

    state: variables broadcast this round. const: public constants. lr: local learning rate.
    trained: the variables that the server trained itself (split protocols), its copies of layers
    that only some clients hold among them. ask(message) puts a
    question to a third party and returns its answers addressed to the server.
    """

    state: State
    const: State
    lr: float
    trained: State | None = None
    ask: Callable[[Message], list[Message]] | None = None


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A batch that the server runs under a split protocol.

    smashed: [B, ...]; targets: soft labels [B, C], or None where labels stay with the clients;
    members: (client, weight of its loss).
    """

    smashed: Tensor
    cut: str
    targets: Tensor | None
    members: Sequence[tuple[str, float]]


class Party:
    """A third party (mixer, key server). It acts by messages alone."""

    def begin(self, when: Stage, roster: Sequence[str], round: int, step: int) -> list[Message]:
        """Messages that it sends unasked at a stage; roster: ids of the joining clients."""
        return []

    def reply(self, message: Message) -> list[Message]:
        """Messages that it sends in answer to one it received."""
        return []


def as_kind(message: Message, kind: Kind, *, base: State, lr: float) -> Message:
    """The same upload expressed as end weights, update (end - base) or mean gradient.

    base: the state that was broadcast. gradient = (base - end) / (lr * local_steps), so all
    three describe one local training. Presence and wire width are kept. Raises ValueError for
    a kind that is no upload.
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
        value = part.values
        update = {
            "weights": value - base[name],
            "update": value,
            "gradient": value * scale,
        }[message.kind]
        converted = {
            "weights": update + base[name],
            "update": update,
            "gradient": update / scale,
        }[kind]
        parts[name] = replace(part, values=converted)
    return replace(message, kind=kind, parts=parts)


class Defense:
    """Base class of a defense: every hook is the identity.

    A subclass takes its settings as keyword arguments, checks them in `__init__` (ValueError),
    and keeps no run state on `self`: what a client remembers goes to `client.memory`, what the
    parties know travels in messages. `owns` names the exclusive roles it takes, of which a
    composed defense `a+b` may have only one owner each.
    """

    requires: frozenset[str] = frozenset()
    """What the protocol must offer, e.g. {"smashed"}; otherwise the cell is not applicable."""
    owns: frozenset[str] = frozenset()
    """Roles among: variables, gradient, joins, batch, mix, aggregate."""
    together: int = 1
    """Clients that must take a step together, e.g. because their smashed data is mixed."""
    is_reference: bool = False
    """True for the undefended protocol: attacks' convergence is measured on it."""
    zero_strength: Mapping[str, Any] | None = None
    """Settings that, in place of the given ones, make it the identity; None: none declared. A
    conformance check holds it to that."""
    source: str = ""
    """Where the mechanism is published."""

    @property
    def variant(self) -> str:
        """`printed` or `corrected` (or a finer name) where paper and proof differ, else ''."""
        return ""

    # --- set-up -------------------------------------------------------------------------
    def third_parties(self, seed: int) -> Mapping[str, Party]:
        return {}

    def extra_parameters(
        self, network: NetworkView, params: State, stages: Sequence[str], rng: torch.Generator
    ) -> State:
        """Initial values of parameters that clients train beside the network's own, named
        `STAGE.own_name`: a client has those of the stages it holds.

        params: the network's initial parameters. stages: those that any client holds. rng: as
        public as the network's initial values.
        """
        return {}

    def variables(
        self, params: State, on_clients: Sequence[str], rng: torch.Generator
    ) -> tuple[State, State]:
        """Split initial parameters into (trained state, public constants). Role: variables.

        on_clients: names of the parameters that clients train; the others are the server's and
        belong to the state as they are. The state keeps the parameters' names and shapes. rng:
        for constants that are drawn once; public.
        """
        return params, {}

    # --- pure, vmapped over clients and over an attacker's candidates --------------------
    def draw(self, variables: State, const: State, rng: torch.Generator) -> State:
        """One step's randomness for `realize` and `gradient`, drawn outside vmap."""
        return {}

    def receive(self, state: State, const: State) -> State:
        """Broadcast state -> variables that the client trains. Role: variables."""
        return state

    def realize(self, variables: State, const: State, draw: State) -> State:
        """Variables -> network weights of one step. Role: variables."""
        return variables

    def mean_realize(self, variables: State, const: State) -> State:
        """Network weights for evaluation and for attackers. Role: variables."""
        return self.realize(variables, const, {})

    def gradient(self, loss: Loss, variables: State, x: Tensor, y: Tensor, draw: State) -> State:
        """Gradient of one local step. Role: gradient. An empty `draw` means no noise."""
        return torch.func.grad(loss)(variables, x, y)

    def inspects(self, client: Client) -> bool:
        """Whether the client needs `inspect` in this round; asked after it heard the round's
        messages. Every inspection passes over all of the client's data."""
        return False

    def inspect(self, loss: Loss, variables: State, x: Tensor, y: Tensor) -> State:
        """What a client learns of its own data at the start of a round, before it trains: a sum
        over a chunk of samples x [B, ...] with soft labels y [B, C], added over all of them and
        put into `client.memory["inspected"]`. Rows of y that are 0 are padding, whose loss is
        0, and the loss is a mean over B. Called where `inspects` says so, and not under split
        protocols, where a client cannot compute the loss of its data alone.
        """
        return {}

    # --- client, one at a time; may read its own data ------------------------------------
    def joins(self, client: Client, sampled: bool) -> bool:
        """Whether the client takes part in this round. Role: joins."""
        return sampled

    def batch(self, client: Client, size: int) -> Tensor | None:
        """Indices of the next local batch, or None for the protocol's own. Role: batch."""
        return None

    def say(self, when: Stage, client: Client, local: Local | None, round: int) -> list[Message]:
        """Coordination messages that the client sends at a stage."""
        return []

    def hear(self, when: Stage, client: Client, heard: Sequence[Message]) -> None:
        """Set `client.plan` from the messages addressed to the client."""

    def smashed(self, q: Tensor, client: Client) -> Part:
        """Cut-layer activations as sent; differentiable."""
        return Part(values=q)

    def labels(self, y: Tensor, client: Client) -> Tensor:
        """Soft labels [B, C] that the training uses."""
        return y

    def features_grad(self, g: Tensor, client: Client) -> Tensor:
        """Gradient returned to the server at the head cut."""
        return g

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        """The client's messages of the round's end; chainable."""
        return messages

    def finish_uploads(self, uploads: Mapping[str, list[Message]]) -> Mapping[str, list[Message]]:
        """The clients' messages of the round's end, by client, after `upload`: for work that is
        alike for all of them and pays to be done together, such as encryption on several cores.
        No client's messages may depend on another's."""
        return uploads

    # --- server, from messages alone ----------------------------------------------------
    def mix(self, uploads: Mapping[str, Part], heard: Sequence[Message]) -> list[Mixture] | None:
        """Combine clients' smashed data, or None for one batch per client. Role: mix."""
        return None

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        """New state from the uploads, or None for the mean over present. Role: aggregate."""
        return None

    # --- what is known and what is proven -------------------------------------------------
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """How an upload is randomised, in order. Public: attackers are told (Kerckhoffs)."""
        return ()

    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        """As `mechanisms`, for a round of which more is known."""
        return self.mechanisms()

    def public_plans(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """What a round's messages to the server say of its clients' plans, one per client. An
        attacker who plays the defense on public data gives them to its clients in turn, as
        `client.plan`: what was agreed stays agreed."""
        return ()

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """What the mechanism did over the run, for the ledger; never a bare epsilon."""
        return ()

    def claim(self, facts: Facts) -> tuple[float, float, str] | None:
        """(epsilon, delta, unit) by the paper's own formula, or None where it claims none."""
        return None

    def constants(self, facts: Facts) -> dict[str, float | str]:
        """Mechanism constants worth printing: bias and variance factors, noise std."""
        return {}


# --- what an attack gets and gives ----------------------------------------------------------


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
class Layer:
    """One parametrised layer of a forward pass of B samples.

    name: prefix of its parameters, `{name}.weight` and, with a bias, `{name}.bias`. kind: linear
    (output = input W' + b), conv (`module` tells stride, padding and so on), affine (output =
    input * weight + bias per channel; `input` is the normalised one) or other. input, output:
    [B, ...], part of the autograd graph.
    """

    name: str
    kind: Literal["linear", "conv", "affine", "other"]
    module: torch.nn.Module
    input: Tensor
    output: Tensor


class NetworkView(Protocol):
    """The public network as an attack may use it. `cuts`: stages after which it may be cut."""

    shape: tuple[int, ...]
    classes: int
    head: tuple[str, str]
    cuts: tuple[str, ...]

    @property
    def normalises(self) -> bool: ...

    def apply(
        self, params: State, x: Tensor, *, mode: str = "eval", buffers: State | None = None
    ) -> Tensor: ...

    def features(
        self, params: State, x: Tensor, *, mode: str = "eval", buffers: State | None = None
    ) -> Tensor: ...

    def run(
        self,
        params: State,
        x: Tensor,
        *,
        first: str | None = None,
        last: str | None = None,
        mode: str = "eval",
        buffers: State | None = None,
    ) -> Tensor: ...

    def trace(
        self, params: State, x: Tensor, *, mode: str = "eval", buffers: State | None = None
    ) -> tuple[Tensor, list[Layer]]: ...


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


def detached(state: State) -> dict[str, Tensor]:
    """A detached, cloned copy: shares neither graph nor storage with the original."""
    return {k: v.detach().clone() for k, v in state.items()}


def fresh(defense: Defense) -> Defense:
    """A deep copy, so that no party can reach another through the defense object."""
    return copy.deepcopy(defense)
