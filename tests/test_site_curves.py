"""Sweeps on the site: leak over the value that was varied."""

from __future__ import annotations

import base64
import csv
import shutil
from pathlib import Path

import pytest

from bench.errors import UserError
from bench.report import curves, site
from bench.report.sweep import COLUMNS

RESULTS = Path(__file__).parents[1] / "results"


def _sweep(
    folder: Path, values: list[str], *, leak: str = "0.5", over: str = "threat.batch"
) -> Path:
    file = folder / "sweep.csv"
    with file.open("w") as text:
        lines = csv.DictWriter(text, COLUMNS)
        lines.writeheader()
        for value in values:
            for setting in ("spm(epsilon=1)", "none"):
                lines.writerow(
                    {"over": over, "value": value, "protocol": "fedavg", "dataset": "digits",
                     "model": "lenet", "checkpoint": "final", "setting": setting, "leak": leak}
                )  # fmt: skip
    return file


def test_a_plot_has_a_line_per_setting_and_says_what_it_shows(tmp_path: Path) -> None:
    lines = curves.read(_sweep(tmp_path, ["8", "1", "2"]))
    (view,) = curves.views(lines, name="s")
    assert view.choice == "Leak over threat.batch: fedavg · digits · lenet · final"
    assert f'alt="{view.choice}"' in view.drawing
    drawn = base64.b64decode(view.drawing.partition("base64,")[2].rstrip('">')).decode()
    for text in ("spm(epsilon=1)", "none", "threat.batch", "leak (safer"):
        assert f"<!-- {text}" in drawn  # matplotlib draws text as paths, named by comments
    assert curves.views(lines, name="s")[0].drawing == view.drawing


def test_a_sweep_over_texts_or_without_leaks_is_left_out(tmp_path: Path) -> None:
    assert curves.read(_sweep(tmp_path, ["fedavg", "fedsgd"])) == []
    assert curves.read(_sweep(tmp_path, ["1"], leak="")) == []
    assert curves.read(_sweep(tmp_path, ["1"], leak="7")) == []


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has no column 'leak'"):
        curves.read(tmp_path / "sweep.csv")


def test_the_site_draws_the_committed_sweeps_and_has_their_tables(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "curves", tmp_path / "results" / "curves")
    front, *_ = site.write(tmp_path / "results", tmp_path / "site")
    page = front.read_text()
    assert page.count('class="plot"') == 6  # three tables over batch and over rounds
    for name in ("batch", "rounds"):
        assert f"Leak over threat.{name} <span" in page
        table = (tmp_path / "site" / "curves" / name / "sweep.csv").read_text()
        assert table == (RESULTS / "curves" / name / "sweep.csv").read_text()
