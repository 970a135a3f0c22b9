"""`leakbench plan`: what a suite would run, what of it is cached, and what the rest would cost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options

if TYPE_CHECKING:
    from bench.harness.costs.cost import Cost
    from bench.harness.costs.lookup import Estimate, Table
    from bench.harness.costs.records import Finished
    from bench.harness.environment import Environment
    from bench.harness.keys import Keys
    from bench.harness.plan import Plan
    from bench.harness.store import Store
    from bench.records import AttackJob, TrainJob

_UNITS = {"cpu": "core-hours", "cuda": "GPU-hours"}
_COLUMNS = {"cpu": "core-h", "cuda": "GPU-h"}
_GB = 1e9
_LIKELY = 0.8
"""A disk is called short when the estimate passes this share of what is free."""


@dataclass(kw_only=True)
class Sum:
    """What jobs come to together. hours, n_bytes (on disk), matches (how well they could be told):
    of those that are not cached; per device."""

    settings: set[str] = field(default_factory=set)
    trainings: int = 0
    cells: int = 0
    cached_trainings: int = 0
    cached_cells: int = 0
    hours: dict[str, float] = field(default_factory=dict)
    n_bytes: float = 0.0
    matches: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, device: str, estimate: Estimate, *, disk: bool) -> None:
        self.hours[device] = self.hours.get(device, 0.0) + estimate.seconds / 3600
        counts = self.matches.setdefault(device, {"exact": 0, "near": 0, "none": 0})
        counts[estimate.match] += 1
        if disk:
            self.n_bytes += estimate.n_bytes


@dataclass(kw_only=True)
class Forecast:
    """A plan told. rows: per task, by its place in the file. host, device: per device, the peak of
    one worker's memory and of the device's own, in bytes."""

    rows: dict[int, Sum]
    whole: Sum
    host: dict[str, float] = field(default_factory=dict)
    device: dict[str, float] = field(default_factory=dict)


def plan(
    suite: options.SuiteName,
    only: options.Only = None,
    set_: options.Set = None,
    device: options.Device = "auto",
    shard: options.Shard = "1/1",
    out: options.Out = None,
    data_dir: options.DataDir = None,
    download: options.Download = False,
    plugin: options.PluginFile = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, max=1024, help="Workers, for the time it would take."),
    ] = None,
    costs: Annotated[
        list[Path] | None,
        typer.Option("--costs", help="A result folder whose finished cells tell what cells cost."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print every training.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show what would run, what is cached, and how long the rest would take. Writes nothing."""
    with options.plain_errors():
        from bench.harness import launch

        # A plan for a device that this machine lacks, say on a cluster's login node, is fine.
        env = options.chosen_environment(device, data_dir, download, plugin, here=device == "auto")
        part = options.shard_of(shard)
        made, keys = options.planned(suite, only, set_, env, part)
        store = launch.store_of(made, out, part)
        table, settled = learned(store, costs or ())
        told = forecast(made, keys, table, settled)
        workers = launch.default_workers(env.device) if jobs is None else jobs
        if as_json:
            typer.echo(json.dumps(_as_json(made, told, store, workers, env), indent=1))
            return
        if list_:
            _print_trainings(made)
        _print_rows(made, told)
        for line in _sentences(made, told, store, workers, env):
            options.say(line)


# --- the forecast ---------------------------------------------------------------------------


def learned(store: Store, folders: Sequence[Path]) -> tuple[Table, Finished]:
    """What is known of costs, and what the folder holds finished.

    The folder's own records tell first, then those of other folders, then what comes along: where
    the same job stands in several, this machine tells better of itself than another.
    """
    from bench.harness.costs import lookup, records

    own = records.finished(store.folder)
    sources = [records.measure(store.folder, own)] if own.trainings else []
    known: dict[Any, Cost] = {}
    for source in (*sources, *map(records.measure, folders), lookup.shipped()):
        for cost in source:
            known.setdefault((cost.stage, cost.skipped, tuple(sorted(cost.features.items()))), cost)
    return lookup.Table(list(known.values())), own


