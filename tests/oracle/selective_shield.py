"""SelectiveShield's epsilon by other accountants than the claim's, and the noise of its readings.

An upload's noised values move by at most C when a record is added or removed (clipped, Eq. 20),
and by 2C when one is replaced. Everything is for the values given public masks.
"""

import math

from scipy.optimize import brentq

from bench.contract.events import Facts
from bench.privacy.gaussian import best_renyi_epsilon, exact_gaussian_epsilon
from defenses.selective_shield import NoiseScale, SelectiveShield
from tests.docs_modules import formulas


def claimed_epsilon(*, sigma: float, rounds: int, delta: float) -> float:
    """The defense's claim after so many uploads."""
    facts = Facts(parameters=1, rounds=max(1, rounds), participations=rounds, delta=delta)
    return SelectiveShield(noise_multiplier=sigma).claim(facts)[0]


def epsilons(*, sigma: float, rounds: int, delta: float) -> dict[str, float]:
    """Epsilon after `rounds` rounds: best real order, which is the claim, and exact Gaussian."""
    return {
        "eps_best": claimed_epsilon(sigma=sigma, rounds=rounds, delta=delta),
        "alpha_best": best_renyi_epsilon(rounds / (2 * sigma**2), delta)[1],
        "eps_exact": exact_gaussian_epsilon(mu=math.sqrt(rounds) / sigma, delta=delta),
    }


def sigma_for(epsilon: float, *, rounds: int, delta: float) -> float:
    """Smallest sigma whose `claimed_epsilon` is `epsilon`."""

    def excess(log_sigma: float) -> float:
        return claimed_epsilon(sigma=math.exp(log_sigma), rounds=rounds, delta=delta) - epsilon

    return math.exp(float(brentq(excess, math.log(1e-3), math.log(1e6), xtol=1e-13)))


def noises(
    sigma: float, *, clip_norm: float, clients: int, noise_scale: NoiseScale, parameters: int = 1
) -> dict[str, float]:
    """The defense's noise_std, noise_std_of_mean and noise_norm_rms."""
    defense = SelectiveShield(noise_multiplier=sigma, clip_norm=clip_norm, noise_scale=noise_scale)
    constants = defense.constants(Facts(parameters=parameters, clients=clients))
    return {k: float(constants[k]) for k in ("noise_std", "noise_std_of_mean", "noise_norm_rms")}


def upload_rdp(
    alpha: float, *, sigma: float, clients: int, noise_scale: NoiseScale, moved: float
) -> float:
    """The defense's Renyi divergence of one upload."""
    defense = SelectiveShield(noise_multiplier=sigma, noise_scale=noise_scale)
    rdp: float = formulas.upload_rdp(defense, alpha, clients=clients, moved=moved)
    return rdp
