"""The overview as LaTeX: whole environments, as many cells as columns, every name escaped."""

import re
from pathlib import Path

import bench

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
    tables = environments(results.overview_to_latex())
    assert "".join(tables) == results.overview_to_latex().replace("\n\n", "\n")
    assert len(tables) == 10
    for environment in tables:
        for rule in ("toprule", "midrule", "bottomrule"):
            assert environment.count(f"\\{rule}\n") == 1
        (columns,) = re.findall(r"\\begin{tabular}{([lr]+)}", environment)
        lines = body(environment)
        assert {len(line) for line in lines} == {len(columns)}
        assert environment.count("\\begin{") == environment.count("\\end{")
