"""SelectiveShield's epsilon by other accountants than the claim's, and the noise of its readings.

An upload's noised values move by at most C when a record is added or removed (clipped, Eq. 20),
and by 2C when one is replaced. Everything is for the values given public masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.optimize import brentq

from bench.contract.events import Facts
from bench.privacy.gaussian import best_renyi_epsilon, exact_gaussian_epsilon, renyi_epsilon
from defenses.selective_shield import NoiseScale, SelectiveShield
from tests.docs_modules import formulas

OPACUS_ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))
"""Default Renyi orders of the paper's accountant."""


def claimed_epsilon(*, sigma: float, rounds: int, delta: float) -> float:
    """The defense's claim after so many uploads."""
    facts = Facts(parameters=1, rounds=max(1, rounds), participations=rounds, delta=delta)
    return SelectiveShield(noise_multiplier=sigma).claim(facts)[0]


def epsilons(*, sigma: float, rounds: int, delta: float) -> dict[str, float]:
    """Epsilon after `rounds` rounds and its order: best real order, which is the claim, best of
    Opacus's grid, and the exact Gaussian."""
    grid, at = _on_grid(sigma, rounds, delta)
    return {
        "eps_best": claimed_epsilon(sigma=sigma, rounds=rounds, delta=delta),
        "alpha_best": best_renyi_epsilon(rounds / (2 * sigma**2), delta)[1],
        "eps_opacus_grid": grid,
        "alpha_opacus_grid": at,
        "eps_exact": exact_gaussian_epsilon(mu=math.sqrt(rounds) / sigma, delta=delta),
    }


def _on_grid(sigma: float, rounds: int, delta: float) -> tuple[float, float]:
    slope = rounds / (2 * sigma**2)
    return min((renyi_epsilon(slope, alpha=a, delta=delta), a) for a in OPACUS_ORDERS)


def sigma_for(epsilon: float, *, rounds: int, delta: float, grid: bool = False) -> float:
    """Smallest sigma whose `claimed_epsilon` is `epsilon`; grid: at Opacus's orders only. Infinite
    where no noise reaches it, as below the grid's last order."""
    spent: Callable[[float], float] = (
        (lambda s: _on_grid(s, rounds, delta)[0])
        if grid
        else (lambda s: claimed_epsilon(sigma=s, rounds=rounds, delta=delta))
    )

    def excess(log_sigma: float) -> float:
        return spent(math.exp(log_sigma)) - epsilon

    if excess(math.log(1e6)) > 0:
        return math.inf
    return math.exp(float(brentq(excess, math.log(1e-3), math.log(1e6), xtol=1e-13)))


def noises(
    sigma: float, *, clip_norm: float, clients: int, noise_scale: NoiseScale, parameters: int = 1
) -> dict[str, float]:
    """The defense's noise_std, noise_std_of_mean and noise_norm_rms."""
    defense = SelectiveShield(noise_multiplier=sigma, clip_norm=clip_norm, noise_scale=noise_scale)
    found = defense.constants(Facts(parameters=parameters, clients=clients))
    return {k: float(found[k]) for k in ("noise_std", "noise_std_of_mean", "noise_norm_rms")}


def upload_rdp(
    alpha: float, *, sigma: float, clients: int, noise_scale: NoiseScale, moved: float
) -> float:
    """The defense's Renyi divergence of one upload."""
    defense = SelectiveShield(noise_multiplier=sigma, noise_scale=noise_scale)
    rdp: float = formulas.upload_rdp(defense, alpha, clients=clients, moved=moved)
    return rdp
