"""`leakbench plan`: what a suite would run, what of it is cached, and what the rest would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options

if TYPE_CHECKING:
    from bench.harness.plan import Plan

_UNITS = {"cpu": "core", "cuda": "GPU"}
_GB = 1e9


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
        int | None, typer.Option(min=1, max=1024, help="Workers, for the time it would take.")
    ] = None,
    costs: Annotated[
        list[Path] | None,
        typer.Option(help="A result folder whose finished jobs the estimates use."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print every training.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show what would run, what is cached, and how long the rest would take. Writes nothing."""
    with options.plain_errors():
        from bench.harness import launch
        from bench.harness.forecast import forecast

        # A plan for a device that this machine lacks, say on a cluster's login node, is fine.
        env = options.choose_environment(device, data_dir, download, plugin, here=device == "auto")
        part = options.shard_of(shard)
        planned, keys = options.plan_suite(suite, only, set_, env, part)
        store = launch.store_of(planned, out, part)
        workers = launch.default_workers(env.device) if jobs is None else jobs
        report = forecast(planned, keys, store, costs or (), workers)
        if as_json:
            options.print_json(report)
            return
        if list_:
            _print_trainings(planned)
        unit = _UNITS[env.device.split(":")[0]]
        _print_rows(report, unit)
        for line in _sentences(planned, report, unit):
            options.say(line)


def _print_trainings(plan: Plan) -> None:
    heads = ("dataset", "model", "protocol", "defense", "settings", "seed", "attack cells")
    lines = []
    for job, attacks in plan.by_training().items():
        settings = ", ".join(f"{k}={v}" for k, v in job.settings.items())
        names = (job.task.dataset, job.task.model, job.protocol.name, job.defense)
        lines.append((*names, settings, str(job.seed), str(len(attacks))))
    options.print_table(heads, lines, title=f"{plan.suite.name} v{plan.suite.version}")


def _print_rows(report: Mapping[str, Any], unit: str) -> None:
    figures = ("rows", "trainings", "cells", "cached", f"{unit}-h", "GB")
    lines = []
    for row in report["rows"]:
        about = (row["task"], row["protocol"], f"{row['dataset']}, {row['model']}")
        cached = row["cached_trainings"] + row["cached_cells"]
        counts = (row["settings"], row["trainings"], row["cells"], cached)
        costs = (_short(row["hours"]), _short(row["bytes"] / _GB))
        lines.append([*map(str, (*about, *counts)), *costs])
    heads = ("task", "protocol", "data set, model", *figures)
    title = f"{report['suite']} v{report['version']}"
    options.print_table(heads, lines, figures=len(figures), title=title, padding=(0, 1, 0, 0))


def _short(value: float) -> str:
    """Two figures that count, and no more digits than a reader takes in."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _sentences(plan: Plan, report: Mapping[str, Any], unit: str) -> Iterator[str]:
    from bench.harness.progress import duration

    yield (
        f"{report['trainings']} trainings ({report['cached_trainings']} cached), "
        f"{report['cells']} attack cells ({report['cached_cells']} cached)."
    )
    cached = report["cached_trainings"] + report["cached_cells"]
    if missing := report["trainings"] + report["cells"] - cached:
        unlike = report["unlike"]
        if unlike < missing:
            left_out = f" {unlike:,} jobs are like nothing measured and left out." if unlike else ""
            hours, time = _short(report["hours"]), duration(3600 * report["wall_hours"])
            yield f"Not cached: {hours} {unit}-hours, by medians of measured jobs.{left_out}"
            yield f"With --jobs {report['jobs']}: {time}, if nothing else runs."
        else:
            yield (
                f"No cell was measured on a {unit} yet, so no {unit}-hours: run a part of it there "
                f"(leakbench run {plan.suite.name} --only seed={plan.trainings[0].seed} --only "
                "task=0 --device cuda) and plan again with the same --out."
            )
        more, free = (_short(report[name] / _GB) for name in ("bytes", "free_bytes"))
        yield f"Disk: {more} GB more in {report['folder']}, {free} GB are free."
        if report["bytes"] > 0.8 * report["free_bytes"]:
            yield "Warning: that disk is likely too small; run parts of it with --out on others."
