"""What follows from SPM's Algorithm 2 beside what the paper prints; of a value of magnitude 1."""

from __future__ import annotations

import math

from scipy import stats

from defenses.spm import (
    Variant,
    growth,
    keep_probability,
    moments,
    scale_range,
)
from tests.docs_modules import formulas


def mechanism_constants(epsilon: float) -> dict[str, float]:
    """Constants of the printed mechanism beside those of its normalised and unbiased forms."""
    e = math.exp(epsilon)
    _, c = scale_range(epsilon, "printed")
    keep = keep_probability(epsilon)
    mean, variance = moments(epsilon, "printed")
    return {
        "C": c,
        "p_printed": (e - 1) / 2,
        "printed_pdf_total_mass": 1 + 1 / e,
        "keep_prob": keep,
        "flip_prob": 1 - keep,
        "pdf_normalised_keep": keep / (c - 1),
        "pdf_normalised_flip": (1 - keep) / (c - 1),
        "bias_factor_alg2": mean,
        "var_printed": formulas.printed_variance(epsilon),
        "var_alg2_uniform": variance,
        "mse_alg2_uniform": variance + (1 - mean) ** 2,
        "var_alg2_endpoints_1_or_C": (1 + c * c) / 2 - mean * mean,
        "C_unbiased_uniform": scale_range(epsilon, "unbiased")[1],
        "var_unbiased_uniform": moments(epsilon, "unbiased")[1],
        "var_sign_rr_t_equals_plusminus_C": moments(epsilon, "sign_rr")[1],
        "var_debiased_alg2_divided_by_b": variance / mean**2,
    }


def variances(epsilon: float, w: float) -> dict[str, float]:
    """Variance of the released w in [-1, 1] under SPM and its rivals."""
    return formulas.rival_variances(epsilon, w) | {
        "spm_printed": formulas.printed_variance(epsilon) * w * w,
        "spm_alg2": moments(epsilon, "printed")[1] * w * w,
        "spm_unbiased": moments(epsilon, "unbiased")[1] * w * w,
        "spm_sign_rr": moments(epsilon, "sign_rr")[1] * w * w,
    }


def magnitude_leak(epsilon: float, w: float, other: float) -> dict[str, float | bool]:
    """Lower bounds on delta, at any epsilon, for telling w from `other` by |upload| alone.

    0 < w < other. |upload| is uniform on [|w|, C |w|]; what falls outside the other's range
    identifies w for certain.
    """
    _, c = scale_range(epsilon, "printed")
    below = min(max(other - w, 0.0) / (w * (c - 1)), 1.0)
    above = min(max(c * other - c * w, 0.0) / (other * (c - 1)), 1.0)
    return {
        "C": c,
        "delta_lower_w_vs_wprime": below,
        "delta_lower_wprime_vs_w": above,
        "rel_std_of_magnitude_given_w": (c - 1) / math.sqrt(12) / ((c + 1) / 2),
        "disjoint_supports": c * w < other,
    }


def composition(epsilon: float, *, coordinates: int, rounds: int, delta: float) -> dict[str, float]:
    """Epsilon of the signs alone: pure over one round and all, and advanced for one round
    (Dwork, Rothblum, Vadhan 2010)."""
    slack = epsilon * math.sqrt(2 * coordinates * math.log(1 / delta))
    return {
        "one_round_pure": coordinates * epsilon,
        "T_rounds_pure": coordinates * rounds * epsilon,
        "one_round_advanced": slack + coordinates * epsilon * math.expm1(epsilon),
    }


def majority_sign_error(epsilon: float, uploads: int) -> float:
    """Chance that the majority of `uploads` releases of one sign is wrong; a tie counts half."""
    flips = stats.binom(uploads, 1 - keep_probability(epsilon))
    error = float(flips.sf(uploads // 2))
    return error + (float(flips.pmf(uploads // 2)) / 2 if uploads % 2 == 0 else 0.0)


def theorem3(epsilon: float, *, uploads: int, beta: float, w: float) -> dict[str, float | bool]:
    """Theorem 3's radius beside the bias that stays."""
    radius = w * formulas.theorem3_radius(epsilon, uploads=uploads, beta=beta)
    bias = w * (1 - moments(epsilon, "printed")[0])
    return {"lambda_": radius, "bias_floor": bias, "claim_violated_by_bias_alone": bias > radius}


def growth_constants(epsilon: float, uploads: int) -> dict[str, float | int]:
    """E[w_next^2] / w^2 per variant, and the fewest uploads that keep Algorithm 2 below 1."""
    mean, variance = moments(epsilon, "printed")
    variants: dict[str, Variant] = {
        "alg2": "printed",
        "unbiased": "unbiased",
        "sign_rr": "sign_rr",
    }
    factors = {name: growth(epsilon, v, uploads) for name, v in variants.items()}
    return {**factors, "n_stable_alg2": math.floor(variance / (1 - mean * mean)) + 1}
