"""Runs a plan: which records are missing, in what order they are made, what failed."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bench import data, jobs, models
from bench.executors import Outcome, Task, run_here, run_in_workers
from bench.protocols.split import Split
from bench.registry import PluginKind, Registry
from bench.store import SCHEMA, Store, key_of, to_json, write_whole
from bench.suite import AttackCell, Plan, TrainJob

_TRAIN_CODE = ("api.py", "compose.py", "seeding.py", "jobs.py", "toolkit", "data", "models",
               "protocols", "privacy", "metrics/distinguish.py")  # fmt: skip
_ATTACK_CODE = ("metrics",)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a live view shows after each finished job."""

    total: int
    done: int
    failed: int
    label: str


@dataclass(kw_only=True)
class Report:
    """Counts of a finished run. failures: (label, reason) of failed and timed-out jobs."""

    ran: int = 0
    cached: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)


@cache
def _code(parts: tuple[str, ...]) -> str:
    """Hash of leakbench's own source that decides numbers: old results of other code are not
    taken for results of this code."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for part in parts:
        place = root / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Keys:
    """Store keys of a plan's jobs under one environment."""

    def __init__(self, registry: Registry, env: jobs.Environment) -> None:
        self.registry, self.env = registry, env
        self._files: dict[str, str] = {}
        self._sources: dict[tuple[PluginKind, str], str] = {}

    def train(self, job: TrainJob) -> str:
        return key_of(
            {
                "schema": SCHEMA,
                "code": _code(_TRAIN_CODE),
                "plugin": self._source("defense", job.defense),
                "device": self.env.device.split(":")[0],
                "data": self._fingerprint(job.task.dataset),
                **job.inputs(),
            }
        )

    def attack(self, cell: AttackCell) -> str:
        return key_of(
            {
                "train": self.train(cell.train),
                "code": _code(_ATTACK_CODE),
                "plugin": self._source("attack", cell.attack),
                **cell.inputs(),
            }
        )

    def code(self, plan: Plan) -> dict[str, str]:
        """Hashes of all source that decides the plan's numbers, by what it belongs to."""
        names: set[tuple[PluginKind, str]] = {("defense", j.defense) for j in plan.trainings}
        names |= {("attack", c.attack) for c in plan.cells}
        own = {f"{kind} {name}": self._source(kind, name) for kind, name in sorted(names)}
        return own | {"leakbench": _code(_TRAIN_CODE + _ATTACK_CODE)}

    def _source(self, kind: PluginKind, name: str) -> str:
        """Hash of a plugin's source, read once."""
        if (kind, name) not in self._sources:
            self._sources[kind, name] = self.registry.sources(kind, name)
        return self._sources[kind, name]

    def _fingerprint(self, dataset: str) -> str:
        """Size and modification time of the user's files behind a dataset, "" if embedded."""
        if dataset not in self._files:
            own = dataset.partition(":")[2]
            root = Path(own) if own else None
            if root is None and self.env.data_dir and dataset not in data.NO_DOWNLOAD:
                root = self.env.data_dir / dataset
            paths = [] if root is None else [root, *sorted(root.rglob("*"))]
            facts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in paths if p.is_file()]
            self._files[dataset] = hashlib.sha256(repr(facts).encode()).hexdigest() if facts else ""
        return self._files[dataset]


def check(plan: Plan, registry: Registry, env: jobs.Environment) -> None:
    """Find before any work whatever can be found: names, settings, data, shapes, threats.

    Raises ValueError with one sentence.
    """
    place = plan.suite.name
    datasets = {}
    for job in plan.trainings:
        defense = registry.defense(job.defense, job.settings, where=place)
        where = (job.task.dataset, repr(job.task.dataset_settings), job.seed)
        if where not in datasets:
            datasets[where] = jobs.dataset_of(job, env)
        dataset = datasets[where]
        network = models.build(
            job.task.model,
            shape=dataset.shape,
            classes=dataset.classes,
            settings=job.task.model_settings,
        )
        if job.protocol.cuts:
            Split(network=network, cuts=job.protocol.cuts, labels=job.protocol.labels)
        jobs.check_company(job, defense)
        need = job.protocol.clients * max(t.batch * t.local_steps for t in job.threats)
        if len(dataset.train_y) < need:
            raise ValueError(
                f"{place}: {job.task.dataset} has {len(dataset.train_y)} training samples, but "
                f"{job.protocol.clients} clients and the threats' batches need {need}."
            )
    for cell in plan.cells:
        registry.attack(cell.attack, cell.settings, where=place)


def cached(plan: Plan, store: Store, keys: Keys) -> tuple[int, int]:
    """How many of the plan's trainings and cells need not be run again."""
    trainings = sum(_settled(store.read("train", keys.train(j))) for j in plan.trainings)
    cells = sum(_settled(store.read("attack", keys.attack(c))) for c in plan.cells)
    return trainings, cells


