"""A defense: hooks where something leaves a client or is decided, each with an identity default.

`docs/architecture.md` says how each published defense sits on these hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.contract.events import Event, Facts, Formula, Round
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import Message, Part, Stage, State
from bench.contract.network import NetworkView


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

    def paper_formulas(self, facts: Facts) -> tuple[Formula, ...]:
        """The paper's own formulas at these settings and facts, and what holds of them."""
        return ()


def fresh(defense: Defense) -> Defense:
    """A deep copy, so that no party can reach another through the defense object."""
    return copy.deepcopy(defense)