def forecast(made: Plan, keys: Keys, table: Table, settled: Finished) -> Forecast:
    """Counts of a checked plan, and what is not cached, by each device that was measured."""
    from bench.harness.costs.prices import Prices

    devices = sorted(table.devices())
    kind = keys.env.device.split(":")[0]
    prices = Prices(table=table, keys=keys)
    told = Forecast(rows={}, whole=Sum())
    for job, attacks in made.by_training().items():
        sums = (told.rows.setdefault(made.suite.tasks.index(job.task), Sum()), told.whole)

        def add(name: str, estimate: Estimate, sums: tuple[Sum, ...] = sums) -> None:
            for total in sums:
                total.add(name, estimate, disk=name == (kind if kind in devices else devices[0]))
            for peaks, value in ((told.host, estimate.host), (told.device, estimate.device)):
                if value is not None:
                    peaks[name] = max(peaks.get(name, 0.0), value)

        trained = keys.train(job) in settled.trainings
        done = [trained and keys.attack(attack) in settled.attacks for attack in attacks]
        for total in sums:
            total.settings.add(f"{job.defense} {dict(job.settings)}")
            total.trainings += 1
            total.cached_trainings += trained
            total.cells += len(done)
            total.cached_cells += sum(done)
        missing: list[TrainJob | AttackJob] = [] if trained else [job]
        missing += [a for a, finished in zip(attacks, done, strict=True) if not finished]
        for one in missing:
            for name in devices:
                add(name, prices.of(one, name))
    return told


# --- what is printed ------------------------------------------------------------------------


def _print_trainings(made: Plan) -> None:
    from rich.table import Table as Grid

    grid = Grid(title=f"{made.suite.name} v{made.suite.version}", title_justify="left")
    for name in ("dataset", "model", "protocol", "defense", "settings", "seed", "attack cells"):
        grid.add_column(name)
    for job, attacks in made.by_training().items():
        settings = ", ".join(f"{k}={v}" for k, v in job.settings.items())
        grid.add_row(
            job.task.dataset,
            job.task.model,
            job.protocol.name,
            job.defense,
            settings,
            str(job.seed),
            str(len(attacks)),
        )
    options.console.print(grid)


