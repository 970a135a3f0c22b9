"""The Gaussian mechanism without sampling, exactly.

n releases with standard deviations s_i of vectors with L2 sensitivities d_i are one release with
mu = sqrt(sum (d_i / s_i)^2): its worst pair is N(0, 1) against N(mu, 1).
Source: Balle, Wang, arXiv:1805.06530, Theorem 8; Dong, Roth, Su, arXiv:1905.02383, Corollary 3.3.
"""

import math
from functools import lru_cache

from scipy import optimize, special


def gaussian_delta(*, mu: float, epsilon: float) -> float:
    """Smallest delta of N(0, 1) against N(mu, 1) at `epsilon`; any real epsilon, mu >= 0."""
    if mu == 0:
        return max(0.0, -math.expm1(epsilon))
    if math.isinf(mu):
        return 1.0
    low, high = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    tail = float(special.log_ndtr(low))
    if math.isinf(tail):
        return 0.0
    # Both terms in logs: e^epsilon alone overflows from 710 on.
    ratio = epsilon + float(special.log_ndtr(high)) - tail
    return float(special.ndtr(low)) * -math.expm1(min(ratio, 0.0))


def exact_gaussian_epsilon(*, mu: float, delta: float) -> float:
    """Return the smallest epsilon >= 0 of N(0, 1) against N(mu, 1) at `delta` in (0, 1); inf for mu
    = inf."""
    if math.isinf(mu):
        return math.inf
    if gaussian_delta(mu=mu, epsilon=0.0) <= delta:
        return 0.0
    # At this epsilon the first term alone is delta.
    high = mu * mu / 2 - mu * float(special.ndtri(delta))
    if math.isinf(high):
        return math.inf

    def excess(epsilon: float) -> float:
        reached = gaussian_delta(mu=mu, epsilon=epsilon)
        return math.log(max(reached, 1e-300)) - math.log(delta)

    if excess(high) > 0:  # at huge mu the two differ by less than rounding
        return high
    root = optimize.brentq(excess, 0.0, max(high, 1e-12), xtol=1e-12, rtol=1e-12)
    return float(root)


def gaussian_std(*, sensitivity: float, epsilon: float, delta: float) -> float:
    """Smallest standard deviation with (epsilon, delta)-DP for an L2 sensitivity.

    Valid for every epsilon > 0, unlike sqrt(2 ln(1.25 / delta)) / epsilon, which is proven for
    epsilon <= 1. Source: the analytic Gaussian mechanism of Balle, Wang.
    """
    return sensitivity / _largest_mu(epsilon, delta)


@lru_cache(maxsize=64)
def _largest_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu with (epsilon, delta)-DP; cached, since every tensor of every upload
    needs it."""

    def excess(log_mu: float) -> float:
        reached = gaussian_delta(mu=math.exp(log_mu), epsilon=epsilon)
        return math.log(max(reached, 5e-324)) - math.log(delta)

    root = optimize.brentq(excess, -690, 340, xtol=1e-13)  # all that squares to a float64
    return math.exp(float(root))


def classic_gaussian_std(*, sensitivity: float, epsilon: float, delta: float) -> float:
    """sensitivity sqrt(2 ln(1.25 / delta)) / epsilon, proven for epsilon <= 1 alone.

    Source: Dwork, Roth 2014, Theorem 3.22.
    """
    return sensitivity * math.sqrt(2 * (math.log(1.25) - math.log(delta))) / epsilon


def renyi_epsilon(slope: float, *, alpha: float, delta: float) -> float:
    """Epsilon at `delta` of a Renyi divergence of alpha * slope at one order alpha > 1; for
    Gaussian releases slope is half the sum of (sensitivity / std)^2.

    Source: Balle et al., arXiv:1905.09982, Theorem 21.
    """
    shrink = math.log1p(-1 / alpha) - (math.log(delta) + math.log(alpha)) / (alpha - 1)
    return alpha * slope + shrink


def best_renyi_epsilon(slope: float, delta: float) -> tuple[float, float]:
    """Return (epsilon, alpha) of `renyi_epsilon` at the best real alpha; (0, inf) for slope 0."""
    if slope == 0:
        return 0.0, math.inf
    if math.isinf(slope):
        return math.inf, 1.0
    optimum = optimize.minimize_scalar(
        lambda x: renyi_epsilon(slope, alpha=1 + math.exp(x), delta=delta),
        bounds=(-15, 15),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return max(0.0, float(optimum.fun)), 1 + math.exp(optimum.x)
