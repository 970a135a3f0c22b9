"""Local DP per value on an interval: closed forms, ratios, ranges, and the uploads themselves."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chisquare, ks_2samp
from torch import Tensor

from bench.contract.events import Facts, Round, Unprotected
from bench.contract.mechanisms import AdaptiveTwoPoint, Mechanism, Piecewise, TwoPoint
from bench.contract.messages import SUM, Message, as_kind
from bench.data.dataset import Dataset
from bench.privacy.ledger import account
from bench.sandbox.audit import audit
from bench.seeding import generator
from defenses.bounded_ldp import (
    PNPM,
    Duchi,
    PMPiecewise,
    count_sampled_dimensions,
    duchi,
    piecewise,
    piecewise_shape,
)
from defenses.sun_adaptive import SunAdaptive, compute_shuffled_epsilon
from tests.conftest import federation_of, network_for, seen_under
from tests.docs_modules import formulas
from tests.uploads import assert_moments, distance, epsilon_of_coins, play, upload_of

DRAWS = 200_000
EPSILONS = (0.3, 1.5, 3.9)
BOUNDED: tuple[Any, ...] = (Duchi, PMPiecewise, PNPM)
VARIANCE: dict[Any, Callable[[float, float], float]] = {
    Duchi: lambda e, v: ((e + 1) / (e - 1)) ** 2 - v * v,
    PMPiecewise: lambda e, v: v * v / (e**0.5 - 1) + (e**0.5 + 3) / (3 * (e**0.5 - 1) ** 2),
    PNPM: lambda e, v: 4 * (e + 1 / 3) / (e - 1) ** 2 * v * v,
}
"""As printed by the papers, in E = e^epsilon."""


def uploaded(
    defense: Any, update: Tensor, *, base: Tensor | None = None, kind: str = "update",
    seed: int = 0, lr: float = 0.5, steps: int = 2,
) -> Message:  # fmt: skip
    """What the defense's real upload makes of one tensor's update, sent as `kind`."""
    rng = generator(seed, "ldp")
    return upload_of(defense, update, rng, base=base, kind=kind, lr=lr, steps=steps)  # type: ignore[arg-type]


def released(defense: Any, v: float, **how: Any) -> Tensor:
    return uploaded(defense, torch.full((DRAWS,), v), **how).parts["p"].values.double()


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("v", [-1.0, -0.4, 0.0, 0.7])
def test_a_release_is_unbiased_with_the_published_variance(
    kind: Any, epsilon: float, v: float
) -> None:
    bound = 0.05
    out = released(kind(epsilon=epsilon, bound=bound), v * bound)
    assert_moments(out / bound, mean=v, variance=VARIANCE[kind](math.exp(epsilon), v))


# --- privacy --------------------------------------------------------------------------------


def plus_probability(v: float, epsilon: float) -> float:
    """P(+) of Duchi's mechanism, from the mechanism itself: bisection for the u that turns it."""
    low, high = 0.0, 1.0
    value = torch.tensor(v, dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        plus = float(duchi(value, torch.tensor(middle, dtype=torch.float64), epsilon=epsilon)) > 0
        low, high = (middle, high) if plus else (low, middle)
    return low


@given(epsilon=st.floats(1e-3, 12), v=st.floats(-1, 1), other=st.floats(-1, 1))
@settings(deadline=None, max_examples=50)
def test_duchi_keeps_the_ratio_of_probabilities_within_e_to_the_epsilon(
    epsilon: float, v: float, other: float
) -> None:
    p, q = plus_probability(v, epsilon), plus_probability(other, epsilon)
    limit = math.exp(epsilon) * (1 + 1e-9)
    assert p <= limit * q
    assert 1 - p <= limit * (1 - q)
    ends = plus_probability(1.0, epsilon) / plus_probability(-1.0, epsilon)
    assert ends == pytest.approx(math.exp(epsilon), rel=1e-6)


@given(epsilon=st.floats(1e-3, 100), v=st.floats(-1, 1))
@settings(deadline=None)
def test_the_piecewise_window_lies_in_the_support_and_its_density_is_e_to_the_epsilon_higher(
    epsilon: float, v: float
) -> None:
    """Uniforms on a grid are mapped to the window and to the rest, each evenly and completely:
    two heights of density, whatever v, whose ratio is what LDP bounds."""
    edge, width, near = piecewise_shape(epsilon)
    high, low = near / width, (1 - near) / (edge + 1)
    if epsilon < 30:  # 1 - near keeps no digits beyond
        assert high / low == pytest.approx(math.exp(epsilon), rel=1e-3 if epsilon > 20 else 1e-6)
    n = 1000
    value = torch.full((n,), v, dtype=torch.float64)
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    inside = piecewise(value, torch.zeros(n, dtype=torch.float64), grid, epsilon=epsilon)
    rest = piecewise(value, torch.ones(n, dtype=torch.float64), grid, epsilon=epsilon)
    left = (edge + 1) / 2 * v - (edge - 1) / 2
    tiny = 1e-9 * edge
    assert float(inside.min()) >= max(-edge, left) - tiny
    assert float(inside.max()) <= min(edge, left + width) + tiny
    assert torch.allclose(inside.diff(), torch.full((n - 1,), width / n).double(), atol=tiny)
    assert float(rest.abs().max()) <= edge
    assert not bool(((rest > left + tiny) & (rest < left + width - tiny)).any())
    # Closing the window's gap leaves an even grid over a length of C + 1.
    closed = torch.where(rest >= left + width / 2, rest - width, rest)
    assert torch.allclose(
        closed.diff(), torch.full((n - 1,), (edge + 1) / n).double(), atol=2 * tiny
    )


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("epsilon", [1e-3, 0.3, 30.0, 100.0, 700.0])
def test_outputs_stay_in_their_support_at_any_budget(kind: Any, epsilon: float) -> None:
    bound, values = 0.02, torch.linspace(-0.05, 0.05, 2001)
    out = uploaded(kind(epsilon=epsilon, bound=bound), values).parts["p"].values
    assert bool(torch.isfinite(out).all())
    half, quarter = math.tanh(epsilon / 2), math.tanh(epsilon / 4)
    size = out.double().abs() / bound
    clipped = (values.double() / bound).clamp(-1, 1)
    if kind is Duchi:
        assert torch.allclose(size, torch.full_like(size, 1 / half), rtol=1e-6)
    elif kind is PMPiecewise:
        assert float(size.max()) <= 1 / quarter * (1 + 1e-6)
        if epsilon >= 100:
            assert torch.allclose(out.double() / bound, clipped, atol=1e-5)
    else:
        reach = 2 / half - 1  # (E+3)/(E-1)
        assert bool((size <= reach * clipped.abs() * (1 + 1e-6)).all())
        assert bool((size >= clipped.abs() * (1 - 1e-6)).all())


# --- uploads --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_value_outside_of_the_bound_is_released_as_the_bound_and_nan_as_zero(kind: Any) -> None:
    defense = kind(epsilon=1.5, bound=0.1)
    out = released(defense, 7.0)
    assert_moments(out / 0.1, mean=1.0, variance=VARIANCE[kind](math.exp(1.5), 1.0))
    assert torch.equal(out, released(defense, 0.1))
    assert torch.equal(out, released(defense, math.inf))
    assert torch.equal(released(defense, math.nan), released(defense, 0.0))


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("sent_as", ["update", "gradient", "weights"])
@pytest.mark.parametrize("target", ["update", "gradient", "weights"])
def test_the_target_is_what_is_perturbed_whatever_kind_was_sent(
    kind: Any, sent_as: str, target: str
) -> None:
    """lr * steps = 1, so that update, gradient and weights (of base 0) differ by a sign."""
    update = torch.linspace(-0.2, 0.2, 101)
    defense = kind(epsilon=1.5, bound=0.1, target=target)
    upload = uploaded(defense, update, kind=sent_as)
    assert upload.kind == target
    sign = -1.0 if target == "gradient" else 1.0
    expected = uploaded(kind(epsilon=1.5, bound=0.1), sign * update).parts["p"].values
    assert torch.allclose(upload.parts["p"].values, expected)


@pytest.mark.parametrize("target", ["update", "gradient", "weights"])
def test_a_release_read_as_another_kind_is_still_unbiased(target: str) -> None:
    base = torch.full((DRAWS,), 0.03)
    defense = PMPiecewise(epsilon=3.9, bound=0.2, target=target)  # type: ignore[arg-type]
    upload = uploaded(defense, torch.full((DRAWS,), 0.05), base=base, lr=0.1, steps=10)
    read = as_kind(upload, "update", base={"p": base}, lr=0.1).parts["p"].values.double()
    value = {"update": 0.05, "gradient": -0.05, "weights": 0.08}[target]
    variance = 0.2**2 * VARIANCE[PMPiecewise](math.exp(3.9), value / 0.2)
    assert_moments(read, mean=0.05, variance=variance)


# --- PM of several dimensions ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "size", "count"),
    [(0.1, 100, 1), (2.5, 100, 1), (4.99, 100, 1), (5.0, 100, 2), (26.0, 100, 10), (26.0, 3, 3)],
)
def test_so_many_dimensions_are_sampled_as_algorithm_4_says(
    epsilon: float, size: int, count: int
) -> None:
    """k = max(1, min(d, floor(epsilon / 2.5)))."""
    assert count_sampled_dimensions(epsilon, size) == count
    defense = PMPiecewise(epsilon=epsilon, bound=0.1, dimensions="sampled")
    part = uploaded(defense, torch.full((size,), 0.05)).parts["p"]
    assert int(part.presence().sum()) == count
    assert part.absent == "zero"
    assert not bool(part.values[~part.presence()].any())


