"""Intervals hold what they say: `python -m tests.test_intervals` prints the table of the docs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import binomtest

from bench.errors import UserError
from bench.metrics.intervals import Interval, interval_of, share_interval
from bench.seeding import numpy_generator

DOCS = Path(__file__).parents[1] / "docs" / "method.md"
SIMULATIONS = 2000
LEAST = 0.93
FIGURES = {
    "normal": lambda rng, size: rng.normal(size=size),
    "exponential": lambda rng, size: rng.exponential(size=size) - 1,
    "beta(.5, 3)": lambda rng, size: (rng.beta(0.5, 3, size=size) - 1 / 7) / (6 / 4.5 / 49) ** 0.5,
}
"""Victims' figures of mean 0 and standard deviation 1."""
ONE_SEED = [(1, n, 0.0, figures) for n in (8, 16, 32) for figures in FIGURES]
SEVERAL = [
    (seeds, n, spread, figures)
    for seeds in (3, 4, 5)
    for n in (4, 8, 32)
    for spread in (0.5, 1.0)
    for figures in ("normal", "exponential")
]


def covered(seeds: int, victims: int, spread: float, figures: str) -> float:
    """Share of intervals that hold the true mean. spread: of seeds, in victims' deviations."""
    rng = numpy_generator(0, "coverage", seeds, victims, figures, str(spread))
    size = (SIMULATIONS, seeds, victims)
    values = FIGURES[figures](rng, size) + spread * rng.normal(size=(SIMULATIONS, seeds, 1))
    found = [interval_of(list(groups)) for groups in values]
    return float(np.mean([i is not None and i.lo <= 0 <= i.hi for i in found]))


def table() -> str:
    """Coverage of every case, as Markdown."""
    lines = [
        "| seeds | victims | spread of seeds | " + " | ".join(FIGURES) + " |",
        "|---|---|---|" + "---|" * len(FIGURES),
    ]
    cases = dict.fromkeys((s, n, spread) for s, n, spread, _ in (*ONE_SEED, *SEVERAL))
    for seeds, victims, spread in cases:
        shares = [f"{covered(seeds, victims, spread, f):.3f}" for f in FIGURES]
        between = "-" if seeds == 1 else f"{spread:g}"
        lines.append(f"| {seeds} | {victims} | {between} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


@pytest.mark.parametrize("case", [*ONE_SEED, *SEVERAL], ids=lambda c: "-".join(map(str, c)))
def test_intervals_hold_the_truth_as_often_as_they_should(
    case: tuple[int, int, float, str],
) -> None:
    assert covered(*case) >= LEAST


@pytest.mark.slow
def test_the_docs_have_the_table_that_this_file_prints() -> None:
    assert table() in DOCS.read_text()


def test_several_seeds_have_students_interval_on_their_means() -> None:
    groups = [np.array([0.1, 0.3]), np.array([0.4, 0.2]), np.array([0.5, 0.5])]
    found = interval_of(groups)
    means = [g.mean() for g in groups]
    lo, hi = stats.t.interval(0.95, 2, loc=np.mean(means), scale=stats.sem(means))
    assert found is not None
    assert (found.mean, found.lo, found.hi) == pytest.approx((np.mean(means), lo, hi))


def test_seeds_of_unequal_size_weigh_by_their_victims() -> None:
    groups = [np.zeros(9), np.ones(1), np.zeros(10)]
    found = interval_of(groups)
    assert found is not None
    assert found.mean == pytest.approx(1 / 20)
    gaps = np.array([-9 / 20, 19 / 20, -10 / 20])
    error = np.sqrt(3 / 2 * (gaps**2).sum()) / 20
    assert found.hi - found.mean == pytest.approx(stats.t.ppf(0.975, 2) * error)


def test_one_seed_is_over_victims_and_wider_than_students_interval() -> None:
    values = np.array([0.1, 0.7, 0.2, 0.4, 0.9, 0.3, 0.5, 0.6])
    found = interval_of([values])
    assert found is not None
    lo, hi = stats.t.interval(0.95, 7, loc=values.mean(), scale=stats.sem(values))
    assert found.lo < lo < hi < found.hi


def test_an_interval_is_cut_at_the_range_of_the_metric() -> None:
    found = interval_of([np.array([0.9, 1.0, 0.2])], (-1.0, 1.0))
    assert found is not None
    assert (found.mean, found.lo, found.hi) == (pytest.approx(0.7), -1.0, 1.0)
    assert interval_of([np.array([0.4])], (0.0, 1.0)) == Interval(mean=0.4, lo=0.0, hi=1.0)
    assert interval_of([np.array([0.4])], (0.0, math.inf)) == Interval(mean=0.4, lo=0.0, hi=0.4)


def test_without_a_value_there_is_no_interval_and_nan_stays_nan() -> None:
    assert interval_of([]) is None
    assert interval_of([np.array([])]) is None
    assert share_interval([], []) is None
    found = interval_of([np.array([0.1, math.nan, 0.3]), np.array([0.5])])
    assert found is not None
    assert all(math.isnan(v) for v in (found.mean, found.lo, found.hi))


@given(
    groups=st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=9), min_size=1, max_size=5).map(
        lambda lists: [np.array(v) for v in lists]
    )
)
@settings(max_examples=50, deadline=None)
def test_the_interval_holds_its_mean_and_stays_in_range(groups: list[np.ndarray]) -> None:
    found = interval_of(groups, (0.0, 1.0))
    assert found is not None
    assert 0 <= found.lo <= found.mean <= found.hi <= 1
    assert found.mean == pytest.approx(np.concatenate(groups).mean())


def test_shares_of_one_seed_have_wilsons_interval() -> None:
    found = share_interval([37], [50])
    reference = binomtest(37, 50).proportion_ci(method="wilson")
    assert found is not None
    assert (found.mean, found.lo, found.hi) == pytest.approx((0.74, reference.low, reference.high))
    for right in (0, 50):
        edge = share_interval([right], [50])
        assert edge is not None
        assert 0 <= edge.lo < edge.hi <= 1


def test_shares_of_several_seeds_are_over_seeds() -> None:
    found = share_interval([80, 90, 85], [100, 100, 100])
    lo, hi = stats.t.interval(0.95, 2, loc=0.85, scale=stats.sem([0.8, 0.9, 0.85]))
    assert found is not None
    assert (found.mean, found.lo, found.hi) == pytest.approx((0.85, lo, hi))


if __name__ == "__main__":
    print(table())


@pytest.mark.parametrize("ends", [(0.6, 0.9), (0.1, 0.4)])
def test_a_mean_outside_of_its_interval_is_refused(ends: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="cannot be that of the mean"):
        Interval(mean=0.5, lo=ends[0], hi=ends[1])
