"""MS-PAFL's claims against the reference values, and where they stop holding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from bench.contract.events import Facts
from bench.privacy.gaussian import gaussian_delta
from defenses import ms_pafl_theorems as theorems
from defenses.ms_pafl import MSPAFL
from tests.docs_modules import formulas
from tests.oracle import assert_reference, reference_cases
from tests.oracle import ms_pafl as oracle

MU = oracle.noise_ratio(epsilon=1.0, delta=1e-4)


def _q(i: dict[str, Any]) -> dict[str, Any]:
    facts = Facts(parameters=1, records=i["D"], local_steps=i["Q"], batch=i["b"])
    wor, wr = (
        MSPAFL(epsilon=0.5, sampling=s).constants(facts)["sampling_rate"]  # type: ignore[arg-type]
        for s in ("wor", "wr")
    )
    return {
        "q_wor": wor,
        "q_wr": wr,
        "q_independent_wor_batches": oracle.independent_rate(
            records=i["D"], steps=i["Q"], batch=i["b"]
        ),
    }


def _amplified(i: dict[str, Any]) -> dict[str, Any]:
    printed, exact = formulas.amplified(i["eps_l"], q=i["q"])
    return {"printed": printed, "exact": exact, "holds": printed >= exact}


def _fig3(i: dict[str, Any]) -> dict[str, Any]:
    rounds = [oracle.single_round(p=i["p"], q=i["q"], epsilon=e) for e in i["eps_l"]]
    return {"eps_c": [e for e, _ in rounds], "delta_c": rounds[0][1]}


def _fig4(i: dict[str, Any]) -> dict[str, Any]:
    of = {"p": i["p"], "q": i["q"], "epsilon": i["eps_l"], "delta_tilde": i["delta_tilde"]}
    totals = [oracle.claimed(**of, rounds=t) for t in i["T"]]
    return {"eps": [e for e, _ in totals], "total_delta": [d for _, d in totals]}


def _until(i: dict[str, Any]) -> dict[str, Any]:
    delta_c = oracle.single_round(p=i["p"], q=i["q"], epsilon=1.0)[1]
    return {"T": oracle.rounds_within(delta_c, target=1e-4), "delta_c": delta_c}


def _c0(i: dict[str, Any]) -> dict[str, Any]:
    return {
        "c0_C1": theorems.c0(delta=i["delta"], clip_norm=1.0),
        "c0_C10": theorems.c0(delta=i["delta"], clip_norm=10.0),
        "c0_scale_free": oracle.c0_scale_free(delta=i["delta"]),
    }


def _thm3(i: dict[str, Any]) -> dict[str, Any]:
    mu = oracle.noise_ratio(epsilon=i["eps_l"], delta=i["delta"])
    of = {"rounds": i["T"], "delta": i["delta"]}
    return {
        "thm3": oracle.local_total(p=i["p"], q=i["q"], epsilon=i["eps_l"], **of),
        "rdp_poisson": oracle.subsampled_epsilon(q=i["q"], mu=mu, **of),
        "unamplified_exact": oracle.unamplified_epsilon(
            mu=mu, uploads=i["T"], delta=i["delta"]
        ),
    }  # fmt: skip


def _server_view(i: dict[str, Any]) -> dict[str, Any]:
    of = {"p": i["p"], "q": i["q"], "epsilon": i["eps_l"], "rounds": i["T"]}
    total, delta = oracle.claimed(**of)
    view = {"p": i["p"], "mu": MU, "rounds": i["T"]}
    return {
        "thm4": total,
        "total_delta": delta,
        "safe_eps_same_delta": oracle.server_view_epsilon(**view, delta=delta),
        "safe_eps_1e4": oracle.server_view_epsilon(**view, delta=1e-4),
        "thm3": oracle.local_total(**of),
    }


def _cor1(i: dict[str, Any]) -> dict[str, Any]:
    eps_c, delta_c = oracle.single_round(p=i["p"], q=i["q"], epsilon=i["eps_l"])
    of = {"p": i["p"], "q": i["q"], "mu": MU}
    return {
        "eps_c": eps_c,
        "delta_c": delta_c,
        "true_delta_server": oracle.visible_round_delta(eps_c, **of),
        "true_delta_mean_of_10": oracle.visible_round_delta(eps_c, **of, uploads=10),
        "true_eps_server_at_delta_c": oracle.visible_round_epsilon(**of, delta=delta_c),
    }


def _b4(i: dict[str, Any]) -> dict[str, Any]:
    """Eq. B.4's pair, which Corollary 1 at p = 1 and no deviation allows q delta."""
    epsilon, allowed = theorems.single_round(
        p=1.0, q=i["eps"] / 2, epsilon=1.0, delta=oracle.PAPER_DELTA, clients=100, beta=10.0
    )
    found = oracle.absent_upload_delta(epsilon, coordinates=i["d_p"], uploads=i["n"])
    return {"true_delta": found, "allowed": allowed}


