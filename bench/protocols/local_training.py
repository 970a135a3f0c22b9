"""Local training: the steps that all clients of a round take on their own data, at once.

No line here asks which defense runs; whatever differs is behind a hook of `bench.api.Defense`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.func import vmap

from bench.contract.defense import Client, Defense, Local, Loss
from bench.contract.messages import State
from bench.models import Network
from bench.protocols.settings import ProtocolSettings
from bench.protocols.wire import Wire
from bench.toolkit.losses import NetworkLoss
from bench.toolkit.memory import halving, to_device

_INSPECTED = 64
"""Samples of a client that `Defense.inspect` sees at a time: per-sample gradients take memory."""
Mode = Literal["train", "eval"]
Group = tuple[int, str | None]
"""Batch size and cut of clients that take a step as one batch."""


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """What every client does in a round.

    Attributes:
        protocol: Name of the protocol; under fedsgd a gradient is uploaded, else an update.
        batch: Batch size; a client with fewer samples uses all it has.
        lr: Learning rate of plain SGD.
        local_steps: Steps of every client, unless epochs are given; absent for one step.
        local_epochs: Passes over a client's samples.
        mode: How the network normalises: by the batch, or by the statistics of public data.
    """

    protocol: str
    batch: int
    lr: float
    local_steps: int | None = None
    local_epochs: float | None = None
    mode: Mode = "train"

    @classmethod
    def of(cls, protocol: ProtocolSettings) -> Self:
        """The work of a round of a training."""
        return cls(
            protocol=protocol.name,
            batch=protocol.batch,
            lr=protocol.lr,
            local_steps=1 if protocol.name == "fedsgd" else protocol.local_steps,
            local_epochs=protocol.local_epochs,
        )

    def steps(self, samples: int) -> int:
        """Return the gradient steps of a client with some number of samples."""
        if self.local_epochs is None:
            return self.local_steps or 1
        return max(1, round(self.local_epochs * samples / min(self.batch, samples)))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of local training of all clients at once.

    Attributes:
        joined: The clients of the round, J of them.
        groups: Rows of `joined` by what they have in common.
        used: Indices of each client's last batch.
        now: Variables [J, ...] by name, changed in place.
        grad_sum: The summed directions in which they moved [J, ...] by name, changed in place.
        memory: What the defense's `direction` remembers of each client's steps of the round
            [J, ...] by name, 0 before the first, changed in place.
    """

    number: int
    joined: Sequence[Client]
    groups: Mapping[Group, list[int]]
    used: Sequence[Tensor]
    now: Mapping[str, Tensor]
    grad_sum: Mapping[str, Tensor]
    memory: dict[str, Tensor]
    work: LocalWork
    wire: Wire

    def variables(self, members: Sequence[int], names: Sequence[str] | None = None) -> State:
        """Variables [M, ...] of some clients; the stack itself where they are all."""
        everyone = len(members) == len(self.joined)
        return {n: self.now[n] if everyone else self.now[n][members] for n in names or self.now}