def _print_rows(made: Plan, told: Forecast) -> None:
    from rich.table import Table as Grid

    devices = sorted(told.whole.hours)
    title = f"{made.suite.name} v{made.suite.version}"
    grid = Grid(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    grid.add_column("task", justify="right", no_wrap=True)
    for name in ("protocol", "dataset", "model"):
        grid.add_column(name, no_wrap=True)
    numbers = ["rows", "trainings", "cells", "cached", *(_COLUMNS.get(d, d) for d in devices)]
    for name in [*numbers, "GB"]:
        grid.add_column(name, justify="right", no_wrap=True)
    for place, row in sorted(told.rows.items()):
        task = made.suite.tasks[place]
        grid.add_row(
            str(place),
            made.suite.protocol_of(task).name,
            task.dataset,
            task.model,
            str(len(row.settings)),
            str(row.trainings),
            str(row.cells),
            str(row.cached_trainings + row.cached_cells),
            *(_short(row.hours.get(d, 0.0)) for d in devices),
            _short(row.n_bytes / _GB),
        )
    options.console.print(grid)


def _short(value: float) -> str:
    """Two figures that count, and no more digits than a reader takes in."""
    if value >= 10:
        return f"{value:,.0f}"
    return "0" if value == 0 else f"{value:.2g}"


def _sentences(
    made: Plan, told: Forecast, store: Store, workers: int, env: Environment
) -> Iterable[str]:
    whole = told.whole
    yield (
        f"{whole.trainings} trainings ({whole.cached_trainings} cached), "
        f"{whole.cells} attack cells ({whole.cached_cells} cached)."
    )
    rest = whole.trainings + whole.cells - whole.cached_trainings - whole.cached_cells
    if rest:
        for device, hours in sorted(whole.hours.items()):
            unit = _UNITS.get(device, device)
            yield f"Not cached: {_short(hours)} {unit}. {_basis(whole, device)}"
        yield from _wall(whole, workers, env)
        if "cuda" not in whole.hours:
            yield (
                "No cell was measured on a GPU yet, so no GPU-hours: run a part of it there "
                f"(leakbench run {made.suite.name} --only seed={made.trainings[0].seed} --only "
                "task=0 --device cuda) and plan again with the same --out."
            )
        yield from _disk(whole, store)
    yield from _memory(told, env)


def _basis(whole: Sum, device: str) -> str:
    counts = whole.matches[device]
    total = sum(counts.values())
    text = (
        f"Of {total} jobs {_share(counts['exact'], total)} were measured as they are, "
        f"{_share(counts['near'], total)} are told from similar ones"
    )
    if counts["none"]:
        share = _share(counts["none"], total)
        return f"{text}; {share} resemble nothing measured: they are not in it."
    return f"{text}."


def _share(part: int, whole: int) -> str:
    if part == whole:
        return "all"
    return f"{100 * part / whole:.1f} %" if part else "none"


def _wall(whole: Sum, workers: int, env: Environment) -> Iterable[str]:
    from bench.harness.progress import duration

    kind = env.device.split(":")[0]
    if kind in whole.hours:
        seconds = 3600 * whole.hours[kind] / workers
        yield f"With --jobs {workers} on {kind}: {duration(seconds)}, if nothing else runs."


def _disk(whole: Sum, store: Store) -> Iterable[str]:
    free = _free(store)
    yield (
        f"Disk: {_short(whole.n_bytes / _GB)} GB more in {store.folder}, "
        f"{_short(free / _GB)} GB are free."
    )
    if whole.n_bytes > _LIKELY * free:
        yield "Warning: that disk is likely too small; run parts of it with --out on others."


def _free(store: Store) -> int:
    """Of the nearest folder that exists."""
    place = store.folder.resolve()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _memory(told: Forecast, env: Environment) -> Iterable[str]:
    kind = env.device.split(":")[0]
    if kind in told.host:
        text = f"Memory: up to {_short(told.host[kind] / _GB)} GB per worker"
        if kind in told.device:
            text += f", and {_short(told.device[kind] / _GB)} GB of the device's"
        yield f"{text}, as far as it was measured."


def _as_json(
    made: Plan, told: Forecast, store: Store, workers: int, env: Environment
) -> Mapping[str, Any]:
    kind = env.device.split(":")[0]
    whole = told.whole
    return {
        "suite": made.suite.name,
        "version": made.suite.version,
        **_sum(whole),
        "jobs": workers,
        "wall_hours": whole.hours[kind] / workers if kind in whole.hours else None,
        "matches": whole.matches,
        "free_bytes": _free(store),
        "folder": os.fspath(store.folder),
        "peak_host_bytes": told.host.get(kind),
        "peak_device_bytes": told.device.get(kind),
        "rows": [
            {
                "task": place,
                "protocol": made.suite.protocol_of(made.suite.tasks[place]).name,
                "dataset": made.suite.tasks[place].dataset,
                "model": made.suite.tasks[place].model,
                **_sum(row),
            }
            for place, row in sorted(told.rows.items())
        ],
    }


def _sum(total: Sum) -> dict[str, Any]:
    return {
        "settings": len(total.settings),
        "trainings": total.trainings,
        "cached_trainings": total.cached_trainings,
        "cells": total.cells,
        "cached_cells": total.cached_cells,
        "hours": total.hours,
        "bytes": total.n_bytes,
    }
