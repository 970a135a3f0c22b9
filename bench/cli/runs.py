"""`leakbench run`, `sweep` and `tune`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options
from bench.cli.reports import publish
from bench.errors import UserError
from bench.names import check_known

if TYPE_CHECKING:
    from bench.harness.keys import Keys
    from bench.harness.plan import Plan
    from bench.harness.runner import Report
    from bench.harness.store import Store
    from bench.records import Row
    from bench.suite import Suite
    from bench.tuning import Search


def tune(
    suite: options.SuiteName,
    loss: Annotated[
        str, typer.Option(help="Points of accuracy that settings may lose: 1,5,10.")
    ] = "1,5,10",
    steps: Annotated[int, typer.Option(min=0, max=60, help="Bisections; 0: the ends alone.")] = 6,
    device: options.Device = "auto",
    jobs: options.Jobs = None,
    out: Annotated[
        Path | None, typer.Option(help="The suite to write; default NAME_tuned.toml.")
    ] = None,
    data_dir: options.DataDir = None,
    download: options.Download = False,
    plugin: options.PluginFile = None,
) -> None:
    """Find each defense's strongest settings that lose just so much accuracy, and write a suite.

    Only trainings are run, in leakbench-runs/NAME-tune; a search that was stopped goes on where it
    was. What declares no strength stays in the suite as it is.
    """
    with options.plain_errors():
        from bench import suite as suites
        from bench import tuning
        from bench.harness import launch
        from bench.harness.environment import registry_for
        from bench.harness.store import Store, write_whole
        from bench.report import leaderboard

        losses = _losses(loss)
        env = options.choose_environment(device, data_dir, download, plugin)
        original = suites.read_suite(suite)
        target = out or Path(f"{original.name}_tuned.toml")
        if target.exists() and out is None:
            raise UserError(f"{target} exists; name another file by --out, or this one.")
        folder = Path("leakbench-runs") / f"{original.name}-tune"

        def play(changed: Suite) -> Sequence[Row]:
            plan, keys = launch.plan_suite(changed, {}, env)
            carry_out(plan, keys, Store(folder), jobs, show=False)
            return leaderboard.rows(folder)

        registry = registry_for(env.plugins)
        searches = tuning.tune(original, registry, play, losses=losses, steps=steps)
        write_whole(target, tuning.write_tuned(original, searches, losses, registry))
        options.console.print()
        _print_searches(searches, losses)
        options.say(f"Written: {target}. Run it: leakbench run {target}")


def _losses(text: str) -> list[float]:
    """Shares of test samples that "1,5,10" stands for."""
    try:
        points = [float(part) for part in text.split(",")]
    except ValueError:
        points = [-1.0]
    if not all(0 <= p <= 100 for p in points) or len(set(points)) < len(points):
        raise UserError(f"--loss takes different points of accuracy, as 1,5,10, got '{text}'.")
    return sorted(p / 100 for p in points)


def _print_searches(searches: Sequence[Search], losses: Sequence[float]) -> None:
    """Print each search's value per loss, and its accuracy drop in points."""
    lines = []
    for search in searches:
        best = [search.best(loss) for loss in losses]
        cells = ["-" if v is None else f"{v:g} ({100 * search.lost[v]:.1f})" for v in best]
        others = " ".join(f"{k}={v}" for k, v in search.settings.items())
        name = f"{search.defense} {others}".strip()
        lines.append([name, str(search.task), search.strength.setting, *cells])
    heads = ("defense", "task", "setting", *(f"<= {100 * loss:g} pt" for loss in losses))
    title = "The strongest settings, and the points of accuracy that they lose"
    options.print_table(heads, lines, figures=len(losses), title=title)


