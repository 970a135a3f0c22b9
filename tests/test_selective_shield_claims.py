"""SelectiveShield's claims against the reference values and the paper's accountant."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench.contract.events import Facts
from bench.privacy.gaussian import renyi_epsilon
from defenses import ckks
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
    found = {n: oracle.noises(sigma, **size, noise_scale=s) for n, s in SCALES}
    return {
        "sigma": sigma,
        "sigma_opacus_grid": oracle.sigma_for(i["eps"], **of, grid=True),
        **{f"std_{n}": v["noise_std"] for n, v in found.items()},
        **{f"mean_std_{n}": v["noise_std_of_mean"] for n, v in found.items()},
        "rms_noise_norm_printed_d235146": found["printed"]["noise_norm_rms"],
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


def _chunks(i: dict[str, Any]) -> dict[str, Any]:
    encrypted = [round(share * i["d"]) for share in i["shares"]]
    return {
        "d": i["d"],
        "n_enc": encrypted,
        **{
            f"chunks_{degree // 2}": [ckks.ciphertexts_for(n, degree // 2) for n in encrypted]
            for degree in i["poly"]
        },
    }


COMPUTE: dict[str, Any] = {
    "ss_eps": lambda i: oracle.epsilons(sigma=i["sigma"], rounds=i["T"], delta=i["delta"]),
    "ss_sigma_for": _sigma_for,
    "ss_eq22": _eq22,
    "ss_lemma2": lambda i: {
        "eps": renyi_epsilon(i["rdp"] / i["alpha"], alpha=i["alpha"], delta=i["delta"])
    },
    "ss_ckks_chunks": _chunks,
}
CASES = reference_cases(
    "selective_shield",
    elsewhere=("ss_fisher", "ss_mask_not_dp", "ss_negotiate", "ss_aggregate", "ss_clip"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_reference_values(case: dict[str, Any]) -> None:
    assert_reference(case, COMPUTE, whole=True)


def test_the_grid_is_that_of_opacus() -> None:
    from opacus.accountants import RDPAccountant

    assert list(oracle.OPACUS_ORDERS) == RDPAccountant.DEFAULT_ALPHAS
    accountant = RDPAccountant()
    for _ in range(10):
        accountant.step(noise_multiplier=5.0, sample_rate=1.0)
    found = oracle.epsilons(sigma=5.0, rounds=10, delta=1e-5)["eps_opacus_grid"]
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_the_exact_epsilon_is_below_every_renyi_bound() -> None:
    for sigma in (0.5, 2.0, 20.0):
        found = oracle.epsilons(sigma=sigma, rounds=10, delta=1e-5)
        assert found["eps_exact"] < found["eps_best"] <= found["eps_opacus_grid"] + 1e-12


def _replaced(clients: int, scale: NoiseScale) -> tuple[float, float]:
    """Eq. 22 and the Renyi divergence of an upload, of order 2, as the ledger prints them."""
    defense = SelectiveShield(noise_multiplier=3.0, noise_scale=scale)
    found_all = formulas.formulas(defense, Facts(parameters=1, clients=clients))
    (found,) = [f for f in found_all if f.equation == "Eq. 22"]
    assert found.really is not None
    return found.value, found.really


def test_printed_noise_keeps_eq_22_under_replacement_from_four_clients_on() -> None:
    for clients in (1, 3, 4, 20):
        printed, real = _replaced(clients, "times_K")
        assert (real <= printed * (1 + 1e-12)) == (clients >= 4)


@pytest.mark.parametrize(("scale", "factor"), [("plain", 4.0), ("div_K", 80.0)])
def test_other_noise_breaks_eq_22_under_replacement(scale: NoiseScale, factor: float) -> None:
    printed, real = _replaced(20, scale)
    assert real == pytest.approx(factor * printed)


def test_sigma_for_is_the_inverse_of_the_claim() -> None:
    for epsilon in (0.1, 1.0, 50.0):
        sigma = oracle.sigma_for(epsilon, rounds=7, delta=1e-6)
        found = oracle.claimed_epsilon(sigma=sigma, rounds=7, delta=1e-6)
        assert found == pytest.approx(epsilon, rel=1e-8)


def test_no_round_costs_nothing_and_no_noise_everything() -> None:
    assert oracle.claimed_epsilon(sigma=2.0, rounds=0, delta=1e-5) == 0
    assert oracle.claimed_epsilon(sigma=0.0, rounds=1, delta=1e-5) == math.inf
