"""What a plan would take of time and disk, by the medians of finished jobs per stage,
device, plugin, protocol and model."""

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from bench.errors import UserError
from bench.harness.environment import Environment, dataset_of, shares_of
from bench.harness.keys import Keys
from bench.harness.plan import Plan
from bench.harness.store import Store
from bench.protocols.local_training import LocalWork
from bench.protocols.settings import MOST_RECORDED
from bench.records import AttackRecord, TrainRecord, is_settled, to_json
from bench.records.jobs import AttackJob, TrainJob, canonical

_SHARED = ((0, 1, 2, 3, 4), (0, 1, 2), (0, 1, 3, 4), (0, 1))
"""Which parts of their groups two jobs share, the most similar first: of a plugin that was never
measured, others tell on the same network."""


_Key: TypeAlias = tuple[tuple[int, str], ...]
"""Some parts of a group, with their places."""


class Group(NamedTuple):
    """Jobs that cost the same per unit of work."""

    stage: str
    device: str
    plugin: str
    protocol: str
    model: str


class Cost(NamedTuple):
    """What a job takes, measured or estimated, or the medians of several jobs.

    Attributes:
        group: Of the jobs that were measured.
        seconds: Per unit of work if `grows`, else of the whole job.
        grows: Whether seconds are proportional to the job's work.
        n_bytes: On disk, record included.
    """

    group: Group
    seconds: float
    grows: bool
    n_bytes: float


def group_of(job: TrainJob | AttackJob, device: str) -> Group:
    """The group of a job on a device, cpu or cuda with or without a number."""
    if isinstance(job, AttackJob):
        return group_of(job.train, device)._replace(stage="attack", plugin=job.attack)
    task, kind = job.task, device.split(":")[0]
    return Group("train", kind, job.defense, job.protocol.name, task.model)


def _keys_of(group: Group) -> list[_Key]:
    return [tuple((place, group[place]) for place in shared) for shared in _SHARED]


def threat_size(job: AttackJob) -> float:
    """Samples that an attack reconstructs, counted in every observed round."""
    threat, protocol = job.threat, job.train.protocol
    if threat.recorded:
        steps = protocol.local_steps or 1
        return float(MOST_RECORDED * protocol.participants * steps * protocol.batch)
    return float(threat.victims * threat.batch * threat.local_steps * threat.rounds)


def read_finished(folder: Path) -> dict[str, Cost | None]:
    """Return the cache keys of a result folder's finished jobs, or a published one's, and their
    costs.

    A cost is None where the job was not applicable or the record does not hold its inputs.
    """
    store, costs = Store(folder), dict[str, Cost | None]()
    trainings = dict[str, TrainJob]()
    for kind, key in sorted(store.names, reverse=True):  # trainings before the attacks on them
        record = store.read(kind, key, lenient=True)
        if is_settled(record):
            costs[key] = None
        if isinstance(record, TrainRecord) and record.inputs:
            job = trainings[key] = record.inputs
            steps, protocol = record.facts.local_steps, job.protocol
            work = float(max(1, record.rounds_played) * protocol.participants * steps)
            costs[key] = _cost(record, job, work)
        if isinstance(record, AttackRecord) and record.inputs and record.train in trainings:
            train = trainings[record.train]
            if record.inputs.threat in {t.name for t in train.threats}:
                attack = record.inputs.on(train)
                work = attack.budget * threat_size(attack) if record.gradient_evaluations else 0
                costs[key] = _cost(record, attack, work)
    return costs


def _cost(record: TrainRecord | AttackRecord, job: TrainJob | AttackJob, work: float) -> Cost:
    """Return what a finished job took. work: 0 where its time follows from no such number."""
    again = record.doubled if isinstance(record, AttackRecord) else None
    seconds = record.seconds + (again.seconds if again else 0.0)
    group, per_unit = group_of(job, record.device), seconds / (work or 1)
    n_bytes = len(to_json(record)) + sum((record.files or {}).values())
    return Cost(group, per_unit, work > 0, n_bytes)


def _middle(costs: Sequence[Cost]) -> Cost:
    """The medians of some costs: of seconds, over those that grow if these are at least half."""
    grows = 2 * sum(c.grows for c in costs) >= len(costs)
    return Cost(
        group=costs[0].group,
        seconds=median(c.seconds for c in costs if c.grows == grows),
        grows=grows,
        n_bytes=median(c.n_bytes for c in costs),
    )


def read_shipped() -> list[Cost]:
    """Return the costs that come with leakbench; `costs.json` says where and how they were
    measured."""
    data = json.loads((files("bench.harness") / "costs.json").read_text(encoding="utf-8"))
    rows = (row for source in data["sources"] for row in source["costs"])
    return [Cost(Group(*group), *figures) for group, *figures in rows]


