"""Plots and texts of a report: points, fronts, labels, errors of records."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.harness.plan import expand
from bench.metrics.intervals import Interval
from bench.records import (
    FlagCode,
    PlannedTraining,
    Row,
)
from bench.report import (
    columns,
    plots,
    site,
    terminal,
)
from bench.report.text import markdown
from tests.made_rows import (
    SUITE,
    attack,
    cells_of,
    flag,
    interval,
    page,
    printed,
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
    figure = plots.pareto(rows)
    assert front_of(figure) == pytest.approx(np.array([(0.0, 0.5), (0.25, 0.8), (0.875, 0.9)]))
    (legend,) = figure.legends
    names = {t.get_text() for t in legend.get_texts()}
    assert {"useless (no use)", "own (own networks)"} <= names


def front_of(figure: Any) -> list[Any]:
    """Return the points of the front that a figure shows."""
    (line,) = [one for one in figure.axes[0].lines if one.get_label() == "front"]
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_a_page_shows_a_plot_of_each_table_with_words_for_who_cannot_see_it() -> None:
    text = page(*(row(name, n / 9) for n, name in enumerate(("a", "b", "c"), start=1)))
    assert 'alt="Accuracy against leakage: ' in text
    assert "data:image/svg+xml;base64," in text


def test_errors_of_records_leak_less_the_larger_they_are() -> None:
    def record(name: str, error: float, accuracy: float) -> Any:
        entry = attack(None, status="done", reason=None, mse=interval(error, error / 2),
                       floor={"mse": 1.0})  # fmt: skip
        return row(name, accuracy=interval(accuracy), attacks={"analytic": entry},
                   worst=worst(interval(error, error / 2), "mse", "analytic"))  # fmt: skip

    rows = [record("safe", 0.5, 0.6), record("beaten", 0.1, 0.5),
            record("open", 1e-8, 0.9)]  # fmt: skip
    figure = plots.pareto(rows)
    assert front_of(figure) == pytest.approx(np.array([(0.5, 0.6), (1.0, 0.9)]))
    shown = cells_of(rows)
    assert shown[2]["analytic MSE"].text == "1e-8"
    assert [cells["leakage"].text for cells in shown] == ["0.5", "0.9", "1.0"]


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
    (cells,) = cells_of(rows)
    shown = [(c.text, c.small) for c in cells.values() if "[" in c.small and c.text != "0.900"]
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
    text = printed(terminal.boards([made]))
    assert max(map(len, text.splitlines())) <= 80
    assert "0.09/4e-3" in text
    (first,) = [line.split() for line in text.splitlines() if "8.33e+12/re" in line]
    assert first[-1] == "DC"
    assert {"6.68e-17", "0.800", "0.500", "1.0"} <= {*text.split()}
    assert not {"0", "0.00"} & {*text.split()}
    texts = [columns.two_digits(v, "mse") for v in (0.0, 0.00999, 0.01, 99.0, 1234.0, 1e-100)]
    assert texts == ["0", "1e-2", "0.01", "99.00", "1.2e3", "1e-100"]


def test_a_flag_without_a_letter_is_left_to_the_files() -> None:
    text = printed(terminal.boards([row(flags=(flag(FlagCode.CLAIMED_NOT_PROVEN),))]))
    assert "…" not in text
    (line,) = [one.split() for one in text.splitlines() if " inf" in one]
    assert line == ["none", "0.4", "–", "0.900", "–", "inf"]


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
    entry = object.__new__(site.Published)
    known = {"name": "a", "run": run, "rows": [], "missing": []}
    vars(entry).update(known, submission=None, verified=None)
    assert "seeds 0, 2" in site.pages([entry])["index.html"]


def test_attacks_without_room_in_a_terminal_have_a_table_below_and_no_flag_is_lost() -> None:
    names = [f"no{i:02}" for i in range(16)]
    attacks = {n: attack(i / 100) for i, n in enumerate(names)}
    made = row(
        "gaussian",
        attacks=attacks,
        worst=None,
        flags=(flag(FlagCode.AT_CHANCE), flag(FlagCode.AUDIT_REFUTES_CLAIM)),
    )
    tables = terminal.boards([made])
    lines = printed(tables).splitlines()
    assert len(tables) > 1
    text = " ".join(lines)
    assert all(n in text for n in names)
    figures = [line.split() for line in lines if " gaussian " in line]
    assert figures[0][-1] == "CV"
    shown = [f for line in figures[1:] for f in line if f.startswith("0.") and len(f) == 5]
    assert shown == [f"{i / 100:.3f}" for i in range(16)]


def test_an_error_of_several_lines_stays_in_its_row_of_the_markdown_table() -> None:
    reason = "ValueError: a|b\nsecond line\r\nthird"
    attacks = {"dlg": attack(), "idlg": attack(None, status="failed", reason=reason)}
    rows = [row(flags=(flag(FlagCode.AUDIT_FAILED, reason=reason),), attacks=attacks)]
    lines = markdown(rows, run_of()).splitlines()
    body = lines[lines.index(next(line for line in lines if line.startswith("| marks "))) + 2]
    assert body.endswith("audit failed: ValueError: a&#124;b second line third |")
    assert lines[-1] == "- idlg failed: ValueError: a&#124;b second line third (none)"
