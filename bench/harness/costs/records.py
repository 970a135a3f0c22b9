"""Costs read off the records of result folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.errors import UserError
from bench.files import no_link
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
    for path in _files(folder, "train"):
        training = store.read("train", path.stem, lenient=True)
        if training is None or not settled(training):
            continue
        trainings[path.stem] = None
        if isinstance(training.inputs, TrainJob):
            device = training.device if isinstance(training, TrainRecord) else "cpu"
            jobs[path.stem] = training.inputs, device
            trainings[path.stem] = _of_training(path, training, training.inputs, device)
    attacks: dict[str, Cost | None] = {}
    for path in _files(folder, "attack"):
        attack = store.read("attack", path.stem, lenient=True)
        if attack is None or not settled(attack):
            continue
        attacks[path.stem] = None
        inputs, trained = attack.inputs, jobs.get(attack.train or "")
        if isinstance(inputs, AttackInputs) and trained and _has(trained[0], inputs.threat):
            attacks[path.stem] = _of_attack(path, attack, inputs.on(trained[0]), trained[1])
    return Finished(trainings=trainings, attacks=attacks)


def measure(folder: Path, found: Finished | None = None) -> list[Cost]:
    """The costs of a result folder's finished trainings and attacks, one per set of features.

    `found` are its `finished` jobs, if they were read already. Raises UserError for a folder
    without records.
    """
    if not (folder / "records").is_dir():
        raise UserError(f"{folder} holds no records: give --costs a result folder.")
    found = finished(folder) if found is None else found
    return joined(c for c in (*found.trainings.values(), *found.attacks.values()) if c is not None)


def _files(folder: Path, kind: Kind) -> list[Path]:
    return sorted((folder / "records" / kind).glob("*.json"))


def _has(train: TrainJob, threat: str) -> bool:
    return threat in {t.name for t in train.threats}


def _of_training(path: Path, record: TrainOutcome, job: TrainJob, device: str) -> Cost:
    done = record if isinstance(record, TrainRecord) else None
    steps = done.facts.local_steps if done else 1
    return Cost(
        stage="train",
        features=training_features(job, device),
        points=(Point(work=job.protocol.rounds, seconds=done.seconds if done else 0.0),),
        grows=done is not None,
        size=round_size(job, steps),
        n_bytes=_bytes(path, record),
        skipped=done is None,
        step_s=done.client_seconds / steps if done else None,
        parameters=done.parameters if done else None,
        host=record.memory.get("host"),
        device=record.memory.get("device"),
    )


def _of_attack(path: Path, record: AttackOutcome, job: AttackJob, device: str) -> Cost:
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
        size=threat_size(job.threat),
        n_bytes=_bytes(path, record),
        skipped=record.status != "done",
        host=record.memory.get("host"),
        device=record.memory.get("device"),
    )


def _bytes(path: Path, record: Record) -> float:
    """On disk: the record and its files, counted there where the record does not list them."""
    own = path.stat().st_size
    if record.files is not None:
        return float(own + sum(record.files.values()))
    place = no_link(path.parents[2], "artifacts", path.stem)
    return float(own + sum(p.stat().st_size for p in place.rglob("*") if p.is_file()))
