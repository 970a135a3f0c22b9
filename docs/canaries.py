"""How much the server tells of whole clients, measured in one training, beside what is proven.

    python docs/canaries.py SUITE DEFENSE [--task N] [--canaries K] [--seed S] [--data-dir DIR]

trains a row of a suite with K more clients, the canaries, who take part as the others do and whose
updates are random directions as long as the clip. The server correlates what it reads of all rounds
with a canary's direction, weighed as suits the rounds in which it took part and the covariance of
their noise. Directions of nobody tell what it finds where no canary was. From both it prints a
lower bound of epsilon at 95 % confidence (Clopper and Pearson), and an estimate, the epsilon of the
two normal distributions that fit. Neighbours: a client added or removed, whose rounds are known to
the server.

Source: Andrew et al., One-shot empirical privacy estimation for federated learning,
arXiv:2302.03098, there against those who see the models alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.contract.defense import Client, Defense, Local
from bench.contract.events import Facts
from bench.contract.messages import Message, Part
from bench.errors import UserError
from bench.harness.environment import Environment, dataset_of, network_of, shares_of
from bench.harness.plan import expand
from bench.metrics.distinguish import separate
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.protocols.federation import PARTICIPATION, Federation, sample_clients
from bench.protocols.local_training import LocalWork
from bench.records import TrainJob
from bench.registry import discover
from bench.seeding import generator
from bench.suite import read_suite
from bench.toolkit.vectors import cut_like
from defenses.aggregator import AGGREGATOR, Aggregator, CentralNoise

LEAST = 100
"""Canaries, of whom half certify a bound."""
DELTA = 1e-5
_DRAWS = 20_000
"""Of the rounds' noise, for its covariance."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What canaries told.

    Attributes:
        bound: Lower bound of epsilon at 95 % confidence.
        estimate: Epsilon of the normal distributions that fit.
        mu: Distance of their means in standard deviations of the one without a canary.
        proven: Epsilon for a client added or removed, by the ledger's events.
    """

    bound: float
    estimate: float
    mu: float
    proven: float


def measure(federation: Federation, job: TrainJob, canaries: int) -> Measured:
    """Train with canaries as the last clients, and tell what the server learns of them.

    Raises:
        UserError: For a defense without a sum with central noise, or too few canaries.
    """
    defense = federation.defense
    if not isinstance(defense, CentralNoise):
        raise UserError(f"canaries need a sum with central noise, which {job.defense} has not.")
    if canaries < LEAST:
        raise UserError(f"canaries must be >= {LEAST}, half of whom certify, got {canaries}.")
    size = sum(v.numel() for v in federation.state.values())
    rng = generator(job.seed, "canaries")
    there, nobody = (_directions(canaries, size, rng) for _ in range(2))
    first = len(federation.clients) - canaries
    _plant(defense, there, first)
    protocol = job.protocol.model_copy(update={"clients": len(federation.clients)})
    sampling, work = generator(job.seed, PARTICIPATION), LocalWork.of(protocol)
    rounds = protocol.rounds
    told = torch.zeros(rounds, 2, canaries, dtype=torch.float64)
    took_part = torch.zeros(rounds, canaries, dtype=torch.float64)
    party = federation.parties[AGGREGATOR]
    assert isinstance(party, Aggregator)
    for number in range(rounds):
        clip = party.clip_norm  # which all are told before the round
        before = _flatten(list(federation.state.values()))
        sampled = sample_clients([c.id for c in federation.clients], protocol, sampling)
        result = federation.play(work, sampled)
        total = (_flatten([result.after[n] for n in federation.state]) - before) * defense.expected
        told[number] = torch.stack([there @ total, nobody @ total]) / clip
        took_part[number, [c.number - first for c in result.joined if c.number >= first]] = 1
    precision = _precision(defense, rounds)
    weights = precision @ took_part
    scale = (took_part * weights).sum(dim=0)
    found = (told * weights[:, None]).sum(dim=0)[:, scale > 0] / scale[scale > 0].sqrt()
    with_one, without = found.numpy()
    mu = max(0.0, float((with_one.mean() - without.mean()) / without.std(ddof=1)))
    separation = separate(with_one[:, None], without[:, None], confidence=0.95, delta=DELTA)
    return Measured(
        bound=separation.epsilon(DELTA),
        estimate=exact_gaussian_epsilon(mu=mu, delta=DELTA),
        mu=mu,
        proven=_proven(defense, federation, job),
    )


def _precision(defense: CentralNoise, rounds: int) -> Tensor:
    """Inverse covariance [T, T] of the rounds' noise, which is public, from draws of it."""
    (party,) = defense.third_parties(0).values()
    assert isinstance(party, Aggregator)
    draws = [party.noise(torch.zeros(_DRAWS, dtype=torch.float64), r) for r in range(rounds)]
    return torch.linalg.inv(torch.cov(torch.stack(draws) / party.std))