def sampled_uploads(epsilon: float, values: Tensor, *, draws: int) -> Tensor:
    """Uploads [draws, d] of values [d] with a bound of 1, 0 where nothing was sent."""
    defense = PMPiecewise(epsilon=epsilon, bound=1.0, dimensions="sampled")
    rng = generator(0, "sampled")
    rows = [upload_of(defense, values, rng).parts["p"].values for _ in range(draws)]
    return torch.stack(rows).double()


def test_a_sampled_upload_is_unbiased_with_its_variance_and_samples_evenly() -> None:
    """d = 5 and epsilon = 5, so that k = 2 values have 2.5 each."""
    values, draws = torch.tensor([1.0, -0.4, 0.0, 0.7, -1.0]), 2_500
    rows = sampled_uploads(5.0, values, draws=draws)
    for column, v in zip(rows.T, values.tolist(), strict=True):
        one = VARIANCE[PMPiecewise](math.exp(2.5), v)
        assert_moments(column, mean=v, variance=2.5 * (one + v * v) - v * v)
    shown = rows != 0
    assert bool((shown.sum(dim=1) == 2).all())
    pairs = torch.bincount((shown.long() * 2 ** torch.arange(5)).sum(dim=1))
    counts = pairs[pairs > 0]
    assert len(counts) == 10
    assert chisquare(counts.numpy()).pvalue > 1e-6


