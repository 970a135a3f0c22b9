"""What a report of many records may cost: every record read once, every shape resampled once.

How long it takes is measured in tests/benchmarks/test_report_growth.py.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.harness.store import Store
from bench.metrics import intervals
from bench.metrics.intervals import RESAMPLES, Interval, bootstrap, bootstraps
from bench.records import Run
from bench.report import entries, leaderboard, plots, terminal, text
from bench.report.files import FILES, Files
from bench.seeding import numpy_generator
from tests.benchmarks.drawn_folder import Extent, write
from tests.made_rows import row

SIZES = [(1,), (7,), (8,), (9,), (24,), (130,), (8, 8, 8), (10, 9, 10), (1, 5), (3, 0, 8), (2, 2)]


def one_by_one(groups: list[np.ndarray]) -> Interval:
    """The bootstrap as its definition says it: seeds, then victims of each drawn seed."""
    groups = [g for g in groups if len(g)]
    rng = numpy_generator(0, "bootstrap")
    if len({len(g) for g in groups}) == 1:
        table = np.stack(groups)
        seeds = rng.integers(len(table), size=(RESAMPLES, len(table)))
        victims = rng.integers(table.shape[1], size=(RESAMPLES, *table.shape))
        means = table[seeds[..., None], victims].mean(axis=(1, 2))
    else:
        means = np.empty(RESAMPLES)
        for i in range(RESAMPLES):
            drawn = [groups[j] for j in rng.integers(len(groups), size=len(groups))]
            means[i] = np.concatenate([rng.choice(g, size=len(g)) for g in drawn]).mean()
    tail = 100 * (1 - intervals.LEVEL) / 2
    lo, hi = np.percentile(means, [tail, 100 - tail])
    mean = float(np.concatenate(groups).mean())
    return Interval(mean=mean, lo=min(float(lo), mean), hi=max(float(hi), mean))


def drawn_entries(seed: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    out = []
    for sizes in SIZES:
        out.append([rng.random(n) * 1e-7 for n in sizes])
        if len(set(sizes)) > 1:
            continue  # the definition takes its time with these
        out.append([(rng.random(n) > 0.5).astype(float) for n in sizes])
        out.append([-np.round(10 * rng.random(n), 1) for n in sizes])
    return [out[i] for i in rng.permutation(len(out))]


def test_intervals_of_many_entries_are_to_the_last_bit_those_of_each_alone() -> None:
    found = bootstraps(drawn_entries(1))
    assert found == [one_by_one(groups) for groups in drawn_entries(1)]


def test_an_entry_without_values_has_no_interval_and_changes_no_other() -> None:
    groups = [np.array([0.1, 0.7, 0.2])]
    assert bootstraps([[], groups, [np.array([])], groups]) == [
        None, bootstrap(groups), None, one_by_one(groups),
    ]  # fmt: skip


def test_a_figure_that_is_not_a_number_stays_one_in_its_interval() -> None:
    interval = bootstrap([np.array([0.1, math.nan, 0.3]), np.array([0.5])])
    assert interval is not None
    assert all(math.isnan(v) for v in (interval.mean, interval.lo, interval.hi))


def test_more_entries_than_fit_at_once_are_no_different() -> None:
    many = [[np.random.default_rng(i).random(5)] for i in range(2 * intervals._AT_ONCE + 3)]
    found = bootstraps(many)
    for i in (0, intervals._AT_ONCE - 1, intervals._AT_ONCE, len(many) - 1):
        assert found[i] == one_by_one(many[i])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of two and of four settings."""
    out = {}
    for settings in (2, 4):
        out[settings] = tmp_path_factory.mktemp("drawn") / "results"
        write(out[settings], Extent(tasks=1, settings=settings))
    return out


def test_rows_read_every_record_once_and_draw_resamples_once_per_shape(
    drawn: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times the rows are four times the work, and the same resamples."""
    reads: Counter[str] = Counter()
    original = Store.read

    def counted(self: Store, kind: Any, key: str) -> Any:
        reads[key] += 1
        return original(self, kind, key)

    monkeypatch.setattr(Store, "read", counted)
    shapes: set[tuple[int, ...]] = set()
    asked = 0

    def noted(some: Any) -> Any:
        nonlocal asked
        asked += len(some)
        shapes.update(tuple(len(g) for g in groups) for groups in some if groups)
        return bootstraps(some)

    monkeypatch.setattr(entries, "bootstraps", noted)
    work = {}
    for settings, folder in drawn.items():
        reads.clear()
        shapes.clear()
        asked = 0
        intervals._draws.cache_clear()
        assert len(leaderboard.rows(folder)) == 2 * settings
        run = Run.read(folder)
        keys = [t.key for t in run.trainings] + [c.key for c in run.cells]
        assert reads == Counter(keys)
        assert intervals._draws.cache_info().misses == len(shapes)
        work[settings] = asked
    # Beside those of each row there are the reference's runs at twice the budget.
    assert work[4] <= 2 * work[2] < 2 * work[4]


def test_the_order_in_which_intervals_are_computed_changes_no_row(
    drawn: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = leaderboard.rows(drawn[2])
    monkeypatch.setattr(entries.Intervals, "AT_ONCE", 1)
    assert leaderboard.rows(drawn[2]) == together


def test_all_files_come_from_one_reading_of_the_records(
    drawn: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = leaderboard.rows
    monkeypatch.setattr(leaderboard, "rows", lambda f: calls.append(f) or original(f))
    texts: list[Any] = []
    to_json = text.to_leaderboard_json
    monkeypatch.setattr(
        text, "to_leaderboard_json", lambda rows: texts.append(rows) or to_json(rows)
    )
    found = Files(drawn[2])
    assert all(found.text(name) for name in FILES)
    assert len(calls) == len(texts) == 1


def test_a_terminal_shows_one_line_per_table_of_very_many_rows() -> None:
    most = terminal.MOST_ROWS
    few = [row(f"d{i}", i + 1) for i in range(most)]
    (whole,) = terminal.shown(few)
    assert whole.row_count == most
    more = [*few, *(row(f"e{i}", i + 1, checkpoint="final") for i in range(3))]
    (overview,) = terminal.shown(more)
    assert [list(column.cells)[:2] for column in overview.columns][1:3] == [
        ["d0", "e0"], [str(most), "3"],
    ]  # fmt: skip


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