def sweep(
    suite: options.SuiteName,
    over: Annotated[
        str,
        typer.Option(
            help="key=value,value,...: threat.batch=1,8,32 (of every threat), or a path as of "
            "--set: protocol.rounds=10,30, defenses.0.settings.epsilon=1,8."
        ),
    ],
    only: options.Only = None,
    set_: options.Set = None,
    device: options.Device = "auto",
    jobs: options.Jobs = None,
    out: options.Out = None,
    data_dir: options.DataDir = None,
    download: options.Download = False,
    plugin: options.PluginFile = None,
    figures: Annotated[str, typer.Option(help="Formats: pdf,png,svg.")] = "png",
) -> None:
    """Run a suite once for every value of one key, and draw leakage over it.

    Every value has a result folder of its own, OUT/KEY=VALUE, as `run` makes it; OUT/sweep.csv and
    OUT/figures hold all. A sweep that was stopped goes on where it was.
    """
    with options.plain_errors():
        from pandas import isna

        from bench.harness.store import Store, write_whole
        from bench.report import leaderboard
        from bench.report import sweep as sweeps
        from bench.report.frames import csv_of
        from bench.report.paper import FORMATS
        from bench.suite import parse_value

        key, texts = options.values_over(over)
        formats = [f.strip() for f in figures.split(",") if f.strip()]
        for name in formats:
            check_known("figure format", name, FORMATS)
        env = options.choose_environment(device, data_dir, download, plugin)
        # All are checked before the first is run.
        plans = {
            text: options.plan_suite(suite, only, [*(set_ or ()), f"{key}={text}"], env)
            for text in texts
        }
        name = next(iter(plans.values()))[0].suite.name
        base = out or Path("leakbench-runs") / f"{name}-over-{re.sub(r'[^A-Za-z0-9.]', '_', key)}"
        swept: dict[Any, Any] = {}
        failed = 0
        for text, (plan, keys) in plans.items():
            folder = base / re.sub(r"[^A-Za-z0-9.=+-]", "_", f"{key}={text}")
            options.say(f"{key}={text}", style="bold")
            report = carry_out(plan, keys, Store(folder), jobs, show=False)
            failed += len(report.failures)
            swept[parse_value(text)] = leaderboard.load(folder)
        frame = sweeps.frame_of(key, swept)
        write_whole(base / "sweep.csv", csv_of(frame.to_dict("records")))
        paths = sweeps.write_figures(frame, base, formats)
        for title, table in frame.groupby("table", sort=False):
            curves = table.pivot(index="curve", columns="value", values="leakage")
            shown = curves[list(swept)].map(lambda leak: "-" if isna(leak) else f"{leak:.2f}")
            options.say(f"\n{title}: leakage\n{shown.rename_axis(index=None).to_string()}")
        options.say(f"Written: {base / 'sweep.csv'} and {len(paths)} figures beside it.")
    if failed:
        raise typer.Exit(1)


_LOCAL = ("--out", "--data-dir", "--jobs")
"""Options that name this machine's folders or move no number."""


def run(
    suite: options.SuiteName,
    only: options.Only = None,
    set_: options.Set = None,
    device: options.Device = "auto",
    jobs: options.Jobs = None,
    shard: options.Shard = "1/1",
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

        if jobs != 0:
            from bench.harness.executors.local import start_server

            start_server()
        env = options.choose_environment(device, data_dir, download, plugin)
        part = options.shard_of(shard)
        plan, keys = options.plan_suite(suite, only, set_, env, part)
        store = launch.store_of(plan, out, part)
        report = carry_out(plan, keys, store, jobs, fresh=fresh, details=details, loss=loss)
    if report.failures:
        raise typer.Exit(1)


def carry_out(
    plan: Plan,
    keys: Keys,
    store: Store,
    jobs: int | None,
    *,
    fresh: bool = False,
    show: bool = True,
    details: bool = False,
    loss: float = 5.0,
) -> Report:
    """Run a plan by local workers with progress shown, write its leaderboard and print that too
    (`show`)."""
    from bench.harness import launch, progress, runner

    executor, command = launch.local(plan, keys.env, workers=jobs), quote_command(sys.argv[1:])
    with progress.live(plan, options.console) as tell:
        try:
            report = runner.run(
                plan, store, keys, executor=executor, fresh=fresh, command=command, on_progress=tell
            )
        except KeyboardInterrupt:
            stopped = "Stopped. What is finished is kept; run the same command to go on."
            options.say(stopped, aside=True)
            raise typer.Exit(130) from None
    formats = ("json", "csv", "md", "html")
    paths = publish(store.folder, formats, show=show, details=details, loss=loss)
    for wrong in report.remade:
        options.say(f"{wrong} It was made again.", aside=True, style="yellow")
    for label, reason in report.failures:
        options.say(f"{label}: {reason}", aside=True, style="red")
    options.say(
        f"{report.ran} run, {report.cached} cached, {len(report.failures)} failed. "
        f"Leaderboard: {paths[0].with_suffix('')}.{{json,csv,md}}\nReport: {paths[-1]}"
    )
    return report


def quote_command(arguments: list[str]) -> list[str]:
    """The command as a reader would repeat it."""
    kept = [
        argument
        for before, argument in pairwise(["leakbench", *arguments])
        if before not in _LOCAL and argument.partition("=")[0] not in _LOCAL
    ]
    return ["leakbench", *kept]
