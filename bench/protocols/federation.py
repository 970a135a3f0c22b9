"""A federation: server, clients and third parties, and one round of fedsgd or fedavg.

No line here asks which defense runs; whatever differs is behind a hook of `bench.api.Defense`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from bench.api import (
    SERVER,
    Client,
    Defense,
    Local,
    Loss,
    Message,
    Part,
    Party,
    Server,
    Stage,
    State,
    as_kind,
    detached,
    fresh,
)
from bench.models import Network
from bench.protocols.wire import Wire
from bench.seeding import derived_seed, generator
from bench.toolkit.batches import soft_cross_entropy

STREAMS = ("joins", "batch", "defense")
Mode = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True)
class Work:
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


@dataclass(kw_only=True)
class Federation:
    """State of a run between rounds. `fork` copies it, so an observed round disturbs nothing.

    data: client id -> (x, y). buffers: normalisation statistics of public data for eval mode.
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
    ) -> Federation:
        """A federation at round 0. data: one (x, y) per client; params: initial weights or
        None to draw them from the seed (the same for every defense)."""
        if params is None:
            params = network.init(generator(seed, "init"))
        params = {k: v.to(device) for k, v in params.items()}
        state, const = defense.variables(params, list(network.cuts))
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
        )

    def fork(self, *names: str | int) -> Federation:
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
    def play(self, work: Work, sampled: Sequence[str]) -> RoundResult:
        """Play one round in which the server samples the clients `sampled`, and advance."""
        joined = [c for c in self.clients if self.defense.joins(c, c.id in sampled)]
        roster = [c.id for c in joined]
        wire = Wire(self.parties, roster)
        before = self.state
        self._coordinate("round", wire, joined, {})
        wire.send(
            Message(
                kind="broadcast",
                sender=SERVER,
                receiver=c.id,
                round=self.round,
                parts={n: Part(values=v) for n, v in before.items()},
            )
            for c in joined
        )
        for client in joined:
            wire.collect(client.id)
        began = time.perf_counter()
        locals_, used = self._train(joined, work)
        seconds = time.perf_counter() - began
        self._coordinate("upload", wire, joined, locals_)
        began = time.perf_counter()
        uploads = {c.id: self._upload(c, locals_[c.id], work) for c in joined}
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

    def _coordinate(
        self, when: Stage, wire: Wire, joined: Sequence[Client], locals_: Mapping[str, Local]
    ) -> None:
        roster = [c.id for c in joined]
        for party in self.parties.values():
            wire.send(party.begin(when, roster, self.round, 0))
        for client in joined:
            wire.send(self.defense.say(when, client, locals_.get(client.id), self.round))
        for client in joined:
            self.defense.hear(when, client, wire.collect(client.id))

    def _begin_at(self, client: Client) -> tuple[State, State]:
        """Variables as received, and where the client starts: kept coordinates stay its own."""
        received = self.defense.receive(self.state, self.const)
        if client.kept is None or client.own is None:
            return received, received
        own, kept = client.own, client.kept
        start = {
            n: torch.where(kept[n], own[n], v) if n in kept else v for n, v in received.items()
        }
        return received, start

    def _next_batch(self, client: Client, size: int) -> Tensor:
        chosen = self.defense.batch(client, size)
        if chosen is not None:
            return chosen.to(client.y.device)
        size = min(size, len(client.y))
        queue = self.queues.get(client.id, torch.empty(0, dtype=torch.int64))
        if len(queue) < size:  # a new epoch; the rest of the old one comes first
            order = torch.randperm(len(client.y), generator=client.rng["batch"])
            order = torch.cat([order[~torch.isin(order, queue)], order[torch.isin(order, queue)]])
            queue = torch.cat([queue, order])
        self.queues[client.id] = queue[size:]
        return queue[:size].to(client.y.device)

    def loss(self, mode: Mode, draw: State | None = None) -> Loss:
        """Training loss as a pure function (variables, x, y) -> scalar."""

        def loss(variables: State, x: Tensor, y: Tensor) -> Tensor:
            weights = self.defense.realize(variables, self.const, draw or {})
            logits = self.network.apply(weights, x, mode=mode, buffers=self.buffers)
            return soft_cross_entropy(logits, y)

        return loss

    def _train(
        self, joined: Sequence[Client], work: Work
    ) -> tuple[dict[str, Local], dict[str, Tensor]]:
        """Local training of all clients; those with equal batch shapes advance as one batch."""
        begin = [self._begin_at(c) for c in joined]
        steps = [work.steps(len(c.y)) for c in joined]
        if not joined:
            return {}, {}
        now = {n: torch.stack([s[n] for _, s in begin]).detach().clone() for n in begin[0][1]}
        grad_sum = {n: torch.zeros_like(v) for n, v in now.items()}
        used: list[list[Tensor]] = [[] for _ in joined]
        for client in joined:
            client.loss = self.loss(work.mode)
        for step in range(max(steps)):
            groups: dict[int, list[int]] = {}
            for i, client in enumerate(joined):
                if step < steps[i]:
                    used[i].append(self._next_batch(client, work.batch))
                    groups.setdefault(len(used[i][-1]), []).append(i)
            for members in groups.values():
                self._step(joined, members, used, now, grad_sum, work)
        results = {}
        for i, (client, (received, start)) in enumerate(zip(joined, begin, strict=True)):
            results[client.id] = Local(
                broadcast=received,
                start=start,
                end={n: v[i].clone() for n, v in now.items()},
                const=self.const,
                grad_sum={n: v[i].clone() for n, v in grad_sum.items()},
                lr=work.lr,
                steps=steps[i],
            )
        return results, {c.id: torch.stack(u) for c, u in zip(joined, used, strict=True)}

    def _step(
        self,
        joined: Sequence[Client],
        members: list[int],
        used: Sequence[Sequence[Tensor]],
        now: dict[str, Tensor],
        grad_sum: dict[str, Tensor],
        work: Work,
    ) -> None:
        """One gradient step of the clients `members`, in place on the stacked variables."""
        x = torch.stack([joined[i].x[used[i][-1]] for i in members])
        y = torch.stack([self._targets(joined[i], used[i][-1]) for i in members])
        everyone = len(members) == len(joined)
        variables = now if everyone else {n: v[members] for n, v in now.items()}
        draws = [
            self.defense.draw(
                {n: v[i] for n, v in now.items()}, self.const, joined[i].rng["defense"]
            )
            for i in members
        ]
        draw = {n: torch.stack([d[n] for d in draws]) for n in draws[0]}

        def gradient(variables: State, x: Tensor, y: Tensor, draw: State) -> State:
            return self.defense.gradient(self.loss(work.mode, draw), variables, x, y, draw)

        grads = vmap(gradient, chunk_size=self._chunk())(variables, x, y, draw)
        for name, grad in grads.items():
            grad = grad.detach()
            if everyone:
                now[name].sub_(grad, alpha=work.lr)
                grad_sum[name].add_(grad)
            else:
                now[name][members] -= work.lr * grad
                grad_sum[name][members] += grad

    def _chunk(self) -> int | None:
        """Clients per vmapped call: all on a GPU. On a CPU, batching pays for small networks
        (fewer calls) and not for large ones, whose per-client convolutions become grouped; the
        number depends on the network alone, so results do not change with the machine's load.
        """
        if self.device.type != "cpu":
            return None
        return max(1, 4_000_000 // self.network.n_parameters)

    def _targets(self, client: Client, chosen: Tensor) -> Tensor:
        one_hot = torch.nn.functional.one_hot(client.y[chosen], self.network.classes).float()
        return self.defense.labels(one_hot, client)

    def _upload(self, client: Client, local: Local, work: Work) -> list[Message]:
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
        kept = {n: torch.ones_like(v, dtype=torch.bool) for n, v in local.end.items()}
        for message in uploads:
            for name, part in message.parts.items():
                if name in kept:
                    kept[name] &= ~part.presence()
            for name, sealed in message.sealed.items():
                if name in kept:
                    kept[name] &= ~sealed.covers
        withheld = any(bool(k.any()) for k in kept.values())
        client.own, client.kept = (local.end, kept) if withheld else (None, None)

    def _aggregate(self, wire: Wire, work: Work) -> State:
        def ask(message: Message) -> list[Message]:
            wire.send([message])
            return wire.collect(SERVER)

        server = Server(state=self.state, const=self.const, lr=work.lr, ask=ask)
        messages = wire.collect(SERVER)
        chosen = self.defense.aggregate(server, messages)
        return detached(mean_over_present(server, messages) if chosen is None else chosen)


def mean_over_present(server: Server, messages: Sequence[Message]) -> State:
    """Per coordinate, the mean of the uploaded weights over the clients that sent it.

    A coordinate that nobody sent keeps the server's value.
    """
    total = {n: torch.zeros_like(v) for n, v in server.state.items()}
    count = {n: torch.zeros_like(v) for n, v in server.state.items()}
    for message in messages:
        if message.kind not in ("weights", "update", "gradient"):
            continue
        parts = as_kind(message, "weights", base=server.state, lr=server.lr).parts
        for name, part in parts.items():
            present = part.presence()
            total[name] += torch.where(present, part.values, 0.0)
            count[name] += present.to(total[name])
    return {
        n: torch.where(count[n] > 0, total[n] / count[n].clamp_min(1), v)
        for n, v in server.state.items()
    }
