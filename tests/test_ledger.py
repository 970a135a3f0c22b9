"""The ledger: composition, units, and what is never proven."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from scipy import integrate
from scipy.stats import binom, norm

from bench.api import (
    Encrypted,
    Event,
    Facts,
    Gaussian,
    Laplace,
    Mechanism,
    RandomisedResponse,
    Unprotected,
)
from bench.privacy.gaussian import (
    classic_gaussian_std,
    exact_gaussian_epsilon,
    gaussian_delta,
    gaussian_std,
)
from bench.privacy.ledger import (
    account,
    gaussian_epsilon,
    record_epsilon,
    subsampled_gaussian_epsilon,
)
from bench.registry import Registry

FACTS = Facts(parameters=1000, rounds=10, clients=5, batch=8, records=50)


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("steps", [1, 30])
def test_gaussian_epsilon_bounds_the_exact_value_and_is_no_looser_than_opacus(
    noise_multiplier: float, steps: int
) -> None:
    ours = gaussian_epsilon(noise_multiplier=noise_multiplier, steps=steps, delta=1e-5)
    exact = exact_gaussian_epsilon(mu=math.sqrt(steps) / noise_multiplier, delta=1e-5)
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, 1.0, steps)]
    assert exact <= ours <= accountant.get_epsilon(1e-5) * (1 + 1e-6)
    assert ours <= 1.2 * exact + 0.05


def test_published_values_of_the_composed_gaussian_are_reproduced() -> None:
    """SelectiveShield's Lemmas 2-3 at T = 10, delta = 1e-5, at the best order."""
    for sigma, expected in {1: 19.0473, 2: 8.07836, 5: 2.81363, 10: 1.30812, 15: 0.841055}.items():
        ours = gaussian_epsilon(noise_multiplier=sigma, steps=10, delta=1e-5)
        assert ours == pytest.approx(expected, rel=2e-3)


@given(std=st.floats(0.1, 50), count=st.integers(1, 50), delta=st.floats(1e-8, 1e-2))
@settings(deadline=None, max_examples=40)
def test_epsilon_falls_with_noise_and_delta_and_rises_with_releases(
    std: float, count: int, delta: float
) -> None:
    def of(std: float, count: int, delta: float) -> float:
        event = Gaussian(sensitivity=1.0, std=std, unit="record", count=count)
        return record_epsilon((event,), delta)

    base = of(std, count, delta)
    assert of(2 * std, count, delta) <= base
    assert of(std, count + 1, delta) >= base
    assert of(std, count, min(0.5, 2 * delta)) <= base


def test_pure_mechanisms_add_up_and_gaussians_compose_by_squares() -> None:
    events: tuple[Event, ...] = (
        Laplace(sensitivity=2.0, scale=4.0, unit="record", count=3),
        RandomisedResponse(epsilon=0.5, coordinates=4, covers="signs", unit="record", count=2),
    )
    assert record_epsilon(events, 1e-300) == pytest.approx(1.5 + 4.0)
    twice = (Gaussian(sensitivity=1.0, std=2.0, unit="record"),) * 4
    once = (Gaussian(sensitivity=1.0, std=1.0, unit="record"),)
    assert record_epsilon(twice, 1e-5) == pytest.approx(record_epsilon(once, 1e-5))


@pytest.mark.parametrize(
    "events",
    [
        (),
        (Unprotected(what="x", why="y"),),
        (Gaussian(sensitivity=1, std=0.0, unit="record"),),
        (Laplace(sensitivity=1, scale=0.0, unit="record"),),
    ],
)
def test_what_is_not_protected_is_infinite(events: tuple[Event, ...]) -> None:
    assert record_epsilon(events, 1e-5) == math.inf


def test_a_gaussian_defense_proves_twice_its_claims_sensitivity(registry: Registry) -> None:
    defense = registry.defense("gaussian", {"noise_multiplier": 4.0, "clip_norm": 2.0})
    entry = account(defense, FACTS)
    assert entry.unit == "client"
    assert entry.eps_claimed == gaussian_epsilon(noise_multiplier=4.0, steps=10, delta=1e-5)
    exact = exact_gaussian_epsilon(mu=math.sqrt(10) / 2, delta=1e-5)
    assert entry.eps_record == pytest.approx(exact)
    assert exact < gaussian_epsilon(noise_multiplier=2.0, steps=10, delta=1e-5) < 1.1 * exact
    assert entry.constants["noise_std"] == 8.0


