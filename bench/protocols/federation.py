"""A federation: server, clients and third parties, and one round of fedsgd or fedavg.

No line here asks which defense runs; whatever differs is behind a hook of `bench.api.Defense`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.func import vmap

from bench.contract.defense import Client, Defense, Local, Loss, Party, Server, fresh
from bench.contract.messages import SERVER, Message, Part, Stage, State, detached
from bench.models import Network
from bench.protocols.wire import Wire
from bench.seeding import derived_seed, generator
from bench.toolkit.aggregation import mean_over_present
from bench.toolkit.losses import NetworkLoss
from bench.toolkit.memory import halving, to_device

STREAMS = ("joins", "batch", "defense")
_INSPECTED = 64
"""Samples of a client that `Defense.inspect` sees at a time: per-sample gradients take memory."""
Mode = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """Local work of a round: protocol name, batch size, learning rate, steps or epochs."""

    protocol: str
    batch: int
    lr: float
    local_steps: int | None = None
    local_epochs: float | None = None
    mode: Mode = "train"

    def steps(self, samples: int) -> int:
        """Gradient steps of a client with so many samples."""
        if self.local_epochs is None:
            return self.local_steps or 1
        return max(1, round(self.local_epochs * samples / min(self.batch, samples)))


@dataclass(kw_only=True)
class RoundResult:
    """One round: the wire, the clients that took part, the samples each used."""

    wire: Wire
    before: State
    joined: list[Client]
    used: dict[str, Tensor]
    client_seconds: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of local training of all clients at once.

    groups: rows of `joined` by (batch size, cut); used: each client's last batch. now, grad_sum:
    variables and their summed gradients, [J, ...] by name, changed in place.
    """

    number: int
    joined: Sequence[Client]
    groups: Mapping[tuple[int, str | None], list[int]]
    used: Sequence[Tensor]
    now: Mapping[str, Tensor]
    grad_sum: Mapping[str, Tensor]
    work: LocalWork
    wire: Wire

    def variables(self, members: Sequence[int], names: Sequence[str] | None = None) -> State:
        """Variables [M, ...] of some clients; the stack itself where they are all."""
        everyone = len(members) == len(self.joined)
        return {n: self.now[n] if everyone else self.now[n][members] for n in names or self.now}

    def descend(self, members: list[int], grads: State) -> None:
        """Move the clients' variables against gradients [M, ...]."""
        everyone = len(members) == len(self.joined)
        for name, grad in grads.items():
            grad = grad.detach()
            if everyone:
                self.now[name].sub_(grad, alpha=self.work.lr)
                self.grad_sum[name].add_(grad)
            else:
                self.now[name][members] -= self.work.lr * grad
                self.grad_sum[name][members] += grad


