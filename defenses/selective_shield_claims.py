"""SelectiveShield's claims in numbers: Lemmas 2 and 3 over rounds, and Eq. 21 against Eq. 22.

sigma: the paper's noise multiplier; C sigma is a std. An upload's noise-zone values move by at
most C when a record is added or removed (clipped, Eq. 20), and by 2C when one is replaced.
Everything is for the noise zone's VALUES given public masks: the masks have no DP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from scipy.optimize import brentq

from bench.privacy.gaussian import exact_gaussian_epsilon
from defenses.dp_cutmix_claims import balle_epsilon, best_epsilon

NoiseScale = Literal["times_K", "plain", "div_K"]
"""Variance of Eq. 21 over (C sigma)^2: |K| as printed, 1, or 1 / |K|."""
OPACUS_ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))
"""Default Renyi orders of the paper's accountant."""


def lemma2(rdp: float, *, alpha: float, delta: float) -> float:
    """Epsilon at `delta` of a mechanism whose Renyi divergence of order alpha is `rdp`."""
    return balle_epsilon(rdp / alpha, alpha=alpha, delta=delta)


def claimed_epsilon(*, sigma: float, rounds: int, delta: float) -> float:
    """The paper's epsilon after `rounds` rounds: Lemma 3, added up, Lemma 2 at the best order.

    0 for no round, inf without noise.
    """
    return _best(sigma, rounds, delta)[0]


def _best(sigma: float, rounds: int, delta: float) -> tuple[float, float]:
    if rounds and sigma <= 0:
        return math.inf, 1.0
    return best_epsilon(rounds / (2 * sigma**2) if rounds else 0.0, delta)


def _on_grid(sigma: float, rounds: int, delta: float) -> tuple[float, float]:
    slope = rounds / (2 * sigma**2)
    return min((balle_epsilon(slope, alpha=a, delta=delta), a) for a in OPACUS_ORDERS)


def epsilons(*, sigma: float, rounds: int, delta: float) -> dict[str, float]:
    """Epsilon after `rounds` rounds and its order: best real order, best of Opacus's grid, and
    the exact Gaussian."""
    best, alpha = _best(sigma, rounds, delta)
    grid, at = _on_grid(sigma, rounds, delta)
    return {
        "eps_best": best,
        "alpha_best": alpha,
        "eps_opacus_grid": grid,
        "alpha_opacus_grid": at,
        "eps_exact": exact_gaussian_epsilon(mu=math.sqrt(rounds) / sigma, delta=delta),
    }


def sigma_for(epsilon: float, *, rounds: int, delta: float, grid: bool = False) -> float:
    """Smallest sigma whose `claimed_epsilon` is `epsilon`; grid: at Opacus's orders only."""
    spent: Callable[[float, int, float], tuple[float, float]] = _on_grid if grid else _best

    def excess(log_sigma: float) -> float:
        return spent(math.exp(log_sigma), rounds, delta)[0] - epsilon

    return math.exp(float(brentq(excess, math.log(1e-3), math.log(1e6), xtol=1e-13)))


def upload_std(sigma: float, *, clip_norm: float, clients: int, noise_scale: NoiseScale) -> float:
    """Noise std per coordinate of one upload (Eq. 21) among |K| = `clients`."""
    power = {"times_K": 0.5, "plain": 0.0, "div_K": -0.5}[noise_scale]
    return clip_norm * sigma * clients**power


def mean_std(sigma: float, *, clip_norm: float, clients: int, noise_scale: NoiseScale) -> float:
    """Noise std per coordinate of the mean of |K| uploads (Eq. 26 with eta_g = 1)."""
    one = upload_std(sigma, clip_norm=clip_norm, clients=clients, noise_scale=noise_scale)
    return one / math.sqrt(clients)


def noise_norm(std: float, *, coordinates: int) -> float:
    """Root mean squared norm of the noise of one upload."""
    return std * math.sqrt(coordinates)


def eq22(alpha: float, *, sigma: float) -> float:
    """The Renyi divergence the paper claims for one upload: alpha / (2 sigma^2)."""
    return alpha / (2 * sigma**2)


def upload_rdp(
    alpha: float, *, sigma: float, clients: int, noise_scale: NoiseScale, replace: bool
) -> float:
    """Renyi divergence of ONE upload as the aggregator receives it, for Eq. 21's actual noise.

    replace: a record is replaced (sensitivity 2C), else added or removed (C).
    """
    std = upload_std(sigma, clip_norm=1.0, clients=clients, noise_scale=noise_scale)
    return alpha * (2.0 if replace else 1.0) ** 2 / (2 * std**2)


def sum_rdp(alpha: float, *, sigma: float, clients: int, noise_scale: NoiseScale) -> float:
    """Renyi divergence of the sum of |K| uploads, a record added or removed."""
    one = upload_rdp(alpha, sigma=sigma, clients=clients, noise_scale=noise_scale, replace=False)
    return one / clients
