"""A federation: server, clients and third parties, and one round of fedsgd or fedavg.

No line here asks which defense runs; whatever differs is behind a hook of `bench.api.Defense`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from bench.contract.defense import Client, Defense, Local, Party, Server, Submodel, fresh
from bench.contract.messages import FORMER, SERVER, Message, Part, Stage, State, detached
from bench.errors import UserError
from bench.models import Network
from bench.protocols.local_training import LocalTraining, LocalWork
from bench.protocols.settings import ProtocolSettings
from bench.protocols.wire import Wire, freeze
from bench.seeding import derive_seed, generator
from bench.toolkit.aggregation import filled, mean_over_present

UPLOADED = ("clear", "sealed", "withheld")
"""What a client may do with a coordinate that it trained: send its value readable, or encrypted, or
not send it."""
STREAMS = ("joins", "batch", "defense")
"""Names of a client's random streams, which `Client.rng` holds."""


PARTICIPATION = "participation"
"""Name of the random stream of the server's sampling."""


def sample_clients(
    ids: Sequence[str], protocol: ProtocolSettings, rng: torch.Generator
) -> list[str]:
    """Return the clients that the server samples in a round: a fixed number, drawn without
    replacement, or each by itself."""
    if protocol.sampling == "poisson":
        joining = torch.rand(len(ids), generator=rng, dtype=torch.float64) < protocol.participation
        return [client for client, joins in zip(ids, joining.tolist(), strict=True) if joins]
    chosen = torch.randperm(len(ids), generator=rng)[: protocol.participants]
    return [ids[i] for i in chosen.sort().values]


def clients_of(data: Sequence[tuple[Tensor, Tensor]], seed: int) -> list[Client]:
    """The clients of a run at its beginning.

    data: Samples and labels (x, y), one pair per client.
    """
    return [
        Client(
            id=f"client-{i}",
            x=x,
            y=y,
            rng={s: generator(seed, "client", i, s) for s in STREAMS},
            number=i,
        )
        for i, (x, y) in enumerate(data)
    ]


@dataclass(kw_only=True)
class RoundSeconds:
    """Where time went.

    Attributes:
        training: Local training of all clients.
        uploading: What each client does to its upload by itself.
        parties: Third parties' answers to the server and the clients' uploads.
        aggregation: The server's aggregation, without third parties.
    """

    training: float = 0.0
    uploading: float = 0.0
    parties: float = 0.0
    aggregation: float = 0.0

    def __iadd__(self, other: RoundSeconds) -> RoundSeconds:
        for name, seconds in vars(other).items():
            setattr(self, name, getattr(self, name) + seconds)
        return self


@dataclass(kw_only=True)
class Aggregation:
    """What the server aggregated in a round: itself before, the messages, and by the kind of its
    question what third parties answered it."""

    server: Server | None = None
    messages: list[Message] = field(default_factory=list)
    answers: dict[str, list[Message]] = field(default_factory=dict)


@dataclass(kw_only=True)
class RoundResult:
    """One round that was played; `before` is the state that was broadcast.

    Attributes:
        lr: Learning rate of the clients.
        used: Indices of the samples of every step, int64 [steps, B], by client.
        seconds: Where the round's time went.
        uploaded: Coordinates of all clients by what became of them, float64 [3] by UPLOADED.
        trained: The upload of a watched client as it was handed to its defense, by client.
        received: What a watched client made of the broadcast, which that upload is relative to.
        sent: A watched client's messages of the round's end.
        aggregation: Of an observed round what `aggregate` was given, and third parties' answers.
        after: The state that it returned, before the server's own step.
    """

    wire: Wire
    before: State
    joined: list[Client]
    lr: float
    uploaded: Tensor
    used: dict[str, Tensor] = field(default_factory=dict)
    seconds: RoundSeconds = field(default_factory=RoundSeconds)
    trained: dict[str, Message] = field(default_factory=dict)
    received: dict[str, State] = field(default_factory=dict)
    sent: dict[str, list[Message]] = field(default_factory=dict)
    aggregation: Aggregation = field(default_factory=Aggregation)
    after: State = field(default_factory=dict)

    @property
    def shared(self) -> float:
        """Share of the trained coordinates that clients sent, readable or encrypted."""
        clear, sealed, withheld = self.uploaded.tolist()
        return (clear + sealed) / max(1.0, clear + sealed + withheld)


