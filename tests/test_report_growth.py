"""What a report of many records may cost: every record is read once.

How long it takes is measured in tests/benchmarks/test_report_growth.py.
"""

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.harness.store import Store
from bench.records import Run
from bench.report import leaderboard, plots
from tests.benchmarks.drawn_folder import Extent, write


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of two and of four settings."""
    out = {}
    for settings in (2, 4):
        out[settings] = tmp_path_factory.mktemp("drawn") / "results"
        write(out[settings], Extent(tasks=1, settings=settings))
    return out


def test_rows_read_every_record_once(
    drawn: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: Counter[str] = Counter()
    original = Store.read

    def counted(self: Store, kind: Any, key: str) -> Any:
        reads[key] += 1
        return original(self, kind, key)

    monkeypatch.setattr(Store, "read", counted)
    for settings, folder in drawn.items():
        reads.clear()
        assert len(leaderboard.rows(folder)) == 2 * settings
        run = Run.read(folder)
        assert reads == Counter([t.key for t in run.trainings] + [c.key for c in run.cells])


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_that_of_comparing_every_pair(seed: int) -> None:
    rng = np.random.default_rng(seed)
    xs, ys = rng.integers(5, size=12).astype(float), rng.integers(5, size=12).astype(float)
    points = [(math.inf if x == 4 else x, -y) for x, y in zip(xs, ys, strict=True)]
    beaten = {
        i for (i, (x, y)), (u, v) in itertools.product(enumerate(points), points)
        if (u <= x and v <= y) and (u < x or v < y)
    }  # fmt: skip
    assert set(plots.front(points)) == set(range(len(points))) - beaten
