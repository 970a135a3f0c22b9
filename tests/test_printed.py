"""What papers print, beside what was measured."""

import itertools
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from bench.harness.plan import expand
from bench.metrics.intervals import Interval
from bench.records import PlannedTraining, Row, Run
from bench.records.flags import Flag, FlagCode
from bench.registry import Registry
from bench.report import leaderboard
from bench.report.leaderboard import heading, settings_of
from bench.suite import read_suite
from tests.docs_modules import formulas, printed
from tests.made_rows import row
from tests.small_folders import leakbench

ROOT = Path(__file__).parents[1]
TABLES = [(p, t) for p in printed.papers() for t in printed.read_paper(p).tables]
IDS = [f"{paper}-{table.id}" for paper, table in TABLES]


def accuracy(mean: float, half: float) -> Interval:
    return Interval(mean=mean, lo=mean - half, hi=mean + half)


def example(**changes: object) -> printed.PrintedTable:
    content = {
        "id": "table-1",
        "title": "Accuracy",
        "unit": "%",
        "run": "leakbench run quick",
        "paper_run": "leakbench run full",
        "factor": 100.0,
        "digits": 1,
        "columns": [
            {"title": "0.5", "pick": {"settings.epsilon": 0.5}},
            {"title": "2", "pick": {"settings.epsilon": 2.0}},
        ],
        "rows": [
            {"title": "Ours", "pick": {"defense": "spm"}, "printed": [90.0, 95.0]},
            {"title": "Theirs", "pick": {"defense": "duchi"}, "printed": [50.0, "NaN"]},
        ],
        "claims": [{"says": "Ours is better.", "left": "Ours", "right": "Theirs", "by": 5.0}],
    }
    return printed.PrintedTable.model_validate(content | changes)


def rows(seeds: tuple[int, ...] = (0, 1, 2)) -> list[Row]:
    spm = [
        row("spm", seeds=seeds, settings={"epsilon": e}, accuracy=accuracy(a, 0.02))
        for e, a in ((0.5, 0.89), (2.0, 0.3))
    ]
    duchi = [
        row("duchi", seeds=seeds, settings={"epsilon": e}, accuracy=accuracy(a, 0.02))
        for e, a in ((0.5, 0.4), (2.0, 0.4))
    ]
    return [*spm, *duchi]


def test_a_cell_finds_its_row_and_says_whether_the_printed_figure_is_met(
    registry: Registry,
) -> None:
    shown = printed.compared(example(), rows(), registry)
    assert [[shown.text(c) for c in cells] for cells in shown.cells] == [
        [("90.0", "89.0 [87.0, 91.0]"), ("95.0", "30.0 [28.0, 32.0]")],
        [("50.0", "40.0 [38.0, 42.0]"), ("NaN", "40.0 [38.0, 42.0]")],
    ]
    assert [[c.differs for c in cells] for cells in shown.cells] == [[False, True], [True, False]]


def test_what_differs_has_a_reason_or_is_open(registry: Registry) -> None:
    assert printed.compared(example(), rows(), registry).reasons == {
        "open": ["Ours (1 of 2)", "Theirs (1 of 1)"]
    }
    table = example(why="A tenth of the data.")
    own = table.rows[0].model_copy(update={"why": "No learning rate is named."})
    table = table.model_copy(update={"rows": [own, table.rows[1]]})
    assert printed.compared(table, rows(), registry).reasons == {
        "No learning rate is named.": ["Ours (1 of 2)"],
        "A tenth of the data.": ["Theirs (1 of 1)"],
    }


def test_a_claim_is_held_against_every_measured_column(registry: Registry) -> None:
    (verdict,) = printed.compared(example(), rows(), registry).verdicts
    assert verdict.text == "holds in 1, does not hold in 1 of 2 columns"
    near = [{"says": "", "left": "Ours", "right": "Theirs", "by": 48.0}]
    (verdict,) = printed.compared(example(claims=near), rows(), registry).verdicts
    assert verdict.text == "does not hold in 1, cannot be told in 1 of 2 columns"
    (verdict,) = printed.compared(example(), [], registry).verdicts
    assert verdict.text == "not measured"
    lost = [{"says": "", "left": "Theirs", "right": "Ours", "by": 20.0}]
    (verdict,) = printed.compared(example(claims=lost), rows(), registry).verdicts
    assert verdict.text == "does not hold in all 2 columns"


def test_one_training_carries_only_what_exceeds_the_spread_of_trainings(registry: Registry) -> None:
    table = example(claims=[{"says": "", "left": "Ours", "right": "Theirs", "by": 40.0}])
    (verdict,) = printed.compared(table, rows(), registry).verdicts
    assert verdict.text == "holds in 1, does not hold in 1 of 2 columns"
    (verdict,) = printed.compared(table, rows(seeds=(0,)), registry).verdicts
    assert verdict.text == (
        "does not hold in 1, cannot be told in 1 of 2 columns, from one training of each"
    )


def test_a_diverged_training_is_marked(registry: Registry) -> None:
    flag = Flag(code=FlagCode.DIVERGED, values={"reason": "weights grew"})
    first, *rest = rows()
    shown = printed.compared(example(), [replace(first, flags=(flag,)), *rest], registry)
    assert shown.text(shown.cells[0][0])[1].endswith("]†")
    assert "†: the training diverged." in printed.findings(shown)


