"""Costs read off the records of result folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.errors import UserError
from bench.harness.costs.cost import Cost, Point, joined
from bench.harness.costs.features import attack_features, round_size, threat_size, training_features
from bench.harness.store import Store
from bench.records import (
    AttackInputs,
    AttackJob,
    AttackOutcome,
    Kind,
    Record,
    TrainJob,
    TrainOutcome,
    TrainRecord,
    settled,
    to_json,
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a result folder's finished jobs tell of costs, by their keys.

    Attributes:
        trainings: Key -> training; its cost, None where an old record does not say of what.
        attacks: Key -> the same of attacks.
    """

    trainings: Mapping[str, Cost | None] = field(default_factory=dict)
    attacks: Mapping[str, Cost | None] = field(default_factory=dict)


def finished(folder: Path) -> Finished:
    """What a result folder's finished jobs tell; nothing if it is none."""
    jobs: dict[str, tuple[TrainJob, str]] = {}
    trainings: dict[str, Cost | None] = {}
    store = Store(folder)
    for key in store.keys("train"):
        training = store.read("train", key, lenient=True)
        if training is None or not settled(training):
            continue
        trainings[key] = None
        if isinstance(training.inputs, TrainJob):
            device = training.device if isinstance(training, TrainRecord) else "cpu"
            jobs[key] = training.inputs, device
            n_bytes = _bytes(store, "train", key, training)
            trainings[key] = _of_training(training, training.inputs, device, n_bytes)
    attacks: dict[str, Cost | None] = {}
    for key in store.keys("attack"):
        attack = store.read("attack", key, lenient=True)
        if attack is None or not settled(attack):
            continue
        attacks[key] = None
        inputs, trained = attack.inputs, jobs.get(attack.train or "")
        if isinstance(inputs, AttackInputs) and trained and _has(trained[0], inputs.threat):
            n_bytes = _bytes(store, "attack", key, attack)
            attacks[key] = _of_attack(attack, inputs.on(trained[0]), trained[1], n_bytes)
    return Finished(trainings=trainings, attacks=attacks)


def measure(folder: Path, found: Finished | None = None) -> list[Cost]:
    """The costs of the finished trainings and attacks of a result folder, or of what was published
    of one, one per set of features.

    `found` are its `finished` jobs, if they were read already. Raises UserError for a folder
    without records.
    """
    if not Store(folder).has_records:
        raise UserError(f"{folder} holds no records: give --costs a result folder.")
    found = finished(folder) if found is None else found
    return joined(c for c in (*found.trainings.values(), *found.attacks.values()) if c is not None)


def _has(train: TrainJob, threat: str) -> bool:
    return threat in {t.name for t in train.threats}


def _of_training(record: TrainOutcome, job: TrainJob, device: str, n_bytes: float) -> Cost:
    done = record if isinstance(record, TrainRecord) else None
    steps = done.facts.local_steps if done else 1
    return Cost(
        stage="train",
        features=training_features(job, device),
        points=(Point(work=job.protocol.rounds, seconds=done.seconds if done else 0.0),),
        grows=done is not None,
        size=round_size(job, steps),
        n_bytes=n_bytes,
        skipped=done is None,
        step_s=done.client_seconds / steps if done else None,
        parameters=done.parameters if done else None,
        host=record.memory.get("host"),
        device=record.memory.get("device"),
    )


def _of_attack(record: AttackOutcome, job: AttackJob, device: str, n_bytes: float) -> Cost:
    points = [Point(work=job.budget, seconds=0.0)]
    if record.status == "done":
        points = [Point(work=job.budget, seconds=record.seconds)]
        again = record.doubled
        if again is not None:  # the second run tells what twice the budget takes
            points = [
                replace(points[0], again=again.seconds),
                Point(work=again.budget, seconds=again.seconds),
            ]
    return Cost(
        stage="attack",
        features=attack_features(job, device),
        points=tuple(points),
        grows=record.status == "done" and record.gradient_evaluations > 0,
        size=threat_size(job),
        n_bytes=n_bytes,
        skipped=record.status != "done",
        host=record.memory.get("host"),
        device=record.memory.get("device"),
    )


def _bytes(store: Store, kind: Kind, key: str, record: Record) -> float:
    """On disk, in a run's own folder: the record and its files, counted where the record does not
    list them."""
    path = store.path(kind, key)
    own = path.stat().st_size if path.is_file() else len(to_json(record))
    if record.files is not None:
        return float(own + sum(record.files.values()))
    place = store.artifacts(key)
    return float(own + sum(p.stat().st_size for p in place.rglob("*") if p.is_file()))
