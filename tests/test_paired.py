"""The test that marks a leaderboard: p-values, their adjustment, and how often it errs."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bench.metrics.paired import ALPHA, Difference, Outcomes, differences, holm
from bench.seeding import numpy_generator
from tests.conftest import require

TRIES = 300


def outcomes(*means: float, spread: float = 0.05, victims: int = 4) -> Outcomes:
    steps = spread * np.linspace(-1, 1, victims)
    return {seed: mean + steps for seed, mean in enumerate(means)}


def one(rows: list[Outcomes], reference: int = 0, place: int = 1, **more: Any) -> Difference:
    return require(differences(rows, reference, **more)[place])


def test_of_two_rows_it_is_students_test_where_seeds_differ_more_than_victims() -> None:
    base = outcomes(0.5, 0.5, 0.5)
    row = outcomes(0.6, 0.9, 0.7)  # the same steps: no difference within a seed
    difference = one([base, row])
    assert difference.p == pytest.approx(stats.ttest_1samp([0.1, 0.4, 0.2], 0).pvalue)
    lo, hi = stats.t.interval(0.95, 2, loc=0.7 / 3, scale=stats.sem([0.1, 0.4, 0.2]))
    assert (difference.interval.lo, difference.interval.hi) == pytest.approx((lo, hi))
    assert difference.seed_means == pytest.approx((0.1, 0.4, 0.2))
    assert difference.adjusted == difference.p
    assert difference.victims == (4, 4, 4)


def test_further_rows_lend_their_degrees_of_freedom() -> None:
    rng = numpy_generator(0, "rows")
    made = [
        outcomes(*(mean + rng.normal(0, 0.06, size=3)), spread=0.0)
        for mean in (0.25, 0.5, 0.5, 0.5, 0.5, 0.5)
    ]
    alone, together = one(made[:2]), one(made)
    assert together.p < alone.p
    # by hand: the mean square of rows by seeds is the variance of a row's mean over seeds
    means = np.array([[v.mean() for v in row.values()] for row in made])
    left = means - means.mean(1, keepdims=True) - means.mean(0) + means.mean()
    pooled = 2 * (left**2).sum() / 10
    gaps = means[1] - means[0]
    variance = max(pooled, gaps.var(ddof=1))
    by_hand = 2 * stats.t.sf(abs(gaps.mean()) / math.sqrt(variance / 3), 10)
    assert together.p == pytest.approx(max(by_hand, 2**-11))


def test_with_one_seed_it_is_students_test_over_victims() -> None:
    rng = numpy_generator(0, "victims")
    base, row = rng.normal(size=8), rng.normal(0.5, size=8)
    difference = one([{0: base}, {0: row}])
    assert difference.p == pytest.approx(stats.ttest_rel(row, base).pvalue)
    apart = one([{0: base}, {0: row}], paired=[True, False])
    error = math.sqrt(base.var(ddof=1) / 8 + row.var(ddof=1) / 8)
    mean = row.mean() - base.mean()
    assert apart.p == pytest.approx(2 * stats.t.sf(abs(mean) / error, 7))


def test_no_p_value_is_below_that_of_a_permutation_of_signs() -> None:
    assert one([outcomes(0, 0, spread=0), outcomes(1, 1, spread=0)]).p == 2**-7
    assert one([outcomes(1, 1, spread=0), outcomes(1, 1, spread=0)]).p == 1
    few = {0: np.ones(1), 1: np.ones(1), 2: np.ones(1)}  # of other victims
    assert one([outcomes(0, 0, 0, spread=0), few], paired=[True, False]).p == 2 / 455
    single = one([{0: np.zeros(1)}, {0: np.ones(1)}])
    assert single.p == 1
    assert (single.interval.lo, single.interval.hi) == (-math.inf, math.inf)


def test_rows_without_a_common_seed_are_not_compared() -> None:
    base = outcomes(0.1, 0.2)
    difference = differences([base, {7: np.ones(4)}, outcomes(0.1, 0.2, 0.9)], 0)
    assert difference[0] is None
    assert difference[1] is None
    assert difference[2] is not None
    assert difference[2].seed_means == (0.0, 0.0)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(
    values=st.lists(st.floats(0, 1).map(lambda v: round(v, 3)), min_size=12, max_size=12),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_it_ignores_order_and_turns_with_the_rows(values: list[float], order: Any) -> None:
    base, row = ({s: np.array(values[o + 3 * s : o + 3 * s + 3]) for s in (0, 1)} for o in (0, 6))
    difference, turned = one([base, row]), one([base, row], reference=1, place=0)
    assert turned.p == pytest.approx(difference.p)
    assert difference.reverse().interval.mean == pytest.approx(turned.interval.mean)
    assert difference.reverse().interval.lo == pytest.approx(turned.interval.lo)
    places = order.sample(range(3), 3)
    mixed = one([{s: v[places] for s, v in base.items()}, {s: v[places] for s, v in row.items()}])
    assert mixed.p == pytest.approx(difference.p)
    assert difference.separated == (difference.adjusted <= ALPHA)


def errors(rows: int, seeds: int, victims: int, uneven: bool) -> tuple[float, float, float]:
    """How often the truly best row is said to be worse than the best one shown, how often any of
    the rows like the undefended is said to differ, and the share of truly better rows that are told
    from it. Half of the rows leak less than the undefended, which is the last one; uneven: their
    victims spread unevenly."""
    rng = numpy_generator(0, "errors", rows, seeds, victims, uneven)
    truth = np.full(rows, 0.6)
    truth[: rows // 2] = np.linspace(0.2, 0.4, rows // 2)
    wrong_best = wrong_bare = told = 0.0
    for _ in range(TRIES):
        scale = np.exp(rng.normal(0, 0.5, rows)) if uneven else np.ones(rows)
        drawn = (
            truth[:, None, None]
            + 0.04 * rng.normal(size=(1, seeds, 1))
            + 0.12 * rng.normal(size=(1, seeds, victims))
            + 0.05 * rng.normal(size=(rows, seeds, 1))
            + 0.08 * scale[:, None, None] * rng.normal(size=(rows, seeds, victims))
        )
        table = [dict(enumerate(row)) for row in drawn]
        best = int(drawn.mean(axis=(1, 2)).argmin())
        of_best = differences(table, best)[int(truth.argmin())]
        wrong_best += of_best is not None and of_best.separated
        of_bare = [d is not None and d.separated for d in differences(table, rows - 1)]
        wrong_bare += any(of_bare[rows // 2 : -1])
        told += float(np.mean(of_bare[: rows // 2]))
    return wrong_best / TRIES, wrong_bare / TRIES, told / TRIES


@pytest.mark.parametrize("case", [(6, 3, 4, False), (10, 3, 8, True), (10, 5, 8, False)])
def test_a_true_best_row_and_rows_like_the_undefended_are_rarely_said_to_differ(
    case: tuple[int, int, int, bool],
) -> None:
    wrong_best, wrong_bare, told = errors(*case)
    assert wrong_best <= 0.05
    assert wrong_bare <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / TRIES)
    assert told >= 0.8  # three seeds alone, by a t-test with 2 degrees of freedom: below .4