@dataclass(kw_only=True)
class LocalTraining:
    """What clients start from, and the training that they do; a federation stands on it.

    Attributes:
        buffers: Normalisation statistics of public data for eval mode.
        queues: Samples of each client's present epoch that are still to come, by client.
        pinned: Whether it is given who takes part and with which samples, as in an observed
            round, instead of being the defense's to decide.
        fewest: Clients in the step that had the fewest, None before the first step.
        at_once: Clients per vmapped call that fitted into a GPU's memory, None as long as all do.
    """

    network: Network
    defense: Defense
    state: State
    const: State
    device: torch.device
    buffers: State | None = None
    queues: dict[str, Tensor] = field(default_factory=dict)
    pinned: bool = False
    fewest: int | None = None
    at_once: int | None = None

    def names_held(self, client: Client) -> list[str]:
        """Names of the state that the client receives, trains and uploads."""
        return list(self.state)

    def _take_step(self, step: Step) -> None:
        for members in step.groups.values():
            self._step(step, members)

    def _begin_at(self, client: Client, names: Sequence[str] | None = None) -> tuple[State, State]:
        """Return where a client starts: what it received, but its own values in what it kept.

        Returns:
            The variables as received, and the variables to start from.
        """
        names = self.names_held(client) if names is None else names
        received = self.defense.receive({n: self.state[n] for n in names}, self.const)
        if client.kept is None or client.own is None:
            return received, received
        own, kept = client.own, client.kept
        start = {
            n: torch.where(kept[n], own[n], v) if n in kept else v for n, v in received.items()
        }
        return received, start

    def _inspect(self, joined: Sequence[Client], work: LocalWork) -> None:
        """Call `Defense.inspect` on the data of all clients that need it, chunk by chunk."""
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
                rows = [_pad(joined[i], first, width, self.network.classes) for i in members]
                which = to_device(torch.tensor(members), self.device)
                results = self._for_each(inspect, len(members))(
                    {n: v[which] for n, v in variables.items()},
                    torch.stack([x for x, _ in rows]),
                    torch.stack([y for _, y in rows]),
                )
                for name, value in results.items():
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
        chooser = None if self.pinned else self.defense
        batches = [
            [next_batch(c, work.batch, self.queues, chooser) for _ in range(work.steps(len(c.y)))]
            for c in joined
        ]
        everything = torch.cat([batch for mine in batches for batch in mine])
        moved = iter(
            to_device(everything, self.device).split([len(b) for mine in batches for b in mine])
        )
        return [[next(moved) for _ in mine] for mine in batches]

    def loss(self, mode: Mode, draw: State | None = None) -> Loss:
        """The training loss as a pure function (variables, x, y) -> scalar."""
        return NetworkLoss(
            network=self.network,
            realize=self._realization(draw or {}),
            mode=mode,
            buffers=self.buffers,
        )

    def _realization(self, draw: State) -> Callable[[State], State]:
        """Return the function from variables to network weights under one draw."""
        return lambda variables: self.defense.realize(variables, self.const, draw)

    def _train(
        self, joined: Sequence[Client], work: LocalWork, wire: Wire
    ) -> tuple[dict[str, Local], dict[str, Tensor]]:
        """Local training of all clients; those with equal batch shapes advance as one batch."""
        if not joined:
            return {}, {}
        held = [self.names_held(c) for c in joined]
        names = [n for n in self.state if any(n in h for h in held)]
        begin = [self._begin_at(c, names) for c in joined]
        used = self._batches(joined, work)
        now = {n: torch.stack([s[n] for _, s in begin]).detach().clone() for n in names}
        grad_sum = {n: torch.zeros_like(v) for n, v in now.items()}
        memory: dict[str, Tensor] = {}
        for client in joined:
            client.loss = self.loss(work.mode)
        for number in range(max(len(u) for u in used)):
            groups: dict[Group, list[int]] = {}
            for i, client in enumerate(joined):
                if number < len(used[i]):
                    groups.setdefault((len(used[i][number]), client.cut), []).append(i)
            company = sum(len(members) for members in groups.values())
            self.fewest = min(company, self.fewest or company)
            step = Step(
                number=number,
                joined=joined,
                groups=groups,
                used=[u[min(number, len(u) - 1)] for u in used],
                now=now,
                grad_sum=grad_sum,
                memory=memory,
                work=work,
                wire=wire,
            )
            self._take_step(step)
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
        self._descend(step, members, self._for_each(gradient, len(members))(variables, x, y, draw))

    def _descend(self, step: Step, members: list[int], grads: State) -> None:
        """Move the clients' variables by their gradients [M, ...]."""
        everyone = len(members) == len(step.joined)
        grads = {n: g.detach() for n, g in grads.items()}
        before = {n: m[members] for n, m in step.memory.items()}
        directions, memory = self.defense.direction(grads, before, step.number, self.const)
        for name, after in memory.items():
            if name not in step.memory:
                step.memory[name] = after.new_zeros(len(step.joined), *after.shape[1:])
            step.memory[name][members] = after
        for name, direction in directions.items():
            if everyone:
                step.now[name].sub_(direction, alpha=step.work.lr)
                step.grad_sum[name].add_(direction)
            else:
                step.now[name][members] -= step.work.lr * direction
                step.grad_sum[name][members] += direction

    def _samples(self, step: Step, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Samples [M, B, ...] and targets [M, B, C] of the clients' present batches."""
        x = torch.stack([step.joined[i].x[step.used[i]] for i in members])
        y = torch.stack([self.targets(step.joined[i], step.used[i]) for i in members])
        return x, y

    def _draws(self, step: Step, members: Sequence[int]) -> State:
        """The step's randomness, [M, ...] by name, each client's from its own stream."""
        draws = [
            self.defense.draw(
                {n: v[i] for n, v in step.now.items()}, self.const, step.joined[i].rng["defense"]
            )
            for i in members
        ]
        return {n: torch.stack([d[n] for d in draws]) for n in draws[0]}

    def _for_each(self, function: Callable[..., Any], count: int) -> Callable[..., Any]:
        """Turn a pure function of one client's tensors into one of `count` clients' stacks.

        Clients are stacked along dimension 0; an argument that is None stays so. As many go at
        once as `_chunk` says, and half as many after every call that ran out of memory.
        """
        most = min(count, self._chunk() or self.at_once or count)

        def over(*stacked: Any) -> Any:
            dims = tuple(None if s is None else 0 for s in stacked)
            results, size = halving(
                lambda few: vmap(function, dims, chunk_size=few if few < count else None)(*stacked),
                at_once=most,
                device=self.device,
            )
            if size < most:
                self.at_once = size
            return results

        return over

    def _chunk(self) -> int | None:
        """Clients per vmapped call: on a GPU all (None) that fit.

        On a CPU, batching pays for small networks (fewer calls) and not for large ones, whose
        per-client convolutions become grouped. The number depends on the network alone, so that
        results do not change with the machine's load.
        """
        if self.device.type != "cpu":
            return None
        return max(1, 4_000_000 // self.network.n_parameters)

    def targets(self, client: Client, chosen: Tensor) -> Tensor:
        """Return what a client trains towards for the samples with the indices `chosen`."""
        one_hot = torch.nn.functional.one_hot(client.y[chosen], self.network.classes).float()
        return self.defense.labels(one_hot, client)


def _pad(client: Client, first: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return samples [width, ...] from `first` on and their one-hot labels, padded with 0."""
    x, y = client.x[first : first + width], client.y[first : first + width]
    one_hot = torch.nn.functional.one_hot(y, classes).float()
    missing = width - len(y)
    return (
        torch.cat([x, x.new_zeros(missing, *x.shape[1:])]),
        torch.cat([one_hot, one_hot.new_zeros(missing, classes)]),
    )


def next_batch(
    client: Client, size: int, queues: dict[str, Tensor], defense: Defense | None
) -> Tensor:
    """Indices of a client's next batch of at most `size` samples.

    queues: Samples of each client's present epoch that are still to come, by client; changed.
    defense: Which may choose others; None: it is not asked.
    """
    chosen = None if defense is None else defense.batch(client, size)
    if chosen is not None:
        return chosen.cpu()
    size = min(size, len(client.y))
    queue = queues.get(client.id, torch.empty(0, dtype=torch.int64))
    if len(queue) < size:  # a new epoch; the rest of the old one comes first
        order = torch.randperm(len(client.y), generator=client.rng["batch"])
        order = torch.cat([order[~torch.isin(order, queue)], order[torch.isin(order, queue)]])
        queue = torch.cat([queue, order])
    queues[client.id] = queue[size:]
    return queue[:size]
