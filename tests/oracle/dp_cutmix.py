"""DP-CutMixSL's observers other than the server, and other conversions than the claim's."""

from __future__ import annotations

import math

from bench.contract.events import Facts
from bench.privacy.gaussian import (
    best_renyi_epsilon,
    exact_gaussian_epsilon,
    gaussian_std,
    renyi_epsilon,
)
from defenses.cutmix import DPSL, DPMixSL
from defenses.dp_cutmix import DPCutMix
from defenses.mixer import partition_sizes
from defenses.noised_smashed import ONE_HOT


def partition_constants(patches: int, clients: int) -> dict[str, list[int] | float]:
    """Largest-remainder sizes beside the totals of the other readings of [lambda N]."""
    sizes = partition_sizes(patches, clients)
    return {
        "sizes": sizes,
        "total": sum(sizes),
        "lambda_eff_max": max(sizes) / patches,
        "sum_floor": clients * (patches // clients),
        "sum_round": clients * round(patches / clients),
        "sum_ceil": clients * -(-patches // clients),
    }


def rdp_views(
    *,
    clients: int,
    alpha: float,
    variance: float,
    clip: float,
    smashed_size: int,
    label_size: int,
) -> dict[str, float]:
    """Printed values beside those of two observers, for uniform lambda = 1 / clients.

    server_view: sees each upload. output_only: sees nothing but the mixed batch, in which n
    noises add up (Eq. 1), one is left per value (B.3), or all are scaled by lambda (mixup and
    the labels).
    """
    std = math.sqrt(variance)
    noise = {"clip": clip, "smashed_std": std, "label_std": std}
    sl, mix = DPSL(**noise), DPMixSL(group=clients, **noise)
    cut = DPCutMix(patches=64, group=clients, **noise)
    facts = Facts(parameters=1, clients=clients)
    share = cut.worst_share(facts)
    smashed, label = (v / variance for v in (clip**2 * smashed_size, label_size))
    both = {"smashed": smashed, "label": label}
    slopes = {
        "printed_SL": sl.bound(**both),
        "printed_Mix": mix.bound(**both),
        "printed_CutMix": cut.bound(**both),
        "server_view_CutMix_paper_label_bound": (share * smashed + label) / 2,
        "server_view_CutMix_onehot": cut.server_slope(smashed_size, facts),
        "server_view_Mix_onehot": mix.server_slope(smashed_size, facts),
        "output_only_Mix": (smashed + label) / clients / 2,
        "output_only_CutMix_B3": (share * smashed + label / clients) / 2,
        "output_only_CutMix_eq1": (share * smashed + label) / clients / 2,
        "smashed_only_server_CutMix": share * smashed / 2,
    }
    return {name: alpha * slope for name, slope in slopes.items()}


def mironov_epsilon(slope: float, *, alpha: float, delta: float) -> float:
    """Mironov 2017, Proposition 3: RDP + log(1 / delta) / (alpha - 1)."""
    return alpha * slope + math.log(1 / delta) / (alpha - 1)


def exact_epsilon(slope: float, delta: float) -> float:
    """Smallest epsilon at `delta` of Gaussian releases with this slope in all."""
    return exact_gaussian_epsilon(mu=math.sqrt(2 * slope), delta=delta)


def conversions(slope: float, *, releases: int, delta: float) -> dict[str, float]:
    """Epsilon of `releases` uploads of one record by every conversion; slope: of one upload."""
    total = slope * releases
    best, alpha = best_renyi_epsilon(total, delta)
    return {
        "rho": total,
        "eps_alpha2_mironov": mironov_epsilon(total, alpha=2, delta=delta),
        "eps_alpha2_balle": renyi_epsilon(total, alpha=2, delta=delta),
        "eps_best": best,
        "alpha_best": alpha,
        "eps_exact_gaussian": exact_epsilon(total, delta),
    }


def sigma_for(
    epsilon: float, delta: float, *, share: float, clip: float, smashed_size: int
) -> float:
    """Common std of smashed and label noise that makes one upload (epsilon, delta)-DP against
    the server, labels one-hot."""
    moved = math.sqrt(share * clip**2 * smashed_size + ONE_HOT)
    return gaussian_std(sensitivity=moved, epsilon=epsilon, delta=delta)
