"""The Python API: run a suite, load a result folder, look at it as tables and figures."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from bench import models
from bench import suite as suites
from bench.errors import UserError
from bench.harness import launch, runner
from bench.harness.progress import live
from bench.records import Cell, NoResult, Row
from bench.report import frames, tables, text
from bench.report.choosing import check_wanted, with_values
from bench.report.console import PlainConsole
from bench.report.files import Files
from bench.report.overview import LOSS, by_protocol, legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from torch import nn


def run(
    suite: str | Path | Mapping[str, Any] | suites.Suite,
    *,
    only: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    device: str = "auto",
    jobs: int | None = None,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    download: bool = False,
    plugins: Sequence[str | Path] = (),
    fresh: bool = False,
    progress: bool | None = None,
    shard: tuple[int, int] = (1, 1),
    model: nn.Module | None = None,
) -> Results:
    """Run a suite as `leakbench run` does, with the same records, and give its results.

    suite: a shipped suite's name, a TOML file, or the suite itself as a dict. only: keeps cells,
    {"defense": "spm", "seed": [0, 1]}. overrides: changes values of a named suite,
    {"protocol.rounds": 5}. jobs: worker processes; 0: none, run in this process. out: result
    folder, by default leakbench-runs/SUITE; a run that was stopped continues there. plugins:
    Python files with a defense or attack. progress: by default on terminals and in notebooks.
    shard: (i, n), the i-th of n parts, with a folder of its
    own. model: takes the place of every task's model, with the parameters that it has at all
    seeds; then this process runs the jobs itself.

    Worker processes import a script's file again, so a script must call this under
    `if __name__ == "__main__":` or with jobs=0; notebooks need neither. Failed cells raise
    nothing: see `Results.failures`. Raises UserError for bad input, before any work.
    """
    chosen_suite = _suite(suite, overrides)
    if model is not None:
        own = {"model": models.hand(model), "model_settings": {}}
        tasks = [task.model_copy(update=own) for task in chosen_suite.tasks]
        chosen_suite = chosen_suite.model_copy(update={"tasks": tasks})
        jobs = 0 if jobs is None else jobs
    place = None if data_dir is None else Path(data_dir)
    env = launch.environment(device, place, download, _files(plugins))
    plan, keys = launch.plan_suite(chosen_suite, only or {}, env, shard)
    if jobs is not None and (not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 0):
        raise UserError(f"jobs must be a whole number >= 0, got {jobs!r}.")
    executor = launch.local(plan, env, workers=jobs)
    if jobs != 0:
        _refuse_unguarded_script(sys._getframe(1))
    store = launch.store_of(plan, None if out is None else Path(out), shard)
    visible = sys.stdout.isatty() or "ipykernel" in sys.modules if progress is None else progress
    command = _command(suite, plan.suite.name, only, overrides, shard)
    with live(plan, PlainConsole(quiet=not visible)) as tell:
        runner.run(
            plan, store, keys, executor=executor, fresh=fresh, command=command, on_progress=tell
        )
    results = Results(store.folder)
    results.write()
    return results


def load(folder: str | Path) -> Results:
    """Return the results in a result folder, or in `results/NAME` of the working folder by their
    name: `bench.load("reference")`. Raises UserError if there are none."""
    published = Path("results") / folder
    return Results(Path(folder) if Path(folder).exists() or not published.exists() else published)


class Results:
    """A result folder: tables as pandas DataFrames, figures as matplotlib Figures.

    Epsilons are floats, `inf` where nothing is proven; what there is no figure of is NaN. `only`
    keeps rows and cells by protocol, dataset, model, defense, checkpoint, and cells by attack.
    Raises UserError if the folder is no result folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = Files(folder)
        self._run = self._files.run
        self._cells = self._run.cells

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return the leaderboard as leaderboard.json holds it; see bench/report/schema.json."""
        return json.loads(text.to_leaderboard_json(self._files.rows))

    @property
    def standing(self) -> str:
        """Whether anybody made these figures again by a rerun."""
        return self._files.standing

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Return (what, why) of trainings and cells that failed or ran out of time."""
        read = self._files.store.read
        trainings = [(t.job.name, read("train", t.key)) for t in self._run.trainings]
        cells = [(f"{c.name}/seed={c.seed}", read("attack", c.key)) for c in self._cells]
        return [
            (name, f"{record.status}: {record.reason}")
            for name, record in [*trainings, *cells]
            if isinstance(record, NoResult) and record.status != "not_applicable"
        ]

    def best(self, *, loss: float = 100 * LOSS) -> DataFrame:
        """One line per table: the defense that leaks least of those whose settings lose at most
        `loss` points of accuracy, as in `overview`, and in `said` what it costs and how sure that
        is; `defense` is None where none can be named. Raises as `overview`."""
        return frames.best(self._files.rows, self._loss(loss))

    def overview(self, *, loss: float = 100 * LOSS) -> DataFrame:
        """One line per defense and table, with the setting that leaks least of those that lose at
        most `loss` points of accuracy: its leak in [0, 1], whether it is tied for best, the
        accuracy that it loses (a share), bytes and client seconds as multiples of the undefended
        row's; `why` says what kept a defense out. `print(results)` shows what the terminal does.
        Raises UserError for a loss outside of [0, 100]."""
        return frames.overview(self._files.rows, self._loss(loss))

    def overview_to_latex(self, *, loss: float = 100 * LOSS, columns: Sequence[str] = ()) -> str:
        """The overview for a paper: one `table` environment per table, for the package booktabs,
        with a caption, a legend and all names escaped. columns: their heads, by default at most
        six. Raises as `overview`, and UserError for a column that there is not."""
        return text.overview_to_latex(self._files.rows, self._loss(loss), columns)

    def bibtex(self) -> str:
        """BibTeX of leakbench, with this run's suite and version, and of the papers of the
        defenses, attacks and data sets in its rows. Raises UserError for a bad papers.toml."""
        return self._files.text("bib")

    @staticmethod
    def _loss(points: float) -> float:
        if not 0 <= points <= 100:
            raise UserError(f"loss is in points of accuracy, in [0, 100], got {points}.")
        return points / 100

    def leaderboard(self, *, wide: bool = False, **only: str | None) -> DataFrame:
        """One line per defense setting and checkpoint, in a dozen columns. wide: with every figure;
        each attack's means are ATTACK_METRIC, e.g. dlg_ssim. Raises UserError for a value that
        occurs nowhere."""
        frame = frames.leaderboard(self._rows(**only))
        return frame if wide or frame.empty else frame[list(frames.NARROW)]

    def attacks(self, **only: str | None) -> DataFrame:
        """One line per row and attack, with every metric, interval, floor, status and reason."""
        return frames.attacks(self._rows(**only))

    def victims(self, **only: str | None) -> DataFrame:
        """One line per victim of every finished cell, from the records."""
        return frames.victims(self._files.store, self._some_cells(**only))

    def pictures(
        self,
        *,
        settings: Mapping[str, Any] | None = None,
        victims: int = 8,
        width: str = "page",
        **only: str | None,
    ) -> Figure:
        """Private images above what attacks made of them, SSIM under each: the first victims in
        the run's order, of the first seed.

        Raises UserError, saying what there is, if nothing matches or more than fits a page.
        """
        from bench.report import grids

        cells = self._some_cells(**only)
        filters = dict(settings or {})
        chosen = [c for c in cells if {k: c.settings.get(k, ...) for k in filters} == filters]
        if not chosen:
            there = ", ".join(dict.fromkeys(c.setting for c in cells))
            raise UserError(f"no cell has the settings {filters}; there are {there}.")
        return grids.pictures(self.folder, chosen, victims=victims, width=width)

    def plot_pareto(self, *, width: str = "column", **only: str | None) -> Figure:
        """Accuracy against leakage of one table; checkpoint: by default the last."""
        from bench.report import plots

        return plots.pareto(self._table(**only), among=self._files.rows, width=width)

    def plot_course(
        self, what: str = "accuracy", *, width: str = "column", **only: str | None
    ) -> Figure:
        """One table's accuracy, leak, eps_record or eps_claimed over the rounds of training.

        Raises UserError if that was not measured after three rounds or more.
        """
        from bench.report import plots

        return plots.course(self._table(**only), self._files.rows, what, width=width)

    def write_figures(self, *formats: str, more: Sequence[str] = ()) -> list[Path]:
        """Write the figures of `leakbench report --figures` into the folder's `figures`. formats:
        of pdf, png, svg; more: figures by name, as --figure. Raises UserError for unknown ones."""
        from bench.report.figures import write_figures

        return write_figures(self._files.rows, self.folder, formats, more)

    def write(self) -> list[Path]:
        """Write leaderboard.json, .csv and .md beside the records, as `leakbench report` does."""
        return self._files.write(self.folder, ("json", "csv", "md"))

    def _rows(self, **wanted: Any) -> list[Row]:
        return with_values(self._files.rows, wanted)

    def _some_cells(self, *, attack: str | None = None, **wanted: Any) -> list[Cell]:
        some = with_values(self._cells, wanted)
        check_wanted("attack", attack, {n for c in self._cells for n in (c.label, c.attack)})
        cells = [c for c in some if attack in (None, c.label, c.attack)]
        if not cells:
            filters = {k: v for k, v in {**wanted, "attack": attack}.items() if v is not None}
            raise UserError(
                f"no cell of {self.folder} has {', '.join(f'{k}={v}' for k, v in filters.items())} "
                "at once."
            )
        return cells

    def _table(self, **only: str | None) -> list[Row]:
        """Return the rows of the one table that the filters fit."""
        rows = self._rows(**only)
        groups = tables.tables(rows)
        if only.get("checkpoint") is None and len(groups) > 1:
            last = self._run.suite.checkpoints[-1]
            groups = tables.tables([r for r in rows if r.checkpoint == last]) or groups
        if len(groups) != 1:
            raise UserError(
                "a figure shows one table; give dataset, model, protocol or checkpoint so that "
                f"one is left of: {', '.join(title for title, _ in groups) or 'none'}."
            )
        return groups[0][1]

    def __str__(self) -> str:
        from rich.console import Group

        from bench.report import terminal

        console, summaries = PlainConsole(width=80), by_protocol(self._files.rows)
        with console.capture() as captured:
            console.print(Group(*terminal.overview(summaries), "\n".join(legend(summaries))))
        return captured.get()

    def __repr__(self) -> str:
        state = self.standing.split()[0].rstrip(":").lower()
        return (
            f"Results({self._run.title}: {len(self._run.trainings)} trainings, "
            f"{len(self._cells)} cells, {len(self.failures)} failed, {state}, in {self.folder})"
        )

    def _repr_html_(self) -> str:
        summaries = by_protocol(self._files.rows)
        body = ""
        for summary in summaries:
            frame = frames.overview_texts(summary, lambda head: " ".join(head.words))
            body += f"<p>{html.escape(summary.protocol)}</p>{frame.to_html(index=False)}"
        below = "".join(f"<li>{html.escape(line)}</li>" for line in legend(summaries))
        return f"<p>{html.escape(repr(self))}</p>{body}<ul>{below}</ul>"


