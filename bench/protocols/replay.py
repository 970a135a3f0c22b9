"""The truth behind an observation, made again from the seed without training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.defense import Defense
from bench.contract.messages import SUM
from bench.errors import UserError
from bench.protocols import settings
from bench.protocols.federation import PARTICIPATION, clients_of, sample_clients
from bench.protocols.local_training import LocalWork, next_batch
from bench.protocols.observe import Truth, Victims, as_one, order_of, truth_of
from bench.seeding import generator


def replay_truth(
    data: Sequence[tuple[Tensor, Tensor]],
    seen: Seen,
    *,
    protocol: settings.ProtocolSettings,
    threat: settings.ThreatSettings,
    checkpoint: settings.Checkpoint,
    seed: int,
    defense: Defense,
) -> Truth:
    """Return the private samples that a view is about.

    Args:
        data: Samples and labels (x, y), one pair per client.
        seen: The view: whom it names as its victims, how many samples it says they used, and in
            which round.
        protocol: How the run trains.
        threat: Under which it was observed.
        checkpoint: When it was observed.
        seed: Of the training.
        defense: Whose `joins` and `batch` draw clients and samples in rounds of the training.

    Raises:
        UserError: For victims, samples or a round that the run does not have.
    """
    clients = {c.id: c for c in clients_of(data, seed)}
    summed = int(seen.known.get("summed", 1))
    joint = seen.clients == (SUM,)
    samples, batch = int(seen.known["samples"]) // summed, int(seen.known["batch"]) // summed
    if checkpoint == settings.TRAINING:
        number = max((m.round for m in seen.messages), default=-1)
        if number not in settings.rounds_to_record(protocol.rounds, seed):
            raise UserError(f"round {number} is none that is recorded.")
        work, queues = LocalWork.of(protocol), dict[str, Tensor]()
        sampling, used = generator(seed, PARTICIPATION), dict[str, Tensor]()
        for _ in range(number + 1):
            sampled = sample_clients(list(clients), protocol, sampling)
            used = {}
            for client in clients.values():
                if defense.joins(client, client.id in sampled):
                    steps = range(work.steps(len(client.y)))
                    batches = [next_batch(client, work.batch, queues, defense) for _ in steps]
                    used[client.id] = torch.cat(batches)
        ids = list(used) if joint else list(seen.clients)
        chosen = {v: used[v][:samples] for v in ids if v in used}
    else:
        ids, streams = list(seen.clients), ("observe", threat.name, checkpoint)
        victims = Victims(ids=(), batch=batch, samples=samples, steps=samples // batch)
        if joint:
            turn = defense.cycle
            ids = [c.id for c in clients.values() if len(c.y) >= samples and not c.number % turn]
            order = torch.randperm(len(ids), generator=generator(seed, *streams, "victims"))
            ids = [ids[i] for i in order[:summed]]
        known = [v for v in ids if v in clients]
        chosen = {v: order_of(clients[v], victims, seed, streams)[:samples] for v in known}
    if len(set(ids)) < len(ids) or chosen.keys() != {*ids} or not ids:
        raise UserError(f"the run has no such victims as {', '.join(ids)}.")
    if {len(rows) for rows in chosen.values()} != {samples}:
        raise UserError(f"the victims did not use {samples} samples.")
    truth = truth_of([clients[v] for v in ids], chosen)
    return as_one(truth, batch) if joint else truth
