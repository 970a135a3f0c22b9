"""Plots and texts of a report: points, fronts, labels, errors of records."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

from rich.console import Console

from bench.harness.plan import expand
from bench.metrics.intervals import Interval
from bench.records import (
    DoubledScore,
    FlagCode,
    PlannedTraining,
    Row,
)
from bench.report import (
    boards,
    columns,
    plots,
    site,
    terminal,
)
from bench.report.text import markdown
from tests.made_rows import (
    SUITE,
    attack,
    flag,
    interval,
    page,
    row,
    run_of,
    worst,
)

# --- plots ------------------------------------------------------------------------------------


def test_the_front_holds_the_useful_settings_that_none_beats_in_both() -> None:
    rows = [
        row("safe", 0.2, accuracy=interval(0.5)),
        row("good", 0.4, accuracy=interval(0.8)),
        row("beaten", 0.5, accuracy=interval(0.7)),
        row("open", 0.9, accuracy=interval(0.9)),
        row("useless", 0.1, accuracy=interval(0.95), flags=(flag(FlagCode.AT_CHANCE),)),
        row("own", 0.05, accuracy=None, personal_accuracy=interval(0.99), personalised=True),
    ]
    shown = plots.scatter(rows, "leak")
    assert front_of(shown) == ["safe", "good", "open"]
    assert [s.row.defense for s in shown.spots if s.muted] == ["useless"]
    assert [s.row.defense for s in shown.spots if s.hollow] == ["own"]
    assert [band.label for band in shown.floors] == ["reads nothing", "told the labels"]


def front_of(shown: plots.Scatter) -> list[str]:
    return [shown.spots[i].row.defense for i in shown.front]


def test_a_page_shows_a_plot_of_each_table_with_words_for_who_cannot_see_it() -> None:
    text = page(*(row(name, n / 9) for n, name in enumerate(("a", "b", "c"), start=1)))
    assert 'alt="Accuracy against leakage: ' in text
    assert "data:image/svg+xml;base64," in text


def test_epsilons_without_a_number_stand_in_columns_beside_the_axis() -> None:
    rows = [row("a", eps_claimed=10.0, unit="client", eps_record=100.0),
            row("b", eps_claimed=math.inf, unit="record"), row("c"), row("d")]  # fmt: skip
    claimed, proven = (plots.scatter(rows, v) for v in ("claimed", "proven"))
    assert claimed.x.sides == ("inf", "none")
    assert proven.x.sides == ("inf",)
    places = [s.aside for s in proven.spots if s.side]
    assert len(set(places)) == 3  # equal heights in one column do not hide each other
    assert claimed.front == ()  # claims of different units have no front


def test_errors_of_records_are_safer_the_larger_they_are() -> None:
    def record(name: str, error: float, accuracy: float) -> Any:
        entry = attack(None, status="done", reason=None, mse=interval(error, error / 2),
                       floor={"mse": 1.0})  # fmt: skip
        return row(name, accuracy=interval(accuracy), attacks={"analytic": entry},
                   worst=worst(interval(error, error / 2), "mse", "analytic"))  # fmt: skip

    rows = [record("safe", 0.5, 0.6), record("beaten", 0.1, 0.5),
            record("open", 1e-8, 0.9)]  # fmt: skip
    shown = plots.scatter(rows, "leak")
    assert front_of(shown) == ["safe", "open"]
    assert "safer →" in shown.x.label
    (board,) = boards.boards(rows)
    assert board.lines[2].cells[8].text == "1e-8"
    assert [line.cells[0].text for line in board.lines] == ["0.5", "0.9", "1.0"]


def of_records(defense: str = "none", **more: Any) -> Row:
    """A row of an attack that copies records, and of one that guesses."""
    error = Interval(mean=6.68e-17, lo=3.2e-20, hi=1.34e-16)
    copy = attack(None, status="done", reason=None, mse=error,
                  floor={"mse": 0.0873, "mse_class_mean": 4e-3})  # fmt: skip
    guess = replace(copy, scores={"mse": Interval(mean=0.523, lo=0.386, hi=104.2)})
    attacks = {"analytic": copy, "dlg": guess, **more.pop("attacks", {})}
    return row(defense, attacks=attacks, worst=worst(error, "mse", "analytic"), **more)


def test_errors_of_records_read_the_same_in_markdown_and_page_and_are_explained() -> None:
    rows = [of_records()]
    text = markdown(rows, run_of())
    exact = "6.68e-17 [3.2e-20, 1.3e-16]"
    assert f"| 1.0 [0.4, 1.0] | MSE {exact} analytic |" in text
    assert f"| MSE 0.09/4e-3 | {exact} | 0.523 [0.39, 1e2] |" in text
    ((line,),) = [b.lines for b in boards.boards(rows)]
    shown = [(c.text, c.small) for c in line.cells if "[" in c.small and c.text != "0.900"]
    assert shown == [("1.0", "[0.4, 1.0]"), ("MSE 6.68e-17", "[3.2e-20, 1.3e-16] analytic"),
                     ("6.68e-17", "[3.2e-20, 1.3e-16]"), ("0.523", "[0.39, 1e2]")]  # fmt: skip
    for legend in (text, terminal.legend(rows)):
        assert "MSE: error of reconstructed records" in legend
        assert "higher is safer, 0 is a perfect copy" in legend
    for legend in (markdown([row()], run_of()), terminal.legend([row()])):
        assert "MSE" not in legend
    images, records = (terminal.legend(r) for r in ([row()], rows))
    assert "SSIM, LnAcc:" in images
    assert "SSIM, LnAcc:" not in records
    bare = terminal.legend([row(attacks={}, worst=None, leaks=None, eps_record=None)])
    for word in ("leakage:", "upper bound:", "baseline:", "eps proven:"):
        assert word in images
        assert word not in bare
    mixed = [row(), of_records(dataset="adult")]  # no column of all rows together is an MSE
    assert "MSE: error of reconstructed records" in terminal.legend(mixed)


def test_errors_of_records_fit_80_columns_without_becoming_zero() -> None:
    copy = of_records().attacks["analytic"]
    counts = attack(None, status="done", reason=None, lnacc=interval(0.5))
    made = of_records(
        "ms_pafl", settings={"epsilon": 100.0, "noise": "analytic", "check_in": 0.7},
        personalised=True, personal_accuracy=interval(0.8), eps_claimed=8.33e12, unit="record",
        flags=(flag(FlagCode.DIVERGED, reason="weights not finite"), flag(FlagCode.AT_CHANCE)),
        attacks={"idlg": copy, "ridge": copy, "ilrg": counts},
    )  # fmt: skip
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(*terminal.boards([made]), sep="\n")
    text = console.export_text()
    assert "floor 0.09/4e-3" in text
    (first,) = [line.split() for line in text.splitlines() if "8.33e+12/re" in line]
    assert first[-1] == "DC"
    assert {"7e-17", "0.52", "0.50", "1.0"} <= {*text.split()}  # error, accuracy, LnAcc, leak
    assert not {"0", "0.00"} & {*text.split()}
    texts = [columns.two_digits(v, "mse") for v in (0.0, 0.00999, 0.01, 99.0, 1234.0, 1e-100)]
    assert texts == ["0", "1e-2", "0.01", "99.00", "1.2e3", "1e-100"]


def test_a_flag_without_a_letter_is_left_to_the_files() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(*terminal.boards([row(flags=(flag(FlagCode.CLAIMED_NOT_PROVEN),))]), sep="\n")
    text = console.export_text()
    assert "…" not in text
    assert "claimed" not in text


def test_a_part_of_a_suite_shows_the_seeds_that_were_run() -> None:
    jobs = expand(SUITE.model_copy(update={"seeds": [0, 1, 2]})).trainings
    planned = {j.seed: PlannedTraining(key="0" * 24, job=j, cells=()) for j in jobs}
    run = run_of(trainings=(planned[2], planned[2]))
    assert "Device: cpu, seeds [2]" in markdown([row()], run)
    shown = page(row(), run=run)
    assert "<dt>Seeds</dt><dd>2 (95 % interval over victims, not over other trainings)" in shown
    run = run_of(trainings=(planned[2], planned[0]))
    shown = page(row(seeds=(0, 2)), run=run)
    assert "<dt>Seeds</dt><dd>0, 2 (95 % interval over seeds and victims)" in shown
    entry = site.Published(name="a", run=run, rows=[], missing=[], files={}, subjects={})
    assert "seeds 0, 2" in site.index([entry])


def test_attacks_without_room_in_a_terminal_have_a_table_below_and_no_flag_is_lost() -> None:
    names = [f"no{i:02}" for i in range(16)]
    attacks = {n: attack(i / 100) for i, n in enumerate(names)}
    made = row(
        "gaussian",
        attacks=attacks,
        worst=None,
        flags=(flag(FlagCode.AT_CHANCE), flag(FlagCode.AUDIT_REFUTES_CLAIM)),
    )
    console = Console(width=80, file=io.StringIO(), record=True)
    found = terminal.boards([made])
    for table in found:
        console.print(table)
    lines = console.export_text().splitlines()
    assert len(found) > 1
    text = " ".join(lines)
    assert all(n in text for n in names)
    figures = [line.split() for line in lines if " gaussian " in line]
    assert figures[0][-1] == "CV"
    shown = [f for line in figures for f in line if f.startswith("0.") and len(f) == 4]
    assert shown[-16:] == [f"{i / 100:.2f}" for i in range(16)]


def test_an_error_of_several_lines_stays_in_its_row_of_the_markdown_table() -> None:
    reason = "ValueError: a|b\nsecond line\r\nthird"
    attacks = {"dlg": attack(), "idlg": attack(None, status="failed", reason=reason)}
    rows = [row(flags=(flag(FlagCode.AUDIT_FAILED, reason=reason),), attacks=attacks)]
    lines = markdown(rows, run_of()).splitlines()
    body = lines[lines.index(next(line for line in lines if line.startswith("| marks "))) + 2]
    assert body.endswith("audit failed: ValueError: a&#124;b second line third |")
    assert lines[-1] == "- idlg failed: ValueError: a&#124;b second line third (none)"


def test_leakage_is_drawn_against_the_budgets_of_all_suites() -> None:
    def reference(budget: int, ssim: float, again: float) -> Any:
        doubled = DoubledScore(budget=2 * budget, ssim=interval(again))
        entry = attack(ssim, budget=budget, doubled=doubled)
        return row(suite=f"b{budget} v1", attacks={"dlg": entry, "idlg": attack(0.3)})

    rows = [reference(100, 0.5, 0.6), reference(300, 0.7, 0.8)]
    shown = plots.budgets(rows, rows[0])
    assert shown is not None
    ((name, points),) = shown.lines
    assert (name, [(n, at.mean) for n, at in points]) == (
        "dlg", [(100, 0.5), (200, 0.6), (300, 0.7), (600, 0.8)],
    )  # fmt: skip
    assert plots.budgets([row()], row()) is None
    assert 'alt="Leakage against budget: ' in page(*rows)


def test_ticks_are_round_numbers_inside_the_axis() -> None:
    axis = plots.Scale(label="", lo=0.83, hi=0.97)
    assert [t for _, t in axis.ticks()] == ["0.85", "0.90", "0.95"]
    wide = plots.Scale(label="", lo=1e-8, hi=1e4, log=True)
    assert [t for _, t in wide.ticks()] == ["1e-8", "1e-6", "1e-4", "1e-2", "1", "1e2", "1e4"]