_Given = str | Path | Mapping[str, Any] | suites.Suite
"""A suite as `run` takes it."""
_Values = Mapping[str, Any] | None
"""By their keys."""


def _suite(given: _Given, overrides: _Values) -> suites.Suite:
    if isinstance(given, (str, Path)):
        pairs = [f"{k}={suites.to_toml(v, k)}" for k, v in (overrides or {}).items()]
        return suites.read_suite(str(given), pairs)
    if overrides:
        raise UserError("overrides change a suite's file; change the dict itself instead.")
    if isinstance(given, suites.Suite):
        given = given.model_dump()  # read anew: it may be another's copy with unchecked changes
    if not isinstance(given, Mapping):
        raise UserError(f"suite must be a name, a TOML file or a dict, got {type(given).__name__}.")
    return suites.suite_of(given, "the suite")


def _command(
    suite: _Given, name: str, only: _Values, overrides: _Values, shard: tuple[int, int]
) -> list[str]:
    """The command line that makes the same records; a suite given as a dict is named NAME.toml
    there (run.json holds it whole)."""
    command = ["leakbench", "run", str(suite) if isinstance(suite, (str, Path)) else f"{name}.toml"]
    for key, value in (only or {}).items():
        command += ["--only", f"{key}={suites.as_text(value)}"]
    for key, value in (overrides or {}).items():
        command += ["--set", f"{key}={suites.to_toml(value, key)}"]
    number, of = shard
    return command if of == 1 else [*command, "--shard", f"{number}/{of}"]


def _files(plugins: Sequence[str | Path]) -> list[Path]:
    if isinstance(plugins, (str, Path)):
        plugins = [plugins]
    for plugin in plugins:
        if isinstance(plugin, type):
            raise UserError(
                f"plugins takes Python files, since worker processes cannot find the class "
                f"{plugin.__name__}: save it to a file (in a notebook by %%writefile) and give "
                "its path."
            )
    return [Path(p) for p in plugins]


def _refuse_unguarded_script(caller: FrameType | None) -> None:
    """Raise UserError if workers, which import the script's file, would come here again."""
    while caller is not None:
        names = caller.f_globals
        if caller.f_code.co_name == "<module>" and names.get("__name__") == "__main__":
            break
        caller = caller.f_back
    if caller is None or not names.get("__file__"):
        return  # notebooks and interactive sessions: workers import no file
    if "__name__" in Path(names["__file__"]).read_text(encoding="utf-8", errors="replace"):
        return
    raise UserError(
        "bench.run starts worker processes, which import this script again: call it under "
        'if __name__ == "__main__":, or with jobs=0.'
    )


__all__ = ["Results", "load", "run"]
