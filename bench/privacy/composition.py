"""Epsilon of pure mechanisms and one Gaussian together, at any number and any size.

No mechanism of pure epsilon e tells more than randomised response, a coin that is right with odds
of e^e to one, however many are composed (Kairouz, Oh, Viswanath, arXiv:1311.0776, Theorem 3.3;
Murtagh, Vadhan, arXiv:1507.03113, for different epsilons). So the worst privacy loss L is a sum of
+-e over the coins and a normal variable, of which all moments are known:

    log E[e^(s L)] = sum_coins log(cosh((s + 1/2) e) / cosh(e / 2)) + mu^2 (s^2 + s) / 2.

The smallest delta at epsilon E is E[(1 - e^(E - L))_+], a Laplace transform turned back:

    delta(E) = 1/(2 pi) int E[e^(s L)] e^(-s E) / (s (s + 1)) dt,  s = c + i t, for any c > 0.

The trapezoidal rule of step h gives sum_j e^(j c R) delta(E + j R), R = 2 pi / h, by Poisson's
summation: the wanted delta at j = 0, and others that are not negative. So it errs upwards alone;
bounds on rounding are added on top, and no epsilon from here is below the exact one.

Equal epsilons without a Gaussian put L on a lattice. There the integral is one over a period, delta
is linear in e^E between neighbours, and the epsilon is exact up to rounding. Otherwise the Gaussian
ends the integral, and is widened where it is narrower than about a thousandth of L's spread, since
a wider one tells more.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from bench.privacy.gaussian import exact_gaussian_epsilon

Points = NDArray[Any]
_NEGLIGIBLE = 45.0
"""Minus the logarithm of what may be left out."""
_POINTS = 20_000
"""Points of the integral where L has no lattice."""
_LATTICE = 10**15
"""Coins up to which every point of the lattice is a float64."""
_SMALLEST, _LARGEST, _MOST, _WIDEST = 1e-15, 1e3, 1e30, 1e12
"""Pure epsilons, counts and ratios of the Gaussian beyond which epsilons are added up."""
_ROUNDING = 4e-16
"""Relative error of one operation, with room."""


def compose_epsilon(pure: Iterable[tuple[float, int]], *, mu: float, delta: float) -> float:
    """Return the smallest known epsilon of pure mechanisms and Gaussian releases together.

    Args:
        pure: Pairs of a pure epsilon, >= 0, and how many mechanisms have it.
        mu: Root of the summed squares of the Gaussians' sensitivities over their stds, 0 for none.
        delta: At which epsilon is told, in (0, 1).

    Returns:
        At most the sum of all pure epsilons and the Gaussians' own; exact for up to 10^15 equal
        pure epsilons without a Gaussian.
    """
    gaussian = exact_gaussian_epsilon(mu=mu, delta=delta) if mu else 0.0
    counts: Counter[float] = Counter()
    summed = 0.0
    for epsilon, count in pure:
        if _SMALLEST < epsilon < _LARGEST and count < _MOST:
            counts[float(epsilon)] += count
        elif epsilon and count:
            summed += epsilon * count
    added = summed + gaussian + math.fsum(e * n for e, n in counts.items())
    if not counts or math.isinf(added):
        return added
    if mu > _WIDEST:
        return summed + gaussian + compose_epsilon(counts.items(), mu=0.0, delta=delta)
    if mu or len(counts) > 1:
        return min(added, summed + _mix_epsilons(counts, mu, delta))
    ((epsilon, count),) = counts.items()
    return min(added, summed + _equal_epsilon(epsilon, count, delta))


def _equal_epsilon(epsilon: float, count: int, delta: float) -> float:
    """Return the exact epsilon of `count` mechanisms of one pure epsilon."""
    counts = {epsilon: count}
    bound, c, spread = _chernoff(counts, 0.0, delta)
    if bound <= 0 or count > _LATTICE:
        return max(0.0, bound)
    # An odd number of points per period, so that all but the first come in conjugate pairs.
    half = math.ceil(_reach(c, spread, delta) / (4 * epsilon))
    step = math.pi / epsilon / (2 * half + 1)
    ends = math.sqrt(-math.expm1(-2 * _NEGLIGIBLE / count)) / _sech((c + 0.5) * epsilon)
    if ends < 1:
        half = min(half, math.ceil(math.asin(ends) / epsilon / step))
    s = c + 1j * step * np.arange(half + 1)
    # 1 / (s (s + 1)) summed over all periods: epsilon (coth(epsilon s) - coth(epsilon (s + 1))).
    above, below = -2 * epsilon * s, -2 * epsilon * (s + 1)
    kernel = -2 * epsilon * math.expm1(-2 * epsilon) * np.exp(above)
    kernel /= special.expm1(above) * special.expm1(below)
    excess_at = _invert_moments(s, step, kernel, counts, 0.0, delta)

    def excess(wrong: int) -> float:
        """Return the excess of delta at the epsilon of `wrong` wrong coins; none exceeds that of no
        wrong one."""
        return excess_at((count - 2 * wrong) * epsilon) if wrong else -1.0

    last = (count + 1) // 2
    high = min(last, max(1, math.floor((count - bound / epsilon) / 2)))
    low, stride = high, 1
    while excess(low) > 0:
        low, stride = max(0, low - stride), 2 * stride
    while excess(high) <= 0:
        if high == last:
            return 0.0
        high, stride = min(last, high + stride), 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    over, under = excess(high), -excess(low)
    share = under / (over + under)
    drop = share * -math.expm1(-2 * epsilon)  # linear in e^epsilon
    if drop > 0.5:  # 1 - drop, to all its digits
        remainder = math.log(over / (over + under) + share * math.exp(-2 * epsilon))
    else:
        remainder = math.log1p(-drop)
    return max(0.0, (count - 2 * low) * epsilon + remainder)


def _mix_epsilons(counts: Mapping[float, int], mu: float, delta: float) -> float:
    """Return epsilon of pure mechanisms of several epsilons, or with a Gaussian."""
    bound, c, spread = _chernoff(counts, mu, delta)
    if bound <= 0:
        return 0.0
    far, reach = math.sqrt(2 * _NEGLIGIBLE), _reach(c, spread, delta)
    mu = max(mu, far * reach / (2 * math.pi * _POINTS))
    widened, *_ = _chernoff(counts, mu, delta)
    step = 2 * math.pi / reach
    s = c + 1j * np.arange(0.0, far / mu + step, step)
    excess_at = _invert_moments(s, step, 1 / (s * (s + 1)), counts, mu, delta)
    low, stride = widened, 1 / c
    if excess_at(widened) > 0:  # by rounding alone
        return bound
    while excess_at(low) <= 0:
        if low == 0:
            return 0.0
        low, stride = max(0.0, low - stride), 2 * stride
    root = optimize.brentq(excess_at, low, widened, xtol=1e-12 * widened, rtol=1e-12)
    return min(bound, float(root) + 2e-12 * widened)


def _chernoff(counts: Mapping[float, int], mu: float, delta: float) -> tuple[float, float, float]:
    """Return an upper bound on epsilon, a c for the integral near which it is best, and the spread
    there.

    The bound is that of a Renyi divergence at its best order 1 + c (Balle et al.,
    arXiv:1905.09982, Theorem 21). With weights e^(c L) it is about the mean of L.
    """
    left = -math.log(delta)
    variance = math.fsum(n * e * e for e, n in counts.items()) + mu * mu
    # At the best c, log(1 + c) <= left <= 2 max(c, c^2 variance); beyond 40 / e coins do not move.
    lowest = min(left / 4, math.sqrt(left / variance) / 4)
    highest = min(1 / delta, _NEGLIGIBLE / min(counts))

    def bound(log_c: float) -> float:
        c = math.exp(log_c)
        moments = float(_log_moments(np.array([complex(c)]), counts, mu)[0].real)
        return (moments - c * math.log1p(1 / c) - math.log1p(c) + left) / c

    optimum = optimize.minimize_scalar(
        bound, bounds=(math.log(lowest), math.log(max(highest, 2 * lowest))), method="bounded"
    )
    best = math.exp(float(optimum.x))
    # Nearer to 0 than the spread allows, the integral would need endless points.
    c = max(best, 1 / (_spread(best, counts, mu) + max(counts)))
    return float(optimum.fun), c, _spread(c, counts, mu)


def _spread(c: float, counts: Mapping[float, int], mu: float) -> float:
    """Standard deviation of L under its law with weights e^(c L)."""
    coins = (n * (e * _sech((c + 0.5) * e)) ** 2 for e, n in counts.items())
    return math.sqrt(math.fsum(coins) + mu * mu)


def _sech(x: float) -> float:
    return 1 / math.cosh(min(x, 300.0))  # no float64 has the cosh of 710


def _reach(c: float, spread: float, delta: float) -> float:
    """R, so large that delta at E - R and E + R count for nothing."""
    return max((_NEGLIGIBLE - math.log(delta)) / c, math.sqrt(2 * _NEGLIGIBLE) * spread)


def _invert_moments(
    s: Points, step: float, kernel: Points, counts: Mapping[float, int], mu: float, delta: float
) -> Callable[[float], float]:
    """Return delta(E) / delta - 1 as a function of E, rounded up; s: c + i t for t = 0, step,
    ..."""
    moments = _log_moments(s, counts, mu) - math.log(delta)
    weights = kernel * (step / math.pi)  # of both conjugates
    weights[0] /= 2
    care = _ROUNDING * (50 + np.abs(moments))

    def excess(epsilon: float) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            terms = np.exp(moments - s * epsilon) * weights
            rounding = np.abs(terms) @ (care + _ROUNDING * abs(epsilon) * np.abs(s))
            difference = float(terms.real.sum() + rounding) - 1
        return difference if math.isfinite(difference) else math.inf

    return excess


def _log_moments(s: Points, counts: Mapping[float, int], mu: float) -> Points:
    """log E[e^(s L)]."""
    total = mu * mu * s * (s + 1) / 2
    for epsilon, count in counts.items():
        x = s * epsilon
        if x[0].real < 1:  # no digits may be lost where the logarithm is near 0
            change = special.expm1(-x) * special.expm1(-x - epsilon) * np.exp(x)
            moment = special.log1p(change / (1 + math.exp(-epsilon)))
        else:
            moment = x + special.log1p(np.exp(-2 * x - epsilon)) - math.log1p(math.exp(-epsilon))
        total = total + count * moment
    return total