def _state(i: dict[str, Any]) -> dict[str, Any]:
    thm3 = oracle.local_total(p=i["p"], q=i["q"], epsilon=i["eps_l"], rounds=i["T"])
    rdp = oracle.subsampled_epsilon(q=i["q"], mu=MU, rounds=i["T"])
    of = {"q": i["q"], "mu": MU, "uploads": i["T"]}
    return {
        "eps_thm3": thm3,
        "delta_lower_at_thm3": oracle.memory_delta(thm3, **of),
        "eps_rdp": rdp,
        "delta_lower_at_rdp": oracle.memory_delta(rdp, **of),
    }


def _violation(i: dict[str, Any]) -> dict[str, Any]:
    thm3 = oracle.local_total(p=1.0, q=i["q"], epsilon=i["eps_l"], rounds=i["T"])
    lower, _ = oracle.stateless_delta(thm3, q=i["q"], mu=MU, rounds=i["T"])
    return {"eps_thm3": thm3, "delta_lower": lower}


def _thm4_state(i: dict[str, Any]) -> dict[str, Any]:
    total, allowed = oracle.claimed(p=i["p"], q=i["q"], epsilon=i["eps_l"], rounds=i["T"])
    lower = oracle.memory_delta_visible(total, p=i["p"], q=i["q"], mu=MU, rounds=i["T"])
    return {
        "eps_thm4": total,
        "delta_allowed": allowed,
        "delta_lower": lower,
        "violated": lower > allowed,
    }


def _nu(i: dict[str, Any]) -> dict[str, Any]:
    p = [0.1] * 100 if i["p"] == "100 x 0.1" else i["p"]
    return {
        "nu": theorems.correction(p),
        "expected_weights": oracle.expected_weights(p)[:3],
        "target": 1 / len(p),
    }


COMPUTE: dict[str, Any] = {
    "mspafl_delta_prime": lambda i: {
        "delta_prime": oracle.deviation_probability(beta=i["beta"], clients=i["N"])
    },
    "mspafl_sigma": lambda i: oracle.noise_std(
        epsilon=i["eps_l"], delta=i["delta"], clip_norm=i["C"]
    ),
    "mspafl_snr": lambda i: oracle.mean_noise(
        epsilon=i["eps_l"], delta=1e-4, coordinates=i["d_p"], uploads=i["n"]
    ),
    "mspafl_q_": _q,
    "mspafl_thm1": _amplified,
    "mspafl_fig3": _fig3,
    "mspafl_fig4": _fig4,
    "mspafl_eq21": lambda i: oracle.first_order_step(p=i["p"], q=i["q"], epsilon=i["eps_l"]),
    "mspafl_linear": lambda i: {"T": [oracle.linear_from(e) for e in i["eps_c"]]},
    "mspafl_rounds_until": _until,
    "mspafl_c0": _c0,
    "mspafl_thm3_q": _thm3,
    "mspafl_server_view": _server_view,
    "mspafl_cor1": _cor1,
    "mspafl_B4": _b4,
    "mspafl_private_half_state": _state,
    "mspafl_thm3_violation": _violation,
    "mspafl_thm4_state": _thm4_state,
    "mspafl_nu": _nu,
}
CASES = reference_cases("ms_pafl", elsewhere=("mspafl_clip",))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_reference_values(case: dict[str, Any]) -> None:
    assert_reference(case, COMPUTE, whole=True)


# --- bounds against slow oracles ----------------------------------------------------------------


def test_mixture_delta_is_the_integral_of_the_positive_part() -> None:
    weights, shifts, epsilon = [0.5, 0.3, 0.2], [0.0, 0.7, 2.5], 0.4
    x = np.linspace(-10, 14, 400_001)
    mixed = sum(w * norm.pdf(x, m) for w, m in zip(weights, shifts, strict=True))
    integral = np.maximum(mixed - math.exp(epsilon) * norm.pdf(x), 0).sum() * (x[1] - x[0])
    found = oracle.mixture_delta(weights, shifts, epsilon=epsilon)
    assert found == pytest.approx(integral, rel=1e-6)


def test_mixture_delta_of_one_shift_is_the_gaussian_mechanism() -> None:
    for epsilon in (0.0, 1.0, 30.0):
        found = oracle.mixture_delta([1.0], [1.5], epsilon=epsilon)
        assert found == pytest.approx(gaussian_delta(mu=1.5, epsilon=epsilon), rel=1e-8)


