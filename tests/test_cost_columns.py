"""A cost column is one entry of `COSTS`: it is read from records that there are, and shown wherever
costs are."""

import json
from pathlib import Path

import jsonschema
import pytest

import bench
from bench.report import boards, leaderboard, terminal
from bench.report.costs import COSTS, CostColumn, CostPart
from bench.report.files import Files, readme
from bench.report.overview import by_protocol
from tests.made_rows import printed

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / "quick"
SCHEMA = json.loads((ROOT / "bench" / "report" / "schema.json").read_text())


def test_a_new_cost_column_is_one_entry_and_needs_no_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = CostPart(
        label="aggregation per round", read=lambda r: r.workings and r.workings.aggregation
    )
    cost = CostColumn(title="server seconds", note="Of it.", parts={"aggregation_seconds": part})
    before = leaderboard.rows(FOLDER)
    monkeypatch.setitem(COSTS, "server_seconds", cost)
    results, files = bench.load(FOLDER), Files(FOLDER)
    seconds = results.leaderboard(wide=True)["aggregation_seconds"]
    assert seconds.tolist() == [r.workings and r.workings.aggregation for r in before]
    assert "aggregation_seconds" in files.text("csv").splitlines()[0].split(",")
    costs = {name for one in COSTS.values() for name in one.parts}
    for row, value in zip(results.rows, seconds, strict=True):
        jsonschema.validate([row], SCHEMA)
        assert row["aggregation_seconds"] == value
        assert row.keys() - SCHEMA["$defs"]["row"]["properties"].keys() == costs

    multiples = results.overview()["server_seconds"]
    bare = results.overview()["defense"] == "none"
    assert set(multiples[bare].dropna()) == {1.0}
    assert "| client time | server seconds | ε proven |" in readme(FOLDER)
    assert "| client time | server seconds | ε proven |" in files.text("md")
    assert "server seconds" in results.overview_to_latex(columns=["defense", "server seconds"])
    assert "<th>server seconds</th>" in results._repr_html_()
    page = files.text("html")
    assert 'title="Of it. The worst over the tables.">server seconds</th>' in page
    assert 'data-key="server seconds"' in page
    assert "<li>server seconds: Of it.</li>" in page
    text = printed(terminal.overview(by_protocol(files.rows)))
    assert max(map(len, text.splitlines())) <= 80
    heads = [head for summary in by_protocol(files.rows) for head in summary.heads]
    last = [line.split()[-4:] for line in text.splitlines()]
    assert last.count(["bytes", "time", "seconds", "epsilon"]) == len(heads)
    for row_ in boards.details(files.rows)["rows"]:
        assert row_["costs"][-1][0] == "aggregation per round"
