"""SelectiveShield's claims against the reference values and the paper's accountant."""

import math
from typing import Any

import pytest

from bench.contract.events import Facts
from bench.privacy.gaussian import renyi_epsilon
from defenses.selective_shield import NoiseScale, SelectiveShield
from tests.docs_modules import formulas
from tests.oracle import assert_reference, reference_cases
from tests.oracle import selective_shield as oracle

SCALES: tuple[tuple[str, NoiseScale], ...] = (
    ("printed", "times_K"),
    ("plain", "plain"),
    ("divided", "div_K"),
)


def _sigma_for(i: dict[str, Any]) -> dict[str, Any]:
    of = {"rounds": i["T"], "delta": i["delta"]}
    sigma = oracle.sigma_for(i["eps"], **of)
    size = {"clip_norm": i["C"], "clients": i["K"], "parameters": 235146}
    noises = {n: oracle.noises(sigma, **size, noise_scale=s) for n, s in SCALES}
    return {
        "sigma": sigma,
        **{f"std_{n}": v["noise_std"] for n, v in noises.items()},
        **{f"mean_std_{n}": v["noise_std_of_mean"] for n, v in noises.items()},
        "rms_noise_norm_printed_d235146": noises["printed"]["noise_norm_rms"],
    }


def _eq22(i: dict[str, Any]) -> dict[str, Any]:
    """Eq. 22 as the ledger prints it, at order 2: a Renyi divergence is proportional to alpha."""
    alpha, of = i["alpha"], {"sigma": i["sigma"], "clients": i["K"]}
    defense = SelectiveShield(noise_multiplier=i["sigma"])
    printed = {f.equation: f.value for f in formulas.formulas(defense, Facts(parameters=1))}
    out = {"eq22": printed["Eq. 22"] * alpha / 2}
    for name, scale in SCALES:
        one, two = (oracle.upload_rdp(alpha, **of, noise_scale=scale, moved=m) for m in (1.0, 2.0))
        out |= {f"{name}_upload_C": one, f"{name}_upload_2C": two, f"{name}_sum_C": one / i["K"]}
    return out


COMPUTE: dict[str, Any] = {
    "ss_eps": lambda i: oracle.epsilons(sigma=i["sigma"], rounds=i["T"], delta=i["delta"]),
    "ss_sigma_for": _sigma_for,
    "ss_eq22": _eq22,
    "ss_lemma2": lambda i: {
        "eps": renyi_epsilon(i["rdp"] / i["alpha"], alpha=i["alpha"], delta=i["delta"])
    },
}
CASES = reference_cases(
    "selective_shield",
    elsewhere=("ss_fisher", "ss_mask_not_dp", "ss_negotiate", "ss_aggregate", "ss_clip"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_reference_values(case: dict[str, Any]) -> None:
    assert_reference(case, COMPUTE, whole=True)


def test_the_exact_epsilon_is_below_the_best_renyi_bound() -> None:
    for sigma in (0.5, 2.0, 20.0):
        spent = oracle.epsilons(sigma=sigma, rounds=10, delta=1e-5)
        assert spent["eps_exact"] < spent["eps_best"]


@pytest.mark.parametrize(
    ("scale", "clients", "factor"),
    [("times_K", 1, 4.0), ("times_K", 4, 1.0), ("times_K", 20, 0.2), ("plain", 20, 4.0),
     ("div_K", 20, 80.0)],
)  # fmt: skip
def test_only_printed_noise_of_four_clients_or_more_keeps_eq_22_under_replacement(
    scale: NoiseScale, clients: int, factor: float
) -> None:
    """Eq. 22 and the Renyi divergence of an upload, of order 2, as the ledger prints them."""
    defense = SelectiveShield(noise_multiplier=3.0, noise_scale=scale)
    printed = formulas.formulas(defense, Facts(parameters=1, clients=clients))
    (formula,) = [f for f in printed if f.equation == "Eq. 22"]
    assert formula.really == pytest.approx(factor * formula.value)


def test_no_round_costs_nothing_and_no_noise_everything() -> None:
    assert oracle.claimed_epsilon(sigma=2.0, rounds=0, delta=1e-5) == 0
    assert oracle.claimed_epsilon(sigma=0.0, rounds=1, delta=1e-5) == math.inf
