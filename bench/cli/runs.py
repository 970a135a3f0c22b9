"""`leakbench run`, and what `sweep` has in common with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import options
from bench.cli.reports import publish

if TYPE_CHECKING:
    from bench.harness.executors.task import Executor
    from bench.harness.keys import Keys
    from bench.harness.plan import Plan
    from bench.harness.runner import Report
    from bench.harness.store import Store

_LOCAL = (
    *("--out", "--data-dir", "--jobs", "--memory"),
    *("--ray-address", "--cell-cpus", "--cell-gpus"),
)
"""Options that name this machine's folders or move no number."""


def run(
    suite: options.SuiteName,
    only: options.Only = None,
    set_: options.Set = None,
    device: options.Device = "auto",
    executor: Annotated[
        str, typer.Option("--executor", help="local: worker processes here. ray: a Ray cluster.")
    ] = "local",
    jobs: options.Jobs = None,
    memory: Annotated[
        float | None,
        typer.Option("--memory", help="GB that one worker may hold; default its share of 90 %."),
    ] = None,
    shard: options.Shard = "1/1",
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            help="A running cluster's address, or auto; default: RAY_ADDRESS.",
        ),
    ] = None,
    cell_cpus: Annotated[
        float, typer.Option("--cell-cpus", help="With ray: CPUs that one job takes.")
    ] = 1.0,
    cell_gpus: Annotated[
        float | None,
        typer.Option("--cell-gpus", help="With ray: GPUs per job; 0.25: four share one."),
    ] = None,
    out: options.Out = None,
    data_dir: options.DataDir = None,
    download: options.Download = False,
    plugin: options.PluginFile = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached results.")] = False,
    details: options.Details = False,
    loss: options.Loss = 5.0,
) -> None:
    """Run a suite, continue where it stopped, and print its leaderboard."""
    with options.plain_errors():
        from bench.harness import launch

        launch.check_executor(executor)
        options.check_loss(loss)
        if executor == "local" and jobs != 0:
            from bench.harness.executors.local import start_server

            start_server()
        env = options.chosen_environment(
            device, data_dir, download, plugin, here=executor == "local"
        )
        part = options.shard_of(shard)
        plan, keys = options.planned(suite, only, set_, env, part)
        store = launch.store_of(plan, out, part)
        store.prepare()
        chosen = launch.executor_of(
            plan,
            keys,
            executor,
            jobs=jobs,
            memory=memory,
            ray_address=ray_address,
            cell_cpus=cell_cpus,
            cell_gpus=cell_gpus,
        )
        report = carry_out(
            plan,
            keys,
            store,
            chosen,
            command=recorded(sys.argv[1:]),
            fresh=fresh,
            details=details,
            loss=loss,
        )
    if report.failures:
        raise typer.Exit(1)


def carry_out(
    plan: Plan,
    keys: Keys,
    store: Store,
    executor: Executor,
    *,
    command: list[str],
    fresh: bool = False,
    show: bool = True,
    details: bool = False,
    loss: float = 5.0,
) -> Report:
    """Run a plan with progress shown, write its leaderboard and print that too (`show`)."""
    from bench.harness import progress, runner

    with progress.live(plan, options.console) as on_progress:
        try:
            report = runner.run(
                plan,
                store,
                keys,
                executor=executor,
                fresh=fresh,
                command=command,
                on_progress=on_progress,
            )
        except KeyboardInterrupt:
            stopped = "Stopped. What is finished is kept; run the same command to go on."
            options.say(stopped, aside=True)
            raise typer.Exit(130) from None
    paths = publish(
        store.folder, ("json", "csv", "md", "html"), show=show, details=details, loss=loss
    )
    for wrong in report.remade:
        options.say(f"{wrong} It was made again.", aside=True, style="yellow")
    for label, reason in report.failures:
        options.say(f"{label}: {reason}", aside=True, style="red")
    options.say(
        f"{report.ran} run, {report.cached} cached, {len(report.failures)} failed. "
        f"Leaderboard: {paths[0].with_suffix('')}.{{json,csv,md}}\nReport: {paths[-1]}"
    )
    return report


def carry_out_here(plan: Plan, keys: Keys, folder: Path, jobs: int | None) -> Report:
    """Run a plan by local workers in a folder of its own; prints no leaderboard."""
    from bench.harness import launch

    store = launch.store_of(plan, folder)
    store.prepare()
    executor = launch.executor_of(plan, keys, "local", jobs=jobs)
    return carry_out(plan, keys, store, executor, command=recorded(sys.argv[1:]), show=False)


def recorded(arguments: list[str]) -> list[str]:
    """The command as a reader would repeat it."""
    kept = []
    skip = False
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in _LOCAL:
            kept.append(argument)
        skip = argument in _LOCAL
    return ["leakbench", *kept]