def test_a_cell_that_two_rows_fit_is_an_error(registry: Registry) -> None:
    with pytest.raises(ValueError, match=r"table-1, Ours, 0.5 fits several rows"):
        printed.compared(example(), [*rows(), *rows()], registry)


def test_a_cell_may_be_a_formula_of_the_ledger(registry: Registry) -> None:
    facts = {"facts.parameters": 10, "facts.rounds": 4, "facts.clients": 2}
    settings = {"settings.noise_multiplier": 2.0, "settings.clip_norm": 1.0}
    table = example(
        columns=[{"title": "", "pick": {}}],
        rows=[{"title": "proven"}],
        pick={"defense": "gaussian", **facts, **settings},
        read="ledger.proven epsilon",
        claims=[],
        factor=1.0,
    )
    ((cell,),) = printed.compared(table, [], registry).cells
    _, text = leakbench("ledger", "gaussian", "--set", "noise_multiplier=2", "--set", "clip_norm=1",
                        "--facts", "parameters=10,rounds=4,clients=2", "--json")  # fmt: skip
    assert cell.measured is not None
    assert f'"eps_record": {cell.measured.value.mean}' in text


# --- the papers that are shipped ------------------------------------------------------------------


@cache
def planned(command: str) -> list[Row]:
    """The rows, without figures, of what a command runs; none of a ledger's."""
    rows: list[Row] = []
    for one in command.split(" && "):
        _, verb, *arguments = shlex.split(one)
        if verb in ("ledger", "docs/formulas.py"):
            continue
        name, *options = arguments
        pairs = list(itertools.pairwise(options))
        suite = read_suite(name, [o for f, o in pairs if f == "--set"])
        only = dict(o.split("=", 1) for f, o in pairs if f == "--only")
        plan = expand(suite, {"seed": suite.seeds[0]} | only)  # all seeds run the same
        run = Run(suite=suite, trainings=())
        for members in settings_of(
            PlannedTraining(key="", job=job, cells=()) for job in plan.trainings
        ):
            rows += [heading(run, members[0], c) for c in suite.checkpoints]
    return rows


@pytest.mark.parametrize(("paper", "table"), TABLES, ids=IDS)
def test_every_command_of_a_paper_makes_figures_of_its_table(
    paper: str, table: printed.PrintedTable
) -> None:
    for command in {table.run, table.paper_run} - {""}:
        verbs = {shlex.split(one)[1] for one in command.split(" && ")}
        assert verbs <= {"run", "ledger", "docs/formulas.py"}
        if "run" not in verbs:
            continue
        rows = planned(command)
        counterparts = [
            printed.counterpart(table, line, column, rows)
            for line in table.rows
            for column in table.columns
            if not (column.read or line.read or table.read).startswith("ledger.")
        ]
        assert any(counterparts), f"{command} makes nothing of {table.id}"


@cache
def published_rows(paper: str) -> list[Row]:
    folder = ROOT / "results" / "papers" / paper
    return leaderboard.load(folder) if folder.is_dir() else []


@pytest.mark.parametrize(("paper", "table"), TABLES, ids=IDS)
def test_every_table_of_a_paper_is_shown_with_its_ledger(
    paper: str, table: printed.PrintedTable, registry: Registry
) -> None:
    shown = printed.compared(table, published_rows(paper), registry)
    for line, cells in zip(table.rows, shown.cells, strict=True):
        for column, cell in zip(table.columns, cells, strict=True):
            if (column.read or line.read or table.read).startswith("ledger."):
                assert cell.measured is not None, (line.title, column.title)
    # What the paper's own scale alone makes, for want of its data, is not among the results.
    large = table.run.startswith(f"leakbench run {paper}_paper ")
    if published_rows(paper) and table.run and not large:
        assert any(c.measured for cells in shown.cells for c in cells)
    for command in {table.run, table.paper_run} - {""}:
        for one in command.split(" && "):
            _, verb, *arguments = shlex.split(one)
            if verb == "docs/formulas.py":
                assert formulas.main(arguments)
            if verb == "ledger":
                code, text = leakbench(verb, *arguments)
                assert code == 0, text


def test_every_paper_and_table_has_its_place_in_the_docs() -> None:
    for paper in printed.papers():
        text = (ROOT / "docs" / "papers" / f"{paper}.md").read_text()
        placed = re.findall(rf"^```printed {paper} (\S+)", text, re.MULTILINE)
        assert placed == [t.id for t in printed.read_paper(paper).tables]
        assert "VERDICT" not in text


def test_the_script_shows_a_table_and_refuses_a_paper_that_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed.main([])
    listed = capsys.readouterr().out
    assert all(f"{p}: {printed.read_paper(p).title} (" in listed for p in printed.papers())
    results = str(ROOT / "results" / "papers" / "spm")
    printed.main(["spm", "--table", "table-2", "--results", results])
    shown = capsys.readouterr().out
    assert "SPM" in shown
    assert "Made by `leakbench run spm" in shown
    with pytest.raises(SystemExit, match="2"):
        printed.main(["spn"])
    assert "Did you mean 'spm'" in capsys.readouterr().err