def _directions(count: int, size: int, rng: torch.Generator) -> Tensor:
    drawn = torch.randn(count, size, generator=rng, dtype=torch.float64)
    return drawn / drawn.norm(dim=1, keepdim=True)


def _flatten(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([v.double().flatten() for v in values])


def _plant(defense: CentralNoise, directions: Tensor, first: int) -> None:
    """Let the clients from `first` on send their directions, far longer than any clip."""
    honest = defense.upload

    def upload(messages: list[Message], local: Local, client: Client) -> list[Message]:
        if client.number < first:
            return honest(messages, local, client)
        like = {n: p.values for n, p in messages[0].parts.items()}
        drawn = cut_like(1e3 * defense.clip_norm * directions[client.number - first], like)
        planted = {n: Part(values=v.to(like[n])) for n, v in drawn.items()}
        return honest([messages[0].with_parts(planted)], local, client)

    defense.upload = upload  # type: ignore[method-assign]


def _proven(defense: Defense, federation: Federation, job: TrainJob) -> float:
    facts = Facts(
        parameters=sum(v.numel() for v in federation.state.values()),
        rounds=job.protocol.rounds,
        clients=len(federation.clients),
        participation=job.protocol.participation,
        participations=max(federation.uploads.values()),
        delta=DELTA,
    )
    return float(defense.constants(facts)["eps_client_added"])


def start(job: TrainJob, canaries: int, env: Environment) -> Federation:
    """The federation of a training, with canaries that hold a copy of the last client's data."""
    dataset = dataset_of(job, env)
    shares = [*shares_of(job, dataset)]
    shares += [shares[-1]] * canaries
    return Federation.start(
        network=network_of(job, dataset.shape, dataset.classes),
        defense=discover().defense(job.defense, job.settings),
        data=[(dataset.train_x[s], dataset.train_y[s]) for s in shares],
        seed=job.seed,
        device=torch.device("cpu"),
        server_lr=job.protocol.server_lr,
        server_momentum=job.protocol.server_momentum,
    )


def main() -> None:
    """Print what canaries tell of every setting of a defense in a suite."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite")
    parser.add_argument("defense")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--canaries", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    try:
        suite = read_suite(given.suite, [f"seeds=[{given.seed}]"])
        task = suite.tasks[given.task]
        jobs = [
            j for j in expand(suite).trainings if j.defense == given.defense
            and j.task.protocol == task.protocol and j.task.dataset == task.dataset
        ]  # fmt: skip
        print("| setting | mu | estimate | lower bound | proven, client added |")
        print("| --- | --- | --- | --- | --- |")
        for job in jobs:
            env = Environment(device="cpu", data_dir=given.data_dir)
            told = measure(start(job, given.canaries, env), job, given.canaries)
            figures = (told.mu, told.estimate, told.bound, told.proven)
            texts = (f"{v:.2f}" if math.isfinite(v) else "inf" for v in figures)
            print(f"| {job.defense} {dict(job.settings)} | {' | '.join(texts)} |", flush=True)
    except UserError as error:
        raise SystemExit(f"canaries: {error}") from error


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