def test_the_memory_bounds_agree_with_a_simulated_likelihood_ratio() -> None:
    """The best event of the toy client has more delta than any one statistic, and little more
    than the weighted one: 4000 clients of 30 uploads, 4 standard errors."""
    rng = np.random.default_rng(0)
    q, mu, n, epsilon, draws = 0.3, 0.4, 30, 1.0, 4000
    first = rng.geometric(q, size=draws)
    t = np.arange(1, n + 1)
    x = rng.standard_normal((draws, n)) + mu * (t >= first[:, None])
    tail = np.cumsum((mu * x - mu * mu / 2)[:, ::-1], axis=1)[:, ::-1]
    ratio = np.exp(tail) @ (q * (1 - q) ** (t - 1)) + (1 - q) ** n
    gains = np.maximum(1 - math.exp(epsilon) / ratio, 0)
    error = 4 * gains.std() / math.sqrt(draws)
    of: dict[str, Any] = {"q": q, "mu": mu, "uploads": n}
    last = oracle.memory_delta(epsilon, **of)
    weighted = oracle.memory_delta(epsilon, **of, statistic="weighted")
    assert last < weighted < gains.mean() + error
    assert weighted > gains.mean() - error - 0.01


def test_subsampled_rounds_without_memory_lie_between_their_bounds() -> None:
    lower, upper = oracle.stateless_delta(0.2, q=0.2, mu=MU, rounds=1)
    exact = oracle.visible_round_delta(0.2, p=1.0, q=0.2, mu=MU)
    assert lower <= exact * (1 + 1e-6)
    assert exact <= upper * (1 + 1e-6)
    assert upper < 1.1 * lower


# --- where claims hold and fail -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "rounds", "violated"), [(0.05, 200, True), (0.01, 1000, True), (0.1, 100, False)]
)
def test_theorem_4_is_violated_for_rare_check_ins_with_memory(
    p: float, rounds: int, violated: bool
) -> None:
    """p = .05 takes the weighted statistic: the sum of the last uploads just misses it."""
    epsilon, allowed = oracle.claimed(p=p, q=0.2, epsilon=1.0, rounds=rounds)
    lower = oracle.memory_delta_visible(
        epsilon, p=p, q=0.2, mu=MU, rounds=rounds, statistic="weighted"
    )
    assert (lower > allowed) == violated


def test_the_server_view_never_exceeds_the_unamplified_composition() -> None:
    most = oracle.unamplified_epsilon(mu=MU, uploads=20)
    views = [oracle.server_view_epsilon(p=p, mu=MU, rounds=20) for p in (0.1, 0.5, 0.9, 1.0)]
    assert views == sorted(views)
    assert views[-1] == pytest.approx(most)


# --- edges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 2.5, 100.0, 700.0, 5000.0])
def test_claims_do_not_overflow_at_large_budgets(epsilon: float) -> None:
    one, delta = oracle.single_round(p=0.5, q=1.0, epsilon=epsilon)
    assert 0 < one <= 2 * epsilon
    if epsilon >= 100:
        assert one == pytest.approx(2 * epsilon + math.log(0.5), rel=1e-5)
    total, summed = oracle.claimed(p=0.5, q=1.0, epsilon=epsilon, rounds=10)
    assert total >= 10 * one * min(one, 1.0)
    assert summed == pytest.approx(10 * delta + 1e-4)
    assert formulas.amplified(epsilon, q=0.2)[1] <= epsilon


def test_claims_grow_with_everything_that_leaks() -> None:
    base: dict[str, Any] = {"p": 0.3, "q": 0.2, "epsilon": 1.0, "rounds": 10}
    for name, more in (("p", 0.4), ("q", 0.3), ("epsilon", 1.1), ("rounds", 11)):
        epsilon, delta = oracle.claimed(**base)
        larger, more_delta = oracle.claimed(**(base | {name: more}))
        assert larger > epsilon
        assert more_delta >= delta


def test_few_clients_make_the_hoeffding_bound_void() -> None:
    assert oracle.claimed(p=0.5, q=0.2, epsilon=1.0, clients=5, rounds=1)[0] == math.inf
    assert oracle.claimed(p=0.5, q=0.2, epsilon=1.0, clients=5, beta=1.0, rounds=1)[0] < 2


def test_no_check_in_and_no_round_cost_nothing() -> None:
    assert oracle.claimed(p=0.0, q=0.2, epsilon=900.0, rounds=10)[0] == 0
    assert oracle.claimed(p=0.5, q=0.2, epsilon=1.0, rounds=0)[0] == 0
    assert oracle.local_total(p=0.0, q=1.0, epsilon=1.0, rounds=10) == 0
    assert oracle.local_total(p=0.5, q=1.0, epsilon=1.0, rounds=10) == math.inf


def test_a_sampling_rate_never_exceeds_one() -> None:
    for replacement in (False, True):
        rate = theorems.sampling_rate(records=10, draws=60, replacement=replacement)
        assert 0.99 < rate <= 1
    assert oracle.independent_rate(records=10, steps=3, batch=20) == 1


def test_the_correction_counts_a_client_that_always_comes() -> None:
    assert theorems.correction([1.0, 0.3]) == 1
    assert oracle.expected_weights([1.0, 0.0]) == pytest.approx([1.0, 0.0])
