"""`leakbench run` and `plan`."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli.options import (
    DataDir,
    Device,
    Download,
    Only,
    Out,
    PluginFile,
    Set,
    SuiteName,
    console,
    environment,
    errors,
    plain_errors,
    planned,
)
from bench.cli.reports import publish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.suite import Plan

_LINUX = sys.platform == "linux"


def run(
    suite: SuiteName,
    only: Only = None,
    set_: Set = None,
    device: Device = "auto",
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=0, help="Worker processes; 0: none, run here.")
    ] = None,
    out: Out = None,
    data_dir: DataDir = None,
    download: Download = False,
    plugin: PluginFile = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached results.")] = False,
) -> None:
    """Run a suite, continue where it stopped, and print its leaderboard."""
    with plain_errors():
        from bench import runner
        from bench.jobs import plugins as discover
        from bench.store import Store

        env = environment(device, data_dir, download, plugin)
        registry = discover(env.plugins)
        plan = planned(suite, only, set_, registry, env)
        store = Store(out or Path("leakbench-runs") / plan.suite.name)
        store.prepare()
        keys = runner.Keys(registry, env)
        workers = _workers(env.device) if jobs is None else jobs
        if workers == 0:
            _one_thread()
        with store.locked(), _live(plan) as on_progress:
            try:
                report = runner.run(
                    plan,
                    store,
                    keys,
                    workers=workers,
                    fresh=fresh,
                    command=recorded(sys.argv[1:]),
                    on_progress=on_progress,
                )
            except KeyboardInterrupt:
                errors.print("Stopped. What is finished is kept; run the same command to go on.")
                raise typer.Exit(130) from None
        paths = publish(store.folder, ("json", "csv", "md"))
        for label, reason in report.failures:
            errors.print(f"{label}: {reason}", style="red", markup=False, highlight=False)
        console.print(
            f"{report.ran} run, {report.cached} cached, {len(report.failures)} failed. "
            f"Leaderboard: {paths[0].with_suffix('')}.{{json,csv,md}}",
            soft_wrap=True,
        )
    if report.failures:
        raise typer.Exit(1)


def _one_thread() -> None:
    """As in a worker, so that figures do not depend on --jobs."""
    import torch

    torch.set_num_threads(1)


def recorded(arguments: list[str]) -> list[str]:
    """The command as a reader would repeat it: without what names this machine's folders or
    moves no number."""
    local = ("--out", "--data-dir", "--jobs")
    kept = []
    skip = False
    for argument in arguments:
        if (
            not skip
            and argument not in local
            and not argument.startswith(tuple(f"{o}=" for o in local))
        ):
            kept.append(argument)
        skip = argument in local
    return ["leakbench", *kept]


def _workers(device: str) -> int:
    """One worker on a GPU; on a CPU one single-threaded worker per core, up to four, since each
    takes about 0.9 GB."""
    if device != "cpu":
        return 1
    return max(1, min(4, len(os.sched_getaffinity(0)) if _LINUX else os.cpu_count() or 1))


@contextmanager
def _live(plan: Plan) -> Iterator[Any]:
    """Progress with time left on a terminal, a line every tenth of the way elsewhere."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    view = Progress(
        TextColumn("[bold]{task.fields[suite]}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn(
            "{task.fields[label]}",
            style="dim",
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        expand=True,
    )
    total = len(plan.trainings) + len(plan.cells)
    last = 0
    with view:
        bar = view.add_task("", total=total, suite=plan.suite.name, failed=0, label="starting")

        def on_progress(progress: Any) -> None:
            nonlocal last
            view.update(bar, completed=progress.done, failed=progress.failed, label=progress.label)
            tenth = 10 * progress.done // progress.total
            if not console.is_terminal and tenth > last:
                last = tenth
                console.print(f"{progress.done} of {progress.total} done, {progress.failed} failed")

        yield on_progress


def plan(
    suite: SuiteName,
    only: Only = None,
    set_: Set = None,
    device: Device = "auto",
    out: Out = None,
    data_dir: DataDir = None,
    download: Download = False,
    plugin: PluginFile = None,
) -> None:
    """Show what would run, with counts and what is cached."""
    with plain_errors():
        from rich.table import Table

        from bench import runner
        from bench.jobs import plugins as discover
        from bench.store import Store

        env = environment(device, data_dir, download, plugin)
        registry = discover(env.plugins)
        made = planned(suite, only, set_, registry, env)
        store = Store(out or Path("leakbench-runs") / made.suite.name)
        trainings, cells = runner.cached(made, store, runner.Keys(registry, env))
        table = Table(title=f"{made.suite.name} v{made.suite.version}", title_justify="left")
        for name in ("dataset", "model", "defense", "settings", "seed", "attack cells"):
            table.add_column(name)
        for job in made.trainings:
            settings = ", ".join(f"{k}={v}" for k, v in job.settings.items())
            mine = sum(c.train == job for c in made.cells)
            table.add_row(
                job.task.dataset, job.task.model, job.defense, settings, str(job.seed), str(mine)
            )
        console.print(table)
        console.print(
            f"{len(made.trainings)} trainings ({trainings} cached), "
            f"{len(made.cells)} attack cells ({cells} cached)."
        )
