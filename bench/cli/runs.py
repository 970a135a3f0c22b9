"""`leakbench run` and `plan`."""

from __future__ import annotations

import sys
from typing import Annotated

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
        from bench import launch

        env = environment(device, data_dir, download, plugin)
        plan, keys = planned(suite, only, set_, env)
        store = launch.store_of(plan, out)
        store.prepare()
        workers = launch.default_workers(env.device) if jobs is None else jobs
        with launch.live(plan, console) as on_progress:
            try:
                report = launch.execute(
                    plan,
                    keys,
                    store,
                    workers=workers,
                    fresh=fresh,
                    command=recorded(sys.argv[1:]),
                    on_progress=on_progress,
                )
            except KeyboardInterrupt:
                errors.print("Stopped. What is finished is kept; run the same command to go on.")
                raise typer.Exit(130) from None
        paths = publish(store.folder, ("json", "csv", "md", "html"))
        for label, reason in report.failures:
            errors.print(f"{label}: {reason}", style="red", markup=False, highlight=False)
        console.print(
            f"{report.ran} run, {report.cached} cached, {len(report.failures)} failed. "
            f"Leaderboard: {paths[0].with_suffix('')}.{{json,csv,md}}\nReport: {paths[-1]}",
            soft_wrap=True,
        )
    if report.failures:
        raise typer.Exit(1)


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

        from bench import launch, runner

        env = environment(device, data_dir, download, plugin)
        made, keys = planned(suite, only, set_, env)
        store = launch.store_of(made, out)
        trainings, cells = runner.cached(made, store, keys)
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
