"""DP-CutMixSL's claims in numbers: the printed Eqs. 4-6, and what holds against whom.

Every mechanism here is Gaussian, so its Renyi divergence of order alpha is alpha * slope, and
`slope` is half the sum of (L2 sensitivity / std)^2 over what is released. Smashed data of D_s
values in an interval of width Delta gives `smashed` = Delta^2 D_s / sigma_s^2; labels give
`label` = (squared L2 sensitivity) / sigma_y^2, where the paper bounds the sensitivity by D_y
and two one-hot vectors differ by 2.
"""

from __future__ import annotations

import math
from typing import Literal

from scipy.optimize import minimize_scalar

from bench.privacy.gaussian import exact_gaussian_epsilon, gaussian_std

Method = Literal["sl", "mix", "cutmix"]
PAPER_SMASHED_SIZE, PAPER_LABEL_SIZE = 20, 10
"""D_s and D_y of Sec. 4. D_s = 20 contradicts its own D_s = N P^2 C at N = 64."""
ONE_HOT = 2.0
"""Squared L2 distance of two different one-hot labels."""


# --- masks ----------------------------------------------------------------------------------


def partition_sizes(patches: int, clients: int) -> list[int]:
    """Largest-remainder sizes of `patches` shared evenly; the first clients get the extra one.

    The paper's [lambda N] leaves open how to round, and floor, round and ceiling all miss the
    total for most numbers of clients, which its "no blank patches" excludes.
    """
    share, extra = divmod(patches, clients)
    return [share + (i < extra) for i in range(clients)]


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


def worst_share(*, patches: int, smallest: int, even: bool) -> float:
    """Largest share of the patches that a client may have to send.

    smallest: clients of the smallest group. even: largest-remainder sizes; else sizes are random
    and only "all patches" is excluded for a client in company.
    """
    if smallest == 1:
        return 1.0
    return -(-patches // smallest) / patches if even else (patches - 1) / patches


def box_side(side: int, area: float) -> int:
    """Side of a box with about `area` (a share) of a grid of side x side positions.

    At least 1 and, if the grid has more, less than `side`: a client whose company gets nothing
    is not mixed at all.
    """
    nearest = math.floor(side * math.sqrt(area) + 0.5 + 1e-9)  # ties upwards, by exact areas
    return min(max(1, nearest), max(1, side - 1))


def worst_box_share(*, positions: int, smallest: int, even: bool) -> float:
    """Largest share of the positions that a client may have to send: all but what the least box
    keeps in a corner. Of equal ratios the first box pasted has half the grid, and the others may
    lie inside it. Arguments: see `worst_share`.
    """
    if smallest == 1:
        return 1.0
    width = box_side(math.isqrt(positions), 1 / 2) if even else 1
    return 1 - (-(-width // 2)) ** 2 / positions


# --- Renyi divergence -----------------------------------------------------------------------


def signal(square: float, std: float) -> float:
    """Squared sensitivity over variance; infinite without noise."""
    return square / std**2 if std > 0 else math.inf


def printed_slope(method: Method, *, ratio: float, smashed: float, label: float) -> float:
    """Eqs. 4 (sl), 5 (mix) and 6 (cutmix), divided by alpha; ratio: the largest lambda_i."""
    match method:
        case "sl":
            return (smashed + label) / 2
        case "mix":
            return ratio**2 * (smashed + label) / 2
        case "cutmix":
            return ratio * (smashed + ratio * label) / 2


def server_slope(*, share: float, smashed: float, label: float) -> float:
    """One upload as the server receives it, divided by alpha; share: part of the values sent.

    The client scales neither its noise nor its label by lambda: that the server does so later is
    post-processing and amplifies nothing. Mixup sends everything (share 1).
    """
    return (share * smashed + label) / 2


def rdp_views(
    *,
    clients: int,
    alpha: float,
    variance: float,
    clip: float,
    smashed_size: int,
    label_size: int,
    patches: int = 64,
) -> dict[str, float]:
    """Printed values beside those of two observers, for uniform lambda = 1 / clients.

    server_view: sees each upload. output_only: sees nothing but the mixed batch, in which n
    noises add up (Eq. 1), one is left per value (B.3), or all are scaled by lambda (mixup and
    the labels).
    """
    ratio = 1 / clients
    share = max(partition_sizes(patches, clients)) / patches
    smashed, label, hot = (v / variance for v in (clip**2 * smashed_size, label_size, ONE_HOT))
    both = {"smashed": smashed, "label": label}
    slopes = {
        "printed_SL": printed_slope("sl", ratio=ratio, **both),
        "printed_Mix": printed_slope("mix", ratio=ratio, **both),
        "printed_CutMix": printed_slope("cutmix", ratio=ratio, **both),
        "server_view_CutMix_paper_label_bound": server_slope(share=share, **both),
        "server_view_CutMix_onehot": server_slope(share=share, smashed=smashed, label=hot),
        "server_view_Mix_onehot": server_slope(share=1.0, smashed=smashed, label=hot),
        "output_only_Mix": (smashed + label) / clients / 2,
        "output_only_CutMix_B3": (share * smashed + label / clients) / 2,
        "output_only_CutMix_eq1": (share * smashed + label) / clients / 2,
        "smashed_only_server_CutMix": share * smashed / 2,
    }
    return {name: alpha * slope for name, slope in slopes.items()}


# --- from Renyi divergence to (epsilon, delta) ----------------------------------------------


def mironov_epsilon(slope: float, *, alpha: float, delta: float) -> float:
    """Mironov 2017, Proposition 3: RDP + log(1 / delta) / (alpha - 1)."""
    return alpha * slope + math.log(1 / delta) / (alpha - 1)


def balle_epsilon(slope: float, *, alpha: float, delta: float) -> float:
    """Balle et al. 2020, Theorem 21: tighter than Mironov's at every alpha > 1."""
    shrink = math.log1p(-1 / alpha) - (math.log(delta) + math.log(alpha)) / (alpha - 1)
    return alpha * slope + shrink


def best_epsilon(slope: float, delta: float) -> tuple[float, float]:
    """(epsilon, alpha) of `balle_epsilon` at the best real alpha; (0, inf) for slope 0."""
    if slope == 0:
        return 0.0, math.inf
    if math.isinf(slope):
        return math.inf, 1.0
    found = minimize_scalar(
        lambda x: balle_epsilon(slope, alpha=1 + math.exp(x), delta=delta),
        bounds=(-15, 15), method="bounded", options={"xatol": 1e-10},
    )  # fmt: skip
    return max(0.0, float(found.fun)), 1 + math.exp(found.x)


def exact_epsilon(slope: float, delta: float) -> float:
    """Smallest epsilon at `delta` of Gaussian releases with this slope in all."""
    return exact_gaussian_epsilon(mu=math.sqrt(2 * slope), delta=delta)


def conversions(slope: float, *, releases: int, delta: float) -> dict[str, float]:
    """Epsilon of `releases` uploads of one record by every conversion; slope: of one upload."""
    total = slope * releases
    best, alpha = best_epsilon(total, delta)
    return {
        "rho": total,
        "eps_alpha2_mironov": mironov_epsilon(total, alpha=2, delta=delta),
        "eps_alpha2_balle": balle_epsilon(total, alpha=2, delta=delta),
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
