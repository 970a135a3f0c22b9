"""`leakbench tune`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options
from bench.cli.runs import carry_out_here
from bench.errors import UserError

if TYPE_CHECKING:
    from bench.records import Row
    from bench.suite import Suite
    from bench.tuning import Search


_NAME = 18
"""Width of a defense's name in the table, so that three losses fit 80 columns."""


def tune(
    suite: options.SuiteName,
    loss: Annotated[
        str, typer.Option("--loss", help="Points of accuracy that settings may lose: 1,5,10.")
    ] = "1,5,10",
    steps: Annotated[
        int, typer.Option("--steps", min=0, max=60, help="Bisections; 0: the ends alone.")
    ] = 6,
    device: options.Device = "auto",
    jobs: options.Jobs = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The suite to write; default NAME_tuned.toml.")
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
        from bench.report import leaderboard

        losses = _losses(loss)
        env = options.chosen_environment(device, data_dir, download, plugin)
        original = suites.read_suite(suite)
        target = out or Path(f"{original.name}_tuned.toml")
        if target.exists() and out is None:
            raise UserError(f"{target} exists; name another file by --out, or this one.")
        folder = Path("leakbench-runs") / f"{original.name}-tune"

        def play(changed: Suite) -> Sequence[Row]:
            carry_out_here(*launch.planned(changed, {}, env), folder, jobs)
            return leaderboard.rows(folder)

        registry = registry_for(env.plugins)
        searches = tuning.tune(original, registry, play, losses=losses, steps=steps)
        text = tuning.tuned_text(suites.suite_text(suite)[0], original, searches, losses, registry)
        options.write_out(target, text)
        options.console.print()
        options.console.print(_table(searches, losses))
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


def _table(searches: Sequence[Search], losses: Sequence[float]) -> Any:
    """Return a table with each search's value per loss, and its accuracy drop in points."""
    table = options.open_table("The strongest settings, and the points of accuracy that they lose")
    table.add_column("defense", overflow="fold", max_width=_NAME)
    for name in ("task", "setting"):
        table.add_column(name, no_wrap=True)
    for loss in losses:
        table.add_column(f"<= {100 * loss:g} pt", justify="right")
    for search in searches:
        best = [search.best(loss) for loss in losses]
        cells = ("-" if v is None else f"{v:g} ({100 * search.lost[v]:.1f})" for v in best)
        others = " ".join(f"{k}={v}" for k, v in search.settings.items())
        name = f"{search.defense} {others}".strip()
        table.add_row(name, str(search.task), search.strength.setting, *cells)
    return table
