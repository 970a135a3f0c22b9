"""What follows from PM-SFL's mechanisms beside what the paper prints.

c: every mask probability lies in [c, 1 - c]. d: number of masked coordinates. mu: sensitivity
over standard deviation of a Gaussian release.
"""

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy.special import ndtr
from scipy.stats import norm

from bench.contract.events import Facts
from bench.privacy.gaussian import exact_gaussian_epsilon, gaussian_delta
from defenses.pm_sfl_noised import NoisedPMSFL, amplification_gain, bernoulli_epsilon
from tests.uploads import epsilon_of_coins

# --- Theorem 2: smashed data ----------------------------------------------------------------


def amplified_epsilon(epsilon: float, *, c: float, d: int) -> dict[str, float]:
    """Theorem 2's eps_amp, its gain eps - eps_amp and log10(c^d)."""
    gain = amplification_gain(epsilon, c=c, d=d)
    return {"eps_amp": epsilon - gain, "gain": gain, "log10_c_pow_d": d * math.log10(c)}


def masked_laplace_loss(
    w: Sequence[float], x: Sequence[float], other: Sequence[float], *, keep: float, scale: float
) -> float:
    """Largest ln p_x(u) / p_other(u) over u = (w * M) . x + Laplace(scale), M ~ Bernoulli(keep).

    One direction only: epsilon is the larger of both. Tiny w, since all 2^d masks are
    enumerated. Between neighbouring centres the ratio of two Laplace mixtures is monotone, and
    beyond the outermost it is constant, so its extremes lie at the centres.
    """
    masks = np.array(list(product([0.0, 1.0], repeat=len(w))))
    chance = np.prod(np.where(masks > 0, keep, 1 - keep), axis=1)
    ours, theirs = (masks @ (np.asarray(w) * np.asarray(v)) for v in (x, other))
    at = np.concatenate([ours, theirs])[:, None]
    p, q = (np.exp(-np.abs(at - m) / scale) @ chance for m in (ours, theirs))
    return float(np.log(p / q).max())


# --- Theorem 1: reconstruction from a guessed mask --------------------------------------------


def guessed_mask_error(
    w: Sequence[Sequence[float]],
    mask: Sequence[Sequence[float]],
    x: Sequence[float],
    *,
    keep: float,
) -> dict[str, float]:
    """Theorem 1's attacker, who inverts w * M_hat for a random M_hat: its expected error, and
    Eq. 9's bound with eigenvalues (as printed) and with singular values (Appendix C).

    w: square, tiny, since all masks are enumerated. Sums run over M_hat != M for which
    w * M_hat is invertible.
    """
    weights, true, point = np.asarray(w), np.asarray(mask), np.asarray(x)
    total = {"expected_error": 0.0, "bound_eigen": 0.0, "bound_singular": 0.0}
    for bits in product([0.0, 1.0], repeat=weights.size):
        guess = np.array(bits).reshape(weights.shape)
        used, off = weights * guess, weights * (guess - true)
        if not off.any() or np.linalg.matrix_rank(used) < len(weights):
            continue
        p = float(np.prod(np.where(guess > 0, keep, 1 - keep)))
        error = np.linalg.norm(np.linalg.solve(used, off @ point))
        eigen = np.abs(np.linalg.eigvals(off)).min() / np.abs(np.linalg.eigvals(used)).max()
        singular = np.linalg.svd(off)[1].min() / np.linalg.svd(used)[1].max()
        size = np.linalg.norm(point)
        total["expected_error"] += p * float(error)
        total["bound_eigen"] += p * float(eigen * size)
        total["bound_singular"] += p * float(singular * size)
    return total


# --- Theorem 3: Gaussian noise ----------------------------------------------------------------


def local_noise(
    epsilon: float, *, delta: float, steps: int, clip_norm: float, batch: int
) -> dict[str, float]:
    """Theorem 3a's noise, and the exact epsilon of `steps` such steps."""
    defense = NoisedPMSFL(
        noise="local", epsilon=epsilon, delta=delta, local_steps=steps, clip_norm=clip_norm
    )
    constants = defense.constants(
        Facts(parameters=1, batch=batch, records=batch, local_steps=steps)
    )
    sigma = float(constants["noise_std"])
    mu = math.sqrt(steps) * clip_norm / batch / sigma
    return {
        "sigma": sigma,
        "sigma2": sigma * sigma,
        "exact_eps_add_remove": float(constants["eps_one_round_add_remove"]),
        "exact_eps_replace": float(constants["eps_one_round_replace"]),
        "true_delta_replace_at_eps": gaussian_delta(mu=2 * mu, epsilon=epsilon),
        "exact_eps_100_rounds_add_remove": exact_gaussian_epsilon(mu=10 * mu, delta=delta),
    }


def closing_bound(c: float) -> dict[str, float]:
    """Sec. 5's closing bound per coordinate, which is the pure epsilon, and the KL divergence of
    its Renyi form, which is no (epsilon, delta) bound at any small delta."""
    log_odds = bernoulli_epsilon(c)
    kl = (1 - 2 * c) * log_odds
    return {
        "pure_dp_per_coordinate": log_odds,
        "inf_over_alpha_corrected_KL": kl,
        "delta_needed_at_eps_KL": (1 - c) - math.exp(kl) * c,
    }


def mean_clipped_normal(mean: float, std: float, *, c: float) -> float:
    """E[clip(mean + z, c, 1 - c)] for z ~ N(0, std^2): chance of a 1 where theta was `mean`."""
    low, high = (c - mean) / std, (1 - c - mean) / std
    inside = mean * (ndtr(high) - ndtr(low)) + std * (norm.pdf(low) - norm.pdf(high))
    return float(c * ndtr(low) + inside + (1 - c) * ndtr(-high))


def mask_noise(epsilon: float, *, delta: float, c: float, d: int) -> dict[str, float]:
    """Theorem 3b's noise, and the exact epsilon of one upload of d coordinates.

    eps_clip_first: theta clipped before the noise, L2 sensitivity sqrt(d) (1 - 2c).
    eps_printed_order: noise before the clip, sensitivity sqrt(d). eps_after_bernoulli: of the
    sent bits, printed order, worst case theta = 0 against 1 in every coordinate; bern_a is
    there the chance of the rarer bit.
    """
    facts = Facts(parameters=d)
    printed, corrected = (
        NoisedPMSFL(noise="mask", epsilon=epsilon, delta=delta, clip=c, variant=v).constants(facts)
        for v in ("printed", "corrected")
    )
    sigma = float(printed["noise_std"])
    flip = mean_clipped_normal(0.0, sigma, c=c)
    mu = math.sqrt(d) * (1 - 2 * c) / sigma
    return {
        "sigma": sigma,
        "eps_clip_first": exact_gaussian_epsilon(mu=mu, delta=delta),
        "eps_printed_order": float(printed["eps_one_round"]),
        "bern_a": flip,
        "eps_after_bernoulli": epsilon_of_coins(d, math.log((1 - flip) / flip), delta),
        "sigma_needed_clip_first": float(corrected["noise_std"]),
    }
