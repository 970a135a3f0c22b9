"""Intervals hold what they say: `python -m tests.test_intervals` prints the table of the docs."""

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import binomtest

from bench.errors import UserError
from bench.metrics.intervals import Interval, bound_mean, drop_interval, interval_of, share_interval
from bench.report import leaderboard
from bench.seeding import numpy_generator
from tests.conftest import require

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "method.md"
SIMULATIONS, MANY = 1000, 20_000
"""Of outcomes of many values and of two, which have few different samples."""
LEAST = 0.93
SHAPES = ((3, 4), (3, 8), (5, 8))
CORRELATIONS = (0.0, 0.1, 0.5)
POPULATIONS = {
    "Bernoulli(.05)": lambda u: (u < 0.05).astype(float),
    "Bernoulli(.5)": lambda u: (u < 0.5).astype(float),
    "Bernoulli(.95)": lambda u: (u < 0.95).astype(float),
    "beta(.5, 3)": lambda u: stats.beta.ppf(u, 0.5, 3),
    "published victims": lambda u: np.quantile(
        published(), u.ravel(), method="inverted_cdf"
    ).reshape(u.shape),
}
"""Outcomes of victims, from uniform numbers."""


@cache
def published() -> np.ndarray:
    """Leakage of the victims of the published row of `quick` whose mean is nearest to .5."""
    rows = leaderboard.load(ROOT / "results" / "quick")
    leaky = [(abs(r.leak - 0.5), r.leaks) for r in rows if r.leaks and r.leak is not None]
    _, leaks = min(leaky, key=lambda pair: pair[0])
    return np.clip(np.concatenate(list(leaks.outcomes.values())), 0, 1)


def simulated(name: str, correlation: float, seeds: int, victims: int) -> tuple[float, float]:
    """Coverage and mean width. correlation: of two victims of a seed, in normal scores."""
    rng = numpy_generator(0, "coverage", name, str(correlation), seeds, victims)
    number = MANY if name.startswith("Bernoulli") else SIMULATIONS
    common, own = rng.normal(size=(number, seeds, 1)), rng.normal(size=(number, seeds, victims))
    uniform = stats.norm.cdf(math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own)
    values = POPULATIONS[name](uniform)
    truth = float(POPULATIONS[name]((np.arange(100_000) + 0.5) / 100_000).mean())
    samples = np.sort(values, axis=2)
    order = np.argsort(samples.sum(axis=2), axis=1)
    samples = np.take_along_axis(samples, order[:, :, None], axis=1)
    unique, which = np.unique(samples.reshape(number, -1), axis=0, return_inverse=True)
    intervals = [interval_of(list(u.reshape(seeds, victims)), (0.0, 1.0)) for u in unique]
    ends = np.array([(i.lo, i.hi) for i in intervals if i is not None])[which.ravel()]
    inside = (ends[:, 0] <= truth + 1e-9) & (truth - 1e-9 <= ends[:, 1])
    return float(inside.mean()), float((ends[:, 1] - ends[:, 0]).mean())


