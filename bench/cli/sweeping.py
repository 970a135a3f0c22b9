"""`leakbench sweep`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.cli import options
from bench.cli.runs import carry_out_here


def sweep(
    suite: options.SuiteName,
    over: Annotated[
        str,
        typer.Option(
            "--over",
            help="key=value,value,...: threat.batch=1,8,32 (of every threat), or a path as of "
            "--set: protocol.rounds=10,30, defenses.0.settings.epsilon=1,8.",
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
    figures: Annotated[str, typer.Option("--figures", help="Formats: pdf,png,svg.")] = "png",
) -> None:
    """Run a suite once for every value of one key, and draw leakage over it.

    Every value has a result folder of its own, OUT/KEY=VALUE, as `run` makes it; OUT/sweep.csv and
    OUT/figures hold all. A sweep that was stopped goes on where it was.
    """
    with options.plain_errors():
        from bench.harness.store import write_whole
        from bench.report import leaderboard
        from bench.report import sweep as sweeps
        from bench.report.paper import check_format
        from bench.suite import parse_value

        key, texts = options.values_over(over)
        formats = [f.strip() for f in figures.split(",") if f.strip()]
        for name in formats:
            check_format(name)
        env = options.chosen_environment(device, data_dir, download, plugin)
        # All are checked before the first is run.
        plans = {
            text: options.planned(suite, only, [*(set_ or ()), f"{key}={text}"], env)
            for text in texts
        }
        name = next(iter(plans.values()))[0].suite.name
        base = out or Path("leakbench-runs") / f"{name}-over-{re.sub(r'[^A-Za-z0-9.]', '_', key)}"
        swept: dict[Any, Any] = {}
        failed = 0
        for text, (plan, keys) in plans.items():
            folder = base / re.sub(r"[^A-Za-z0-9.=+-]", "_", f"{key}={text}")
            options.say(f"{key}={text}", style="bold")
            failed += len(carry_out_here(plan, keys, folder, jobs).failures)
            swept[parse_value(text)] = leaderboard.load(folder)
        write_whole(base / "sweep.csv", sweeps.to_csv(key, swept))
        paths = sweeps.write_figures(key, swept, base, formats)
        for title, settings in sweeps.curves(key, swept).items():
            table = options.open_table(f"{title}: leakage")
            table.add_column("setting", overflow="fold")
            for value in swept:
                table.add_column(str(value), justify="right")
            for setting, points in settings.items():
                cells = {value: f"{leakage.mean:.2f}" for value, leakage in points}
                table.add_row(setting, *(cells.get(value, "-") for value in swept))
            options.console.print()
            options.console.print(table)
        options.say(f"Written: {base / 'sweep.csv'} and {len(paths)} figures beside it.")
    if failed:
        raise typer.Exit(1)
