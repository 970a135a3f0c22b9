"""Paired statistics: tests and intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bench.metrics.intervals import interval_of
from bench.metrics.paired import (
    EXACT_UP_TO,
    Variances,
    paired,
    sign_flip,
    variances,
)
from bench.seeding import numpy_generator

# --- tests and intervals ----------------------------------------------------------------------


def test_sign_flips_agree_with_scipy_where_all_are_counted() -> None:
    d = numpy_generator(0, "differences").normal(0.5, 1, size=9)
    oracle = stats.permutation_test(
        (d, np.zeros(9)), lambda x, y: np.mean(x - y), permutation_type="samples",
        n_resamples=np.inf, vectorized=False,
    )  # fmt: skip
    assert sign_flip(d) == pytest.approx(oracle.pvalue, rel=1e-12)


@pytest.mark.parametrize(("n", "against"), [(12, 2), (EXACT_UP_TO, 9), (60, 21)])
def test_sign_flips_of_equal_sizes_are_a_binomial_test(n: int, against: int) -> None:
    d = np.ones(n)
    d[:against] = -1
    exact = float(stats.binomtest(against, n).pvalue)
    tolerance = 1e-9 if n <= EXACT_UP_TO else 4 * (exact / 9999) ** 0.5
    assert sign_flip(d) == pytest.approx(exact, abs=tolerance)


def test_variances_agree_with_a_hand_example_and_with_a_simulation() -> None:
    # means 2 and 6: within (1+1+1+1)/2 = 2, between 2*(4+4)/1 = 16, so (16 - 2) / 2 = 7
    found = variances([np.array([1.0, 3.0]), np.array([5.0, 7.0])])
    assert found == Variances(victims=2.0, seeds=7.0)
    assert found.seed_share == pytest.approx(7 / 9)
    # sizes 1 and 3: within 2/2 = 1, between 1*9 + 3*1 = 12, n0 = 4 - 10/4, so 11 / 1.5
    found = variances([np.array([0.0]), np.array([3.0, 4.0, 5.0])])
    assert found is not None
    assert (found.victims, found.seeds) == pytest.approx((1, 11 / 1.5))
    rng = numpy_generator(0, "unbalanced")
    groups = [rng.normal(0, 2) + rng.normal(0, 3, size=2 + 6 * (i % 2)) for i in range(2000)]
    found = variances(groups)
    assert found is not None
    assert found.victims == pytest.approx(9, rel=0.05)
    assert found.seeds == pytest.approx(4, rel=0.15)
    assert variances([np.array([1.0]), np.array([2.0])]) is None
    assert variances([np.array([1.0, 2.0])]) == Variances(victims=0.5, seeds=None)


def test_the_interval_is_that_of_the_leaderboard() -> None:
    rng = numpy_generator(0, "groups")
    for sizes in ((8, 8, 8), (4, 9), (20,)):
        groups = [rng.normal(i, 1, size=n) for i, n in enumerate(sizes)]
        found, oracle = paired(groups).interval, interval_of(groups)
        assert oracle is not None
        assert found.to_dict() == pytest.approx(oracle.to_dict())


def test_the_t_test_over_seeds_is_scipys_and_absent_without_a_spread() -> None:
    groups = [np.array([0.1, 0.3]), np.array([0.4, 0.2]), np.array([0.5, 0.5])]
    expected = stats.ttest_1samp([0.2, 0.3, 0.5], 0).pvalue
    assert paired(groups).p_seeds == pytest.approx(expected)
    assert paired(groups).seed_std == pytest.approx(np.std([0.2, 0.3, 0.5], ddof=1))
    assert paired(groups[:1]).p_seeds is None
    assert paired(groups[:1]).seed_std is None
    assert paired([np.array([1.0, 2.0]), np.array([2.0, 1.0])]).p_seeds is None


FIGURES = st.lists(
    st.lists(st.floats(-1, 1).map(lambda v: round(v, 4)), min_size=1, max_size=6),
    min_size=1, max_size=4,
).map(lambda lists: [np.array(v) for v in lists])  # fmt: skip


@given(groups=FIGURES, shift=st.floats(-1, 1), order=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_the_comparison_turns_with_the_sign_moves_with_a_shift_and_ignores_order(
    groups: list[np.ndarray], shift: float, order: Any
) -> None:
    one, turned = paired(groups), paired([-g for g in groups])
    assert 0 < one.p <= 1
    assert turned.p == one.p
    assert turned.interval.mean == pytest.approx(-one.interval.mean, abs=1e-12)
    assert turned.interval.lo == pytest.approx(-one.interval.hi, abs=1e-12)
    assert turned.interval.hi == pytest.approx(-one.interval.lo, abs=1e-12)
    moved = paired([g + shift for g in groups])
    for name in ("mean", "lo", "hi"):
        there = getattr(one.interval, name) + shift
        assert getattr(moved.interval, name) == pytest.approx(there, abs=1e-9)
    mixed = paired([np.array(order.sample(list(g), len(g))) for g in groups])
    assert mixed.interval == one.interval
    assert mixed.p == one.p
    if one.variances is not None:
        assert moved.variances is not None
        assert moved.variances.victims == pytest.approx(one.variances.victims, abs=1e-9)
        assert one.variances.seeds is None or one.variances.seeds >= 0


@pytest.mark.parametrize("groups", [[], [np.array([])], [np.array([1.0]), np.array([])]])
def test_no_values_are_refused(groups: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="one or more values in every seed"):
        paired(groups)
    with pytest.raises(ValueError, match="finite"):
        paired([np.array([1.0, np.nan])])