@dataclass(kw_only=True)
class Federation:
    """State of a run between rounds. `fork` copies it, so an observed round disturbs nothing.

    buffers: normalisation statistics of public data for eval mode. queues: samples of a client's
    present epoch that are still to come. uploads: how often a client has sent any. fewest: clients
    in the step that had the fewest, None before the first. pinned: whether who takes part and
    with which samples is given, as in an observed round, instead of the defense's to decide.
    at_once: clients per vmapped call that fitted into a GPU's memory, None before one did not.
    """

    network: Network
    defense: Defense
    clients: list[Client]
    initial: State
    state: State
    const: State
    seed: int
    device: torch.device
    parties: Mapping[str, Party] = field(default_factory=dict)
    buffers: State | None = None
    round: int = 0
    queues: dict[str, Tensor] = field(default_factory=dict)
    uploads: dict[str, int] = field(default_factory=dict)
    fewest: int | None = None
    pinned: bool = False
    at_once: int | None = None

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
        """A federation at round 0. data: one (x, y) per client; params: initial weights or
        None to draw them from the seed (the same for every defense); more: fields of the
        protocol's own."""
        if params is None:
            params = network.init(generator(seed, "init"))
        params = {k: v.to(device) for k, v in params.items()}
        if len(data) < defense.together:
            raise ValueError(
                f"the defense needs {defense.together} clients in every round, but there are "
                f"{len(data)}."
            )
        stages = cls.client_stages(network, **more)
        own = generator(seed, "extra parameters")
        params |= {
            n: v.to(device)
            for n, v in defense.extra_parameters(network, params, stages, own).items()
        }
        held = names_in(stages, params)
        state, const = defense.variables(params, held, generator(seed, "variables"))
        clients = [
            Client(
                id=f"client-{i}",
                x=x.to(device),
                y=y.to(device),
                rng={s: generator(seed, "client", i, s) for s in STREAMS},
            )
            for i, (x, y) in enumerate(data)
        ]
        return cls(
            network=network,
            defense=defense,
            clients=clients,
            initial=detached(params),
            state=detached(state),
            const=detached(const),
            seed=seed,
            device=device,
            parties=dict(defense.third_parties(derived_seed(seed, "parties"))),
            **more,
        )

    @classmethod
    def client_stages(cls, network: Network) -> Sequence[str]:
        """The stages that any client trains: here, all."""
        return network.stages

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
        self, work: LocalWork, sampled: Sequence[str], *, observed: bool = False
    ) -> RoundResult:
        """Play one round in which the server samples the clients `sampled`, and advance.
        observed: whether the result's wire keeps a log of the messages."""
        joined = [c for c in self.clients if self._joins(c, c.id in sampled)]
        roster = [c.id for c in joined]
        wire = Wire(self.parties, roster, keeps=observed)
        before = self.state
        self._open_round()
        self._coordinate("round", wire, joined, {})
        wire.send(
            Message(
                kind="broadcast",
                sender=SERVER,
                receiver=c.id,
                round=self.round,
                parts={n: Part(values=before[n]) for n in self.held(c)},
            )
            for c in joined
        )
        for client in joined:
            wire.collect(client.id)
        began = time.perf_counter()
        self._inspect(joined, work)
        locals_, used = self._train(joined, work, wire)
        seconds = time.perf_counter() - began
        self._coordinate("upload", wire, joined, locals_)
        began = time.perf_counter()
        uploads = self.defense.finish_uploads(
            {c.id: self._upload(c, locals_[c.id], work) for c in joined}
        )
        seconds += time.perf_counter() - began
        for client in joined:
            self._remember(client, locals_[client.id], uploads[client.id])
            wire.send(uploads[client.id])
            self.uploads[client.id] = self.uploads.get(client.id, 0) + 1
        if joined:
            self.state = self._aggregate(wire, work)
        self.round += 1
        return RoundResult(
            wire=wire, before=before, joined=joined, used=used, client_seconds=seconds
        )

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

    # --- what a split protocol does otherwise -------------------------------------------------
    def held(self, client: Client) -> list[str]:
        """Names of the state that the client receives, trains and uploads."""
        return list(self.state)

    def _open_round(self) -> None:
        """Called when a round begins."""

    def _server_variables(self) -> State | None:
        """The server's own trained variables."""
        return None

    def _settle(self, aggregated: State, messages: Sequence[Message]) -> State:
        """The state after the round, from the clients' aggregate."""
        return aggregated

    def _take_step(self, step: Step) -> None:
        for members in step.groups.values():
            self._step(step, members)

    def _joins(self, client: Client, sampled: bool) -> bool:
        return sampled if self.pinned else self.defense.joins(client, sampled)

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

    def _begin_at(self, client: Client, names: Sequence[str] | None = None) -> tuple[State, State]:
        """Variables as received (None: the client's), and where the client starts: kept
        coordinates stay its own."""
        names = self.held(client) if names is None else names
        received = self.defense.receive({n: self.state[n] for n in names}, self.const)
        if client.kept is None or client.own is None:
            return received, received
        own, kept = client.own, client.kept
        start = {
            n: torch.where(kept[n], own[n], v) if n in kept else v for n, v in received.items()
        }
        return received, start

    def _inspect(self, joined: Sequence[Client], work: LocalWork) -> None:
        """`Defense.inspect` over the data of every client that needs it, chunk by chunk, for all
        clients at once."""
        joined = [c for c in joined if self.defense.inspects(c)]
        sizes = [len(c.y) for c in joined]
        starts = [self._begin_at(c)[1] for c in joined]
        names = list(starts[0]) if starts else []
        variables = {n: torch.stack([s[n] for s in starts]) for n in names}
        loss = self.loss(work.mode)
        pads = not (self.network.normalises and work.mode == "train")
        sums: dict[str, Tensor] = {}

        def inspect(variables: State, x: Tensor, y: Tensor) -> State:
            return self.defense.inspect(loss, variables, x, y)

        for first in range(0, max(sizes, default=0), _INSPECTED):
            left: dict[int, list[int]] = {}
            for i, size in enumerate(sizes):
                if size > first:
                    # Batch statistics would be moved by padding.
                    left.setdefault(0 if pads else min(size - first, _INSPECTED), []).append(i)
            for members in left.values():
                width = min(max(sizes[i] for i in members) - first, _INSPECTED)
                rows = [_padded(joined[i], first, width, self.network.classes) for i in members]
                which = to_device(torch.tensor(members), self.device)
                found = self._for_each(inspect, len(members))(
                    {n: v[which] for n, v in variables.items()},
                    torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]),
                )  # fmt: skip
                for name, value in found.items():
                    if name not in sums:
                        sums[name] = value.new_zeros(len(joined), *value.shape[1:])
                    sums[name][which] += value.detach()
        for i, client in enumerate(joined):
            client.memory["inspected"] = {n: v[i] for n, v in sums.items()}

    def _batches(self, joined: Sequence[Client], work: LocalWork) -> list[list[Tensor]]:
        """Indices of every client's batches of the round, step by step.

        All are drawn before the first step and copied to the device together: a copy per client
        and step would make the host wait for a GPU each time.
        """
        drawn = [
            [self._next_batch(c, work.batch) for _ in range(work.steps(len(c.y)))] for c in joined
        ]
        everything = torch.cat([batch for mine in drawn for batch in mine])
        moved = iter(
            to_device(everything, self.device).split([len(b) for mine in drawn for b in mine])
        )
        return [[next(moved) for _ in mine] for mine in drawn]

    def _next_batch(self, client: Client, size: int) -> Tensor:
        chosen = None if self.pinned else self.defense.batch(client, size)
        if chosen is not None:
            return chosen.cpu()
        size = min(size, len(client.y))
        queue = self.queues.get(client.id, torch.empty(0, dtype=torch.int64))
        if len(queue) < size:  # a new epoch; the rest of the old one comes first
            order = torch.randperm(len(client.y), generator=client.rng["batch"])
            order = torch.cat([order[~torch.isin(order, queue)], order[torch.isin(order, queue)]])
            queue = torch.cat([queue, order])
        self.queues[client.id] = queue[size:]
        return queue[:size]

    def loss(self, mode: Mode, draw: State | None = None) -> Loss:
        """Training loss as a pure function (variables, x, y) -> scalar."""
        return NetworkLoss(
            network=self.network, realize=self._realizing(draw or {}), mode=mode,
            buffers=self.buffers,
        )  # fmt: skip

    def _realizing(self, draw: State) -> Callable[[State], State]:
        """variables -> network weights under one draw."""
        return lambda variables: self.defense.realize(variables, self.const, draw)

    def _train(
        self, joined: Sequence[Client], work: LocalWork, wire: Wire
    ) -> tuple[dict[str, Local], dict[str, Tensor]]:
        """Local training of all clients; those with equal batch shapes advance as one batch."""
        if not joined:
            return {}, {}
        held = [self.held(c) for c in joined]
        names = [n for n in self.state if any(n in h for h in held)]
        begin = [self._begin_at(c, names) for c in joined]
        used = self._batches(joined, work)
        now = {n: torch.stack([s[n] for _, s in begin]).detach().clone() for n in names}
        grad_sum = {n: torch.zeros_like(v) for n, v in now.items()}
        for client in joined:
            client.loss = self.loss(work.mode)
        for number in range(max(len(u) for u in used)):
            groups: dict[tuple[int, str | None], list[int]] = {}
            for i, client in enumerate(joined):
                if number < len(used[i]):
                    groups.setdefault((len(used[i][number]), client.cut), []).append(i)
            company = sum(len(members) for members in groups.values())
            self.fewest = min(company, self.fewest or company)
            self._take_step(
                Step(
                    number=number, joined=joined, groups=groups,
                    used=[u[min(number, len(u) - 1)] for u in used],
                    now=now, grad_sum=grad_sum, work=work, wire=wire,
                )
            )  # fmt: skip
        results = {}
        for i, (client, (received, start)) in enumerate(zip(joined, begin, strict=True)):
            results[client.id] = Local(
                broadcast={n: received[n] for n in held[i]},
                start={n: start[n] for n in held[i]},
                end={n: now[n][i].clone() for n in held[i]},
                const=self.const,
                grad_sum={n: grad_sum[n][i].clone() for n in held[i]},
                lr=work.lr,
                steps=len(used[i]),
            )
        return results, {c.id: torch.stack(u) for c, u in zip(joined, used, strict=True)}

    def _step(self, step: Step, members: list[int]) -> None:
        """One gradient step of the clients `members`, in place on the stacked variables."""
        x, y = self._samples(step, members)

        def gradient(variables: State, x: Tensor, y: Tensor, draw: State) -> State:
            return self.defense.gradient(self.loss(step.work.mode, draw), variables, x, y, draw)

        variables, draw = step.variables(members), self._draws(step, members)
        step.descend(members, self._for_each(gradient, len(members))(variables, x, y, draw))

    def _samples(self, step: Step, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Samples [M, B, ...] and targets [M, B, C] of the clients' present batches."""
        x = torch.stack([step.joined[i].x[step.used[i]] for i in members])
        y = torch.stack([self._targets(step.joined[i], step.used[i]) for i in members])
        return x, y

    def _draws(self, step: Step, members: Sequence[int]) -> State:
        """The step's randomness, [M, ...] by name, each client's from its own stream."""
        draws = [
            self.defense.draw(
                {n: v[i] for n, v in step.now.items()},
                self.const,
                step.joined[i].rng["defense"],
            )
            for i in members
        ]
        return {n: torch.stack([d[n] for d in draws]) for n in draws[0]}

    def _for_each(self, function: Callable[..., Any], count: int) -> Callable[..., Any]:
        """A pure function of one client's tensors -> of those of `count` clients, stacked along
        dimension 0; an argument that is None stays so. Clients go at once as `_chunk` says, and
        half as many after every call that ran out of memory."""
        most = min(count, self._chunk() or self.at_once or count)

        def over(*stacked: Any) -> Any:
            dims = tuple(None if s is None else 0 for s in stacked)
            found, size = halving(
                lambda few: vmap(function, dims, chunk_size=few if few < count else None)(*stacked),
                at_once=most, device=self.device,
            )  # fmt: skip
            if size < most:
                self.at_once = size
            return found

        return over

    def _chunk(self) -> int | None:
        """Clients per vmapped call: on a GPU all (None) that fit. On a CPU, batching pays for
        small networks (fewer calls) and not for large ones, whose per-client convolutions become
        grouped; the number depends on the network alone, so results do not change with the
        machine's load.
        """
        if self.device.type != "cpu":
            return None
        return max(1, 4_000_000 // self.network.n_parameters)

    def _targets(self, client: Client, chosen: Tensor) -> Tensor:
        one_hot = torch.nn.functional.one_hot(client.y[chosen], self.network.classes).float()
        return self.defense.labels(one_hot, client)

    def _upload(self, client: Client, local: Local, work: LocalWork) -> list[Message]:
        kind = "gradient" if work.protocol == "fedsgd" else "update"
        values = {}
        for name, start in local.start.items():
            update = (start - local.broadcast[name]) - local.lr * local.grad_sum[name]
            values[name] = -update / (local.lr * local.steps) if kind == "gradient" else update
        message = Message(
            kind=kind,
            sender=client.id,
            receiver=SERVER,
            round=self.round,
            local_steps=local.steps,
            parts={n: Part(values=v) for n, v in values.items()},
        )
        return self.defense.upload([message], local, client)

    def _remember(self, client: Client, local: Local, uploads: Sequence[Message]) -> None:
        """Withheld at upload is kept by the client: the one rule behind personal parameters."""
        shown: dict[str, list[Tensor]] = {n: [] for n in local.end}
        whole: set[str] = set()  # sent with every coordinate, which no value need be asked for
        for message in uploads:
            for name, part in message.parts.items():
                if part.present is None:
                    whole.add(name)
                elif name in shown:
                    shown[name].append(part.present)
            for name, sealed in message.sealed.items():
                if name in shown:
                    shown[name].append(sealed.covers)
        kept = {}
        for name, value in local.end.items():
            kept[name] = torch.full_like(value, name not in whole, dtype=torch.bool)
            for pattern in shown[name]:
                kept[name] &= ~pattern
        asked = [kept[n].any() for n in kept if n not in whole]
        withheld = bool(asked) and bool(torch.stack(asked).any())
        client.own, client.kept = (local.end, kept) if withheld else (None, None)

    def _aggregate(self, wire: Wire, work: LocalWork) -> State:
        def ask(message: Message) -> list[Message]:
            wire.send([message])
            return wire.collect(SERVER)

        server = Server(
            state=self.state,
            const=self.const,
            lr=work.lr,
            trained=self._server_variables(),
            ask=ask,
        )
        messages = wire.collect(SERVER)
        chosen = self.defense.aggregate(server, messages)
        if chosen is None:
            chosen = self._settle(mean_over_present(server, messages), messages)
        return detached(chosen)


def _padded(client: Client, first: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """Samples first .. first + width of a client and their one-hot labels, 0 beyond its last."""
    x, y = client.x[first : first + width], client.y[first : first + width]
    one_hot = torch.nn.functional.one_hot(y, classes).float()
    missing = width - len(y)
    return (
        torch.cat([x, x.new_zeros(missing, *x.shape[1:])]),
        torch.cat([one_hot, one_hot.new_zeros(missing, classes)]),
    )


def names_in(stages: Sequence[str], names: Iterable[str]) -> list[str]:
    """Those of the parameter names that belong to one of the stages."""
    prefixes = tuple(f"{stage}." for stage in stages)
    return [n for n in names if n.startswith(prefixes)]
