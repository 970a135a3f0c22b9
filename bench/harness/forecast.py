"""What a plan would take of time, disk and memory."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from bench.errors import UserError
from bench.harness.costs import Cost, Costs, finished, shipped
from bench.harness.keys import Keys
from bench.harness.plan import Plan
from bench.harness.store import Store
from bench.records import AttackJob, TrainJob

_Job: TypeAlias = tuple[TrainJob | AttackJob, bool]
"""A job and whether it is cached."""


def forecast(
    plan: Plan, keys: Keys, store: Store, folders: Sequence[Path], workers: int
) -> dict[str, Any]:
    """Return what a plan would take, as `--json` prints it.

    Estimates prefer the store's own records, then those of `folders`, then the costs that leakbench
    ships. Raises UserError for a folder without records.
    """
    own, suite = finished(store.folder), plan.suite
    costs = Costs([own.values(), *map(_read_costs, folders), shipped()], keys.env)
    kind = keys.env.device.split(":")[0]
    jobs = defaultdict[int, list[_Job]](list)
    for training, attacks in plan.by_training().items():
        cached = keys.train(training) in own
        mine = jobs[suite.tasks.index(training.task)]
        mine.append((training, cached))
        mine += [(attack, cached and keys.attack(attack) in own) for attack in attacks]
    place = store.folder.resolve()
    disk = next(folder for folder in (place, *place.parents) if folder.exists())
    whole = _total([job for mine in jobs.values() for job in mine], costs, kind)
    return {
        "suite": suite.name,
        "version": suite.version,
        **whole,
        "jobs": workers,
        "wall_hours": whole["hours"][kind] / workers if kind in costs.devices else None,
        "free_bytes": shutil.disk_usage(disk).free,
        "folder": os.fspath(store.folder),
        "rows": [
            {"task": number, "protocol": suite.protocol_of(task).name}
            | task.model_dump(include={"dataset", "model"})
            | _total(jobs[number], costs, kind)
            for number, task in enumerate(suite.tasks)
            if number in jobs
        ],
    }


def _read_costs(folder: Path) -> Iterable[Cost | None]:
    costs = finished(folder)
    if not costs:
        raise UserError(f"{folder} holds no records: give --costs a result folder.")
    return costs.values()


def _total(jobs: Sequence[_Job], costs: Costs, kind: str) -> dict[str, Any]:
    """Count some jobs, and what the uncached ones take on each measured device.

    Bytes on disk are those of the plan's `kind` of device, of another one if it was not measured.
    """
    trainings = [(job, cached) for job, cached in jobs if isinstance(job, TrainJob)]
    missing = [job for job, cached in jobs if not cached]
    cached = sum(cached for _, cached in trainings)
    by_device = {device: [costs.of(job, device) for job in missing] for device in costs.devices}
    here = [cost for cost in by_device.get(kind, ()) if cost]
    return {
        "settings": len({job.setting for job, _ in trainings}),
        "trainings": len(trainings),
        "cached_trainings": cached,
        "cells": len(jobs) - len(trainings),
        "cached_cells": len(jobs) - len(missing) - cached,
        "hours": {d: sum(c.seconds for c in mine if c) / 3600 for d, mine in by_device.items()},
        "bytes": sum(c.n_bytes for c in by_device.get(kind, by_device[costs.devices[0]]) if c),
        "unlike": {d: sum(cost is None for cost in mine) for d, mine in by_device.items()},
        "peak_host_bytes": max((c.host for c in here if c.host), default=None),
        "peak_device_bytes": max((c.gpu for c in here if c.gpu), default=None),
    }