@dataclass(kw_only=True)
class Federation(LocalTraining):
    """State of a run between rounds. `fork` copies it, so an observed round disturbs nothing.

    Attributes:
        seed: From which every random stream of the run is derived.
        uploads: How often each client has uploaded, by client.
        server_lr: By which the server multiplies its step.
        server_momentum: Share of its last step that it adds (FedAvgM, Hsu et al.,
            arXiv:1909.06335).
        last_step: Before `server_lr`; empty before the first.
    """

    clients: list[Client]
    initial: State
    seed: int
    parties: Mapping[str, Party] = field(default_factory=dict)
    round: int = 0
    uploads: dict[str, int] = field(default_factory=dict)
    server_lr: float = 1.0
    server_momentum: float = 0.0
    last_step: State = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        *,
        network: Network,
        defense: Defense,
        data: Sequence[tuple[Tensor, Tensor]],
        seed: int,
        device: torch.device,
        params: State | None = None,
        **more: Any,
    ) -> Self:
        """A federation at round 0.

        Args:
            data: Samples and labels (x, y), one pair per client.
            params: Initial weights, or None to draw them from the seed (the same for every
                defense).
            more: Fields that a protocol adds.

        Raises:
            UserError: If the defense needs more clients together than there are.
        """
        if params is None:
            params = network.init(generator(seed, "init"))
        params = {k: v.to(device) for k, v in params.items()}
        if len(data) < defense.together:
            raise UserError(
                f"the defense needs {defense.together} clients in every round, but there are "
                f"{len(data)}."
            )
        stages = cls.client_stages(network, **more)
        own = generator(seed, "extra parameters")
        params |= {
            n: v.to(device)
            for n, v in defense.extra_parameters(network, params, list(stages), own).items()
        }
        held = {n: stages[n.partition(".")[0]] for n in names_in(stages, params)}
        state, const = defense.variables(params, held, generator(seed, "variables"))
        clients = clients_of([(x.to(device), y.to(device)) for x, y in data], seed)
        return cls(
            network=network,
            defense=defense,
            clients=clients,
            initial=detached(params),
            state=detached(state),
            const=detached(const),
            seed=seed,
            device=device,
            parties=dict(defense.third_parties(derive_seed(seed, "parties"))),
            **more,
        )

    @classmethod
    def client_stages(cls, network: Network, **more: Any) -> Mapping[str, Submodel]:
        """The stages that any client trains, with the submodel of each: here, all."""
        return dict.fromkeys(network.stages, "bottom")

    def fork(self, *names: str | int) -> Self:
        """A copy with fresh randomness named by `names`; data and network are shared."""
        clients = [
            replace(
                c,
                rng={s: generator(self.seed, *names, c.id, s) for s in STREAMS},
                memory=copy.deepcopy(c.memory),
                plan=copy.deepcopy(c.plan),
            )
            for c in self.clients
        ]
        return replace(
            self,
            clients=clients,
            defense=fresh(self.defense),
            parties=copy.deepcopy(dict(self.parties)),
            queues=dict(self.queues),
            uploads=dict(self.uploads),
        )

    # --- one round --------------------------------------------------------------------------
    def play(
        self,
        work: LocalWork,
        sampled: Sequence[str],
        *,
        observed: bool = False,
        party: str | None = None,
        most_bytes: float = math.inf,
        watched: Container[str] = (),
    ) -> RoundResult:
        """Play one round in which the server samples the clients `sampled`, and advance.

        Args:
            observed: Whether the result's wire keeps a log of the messages.
            party: Who observes it and learns nothing else: the log has no other messages, and the
                result nothing that clients or aggregation did. None: all is kept.
            most_bytes: Of that log, which is empty where the messages have more.
            watched: Clients of which the result has what they trained and sent; of an observed
                round all.
        """
        asked = [(c, c.id in sampled) for c in self.clients]
        joined = [c for c, s in asked if (s if self.pinned else self.defense.joins(c, s))]
        roster = [c.id for c in joined]
        wire = Wire(self.parties, roster, keeps=observed, party=party, most_bytes=most_bytes)
        whole = observed and party is None
        result = RoundResult(
            wire=wire,
            before=self.state,
            joined=joined,
            lr=work.lr,
            uploaded=torch.zeros(len(UPLOADED), dtype=torch.float64, device=self.device),
        )
        seconds, clock = result.seconds, time.perf_counter
        self._open_round()
        self._coordinate("round", wire, joined, {})
        for client in joined:
            told = Message(kind="broadcast", sender=SERVER, receiver=client.id, round=self.round)
            held = {n: Part(values=result.before[n]) for n in self.names_held(client)}
            wire.count(told.with_parts(held), [client.id])
        began = clock()
        self._inspect(joined, work)
        locals_, result.used = self._train(joined, work, wire)
        seconds.training = clock() - began
        self._coordinate("upload", wire, joined, locals_)
        began = clock()
        uploads: dict[str, list[Message]] = {}
        for client in joined:
            plain = self._plain_upload(client, locals_[client.id], work)
            if whole or client.id in watched:  # copies, since hooks may change what they get
                result.trained[client.id] = freeze(plain)
                result.received[client.id] = detached(locals_[client.id].broadcast)
            uploads[client.id] = self.defense.upload([plain], locals_[client.id], client)
        seconds.uploading = clock() - began
        answered = wire.party_seconds
        for client in joined:
            if client.id in result.trained:
                result.sent[client.id] = [freeze(m) for m in uploads[client.id]]
            self._remember(client, locals_[client.id], uploads[client.id])
            wire.send(uploads[client.id])
            self.uploads[client.id] = self.uploads.get(client.id, 0) + 1
            result.uploaded += _count_uploaded(uploads[client.id], locals_[client.id])
        began, before_asking = clock(), wire.party_seconds
        result.after = self.state
        if joined:
            result.after = self._aggregate(wire, work, result.aggregation if whole else None)
            self.state = self._move(result.after)
        seconds.parties = wire.party_seconds - answered
        seconds.aggregation = clock() - began - (wire.party_seconds - before_asking)
        self.round += 1
        return result

    def mean_weights(self) -> State:
        """The network's weights in the present state, without the defense's randomness."""
        variables = self.defense.receive(self.state, self.const)
        return self.defense.mean_realize(variables, self.const)

    def weights_of(self, client: Client) -> State:
        """As `mean_weights`, with the client's own values in what it withheld last."""
        _, variables = self._begin_at(client, list(self.state))
        return self.defense.mean_realize(variables, self.const)

    def server_steps(self) -> Sequence[State]:
        """The server's own variables before each step of the last observed round."""
        return ()

    @property
    def head(self) -> list[str]:
        """Names of a head that clients hold apart from the stages before a cut: here, none."""
        return []

    # --- what a split protocol does otherwise -------------------------------------------------
    def _open_round(self) -> None:
        """Prepare a round."""

    def _server_variables(self) -> State | None:
        """The server's own trained variables."""
        return None

    def _settle(self, aggregated: State, messages: Sequence[Message]) -> State:
        """The state after the round, from the clients' aggregate."""
        return aggregated

    # --- phases -------------------------------------------------------------------------------
    def _coordinate(
        self,
        when: Stage,
        wire: Wire,
        joined: Sequence[Client],
        locals_: Mapping[str, Local],
        step: int = 0,
    ) -> None:
        roster = [c.id for c in joined]
        for party in self.parties.values():
            wire.send(party.begin(when, roster, self.round, step))
        for client in joined:
            wire.send(self.defense.say(when, client, locals_.get(client.id), self.round))
        for client in joined:
            self.defense.hear(when, client, wire.collect(client.id))

    def _plain_upload(self, client: Client, local: Local, work: LocalWork) -> Message:
        """Return the upload of a client without a defense."""
        kind = "gradient" if work.protocol == "fedsgd" else "update"
        values = {}
        for name, start in local.start.items():
            update = (start - local.broadcast[name]) - local.lr * local.grad_sum[name]
            values[name] = -update / (local.lr * local.steps) if kind == "gradient" else update
        return Message(
            kind=kind,
            sender=client.id,
            receiver=SERVER,
            round=self.round,
            local_steps=local.steps,
            parts={n: Part(values=v) for n, v in values.items()},
        )

    def _remember(self, client: Client, local: Local, uploads: Sequence[Message]) -> None:
        """Keep at the client what it withheld at upload: the one rule behind personal
        parameters."""
        sent: dict[str, list[Tensor]] = {n: [] for n in local.end}
        whole: set[str] = set()  # told in every coordinate, which no value need be asked for
        for message in uploads:
            for name, part in message.parts.items():
                if part.present is None or part.absent == "zero":
                    whole.add(name)
                elif name in sent:
                    sent[name].append(part.present)
            for name, sealed in message.sealed.items():
                if name in sent:
                    sent[name].append(sealed.covers)
        kept = {n: torch.ones_like(local.end[n], dtype=torch.bool) for n in sent if n not in whole}
        for name in kept:
            for pattern in sent[name]:
                kept[name] &= ~pattern
        client.own = client.kept = None
        if kept and bool(torch.stack([k.any() for k in kept.values()]).any()):
            told = {n: torch.zeros_like(v, dtype=torch.bool) for n, v in local.end.items()}
            client.own, client.kept = local.end, told | kept

    def _aggregate(self, wire: Wire, work: LocalWork, kept: Aggregation | None) -> State:
        def ask(message: Message) -> list[Message]:
            wire.send([message])
            answers = wire.collect(SERVER) + wire.collect(FORMER)
            if kept is not None:
                kept.answers.setdefault(message.kind, []).extend(map(freeze, answers))
            return answers

        trained = self._server_variables()
        server = Server(state=self.state, const=self.const, lr=work.lr, trained=trained, ask=ask)
        messages = [filled(m, base=self.state) for m in wire.collect(SERVER)]
        if kept is not None:
            kept.server, kept.messages = server, [freeze(m) for m in messages]
        chosen = self.defense.aggregate(server, messages)
        if chosen is None:
            chosen = self._settle(mean_over_present(server, messages), messages)
        return detached(chosen)

    def _move(self, aggregated: State) -> State:
        """The state after the server's own step towards what it aggregated."""
        if self.server_lr == 1 and not self.server_momentum:
            return aggregated
        moved = {n: v - self.state[n] for n, v in aggregated.items()}
        if self.last_step:
            moved = {n: v + self.server_momentum * self.last_step[n] for n, v in moved.items()}
        self.last_step = moved
        return {n: v + self.server_lr * moved[n] for n, v in self.state.items()}


def _count_uploaded(messages: Sequence[Message], local: Local) -> Tensor:
    """Count a client's coordinates by what became of them, float64 [3] by UPLOADED."""
    device = next(iter(local.end.values())).device
    whole = 0
    clear = sealed = torch.zeros((), dtype=torch.float64, device=device)
    for message in messages:
        for name, part in message.parts.items():
            if name in local.end and part.present is None:
                whole += part.values.numel()
            elif name in local.end:
                clear = clear + part.presence().sum()
        for name, box in message.sealed.items():
            if name in local.end:
                sealed = sealed + box.covers.sum()
    total = sum(v.numel() for v in local.end.values())
    return torch.stack([clear + whole, sealed, total - whole - clear - sealed])


def names_in(stages: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the parameter names that belong to one of the stages."""
    prefixes = tuple(f"{stage}." for stage in stages)
    return [n for n in names if n.startswith(prefixes)]
