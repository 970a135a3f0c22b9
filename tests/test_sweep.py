"""`leakbench sweep`: one suite over several values of one key."""

import csv
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.records import Run
from bench.report import leaderboard
from tests.small_folders import call

WITH_IMAGES = {
    'name = "ilrg"': 'name = "analytic"', '["init", "final"]': '["init"]', "[0.5, 2.0]": "2.0",
}  # fmt: skip


def swept(suite: Path, out: Path, *more: str) -> str:
    result = call("sweep", suite, "--out", out, "--jobs", "0", *more)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_a_sweep_runs_every_value_and_shows_leakage_over_it(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    suite, out = tiny(**WITH_IMAGES), tmp_path / "out"
    text = swept(suite, out, "--over", "threat.rounds=1,3", "--figures", "png,pdf")
    assert ": leakage" in text
    for value in (1, 3):
        (threat,) = Run.read(out / f"threat.rounds={value}").suite.threats
        assert threat.rounds == value
    lines = list(csv.DictReader((out / "sweep.csv").open()))
    assert [(r["over"], r["value"]) for r in lines[:: len(lines) // 2]] == [
        ("threat.rounds", "1"),
        ("threat.rounds", "3"),
    ]
    for value in ("1", "3"):  # the figures are those of each value's own leaderboard
        rows = leaderboard.load(out / f"threat.rounds={value}")
        mine = {r["setting"]: r for r in lines if r["value"] == value}
        assert {r.setting for r in rows} == set(mine)
        for row in rows:
            assert float(mine[row.setting]["leakage"]) == row.leak
            assert mine[row.setting]["observed"] == row.observed
    assert "in 3 rounds" in lines[-1]["observed"]
    names = sorted(p.name for p in (out / "figures").iterdir())
    assert names == [f"fedavg-digits-mlp_spm-init-sweep.{ending}" for ending in ("pdf", "png")]
    assert "0 run" in swept(suite, out, "--over", "threat.rounds=1,3")  # all is there already


@pytest.mark.slow
def test_any_value_of_the_suite_can_be_swept(tiny: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    over = "defenses.1.settings.epsilon=0.5,8"
    text = swept(tiny(**WITH_IMAGES), out, "--over", over, "--set", "budget=4")
    (curve,) = re.findall(r"^\W*spm\W+(.*)$", text, re.MULTILINE)  # one, through both values
    assert len(re.findall(r"\d\.\d{2}", curve)) == 2
    lines = list(csv.DictReader((out / "sweep.csv").open()))
    assert {r["setting"] for r in lines} == {"none", "spm(epsilon=0.5)", "spm(epsilon=8)"}
    assert Run.read(out / "defenses.1.settings.epsilon=8").suite.budget == 4