def test_a_laplace_defense_composes_over_the_releases_of_one_client(registry: Registry) -> None:
    defense = registry.defense("laplace", {"noise_multiplier": 2.0, "clip_norm": 3.0})
    facts = Facts(parameters=10, rounds=8, participation=0.5, participations=4)
    entry = account(defense, facts)
    assert entry.eps_claimed == pytest.approx(4 * 0.5)
    assert entry.eps_record == pytest.approx(4 * 1.0, rel=1e-4)
    assert entry.eps_record < 4.0


@pytest.mark.parametrize("variant", ["printed", "unbiased", "sign_rr"])
@pytest.mark.parametrize("target", ["weights", "gradient"])
def test_spm_claims_one_sign_and_proves_nothing_for_a_record(
    registry: Registry, variant: str, target: str
) -> None:
    settings = {"epsilon": 0.3, "variant": variant, "target": target}
    defense = registry.defense("spm", settings)
    entry = account(defense, Facts(parameters=203530, rounds=50))
    assert (entry.eps_claimed, entry.unit) == (0.3, "coordinate")
    assert entry.eps_record == math.inf
    assert entry.constants["eps_signs_one_round"] == pytest.approx(61059)
    assert entry.constants["eps_signs_all_rounds"] == pytest.approx(3.05295e6)
    assert any("magnitude" in reason for reason in entry.reasons)


def test_an_unknown_mechanism_of_a_record_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown mechanism"):
        Mechanism.from_dict({"kind": "Magic"})


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"parameters": 0}, r"parameters must be >= 1, got 0"),
        ({"parameters": 1, "participation": 1.5}, r"participation must lie in \(0, 1\]"),
        ({"parameters": 1, "delta": 1.0}, r"delta must lie in \(0, 1\)"),
        ({"parameters": 1, "rounds": 2, "participations": 3}, r"\[0, rounds=2\], got 3"),
    ],
)
def test_impossible_facts_are_refused(facts: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Facts(**facts)  # type: ignore[arg-type]


def test_noise_on_updates_proves_nothing_where_smashed_data_is_sent_too(registry: Registry) -> None:
    defense = registry.defense("gaussian", {"noise_multiplier": 1.0, "clip_norm": 1.0})
    facts = Facts(parameters=10, rounds=2)
    assert account(defense, facts).eps_record < float("inf")
    entry = account(defense, replace(facts, split=True))
    assert entry.eps_record == float("inf")
    assert entry.reasons[-1].startswith("The smashed data of every step: no DP")


# --- exact and numerical accountants --------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [-1.0, 0.0, 0.5, 4.0])
def test_gaussian_delta_is_the_hockey_stick_divergence(mu: float, epsilon: float) -> None:
    """By quadrature of max(0, p - e^eps q)."""

    def excess(z: float) -> float:
        return max(0.0, norm.pdf(z - mu) - math.exp(epsilon) * norm.pdf(z))

    turn = mu / 2 + epsilon / mu
    integral, _ = integrate.quad(excess, max(turn, -12.0), max(turn, -12.0) + 25, limit=200)
    assert gaussian_delta(mu=mu, epsilon=epsilon) == pytest.approx(integral, rel=1e-6, abs=1e-12)


@given(mu=st.floats(1e-3, 1e4), delta=st.floats(1e-12, 0.4))
@settings(deadline=None, max_examples=60)
def test_the_exact_epsilon_solves_its_equation(mu: float, delta: float) -> None:
    epsilon = exact_gaussian_epsilon(mu=mu, delta=delta)
    reached = gaussian_delta(mu=mu, epsilon=epsilon)
    assert reached <= delta * (1 + 1e-6)
    assert epsilon == 0 or reached == pytest.approx(delta, rel=1e-5)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0, 100.0])
def test_the_analytic_std_keeps_the_budget_at_any_epsilon(epsilon: float) -> None:
    """Lemma 1's does up to 1; just below 8 it breaks (delta = 1e-4)."""
    std = gaussian_std(sensitivity=2.0, epsilon=epsilon, delta=1e-4)
    assert exact_gaussian_epsilon(mu=2 / std, delta=1e-4) == pytest.approx(epsilon, rel=1e-6)
    classic = classic_gaussian_std(sensitivity=2.0, epsilon=epsilon, delta=1e-4)
    assert (classic > std) == (epsilon < 8)