def table() -> str:
    """Coverage and mean width of every case, as Markdown."""
    shapes = [f"{seeds} x {victims}" for seeds, victims in SHAPES]
    lines = [
        f"| population | correlation | {' | '.join(shapes)} |",
        "|---|---|" + "---|" * len(SHAPES),
    ]
    for name in POPULATIONS:
        for correlation in CORRELATIONS:
            cells = (simulated(name, correlation, *shape) for shape in SHAPES)
            texts = " | ".join(f"{share:.3f} ({width:.2f})" for share, width in cells)
            lines.append(f"| {name} | {correlation:g} | {texts} |")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=[pytest.mark.slow] if s != (3, 8) else []) for s in SHAPES],
    ids=lambda s: f"{s[0]}x{s[1]}",
)
@pytest.mark.parametrize("correlation", [0.0, pytest.param(0.1, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("name", POPULATIONS)
def test_intervals_hold_the_truth_as_often_as_they_should(
    name: str, correlation: float, shape: tuple[int, int]
) -> None:
    assert simulated(name, correlation, *shape)[0] >= LEAST


@pytest.mark.slow
def test_the_docs_have_the_table_that_this_file_prints() -> None:
    assert table() in DOCS.read_text()


@pytest.mark.parametrize("victims", [2, 3, 12, 24, 80])
def test_all_or_nothing_outcomes_have_the_interval_of_clopper_and_pearson(victims: int) -> None:
    for hits in range(0, victims + 1, max(1, victims // 6)):
        values = np.r_[np.ones(hits), np.zeros(victims - hits)]
        exact = binomtest(hits, victims).proportion_ci(0.95, method="exact")
        assert bound_mean(values, (0.0, 1.0)) == pytest.approx((exact.low, exact.high), abs=1e-4)


def test_the_bounded_interval_is_a_quantile_of_dirichlet_means() -> None:
    rng = numpy_generator(0, "dirichlet")
    values = rng.uniform(0.2, 0.7, size=9)
    weights = rng.dirichlet(np.ones(10), size=100_000)
    lo = np.quantile(weights @ np.r_[values, 0.0], 0.025)
    hi = np.quantile(weights @ np.r_[values, 1.0], 0.975)
    assert bound_mean(values, (0.0, 1.0)) == pytest.approx((lo, hi), abs=0.003)


def test_several_seeds_have_at_least_students_interval_on_their_means() -> None:
    groups = [np.array([0.1, 0.3]), np.array([0.4, 0.2]), np.array([0.5, 0.5])]
    interval = require(interval_of(groups))
    means = [g.mean() for g in groups]
    lo, hi = stats.t.interval(0.95, 2, loc=np.mean(means), scale=stats.sem(means))
    assert (interval.mean, interval.lo, interval.hi) == pytest.approx((np.mean(means), lo, hi))
    bounded = require(interval_of(groups, (0.0, 1.0)))
    ends = bound_mean(np.concatenate(groups), (0.0, 1.0))
    expected = (max(0.0, min(lo, ends[0])), max(hi, ends[1]))
    assert (bounded.lo, bounded.hi) == pytest.approx(expected)


def test_seeds_of_unequal_size_weigh_by_their_victims() -> None:
    groups = [np.zeros(9), np.ones(1), np.zeros(10)]
    interval = require(interval_of(groups))
    assert interval.mean == pytest.approx(1 / 20)
    gaps = np.array([-9 / 20, 19 / 20, -10 / 20])
    error = np.sqrt(3 / 2 * (gaps**2).sum()) / 20
    assert interval.hi - interval.mean == pytest.approx(stats.t.ppf(0.975, 2) * error)


def test_one_seed_without_bounds_is_over_victims_and_wider_than_students_interval() -> None:
    values = np.array([0.1, 0.7, 0.2, 0.4, 0.9, 0.3, 0.5, 0.6])
    interval = require(interval_of([values]))
    lo, hi = stats.t.interval(0.95, 7, loc=values.mean(), scale=stats.sem(values))
    assert interval.lo < lo < hi < interval.hi


def test_outcomes_that_all_agree_have_an_interval() -> None:
    interval = require(interval_of([np.ones(4)] * 3, (0.0, 1.0)))
    assert (interval.lo, interval.hi) == pytest.approx((0.025 ** (1 / 12), 1.0), abs=1e-5)
    one = require(interval_of([np.array([0.4])], (0.0, 1.0)))
    assert (one.lo, one.hi) == pytest.approx((0.4 * 0.025, 1 - 0.6 * 0.025), abs=1e-5)
    assert interval_of([np.array([0.4])], (0.0, math.inf)) == Interval(mean=0.4, lo=0.4, hi=0.4)


def test_values_beyond_the_range_widen_it() -> None:
    interval = require(interval_of([np.array([-2.0, 0.5, 0.6])], (0.0, 1.0)))
    assert interval.lo == interval.mean  # a mean below the range is not moved into it
    assert interval.hi > 0.6


def test_without_a_value_there_is_no_interval_and_nan_stays_nan() -> None:
    assert interval_of([]) is None
    assert interval_of([np.array([])]) is None
    assert share_interval([], []) is None
    assert drop_interval([], [], 0) is None
    interval = require(interval_of([np.array([0.1, math.nan, 0.3]), np.array([0.5])]))
    assert all(math.isnan(v) for v in (interval.mean, interval.lo, interval.hi))


@given(
    groups=st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=9), min_size=1, max_size=5).map(
        lambda lists: [np.array(v) for v in lists]
    )
)
@settings(max_examples=50, deadline=None)
def test_the_interval_holds_its_mean_and_stays_in_range(groups: list[np.ndarray]) -> None:
    interval = require(interval_of(groups, (0.0, 1.0)))
    assert 0 <= interval.lo <= interval.mean <= interval.hi <= 1
    assert interval.mean == pytest.approx(np.concatenate(groups).mean())


def test_shares_of_one_seed_have_wilsons_interval() -> None:
    interval = require(share_interval([37], [50]))
    reference = binomtest(37, 50).proportion_ci(method="wilson")
    expected = (0.74, reference.low, reference.high)
    assert (interval.mean, interval.lo, interval.hi) == pytest.approx(expected)
    for right in (0, 50):
        edge = require(share_interval([right], [50]))
        assert 0 <= edge.lo < edge.hi <= 1


def test_shares_of_several_seeds_are_over_seeds() -> None:
    interval = require(share_interval([80, 90, 85], [100, 100, 100]))
    lo, hi = stats.t.interval(0.95, 2, loc=0.85, scale=stats.sem([0.8, 0.9, 0.85]))
    assert (interval.mean, interval.lo, interval.hi) == pytest.approx((0.85, lo, hi))


def test_a_drop_is_over_seeds_and_with_one_seed_newcombes() -> None:
    interval = require(drop_interval([0.9, 0.8, 0.85], [0.8, 0.75, 0.7], 100))
    lo, hi = stats.t.interval(0.95, 2, loc=0.1, scale=stats.sem([0.1, 0.05, 0.15]))
    assert (interval.mean, interval.lo, interval.hi) == pytest.approx((0.1, lo, hi))
    one = require(drop_interval([0.8], [0.6], 70))
    wide = [binomtest(k, 70).proportion_ci(method="wilson") for k in (56, 42)]
    low = 0.2 - math.hypot(0.8 - wide[0].low, wide[1].high - 0.6)
    high = 0.2 + math.hypot(wide[0].high - 0.8, 0.6 - wide[1].low)
    assert (one.lo, one.hi) == pytest.approx((low, high))
    assert drop_interval([0.5], [0.5], 100) == Interval(mean=0, lo=0, hi=0)


@pytest.mark.parametrize("ends", [(0.6, 0.9), (0.1, 0.4)])
def test_a_mean_outside_of_its_interval_is_refused(ends: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="cannot be that of the mean"):
        Interval(mean=0.5, lo=ends[0], hi=ends[1])


if __name__ == "__main__":
    print(table())
