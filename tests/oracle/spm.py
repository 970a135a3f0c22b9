"""What follows from SPM's Algorithm 2 beside what the paper prints; of a value of magnitude 1."""

import math

from defenses.spm import Variant, growth, keep_probability, moments, scale_range
from tests.docs_modules import formulas


def mechanism_constants(epsilon: float) -> dict[str, float]:
    """Constants of the printed mechanism beside those of its unbiased forms."""
    keep, (mean, variance) = keep_probability(epsilon), moments(epsilon, "printed")
    return {
        "C": scale_range(epsilon, "printed")[1],
        "keep_prob": keep,
        "flip_prob": 1 - keep,
        "bias_factor_alg2": mean,
        "var_printed": formulas.printed_variance(epsilon),
        "var_alg2_uniform": variance,
        "C_unbiased_uniform": scale_range(epsilon, "unbiased")[1],
        "var_unbiased_uniform": moments(epsilon, "unbiased")[1],
        "var_sign_rr_t_equals_plusminus_C": moments(epsilon, "sign_rr")[1],
    }


def variances(epsilon: float, w: float) -> dict[str, float]:
    """Variance of the released w in [-1, 1] under SPM and its rivals."""
    return formulas.rival_variances(epsilon, w) | {
        "spm_printed": formulas.printed_variance(epsilon) * w * w,
        "spm_alg2": moments(epsilon, "printed")[1] * w * w,
        "spm_unbiased": moments(epsilon, "unbiased")[1] * w * w,
        "spm_sign_rr": moments(epsilon, "sign_rr")[1] * w * w,
    }


def theorem3(epsilon: float, *, uploads: int, beta: float, w: float) -> dict[str, float | bool]:
    """Theorem 3's radius beside the bias that stays."""
    radius = w * formulas.theorem3_radius(epsilon, uploads=uploads, beta=beta)
    bias = w * (1 - moments(epsilon, "printed")[0])
    return {"lambda_": radius, "bias_floor": bias, "claim_violated_by_bias_alone": bias > radius}


def growth_constants(epsilon: float, uploads: int) -> dict[str, float | int]:
    """E[w_next^2] / w^2 per variant, and the fewest uploads that keep Algorithm 2 below 1."""
    mean, variance = moments(epsilon, "printed")
    variants: dict[str, Variant] = {"alg2": "printed", "unbiased": "unbiased", "sign_rr": "sign_rr"}
    factors = {name: growth(epsilon, v, uploads) for name, v in variants.items()}
    return {**factors, "n_stable_alg2": math.floor(variance / (1 - mean * mean)) + 1}
