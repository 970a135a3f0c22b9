"""SelectiveShield's claims against the reference values and the paper's accountant."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from defenses import selective_shield_claims as claims

ORACLE = json.loads((Path(__file__).parent / "oracle" / "selective_shield.json").read_text())[
    "cases"
]
ELSEWHERE = ("ss_fisher", "ss_mask_not_dp", "ss_negotiate", "ss_aggregate", "ss_clip", "ss_ckks")
"""Cases of the mechanism, tested with the defense."""
SCALES: tuple[tuple[str, claims.NoiseScale], ...] = (
    ("printed", "times_K"),
    ("plain", "plain"),
    ("divided", "div_K"),
)


def _sigma_for(i: dict[str, Any]) -> dict[str, Any]:
    of = {"rounds": i["T"], "delta": i["delta"]}
    sigma = claims.sigma_for(i["eps"], **of)
    size = {"clip_norm": i["C"], "clients": i["K"]}
    std = {n: claims.upload_std(sigma, **size, noise_scale=s) for n, s in SCALES}
    mean = {n: claims.mean_std(sigma, **size, noise_scale=s) for n, s in SCALES}
    return {
        "sigma": sigma,
        "sigma_opacus_grid": claims.sigma_for(i["eps"], **of, grid=True),
        **{f"std_{n}": v for n, v in std.items()},
        **{f"mean_std_{n}": v for n, v in mean.items()},
        "rms_noise_norm_printed_d235146": claims.noise_norm(std["printed"], coordinates=235146),
    }


def _eq22(i: dict[str, Any]) -> dict[str, Any]:
    alpha, of = i["alpha"], {"sigma": i["sigma"], "clients": i["K"]}
    out = {"eq22": claims.eq22(alpha, sigma=i["sigma"])}
    for name, scale in SCALES:
        for suffix, replace in (("C", False), ("2C", True)):
            out[f"{name}_upload_{suffix}"] = claims.upload_rdp(
                alpha, **of, noise_scale=scale, replace=replace
            )
        out[f"{name}_sum_C"] = claims.sum_rdp(alpha, **of, noise_scale=scale)
    return out


COMPUTE: dict[str, Any] = {
    "ss_eps": lambda i: claims.epsilons(sigma=i["sigma"], rounds=i["T"], delta=i["delta"]),
    "ss_sigma_for": _sigma_for,
    "ss_eq22": _eq22,
    "ss_lemma2": lambda i: {
        "eps": claims.lemma2(i["rdp"], alpha=i["alpha"], delta=i["delta"])
    },
}  # fmt: skip
CASES = [c for c in ORACLE if not c["name"].startswith(ELSEWHERE)]


def test_every_reference_case_has_one_function() -> None:
    assert len(CASES) == 14
    for case in CASES:
        assert sum(case["name"].startswith(k) for k in COMPUTE) == 1, case["name"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_reference_values(case: dict[str, Any]) -> None:
    kind = next(k for k in COMPUTE if case["name"].startswith(k))
    computed = COMPUTE[kind](case["inputs"])
    assert computed.keys() == case["expected"].keys()
    for key, expected in case["expected"].items():
        assert computed[key] == pytest.approx(expected, rel=case.get("tol", 1e-5), abs=0), key


def test_the_grid_is_that_of_opacus() -> None:
    from opacus.accountants import RDPAccountant

    assert list(claims.OPACUS_ORDERS) == RDPAccountant.DEFAULT_ALPHAS
    accountant = RDPAccountant()
    for _ in range(10):
        accountant.step(noise_multiplier=5.0, sample_rate=1.0)
    found = claims.epsilons(sigma=5.0, rounds=10, delta=1e-5)["eps_opacus_grid"]
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_the_exact_epsilon_is_below_every_renyi_bound() -> None:
    for sigma in (0.5, 2.0, 20.0):
        found = claims.epsilons(sigma=sigma, rounds=10, delta=1e-5)
        assert found["eps_exact"] < found["eps_best"] <= found["eps_opacus_grid"] + 1e-12


def test_printed_noise_keeps_eq_22_under_replacement_from_four_clients_on() -> None:
    for clients in (1, 3, 4, 20):
        real = claims.upload_rdp(
            2.0, sigma=3.0, clients=clients, noise_scale="times_K", replace=True
        )
        assert (real <= claims.eq22(2.0, sigma=3.0)) == (clients >= 4)


@pytest.mark.parametrize(("scale", "factor"), [("plain", 4.0), ("div_K", 80.0)])
def test_other_noise_breaks_eq_22_under_replacement(
    scale: claims.NoiseScale, factor: float
) -> None:
    real = claims.upload_rdp(2.0, sigma=3.0, clients=20, noise_scale=scale, replace=True)
    assert real == pytest.approx(factor * claims.eq22(2.0, sigma=3.0))


def test_sigma_for_is_the_inverse_of_the_claim() -> None:
    for epsilon in (0.1, 1.0, 50.0):
        sigma = claims.sigma_for(epsilon, rounds=7, delta=1e-6)
        found = claims.claimed_epsilon(sigma=sigma, rounds=7, delta=1e-6)
        assert found == pytest.approx(epsilon, rel=1e-8)


def test_no_round_costs_nothing_and_no_noise_everything() -> None:
    assert claims.claimed_epsilon(sigma=2.0, rounds=0, delta=1e-5) == 0
    assert claims.claimed_epsilon(sigma=0.0, rounds=1, delta=1e-5) == math.inf
