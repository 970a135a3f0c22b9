"""Sweeps on the site: leakage over the value that was varied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.errors import UserError
from bench.report import site

RESULTS = Path(__file__).parents[1] / "results"


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has no column 'over'"):
        site.sweeps(tmp_path)


def test_the_site_shows_the_committed_sweeps_and_has_their_tables(tmp_path: Path) -> None:
    for name in ("curves", "as_trained_data"):
        shutil.copytree(RESULTS / name, tmp_path / "results" / name)
    front, *_ = site.write(tmp_path / "results", tmp_path / "site")
    page = front.read_text()
    assert page.count('alt="Leakage over ') == 6  # three tables over batch and over rounds
    assert 'alt="Leakage over threat.batch: fedavg-digits-lenet-final"' in page
    for name in ("batch", "rounds"):
        assert f"Leakage over threat.{name} <span" in page
        table = (tmp_path / "site" / "curves" / name / "sweep.csv").read_text()
        assert table == (RESULTS / "curves" / name / "sweep.csv").read_text()