class Costs:
    """Estimates what jobs cost.

    Args:
        sources: Costs of each origin; of equally similar jobs, those of the first origin count.
        env: Where the jobs run.
    """

    def __init__(self, sources: Iterable[Iterable[Cost | None]], env: Environment) -> None:
        self._env = env
        self._near: dict[_Key, list[Cost]] = {}
        for source in sources:
            near = defaultdict[_Key, list[Cost]](list)
            groups = defaultdict[Group, list[Cost]](list)
            for measured in filter(None, source):
                groups[measured.group].append(measured)
            for cost in map(_middle, groups.values()):
                for key in _keys_of(cost.group):
                    near[key].append(cost)
            self._near = {**near, **self._near}
        self._steps = dict[str, int]()

    def of(self, job: TrainJob | AttackJob) -> Cost | None:
        """Return what the whole job takes; None if no job of its stage was measured on the kind of
        device."""
        if isinstance(job, AttackJob):
            work = job.budget * threat_size(job)
        else:
            protocol = job.protocol
            work = float(protocol.rounds * protocol.participants * self._local_steps(job))
        group = group_of(job, self._env.device)
        near = map(self._near.get, _keys_of(group))
        costs = [
            c._replace(seconds=c.seconds * (work if c.grows else 1), grows=False)
            for c in next(filter(None, near), [])
        ]
        return _middle(costs) if costs else None

    def _local_steps(self, job: TrainJob) -> int:
        """Steps per round of the client that takes the most."""
        work = LocalWork.of(job.protocol)
        if work.local_epochs is None:
            return work.steps(work.batch)
        known = canonical([job.task, job.protocol, job.threats, job.seed])
        if known not in self._steps:
            shares = shares_of(job, dataset_of(job, self._env))
            self._steps[known] = max(work.steps(len(share)) for share in shares)
        return self._steps[known]


_Job: TypeAlias = tuple[TrainJob | AttackJob, bool]
"""A job and whether it is cached."""


def forecast(
    plan: Plan, keys: Keys, store: Store, folders: Sequence[Path], workers: int
) -> dict[str, Any]:
    """Return what a plan would take, as `--json` prints it.

    Estimates prefer the store's own records, then those of `folders`, then the costs that leakbench
    ships. Raises UserError for a folder without records.
    """
    own, suite = read_finished(store.folder), plan.suite
    costs = Costs([own.values(), *map(_read_costs, folders), read_shipped()], keys.env)
    jobs = defaultdict[int, list[_Job]](list)
    for training, attacks in plan.by_training().items():
        cached = keys.train(training) in own
        mine = jobs[suite.tasks.index(training.task)]
        mine.append((training, cached))
        mine += [(attack, cached and keys.attack(attack) in own) for attack in attacks]
    place = store.folder.resolve()
    disk = next(folder for folder in (place, *place.parents) if folder.exists())
    whole = _total([job for mine in jobs.values() for job in mine], costs)
    return {
        "suite": suite.name,
        "version": suite.version,
        **whole,
        "jobs": workers,
        "wall_hours": whole["hours"] / workers,
        "free_bytes": shutil.disk_usage(disk).free,
        "folder": os.fspath(store.folder),
        "rows": [
            {"task": number, "protocol": suite.protocol_of(task).name}
            | task.model_dump(include={"dataset", "model"})
            | _total(jobs[number], costs)
            for number, task in enumerate(suite.tasks)
            if number in jobs
        ],
    }


def _read_costs(folder: Path) -> Iterable[Cost | None]:
    costs = read_finished(folder)
    if not costs:
        raise UserError(f"{folder} holds no records: give --costs a result folder.")
    return costs.values()


def _total(jobs: Sequence[_Job], costs: Costs) -> dict[str, Any]:
    """Count some jobs, and what the uncached ones take; those like nothing measured are counted as
    `unlike` and left out."""
    trainings = [(job, cached) for job, cached in jobs if isinstance(job, TrainJob)]
    missing = [job for job, cached in jobs if not cached]
    cached = sum(cached for _, cached in trainings)
    known = [cost for cost in map(costs.of, missing) if cost]
    return {
        "settings": len({job.setting for job, _ in trainings}),
        "trainings": len(trainings),
        "cached_trainings": cached,
        "cells": len(jobs) - len(trainings),
        "cached_cells": len(jobs) - len(missing) - cached,
        "hours": sum(cost.seconds for cost in known) / 3600,
        "bytes": sum(cost.n_bytes for cost in known),
        "unlike": len(missing) - len(known),
    }
