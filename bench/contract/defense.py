"""A defense: hooks where something leaves a client or is decided, each with an identity default.

`docs/architecture.md` lists these hooks; the page of each published defense says how it uses them.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import AfterValidator, AllowInfNan
from torch import Tensor

from bench.contract.events import Event, Facts, Round
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import Message, Part, Stage, State
from bench.contract.network import NetworkView
from bench.contract.settings import check_settings


def _not_nan(value: float) -> float:
    if math.isnan(value):
        raise ValueError("a number is expected")
    return value


Submodel = Literal["bottom", "head"]
"""What a parameter on clients belongs to."""
ModelFormer = Literal["server", "key_server", "clients"]
FloatOrInf = Annotated[float, AllowInfNan(True), AfterValidator(_not_nan)]
"""Annotation of a setting that may be infinite, such as a clip that cuts nothing; a setting that is
a plain float is finite."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """The result of one client's local training.

    Attributes:
        broadcast: Variables as received.
        start: Where training began; it differs from `broadcast` in coordinates that the client
            kept.
        end: Where it ended.
        const: What is not trained.
        grad_sum: Sum of the directions against which the steps moved, their gradients unless the
            defense's `direction` made others of them: end = start - lr * grad_sum. It is added up
            rather than taken from end - start, which would round it.
        lr: Learning rate.
        steps: Gradient steps taken.
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

    Under split protocols x and y are tuples of what the client's two parts need.

    `realize` turns variables into the network weights of the step. `outputs` gives the output
    [B, ...] of every stage that the client holds, by name in the order of the pass; the head's
    logits are among them only where the whole network is the client's. `targets` gives the soft
    labels in y.
    """

    @property
    def realize(self) -> Callable[[State], State]: ...

    def __call__(self, variables: State, x: Tensor, y: Tensor) -> Tensor: ...

    def outputs(self, variables: State, x: Tensor) -> Mapping[str, Tensor]: ...

    def targets(self, y: Tensor) -> Tensor: ...


@dataclass(kw_only=True)
class Client:
    """One client as its own defense's hooks see it.

    Attributes:
        id: Its name in messages.
        x: Samples [N, ...].
        y: Labels, int64 [N].
        rng: Random streams "joins", "batch" and "defense"; using one never moves another.
        number: Its place among the clients, from 0, by which settings are dealt.
        cut: The last stage that it holds under split protocols.
        memory: The defense's own notes, kept across rounds.
        plan: What was agreed in this round, set by `hear` from messages alone.
        own: Variables after the last local training, None if nothing was withheld.
        kept: Which coordinates of `own` were withheld at the last upload; the protocol keeps
            those in place of the broadcast.
        loss: The training loss, for hooks that score the client's own data (Fisher information).
    """

    id: str
    x: Tensor
    y: Tensor
    rng: Mapping[str, torch.Generator]
    number: int = 0
    cut: str | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    own: State | None = None
    kept: Mapping[str, Tensor] | None = None
    loss: Loss | None = None


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server as `aggregate` sees it.

    Attributes:
        state: Variables broadcast this round.
        const: Public constants.
        lr: Local learning rate.
        trained: The variables that the server trained itself (split protocols), with its copies
            of layers that only some clients hold.
        ask: `ask(message)` puts a question to a third party and returns its answers. Those that it
            addresses to `FORMER` the server does not see: `aggregate` then computes what the party
            computes that forms the model.
    """

    state: State
    const: State
    lr: float
    trained: State | None = None
    ask: Callable[[Message], list[Message]] | None = None


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A batch that the server runs under a split protocol.

    Attributes:
        smashed: Activations [B, ...].
        cut: The stage that they come from.
        targets: Soft labels [B, C], or None where labels stay with the clients.
        members: Ids of the clients, each with the weight of its loss.
    """

    smashed: Tensor
    cut: str
    targets: Tensor | None
    members: Sequence[tuple[str, float]]


class Party:
    """A third party, such as a mixer or a key server. It acts by messages alone."""

    def begin(self, when: Stage, roster: Sequence[str], round: int, step: int) -> list[Message]:
        """Messages that it sends unasked.

        Args:
            when: The moment of the round.
            roster: Ids of the clients that take part.
            round: The round, from 0.
            step: The step, from 0.
        """
        return []

    def reply(self, message: Message) -> list[Message]:
        """Messages that it sends in answer to one that it received."""
        return []


@dataclass(frozen=True, kw_only=True)
class Strength:
    """The setting by which a defense trades accuracy for protection.

    Attributes:
        setting: Its name.
        weak: A value > 0 that hardly costs accuracy.
        strong: A value > 0 that protects as much as anybody would ask for; it may lie above or
            below `weak`. `leakbench tune` searches between the two on a logarithmic scale.
    """

    setting: str
    weak: float
    strong: float


class Defense:
    """Base class of a defense: every hook is the identity.

    A subclass takes its settings as keyword arguments and raises ValueError for a value out of
    range. One that is a dataclass annotates numbers with `bench.toolkit.settings.Limits`; these and
    its choices (`Literal`) are then checked when it is made. It keeps no run state on `self`: what
    a client remembers goes to `client.memory`, and what the parties know travels in messages.
    """

    requires: frozenset[str] = frozenset()
    """What the protocol must offer, {"smashed"} or {"cut"}; else its cells are not applicable."""
    owns: frozenset[str] = frozenset()
    """The roles it takes alone: variables, gradient, direction, joins, batch, mix or aggregate."""
    together: int = 1
    """Clients that must take a step together, for example to mix their smashed data."""
    only_sums: bool = False
    """Whether the server reads no client's upload but the mean of all, which `aggregate` notes as a
    message from `SUM` to the server. An observation then has one victim with the samples of all,
    but under split protocols, where clients send more than uploads."""
    forms_model: ModelFormer = "server"
    """Who forms the new model from a round's uploads. Where it is not the server, the server does
    not learn the model after a round, unless a threat lets it hear every broadcast."""
    cycle: int = 1
    """Settings are dealt to clients in turn and begin anew after so many. Clients with the first
    are observed."""
    is_reference: bool = False
    """True for the undefended protocol: attacks' convergence is measured on it."""
    zero_strength: Mapping[str, Any] | None = None
    """Settings that make it the identity, or None; a conformance check holds it to that."""
    strength: Strength | None = None
    """What `leakbench tune` searches; None where no single number trades accuracy for
    protection."""
    source: str = ""
    """Where the mechanism is published."""

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def variant(self) -> str:
        """`printed` or `corrected` (or a finer name) where paper and proof differ, else ''."""
        return ""

    # --- set-up -------------------------------------------------------------------------
    def third_parties(self, seed: int) -> Mapping[str, Party]:
        """Third parties of the run by name."""
        return {}

    def extra_parameters(
        self, network: NetworkView, params: State, stages: Sequence[str], rng: torch.Generator
    ) -> State:
        """Initial values of parameters that clients train beside the network's own.

        They are named `STAGE.own_name`; a client has those of the stages that it holds.

        Args:
            network: The network.
            params: Its initial parameters.
            stages: The stages that any client holds.
            rng: A stream that is as public as the network's initial values.
        """
        return {}

    def variables(
        self, params: State, on_clients: Mapping[str, Submodel], rng: torch.Generator
    ) -> tuple[State, State]:
        """Split initial parameters into (trained state, public constants). Role: variables.

        The state keeps the parameters' names and shapes.

        Args:
            params: The initial parameters.
            on_clients: Names of those that clients train, each with its submodel: `bottom`, up to
                the deepest cut (the whole network where it is not cut), or `head`, where private
                labels keep the last stage on clients. The other parameters are the server's and
                belong to the state as they are.
            rng: A public stream, for constants that are drawn once.
        """
        return params, {}

    # --- pure, vmapped over clients and over an attacker's candidates --------------------
    def draw(self, variables: State, const: State, rng: torch.Generator) -> State:
        """One step's randomness for `realize` and `gradient`, drawn outside vmap."""
        return {}

    def receive(self, state: State, const: State) -> State:
        """The variables that a client trains, from the broadcast state. Role: variables."""
        return state

    def realize(self, variables: State, const: State, draw: State) -> State:
        """The network weights of one step, from the variables. Role: variables."""
        return variables

    def mean_realize(self, variables: State, const: State) -> State:
        """Network weights for evaluation and for attackers. Role: variables."""
        return self.realize(variables, const, {})

    def gradient(self, loss: Loss, variables: State, x: Tensor, y: Tensor, draw: State) -> State:
        """Gradient of one local step. Role: gradient. An empty `draw` means no noise."""
        return torch.func.grad(loss)(variables, x, y)

    def direction(
        self, gradient: State, memory: State, step: int, const: State, softness: float = 0.0
    ) -> tuple[State, State]:
        """What the learning rate multiplies when variables move, in place of the gradient. Role:
        direction.

        It acts on every value by itself: tensors may be one client's [...] or stacks [M, ...].

        Args:
            gradient: Of one local step.
            memory: What it returned at the step before; empty at a client's first of a round.
            step: Of the round, from 0.
            const: Public constants.
            softness: 0 for what clients do; above 0 a smooth form that an attacker's descent can
                follow, for one client, in units of each tensor's root mean square gradient.

        Returns:
            The direction, like the gradient, and the memory for the next step.
        """
        return gradient, memory

    def inspects(self, client: Client) -> bool:
        """Whether the client needs `inspect` in this round.

        It is asked after the client heard the round's messages. Every inspection passes over all of
        the client's data.
        """
        return False

    def inspect(self, loss: Loss, variables: State, x: Tensor, y: Tensor) -> State:
        """What a client learns of its own data at the start of a round, before it trains.

        It is called where `inspects` says so, and not under split protocols, where a client cannot
        compute the loss of its data alone.

        Args:
            loss: The training loss, a mean over B.
            variables: The variables that the client starts from.
            x: A chunk of its samples [B, ...].
            y: Their soft labels [B, C]; rows of zeros are padding, whose loss is 0.

        Returns:
            Sums over the chunk. They are added over all chunks and put into
            `client.memory["inspected"]`.
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
        """Coordination messages that the client sends at a moment of the round."""
        return []

    def hear(self, when: Stage, client: Client, heard: Sequence[Message]) -> None:
        """Set `client.plan` from the messages addressed to the client."""

    def smashed(self, q: Tensor, client: Client) -> Part:
        """The activations at the cut as they are sent; differentiable."""
        return Part(values=q)

    def labels(self, y: Tensor, client: Client) -> Tensor:
        """The soft labels [B, C] that the training uses."""
        return y

    def features_grad(self, g: Tensor, client: Client) -> Tensor:
        """The gradient that is returned to the server at the head's cut."""
        return g

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        """The client's messages of the round's end; chainable."""
        return messages

    # --- server, from messages alone ----------------------------------------------------
    def mix(self, uploads: Mapping[str, Part], heard: Sequence[Message]) -> list[Mixture] | None:
        """Combine clients' smashed data, or return None for one batch per client. Role: mix."""
        return None

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State | None:
        """The new state from the uploads, or None for the mean over present. Role: aggregate."""
        return None

    # --- what is known and what is proven -------------------------------------------------
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """How an upload is randomised, in order, whatever the round. Attackers know it
        (Kerckhoffs); they ask for `mechanisms_in`, and a defense overrides one of the two."""
        return ()

    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        """How an upload is randomised in a round of which more is known."""
        return self.mechanisms()

    def public_plans(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """What a round's messages to the server say of its clients' plans, one per client.

        An attacker who plays the defense on public data gives them to its clients in turn, as
        `client.plan`: what was agreed stays agreed.
        """
        return ()

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """What the mechanism did over the run, for the ledger; never a bare epsilon."""
        return ()

    def claim(self, facts: Facts) -> tuple[float, float, str] | None:
        """The paper's own (epsilon, delta, unit), or None where it claims none."""
        return None

    def constants(self, facts: Facts) -> dict[str, float | str]:
        """Constants worth printing: factors of bias and variance, the noise's std."""
        return {}


def unmet(defense: Defense, *, cut: bool) -> str | None:
    """What the defense requires and a protocol lacks, as one clause, or None.

    Args:
        cut: Whether the protocol cuts the network, so that smashed data is sent.
    """
    missing = sorted(defense.requires - ({"cut", "smashed"} if cut else set()))
    if "cut" in missing:
        return "the network is not cut, so there is no bottom submodel"
    return f"no {', '.join(missing)} data leaves the client" if missing else None


def fresh(defense: Defense) -> Defense:
    """A deep copy, so that no party can reach another through the defense object."""
    return copy.deepcopy(defense)
