"""DP-CutMixSL's observers other than the server, and other conversions than the claim's."""

import math

from bench.contract.events import Facts
from bench.privacy.gaussian import best_renyi_epsilon, exact_gaussian_epsilon, renyi_epsilon
from defenses.cutmix import DPSL, DPMixSL
from defenses.dp_cutmix import DPCutMix


def rdp_views(
    *, clients: int, alpha: float, variance: float, clip: float, smashed_size: int, label_size: int
) -> dict[str, float]:
    """Printed values beside those of a server that sees each upload, for uniform lambda =
    1 / clients."""
    std = math.sqrt(variance)
    noise = {"clip": clip, "smashed_std": std, "label_std": std}
    sl, mix = DPSL(**noise), DPMixSL(group=clients, **noise)
    cut = DPCutMix(patches=64, group=clients, **noise)
    facts = Facts(parameters=1, clients=clients)
    smashed, label = (v / variance for v in (clip**2 * smashed_size, label_size))
    both = {"smashed": smashed, "label": label}
    slopes = {
        "printed_SL": sl.bound(**both),
        "printed_Mix": mix.bound(**both),
        "printed_CutMix": cut.bound(**both),
        "server_view_CutMix_onehot": cut.server_slope(smashed_size, facts),
        "server_view_Mix_onehot": mix.server_slope(smashed_size, facts),
    }
    return {name: alpha * slope for name, slope in slopes.items()}


def exact_epsilon(slope: float, delta: float) -> float:
    """Smallest epsilon at `delta` of Gaussian releases with this slope in all."""
    return exact_gaussian_epsilon(mu=math.sqrt(2 * slope), delta=delta)


def conversions(slope: float, *, releases: int, delta: float) -> dict[str, float]:
    """Epsilon of `releases` uploads of one record by every conversion; slope: of one upload."""
    total = slope * releases
    best, alpha = best_renyi_epsilon(total, delta)
    return {
        "rho": total,
        "eps_alpha2_balle": renyi_epsilon(total, alpha=2, delta=delta),
        "eps_best": best,
        "alpha_best": alpha,
        "eps_exact_gaussian": exact_epsilon(total, delta),
    }