def _settled(record: dict[str, Any] | None) -> bool:
    """Failures and time-outs are tried again by the next run."""
    return record is not None and record["status"] in ("done", "not_applicable")


def label_of(job: TrainJob) -> str:
    settings = ",".join(f"{k}={v}" for k, v in job.settings.items())
    return f"{job.task.dataset}/{job.task.model}/{job.defense}({settings})/seed {job.seed}"


def run(
    plan: Plan,
    store: Store,
    keys: Keys,
    *,
    workers: int,
    fresh: bool = False,
    command: Sequence[str] = (),
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Report:
    """Make every missing record. workers 0 runs in this process (no time limits).

    Trainings come first, attacks follow; a worker has one thread. Records are written as
    jobs finish, so a killed run continues where it stopped.
    """
    report = Report()
    total = len(plan.trainings) + len(plan.cells)
    env = keys.env
    write_run(plan, store, keys, command)
    done = failed = 0

    def advance(label: str, record: dict[str, Any]) -> None:
        nonlocal done, failed
        done += 1
        if record["status"] in ("failed", "timeout"):
            failed += 1
            report.failures.append((label, f"{record['status']}: {record['reason']}"))
        on_progress(Progress(total=total, done=done, failed=failed, label=label))

    def execute(tasks: list[Task]) -> Iterator[Outcome]:
        if workers == 0:
            return run_here(tasks)
        return run_in_workers(tasks, jobs=workers, threads=1, timeout_s=plan.suite.timeout_s)

    trained: dict[str, dict[str, Any]] = {}
    todo: list[tuple[str, TrainJob]] = []
    for job in plan.trainings:
        key = keys.train(job)
        record = None if fresh else store.read("train", key)
        if record is not None and _settled(record):
            trained[key] = record
            report.cached += 1
            advance(label_of(job), record)
        else:
            todo.append((key, job))
    tasks = [
        Task(id=i, label=label_of(job), function=jobs.run_training,
             arguments=(job, env, store.artifacts(key)))
        for i, (key, job) in enumerate(todo)
    ]  # fmt: skip
    for outcome in execute(tasks):
        key, job = todo[outcome.task.id]
        record = outcome.record | {"inputs": job.inputs()}
        store.write("train", key, record)
        trained[key] = record
        report.ran += 1
        advance(outcome.task.label, record)

    open_cells: list[tuple[str, AttackCell]] = []
    retrained = {key for key, _ in todo}
    for cell in plan.cells:
        key, source = keys.attack(cell), keys.train(cell.train)
        record = None if fresh or source in retrained else store.read("attack", key)
        if record is not None and _settled(record):
            report.cached += 1
            advance(_cell_label(cell), record)
        else:
            open_cells.append((key, cell))
    tasks = [
        Task(
            id=i,
            label=_cell_label(cell),
            function=jobs.run_attack,
            arguments=(
                cell, env, trained[keys.train(cell.train)],
                store.artifacts(keys.train(cell.train)), store.artifacts(key),
            ),
        )
        for i, (key, cell) in enumerate(open_cells)
    ]  # fmt: skip
    for outcome in execute(tasks):
        key, cell = open_cells[outcome.task.id]
        record = outcome.record | {"inputs": cell.inputs(), "train": keys.train(cell.train)}
        store.write("attack", key, record)
        report.ran += 1
        advance(outcome.task.label, record)
    return report


def _cell_label(cell: AttackCell) -> str:
    return f"{label_of(cell.train)} {cell.label} at {cell.checkpoint}"


def write_run(plan: Plan, store: Store, keys: Keys, command: Sequence[str]) -> None:
    """What a reader needs to make the results again, and which records belong to the plan."""
    cells: dict[str, list[dict[str, str]]] = {keys.train(j): [] for j in plan.trainings}
    for cell in plan.cells:
        entry = {"key": keys.attack(cell), "label": cell.label, "attack": cell.attack,
                 "checkpoint": cell.checkpoint, "threat": cell.threat.name}  # fmt: skip
        cells[keys.train(cell.train)].append(entry)
    text = {
        "schema": SCHEMA,
        "suite": plan.suite.model_dump(),
        "command": shlex.join(command),
        "device": keys.env.device,
        "versions": jobs.versions(),
        "plugins": [str(p) for p in keys.env.plugins],
        "code": keys.code(plan),
        "trainings": [
            {"key": keys.train(job), **job.inputs(), "cells": cells[keys.train(job)]}
            for job in plan.trainings
        ],
    }
    write_whole(store.folder / "run.json", to_json(text))
