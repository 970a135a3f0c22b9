"""Composition of pure mechanisms: against sums over all outcomes, at any number and any size."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from scipy.special import gammaln

from bench.privacy.composition import compose_epsilon
from bench.privacy.gaussian import exact_gaussian_epsilon, gaussian_delta

SLACK = 1e-9


def equal(epsilon: float, count: int, delta: float) -> float:
    return compose_epsilon([(epsilon, count)], mu=0.0, delta=delta)


def exact(epsilon: float, count: int, delta: float) -> mpf:
    """The largest ln((P - delta) / Q) over the sets of outcomes with the fewest wrong coins, P and
    Q their chances under the two inputs, in 60 digits."""
    with mp.workdps(60):
        odds = mp.exp(mpf(epsilon))
        one, other = (odds / (1 + odds)) ** count, (1 / (1 + odds)) ** count
        p = q = mpf(0)
        best = mpf(1)
        for wrong in range(count // 2 + 1):
            p, q = p + one, q + other
            best = max(best, (p - mpf(delta)) / q)
            ways = mpf(count - wrong) / (wrong + 1)
            one, other = one * ways / odds, other * ways * odds
        return mp.log(best)


@given(
    epsilon=st.floats(-12, 2.8).map(lambda x: 10**x),
    count=st.integers(1, 300),
    delta=st.one_of(st.floats(-30, -0.01).map(lambda x: 10**x), st.floats(0.5, 0.99999)),
)
@settings(deadline=None, max_examples=60)
def test_equal_mechanisms_compose_exactly(epsilon: float, count: int, delta: float) -> None:
    found, true = equal(epsilon, count, delta), float(exact(epsilon, count, delta))
    assert true * (1 - 1e-15) <= found <= count * epsilon
    assert found == pytest.approx(true, rel=1e-8, abs=1e-9 * count * epsilon)


def test_two_coins_compose_to_a_fraction() -> None:
    """Odds of 3 to 1: both right 9/16 against 1/16, one right 6/16 against 6/16."""
    delta = Fraction(1, 16)
    both = (Fraction(9, 16) - delta) / Fraction(1, 16)
    assert equal(math.log(3), 2, float(delta)) == pytest.approx(math.log(both), rel=1e-12)
    delta = Fraction(17, 32)
    assert equal(math.log(3), 2, float(delta)) == 0.0


@pytest.mark.parametrize(
    ("epsilon", "count", "expected"),
    [(0.01, 9_999, 4.376), (0.01, 10_001, 4.377), (0.01, 100_000, 17.856), (1e-4, 500_000, 0.2335)],
)
def test_large_sums_of_epsilons_compose_too(epsilon: float, count: int, expected: float) -> None:
    assert equal(epsilon, count, 1e-5) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("total", [0.01, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_many_small_mechanisms_are_a_gaussian_in_the_limit(total: float, delta: float) -> None:
    """mu^2 is the sum of the squared epsilons; a lattice of 10^12 coins is 10^-6 from it."""
    composed = equal(total * 1e-6, 10**12, delta)
    assert composed == pytest.approx(exact_gaussian_epsilon(mu=total, delta=delta), rel=1e-5)


@given(
    epsilon=st.floats(-12, 2.8).map(lambda x: 10**x),
    count=st.floats(0, 15.5).map(lambda x: int(10**x)),
    delta=st.floats(-15, -0.01).map(lambda x: 10**x),
    more=st.integers(1, 1000),
    factor=st.floats(1.0, 10.0),
)
@settings(deadline=None, max_examples=80)
def test_epsilon_is_monotone_and_no_larger_than_the_sum(
    epsilon: float, count: int, delta: float, more: int, factor: float
) -> None:
    composed = equal(epsilon, count, delta)
    assert 0 <= composed <= count * epsilon
    assert equal(epsilon, count + more, delta) >= composed * (1 - SLACK)
    assert equal(epsilon * factor, count, delta) >= composed * (1 - SLACK)
    assert equal(epsilon, count, min(delta * factor, 0.999)) <= composed * (1 + SLACK)


@given(
    groups=st.lists(
        st.tuples(st.floats(-3, 1).map(lambda x: 10**x), st.integers(1, 8)), min_size=1, max_size=3
    ),
    mu=st.one_of(st.just(0.0), st.floats(-3, 1).map(lambda x: 10**x)),
    delta=st.floats(-10, -0.3).map(lambda x: 10**x),
)
@settings(deadline=None, max_examples=25)
def test_different_mechanisms_and_a_gaussian_compose_tightly(
    groups: list[tuple[float, int]], mu: float, delta: float
) -> None:
    composed = compose_epsilon(groups, mu=mu, delta=delta)
    added = math.fsum(e * n for e, n in groups)
    added += exact_gaussian_epsilon(mu=mu, delta=delta) if mu else 0.0
    assert composed <= added
    assert summed_delta(groups, mu, composed) <= delta * (1 + 1e-9) + 1e-15  # it rounds too
    lower = composed - 2e-3 * max(composed, 1e-6)
    assert composed == 0 or summed_delta(groups, mu, lower) >= delta * (1 - 1e-9) - 1e-15


def summed_delta(groups: list[tuple[float, int]], mu: float, epsilon: float) -> float:
    """delta at epsilon, outcome by outcome of the coins."""
    losses, logs = np.zeros(1), np.zeros(1)
    for e, n in groups:
        wrong = np.arange(n + 1)
        ways = gammaln(n + 1) - gammaln(wrong + 1) - gammaln(n - wrong + 1)
        logs = np.add.outer(logs, ways - wrong * e - n * math.log1p(math.exp(-e))).ravel()
        losses = np.add.outer(losses, (n - 2 * wrong) * e).ravel()
    chances = np.exp(logs)
    if not mu:
        return float(chances @ np.maximum(0.0, -np.expm1(np.minimum(epsilon - losses, 0.0))))
    return math.fsum(
        float(p) * gaussian_delta(mu=mu, epsilon=float(epsilon - loss))
        for p, loss in zip(chances, losses, strict=True)
    )


def test_a_tiny_and_a_huge_mechanism_leave_the_others_as_they_are() -> None:
    alone = equal(0.01, 10_000, 1e-5)
    with_tiny = compose_epsilon([(0.01, 10_000), (1e-9, 1)], mu=0.0, delta=1e-5)
    assert alone <= with_tiny < alone * (1 + 1e-3)
    with_huge = compose_epsilon([(0.01, 10_000), (1e6, 1)], mu=0.0, delta=1e-5)
    assert with_huge == pytest.approx(1e6 + alone, rel=1e-12)


@pytest.mark.parametrize("delta", [5e-324, pytest.param(1e-300, marks=pytest.mark.slow), 1 - 1e-12])
@pytest.mark.parametrize("mu", [0.0, 1e-200, 1e5, 1e100])
def test_extreme_values_end_in_a_number(delta: float, mu: float) -> None:
    for epsilon in (5e-324, 1e-13, 0.3, 700.0, 1e300, math.inf):
        for count in (1, 7, 10**12, 10**18, 10**30):
            composed = compose_epsilon([(epsilon, count), (0.1, 3)], mu=mu, delta=delta)
            assert composed >= 0