def test_values_that_were_sampled_follow_the_law_that_attackers_are_told() -> None:
    values = torch.tensor([0.6, -0.2, 0.1])
    rows = sampled_uploads(4.0, values, draws=2_500)
    defense = PMPiecewise(epsilon=4.0, bound=1.0, dimensions="sampled")
    (told,) = defense.mechanisms_in(Round(parameters=3))
    assert isinstance(told, Piecewise)
    assert (told.epsilon, told.scale, told.faithful) == (4.0, 3.0, False)
    drawn = told.sample(values.double().expand(2_500, 3), generator(1, "told"))
    for sent, other in zip(rows.T, drawn.T, strict=True):
        assert ks_2samp(sent[sent != 0].numpy(), other.numpy()).pvalue > 1e-6
    (alone,) = defense.mechanisms_in(Round())
    assert (alone.epsilon, alone.scale) == (4.0, 1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("epsilon", [1.0, 10.0])
def test_a_sampled_upload_costs_epsilon_as_a_whole_whatever_its_size(epsilon: float) -> None:
    defense = PMPiecewise(epsilon=epsilon, bound=0.1, dimensions="sampled")
    facts = Facts(parameters=10**6, rounds=20, participations=12)
    entry = account(defense, facts)
    assert (entry.eps_claimed, entry.claim_delta, entry.unit) == (12 * epsilon, 0.0, "client")
    count = count_sampled_dimensions(epsilon, 10**6)
    expected = epsilon_of_coins(12 * count, epsilon / count, facts.delta)
    assert entry.eps_record == pytest.approx(expected, rel=1e-9)
    assert entry.eps_record <= 12 * epsilon
    assert (entry.constants["eps_one_round"], entry.constants["values_sent"]) == (epsilon, count)


@pytest.mark.parametrize(
    ("rounds", "draws"), [(1, 400), pytest.param(3, 150, marks=pytest.mark.slow)]
)
def test_no_audit_refutes_a_sampled_uploads_claim_or_proof(rounds: int, draws: int) -> None:
    defense = PMPiecewise(epsilon=5.0, bound=0.1, dimensions="sampled")
    audited = audit(defense, draws=draws, parameters=2, rounds=rounds)
    assert (audited.verdict_claim, audited.verdict_proof) == ("consistent", "consistent")
    assert audited.eps_audited > 1  # both values are sent


# --- LDP-FL ---------------------------------------------------------------------------------


def test_the_adaptive_range_follows_the_broadcast_within_its_limits() -> None:
    weights = torch.tensor([1.0, 2.0, 6.0])  # mean 3, farthest 3
    wide = AdaptiveTwoPoint(of="weights", epsilon=1.0, slack=1.5, floor=0.1, radius=100.0)
    assert wide.interval(weights) == (3.0, 4.5)
    assert replace(wide, radius=2.0).interval(weights) == (3.0, 2.0)
    assert wide.interval(torch.ones(4)) == (1.0, 0.1)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_sun_is_unbiased_inside_the_range_with_duchis_variance_on_its_radius(
    epsilon: float,
) -> None:
    """base alternates between 0.1 and 0.3: centre 0.2, radius 2 * 0.1."""
    base = torch.tensor([0.1, 0.3]).repeat(DRAWS // 2)
    defense = SunAdaptive(epsilon=epsilon, slack=2.0, max_radius=1.0)
    upload = uploaded(defense, torch.full((DRAWS,), 0.25) - base, base=base)
    assert upload.kind == "weights"
    out = upload.parts["p"].values.double()
    e = math.exp(epsilon)
    assert_moments(out, mean=0.25, variance=(0.2 * (e + 1) / (e - 1)) ** 2 - 0.05**2)
    points = torch.tensor([0.2 - 0.2 * (e + 1) / (e - 1), 0.2 + 0.2 * (e + 1) / (e - 1)])
    assert torch.allclose(out.unique(), points.double(), atol=1e-6)


def test_suns_range_does_not_depend_on_the_clients_own_weights() -> None:
    """The two values that can be sent are the same for any training result."""
    base = torch.linspace(-0.05, 0.05, 1000)
    defense = SunAdaptive(epsilon=1.0)
    outputs = [
        uploaded(defense, torch.full((1000,), shift), base=base).parts["p"].values.unique()
        for shift in (0.0, 0.02, -3.0)
    ]
    assert all(torch.equal(outputs[0], o) for o in outputs)


# --- splitting and shuffling ------------------------------------------------------------------


def shuffled(**more: Any) -> SunAdaptive:
    return SunAdaptive(epsilon=2.0, shuffled=True, **more)


def test_shuffling_moves_no_weight_of_the_model(digits: Dataset) -> None:
    network = network_for(digits, "mlp_spm")
    states = []
    for defense in (SunAdaptive(epsilon=2.0), shuffled()):
        federation = federation_of(digits, network, defense)
        play(federation)
        assert all(c.kept is None for c in federation.clients)
        states.append(federation.state)
    assert distance(*states) < 1e-6


def test_the_server_reads_how_many_sent_the_upper_value_and_nobodys_upload(digits: Dataset) -> None:
    seen, truth = seen_under(
        digits, network_for(digits, "mlp_spm"), shuffled(), clients=3, batch=2,
    )  # fmt: skip
    assert seen.clients == (SUM,)
    assert truth.x.shape[:2] == (1, 6)
    uploads = [m for m in seen.messages if m.kind == "weights" and m.sender != SUM]
    assert len(uploads) == 3
    assert not any(bool(p.presence().any()) for m in uploads for p in m.parts.values())
    assert all(s.box is None for m in uploads for s in m.sealed.values())
    (law,) = [Mechanism.from_dict(m) for m in seen.known["mechanisms"][-1:]]
    assert isinstance(law, AdaptiveTwoPoint)
    assert law.count == 3
    (message,) = seen.of(SUM, "weights")
    for name, part in message.parts.items():
        centre, radius = law.interval(seen.before[name])
        ups = 3 * (1 + (part.values.double() - centre) / radius * math.tanh(1.0)) / 2
        torch.testing.assert_close(ups, ups.round(), rtol=0, atol=1e-3)
        assert set(ups.round().unique().tolist()) <= {0.0, 1.0, 2.0, 3.0}


def test_a_rehearsed_upload_stands_for_the_mean_of_as_many_clients() -> None:
    defense, update = shuffled(), torch.full((4000,), 0.002)
    base, rng = {"p": torch.zeros_like(update)}, generator(0, "rehearsed")
    split = upload_of(defense, update, rng)
    plans = defense.public_plans([split] * 3)
    assert SunAdaptive(epsilon=2.0).public_plans([split]) == ()
    upload = upload_of(defense, update, rng, plan=plans[0])
    (one,) = defense.mechanisms()
    law = one.of_mean(3)
    told = law.sample(update.double()[None], generator(1, "told"), base=base)[0]
    values = upload.parts["p"].values.double()
    assert torch.allclose(values.unique(), told.unique(), atol=1e-6)
    assert len(values.unique()) == 4
    assert abs(float(values.mean() - told.mean())) < 8 * float(told.std()) / math.sqrt(4000)


def test_shuffling_proves_nothing_more_for_a_record() -> None:
    facts = Facts(parameters=1000, rounds=20, participations=12, clients=10)
    plain, entry = account(SunAdaptive(epsilon=2.0), facts), account(shuffled(), facts)
    assert entry.eps_record == plain.eps_record
    assert (entry.eps_claimed, entry.unit) == (plain.eps_claimed, plain.unit)
    assert entry.constants["eps_one_value_shuffled"] == 2.0  # ten clients are too few
    many = account(shuffled(), replace(facts, clients=10**6))
    assert float(many.constants["eps_one_value_shuffled"]) < 0.1
    assert many.eps_record == plain.eps_record
    (formula,) = formulas.formulas(shuffled(), facts)
    assert (formula.value, formula.really) == (2.0, 2.0 * 1000 * 12)


def test_what_shuffling_proves_is_the_closed_form_by_hand() -> None:
    """n = 10^6, epsilon = 1, delta = 1e-6: log(1 + 0.46212 (8 sqrt(e 15.2018 / n) + 8 e / n))."""
    assert compute_shuffled_epsilon(1.0, clients=10**6, delta=1e-6) == pytest.approx(
        0.0234968, rel=1e-4
    )
    assert compute_shuffled_epsilon(1.0, clients=600, delta=1e-6) == 1.0  # log(n / 232) < 1


@pytest.mark.parametrize(("epsilon", "clients"), [(0.5, 2000), (1.0, 20_000), (3.0, 100_000)])
def test_counts_of_shuffled_values_keep_what_is_proven(epsilon: float, clients: int) -> None:
    """Both ends of one client's interval beside others that all are at the lower end: the exact
    delta of the two laws of the count."""
    delta = 1e-5
    proven = compute_shuffled_epsilon(epsilon, clients=clients, delta=delta)
    assert proven < epsilon
    low = 1 / (1 + math.exp(epsilon))
    ups = np.arange(clients + 1)
    others = binom.pmf(ups, clients - 1, low)
    moved = np.concatenate([[0.0], others[:-1]])
    one, two = ((1 - p) * others + p * moved for p in (low, 1 - low))
    for a, b in ((one, two), (two, one)):
        assert np.maximum(a - math.exp(proven) * b, 0).sum() <= delta


def test_an_audit_reads_the_counts_and_refutes_no_proof() -> None:
    audited = audit(shuffled(), draws=400, parameters=4)
    assert audited.verdict_proof == "consistent"
    assert audited.eps_audited > 1  # the counts of one client are its values


# --- what is known and what is proven ---------------------------------------------------------


@pytest.mark.parametrize("target", ["update", "gradient", "weights"])
@pytest.mark.parametrize(("kind", "law"), [(Duchi, TwoPoint), (PMPiecewise, Piecewise)])
def test_attackers_are_told_the_true_law(kind: Any, law: Any, target: Any) -> None:
    defense = kind(epsilon=1.5, bound=0.1, target=target)
    (told,) = defense.mechanisms_in(Round())
    assert told == law(of=target, epsilon=1.5, radius=0.1)
    assert told.variance == pytest.approx(0.01 * VARIANCE[kind](math.exp(1.5), 0.0))
    e = math.exp(1.5)
    (told,) = PNPM(epsilon=1.5, bound=0.1, target=target).mechanisms()
    assert (told.of, told.low, told.bound) == (target, 1.0, 0.1)
    assert (told.keep, told.high) == pytest.approx((e / (e + 1), (e + 3) / (e - 1)))


def test_a_record_costs_every_value_of_every_upload() -> None:
    facts = Facts(parameters=1000, rounds=20, participations=12)
    for defense in (Duchi(epsilon=0.5, bound=1.0), PMPiecewise(epsilon=0.5, bound=1.0),
                    SunAdaptive(epsilon=0.5)):  # fmt: skip
        entry = account(defense, facts)
        assert (entry.eps_claimed, entry.claim_delta, entry.unit) == (0.5, 0.0, "coordinate")
        expected = epsilon_of_coins(1000 * 12, 0.5, facts.delta)
        assert entry.eps_record == pytest.approx(expected, rel=1e-9)
        assert entry.constants["eps_one_round"] == pytest.approx(500)


def test_pnpm_leaves_magnitudes_unprotected() -> None:
    defense, facts = PNPM(epsilon=0.5, bound=0.1), Facts(parameters=1000)
    assert any(isinstance(e, Unprotected) for e in defense.guarantee(facts))
    assert account(defense, facts).eps_record == math.inf


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_printed_std_is_in_the_targets_own_scale(kind: Any, epsilon: float) -> None:
    constants = kind(epsilon=epsilon, bound=0.1).constants(Facts(parameters=10))
    e = math.exp(epsilon)
    level = 1.0 if kind is PNPM else 0.0
    assert constants["noise_std"] == pytest.approx(0.1 * math.sqrt(VARIANCE[kind](e, level)))
