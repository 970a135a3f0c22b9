"""The leaderboard as LaTeX: whole environments, as many cells as columns, every name escaped."""

from __future__ import annotations

import math
import re
from pathlib import Path

import bench
from bench.metrics.intervals import Interval
from bench.records import FlagCode, Marks
from bench.report.text import to_latex
from tests.made_rows import attack, flag, row

RESULTS = Path(__file__).parents[1] / "results" / "quick"


def environments(text: str) -> list[str]:
    return re.findall(r"\\begin{table}\n.*?\\end{table}\n", text, re.DOTALL)


def body(environment: str) -> list[list[str]]:
    """Cells of each line between the rules, heads first."""
    lines = environment.split("\\toprule\n")[1].split("\\bottomrule")[0].splitlines()
    return [
        re.split(r"(?<!\\)&", line.removesuffix(r"\\")) for line in lines if line != "\\midrule"
    ]


def test_every_table_is_a_whole_environment_with_a_cell_per_column() -> None:
    results = bench.load(RESULTS)
    tables = environments(results.to_latex())
    assert "".join(tables) == results.to_latex().replace("\n\n", "\n")
    assert len(tables) == 10
    for environment in tables:
        for rule in ("toprule", "midrule", "bottomrule"):
            assert environment.count(f"\\{rule}\n") == 1
        (columns,) = re.findall(r"\\begin{tabular}{([lr]+)}", environment)
        lines = body(environment)
        assert {len(line) for line in lines} == {len(columns)}
        assert environment.count("\\begin{") == environment.count("\\end{")
    only = results.to_latex(checkpoint="final")
    assert len(environments(only)) == 4
    assert "init round" not in only


def test_figures_are_those_of_the_leaderboard() -> None:
    rows = [
        row("spm", 0.3, settings={"epsilon": 1.5}, eps_claimed=1.5, unit="coordinate",
            flags=(flag(FlagCode.AT_CHANCE),), marks=Marks(best=True, undefended=True),
            accuracy_drop=Interval(mean=0.015, lo=-0.01, hi=0.04)),
        row("none", 0.9, eps_record=math.inf,
            attacks={"dlg": attack(0.9, failed=2), "ilrg": attack(None)}),
    ]  # fmt: skip
    heads, spm, none = body(to_latex(rows))
    assert [h.strip() for h in heads[:6]] == [
        "marks", "defense", "leakage", "upper bound", "accuracy drop", "accuracy",
    ]  # fmt: skip
    assert [c.strip() for c in spm[:6:2]] == [
        "{}*=", r"0.1 {\footnotesize [0.0, 0.7]}", r"2 {\footnotesize [$-$1, 4]}",
    ]  # fmt: skip
    assert spm[6].strip() == r"1.5 {\footnotesize /coordinate}"
    assert [h.strip() for h in heads[6:9]] == [
        r"$\varepsilon$ claimed", r"$\varepsilon$ proven", r"$\varepsilon$ audited",
    ]  # fmt: skip
    assert spm[-1].strip() == "C"
    assert none[0].strip() == ""
    assert none[7].strip() == r"$\infty$"
    assert r"0.900 {\footnotesize (2 failed)}" in "&".join(none)
    assert "C: accuracy at chance" in to_latex(rows)
    assert "[0.85, 0.95]" not in to_latex(rows)
    assert r"0.900 {\footnotesize [0.85, 0.95]}" in to_latex(rows, intervals=True)