def test_three_accountants_agree_on_the_subsampled_gaussian() -> None:
    """opacus' RDP (ours), opacus' PRV and dp-accounting's PLD; RDP is the loosest bound."""
    from dp_accounting.pld import privacy_loss_distribution as pld
    from opacus.accountants import PRVAccountant

    for noise, rate, steps in [(1.0, 0.1, 50), (0.8, 0.25, 20)]:
        ours = subsampled_gaussian_epsilon(
            noise_multiplier=noise, rate=rate, steps=steps, delta=1e-5
        )
        accountant = PRVAccountant()
        accountant.history = [(noise, rate, steps)]
        prv = accountant.get_epsilon(1e-5)
        distribution = pld.from_gaussian_mechanism(
            noise, sampling_prob=rate, value_discretization_interval=1e-3
        ).self_compose(steps)
        exact = distribution.get_epsilon_for_delta(1e-5)
        assert prv == pytest.approx(exact, rel=0.02)
        assert exact <= ours * (1 + 1e-3)
        assert ours < 1.25 * exact


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "above"),
    [(0.5, 0.5, 500, 0.038), (0.5, 0.05, 10, 0.212), (1.0, 0.05, 10, 0.302), (10.0, 0.5, 10, 0.102),
     (2.0, 0.01, 1, 5.85)],
)  # fmt: skip
def test_the_papers_accountant_is_as_far_above_the_numerical_one_as_documented(
    noise: float, rate: float, steps: int, above: float
) -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    ours = subsampled_gaussian_epsilon(noise_multiplier=noise, rate=rate, steps=steps, delta=1e-5)
    interval = 1e-4 if steps == 1 else 1e-3
    distribution = pld.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=interval
    )
    exact = distribution.self_compose(steps).get_epsilon_for_delta(1e-5)
    assert ours / exact - 1 == pytest.approx(above, rel=0.05)


def test_a_pure_composition_equals_the_binomial_one() -> None:
    """k randomised responses of one epsilon: the privacy loss is (2 i - k) epsilon, i binomial."""
    k, epsilon, delta = 60, 0.1, 1e-5
    keep = 1 / (1 + math.exp(-epsilon))

    def exact_delta(total: float) -> float:
        i = range(k + 1)
        one, other = binom.pmf(i, k, keep), binom.pmf(i, k, 1 - keep)
        return float((one - math.exp(total) * other).clip(min=0).sum())

    event = RandomisedResponse(
        epsilon=epsilon, coordinates=12, covers="signs", unit="record", count=5
    )
    composed = record_epsilon((event,), delta)
    assert composed < 0.7 * k * epsilon
    assert exact_delta(composed) <= delta
    assert exact_delta(composed - 0.1) > delta


def test_pure_and_gaussian_events_compose_no_worse_than_by_adding() -> None:
    gauss = Gaussian(sensitivity=1.0, std=2.0, unit="record", count=4)
    pure = Laplace(sensitivity=1.0, scale=5.0, unit="record", count=20)
    together = record_epsilon((gauss, pure), 1e-5)
    assert together < record_epsilon((gauss,), 1e-5) + 4.0
    assert together > max(record_epsilon((gauss,), 1e-5), record_epsilon((pure,), 1e-5))


def test_ciphertexts_cost_nothing_against_a_server_without_the_key() -> None:
    gauss = Gaussian(sensitivity=1.0, std=2.0, unit="record")
    sealed = Encrypted(what="the encrypted zone")
    assert record_epsilon((gauss, sealed), 1e-5) == record_epsilon((gauss,), 1e-5)


def test_the_ledger_explains_in_two_plain_sentences(registry: Registry) -> None:
    for name, chosen in [
        ("none", {}), ("spm", {"epsilon": 1.0}), ("laplace", {"noise_multiplier": 1.0,
        "clip_norm": 1.0}), ("selective_shield", {}), ("ms_pafl", {"epsilon": 0.5}),
    ]:  # fmt: skip
        entry = account(registry.defense(name, chosen), FACTS)
        assert len(entry.words) == 2
        assert all(w.endswith(".") and "  " not in w for w in entry.words)
        assert ("Nothing is proven" in entry.words[1]) == math.isinf(entry.eps_record)
