"""What the public mechanisms say of themselves: laws, draws, estimates.

Statistical tests here fail an honest mechanism with probability 1e-6 in all: each of the at most
2,000 of them has 5e-10.
"""

import math
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import comb
from scipy.stats import binom
from torch import Tensor

from bench.api import (
    AdaptiveTwoPoint,
    BernoulliMask,
    Clip,
    GaussianNoise,
    LabelNoise,
    LaplaceNoise,
    Mechanism,
    Piecewise,
    SignPerturbation,
    SmashedNoise,
    TwoPoint,
    squared_distance,
    without_law,
)
from bench.sandbox.conformance.playground import Ground
from bench.sandbox.conformance.proofs import mechanisms_on, pairs_of
from bench.sandbox.noise import checks_of
from defenses.bounded_ldp import PNPM, Duchi, PMPiecewise
from defenses.noise import GaussianUpdate, LaplaceUpdate
from defenses.pm_sfl_noised import NoisedPMSFL
from defenses.splitfed import SplitFedDP, SplitFedPM
from defenses.spm import SPM
from defenses.sun_adaptive import SunAdaptive
from tests.broken_plugins import outcome_of

F64 = torch.float64
DRAWS = 20_000
ALONE = 5e-10
"""Chance that one test fails an honest mechanism."""

levels = st.floats(0.05, 20.0)
budgets = st.floats(0.1, 12.0)
shares = st.floats(0.02, 0.98)
BASE = torch.tensor([0.3, 0.5, 0.1], dtype=F64)
"""Broadcast values, of which the first belongs to what is sent: mean 0.3, farthest 0.2."""


def _signs(keep: float, low: float, width: float, bound: float | None) -> SignPerturbation:
    return SignPerturbation(of="gradient", keep=keep, low=low, high=low + width, bound=bound)


RANDOM: Mapping[str, st.SearchStrategy[Mechanism]] = {
    "GaussianNoise": st.builds(lambda s: GaussianNoise(of="update", std=s), levels),
    "LabelNoise": st.builds(lambda s: LabelNoise(of="labels", std=s), levels),
    "SmashedNoise": st.builds(
        lambda s: SmashedNoise(of="smashed", std=s, low=-0.5, high=1.0), levels
    ),
    "LaplaceNoise": st.builds(lambda s: LaplaceNoise(of="update", scale=s), levels),
    "SignPerturbation": st.builds(_signs, shares, levels, levels, st.sampled_from([None, 0.4])),
    "SignPerturbation alone": st.builds(_signs, shares, levels, st.just(0.0), st.none()),
    "BernoulliMask": st.builds(
        lambda noise, c: BernoulliMask(of="weights", clip=0.05, theta_clipped=c, **noise),
        st.one_of(
            st.just({}), st.builds(lambda s: {"score_std": s}, levels),
            st.builds(lambda s: {"theta_std": s}, levels),
        ),
        st.booleans(),
    ),
    "TwoPoint": st.builds(
        lambda e, r: TwoPoint(of="weights", epsilon=e, radius=r), budgets, levels
    ),
    "AdaptiveTwoPoint": st.builds(
        lambda e, s: AdaptiveTwoPoint(of="weights", epsilon=e, radius=9.0, slack=s, floor=0.01),
        budgets, levels,
    ),
    "Piecewise": st.builds(
        lambda e, r: Piecewise(of="update", epsilon=e, radius=r), budgets, levels
    ),
    "Piecewise of some values": st.builds(
        lambda e, r, c: Piecewise(of="update", epsilon=e, radius=r, scale=c),
        budgets, levels, st.floats(1.0, 1e4),
    ),
}  # fmt: skip

MEANS: Mapping[str, st.SearchStrategy[Mechanism]] = {
    f"{kind} of a mean": st.builds(lambda m, n: m.of_mean(n), RANDOM[kind], st.integers(2, 9))
    for kind in ("TwoPoint", "AdaptiveTwoPoint")
}
ALL = {**RANDOM, **MEANS}


def drawn(mechanism: Mechanism, value: float, *, seed: int = 0) -> Tensor:
    """Draws of what is sent for one value, beside two others of the same tensor."""
    rows = torch.full((DRAWS, len(BASE)), value, dtype=F64)
    return mechanism.sample(rows, torch.Generator().manual_seed(seed), base=BASE)[:, 0]


def misfit(mechanism: Mechanism, sent: Tensor, seen: Tensor, softness: float = 0.0) -> Any:
    """Of single values, as that of the first broadcast one."""
    rows = (v[:, None].expand(-1, len(BASE)) for v in (sent, seen))
    loss, slope = mechanism.misfit(*rows, softness, base=BASE)
    return loss[:, 0], slope[:, 0]


@pytest.mark.parametrize("name", RANDOM)
@given(data=st.data(), value=st.integers(-200, 200), seed=st.integers(0, 2**31))
@settings(max_examples=8, deadline=None)
def test_the_true_law_is_that_of_the_draws(name: str, data: Any, value: float, seed: int) -> None:
    """Chi-square of the outcomes, or Kolmogorov-Smirnov of the integrated density."""
    mechanism, value = data.draw(RANDOM[name]), value / 100
    sent = drawn(mechanism, value, seed=seed)
    exact = mechanism.apply(torch.tensor([[value]], dtype=F64))[0]
    outcomes, counts = sent.unique(return_counts=True)
    if len(outcomes) <= 2:
        if len(outcomes) == 1:
            (chance,) = (-misfit(mechanism, exact, outcomes)[0]).exp()
            assert value == 0 or float(chance) ** DRAWS > ALONE
            return
        chances = (-misfit(mechanism, exact.expand(2), outcomes)[0]).exp()
        assert float(chances.sum()) == pytest.approx(1, abs=1e-6)
        p, n = float(chances[0]), DRAWS
        # Bernstein's bound, which holds for rare outcomes too.
        reach = math.log(2 / ALONE)
        most = reach / 3 + math.sqrt(reach * reach / 9 + 2 * reach * n * p * (1 - p))
        assert abs(int(counts[0]) - n * p) <= most + 1e-5 * n
        return
    if value == 0 and isinstance(mechanism, SignPerturbation):
        assert not bool(sent.any())
        return
    low, high = float(sent.min()), float(sent.max())
    reach = 0.1 * (high - low) + 1e-9
    edges = torch.linspace(low - reach, high + reach, 200_001, dtype=F64)
    middles = (edges[1:] + edges[:-1]) / 2
    loss = misfit(mechanism, exact.expand_as(middles), middles)[0]
    density = (loss[loss.isfinite()].min() - loss).exp()
    cdf = torch.cat([torch.zeros(1, dtype=F64), density.cumsum(0)]) / density.sum()
    ordered = sent.sort().values
    at = torch.searchsorted(edges, ordered).clamp(1, len(edges) - 1)
    share = (ordered - edges[at - 1]) / (edges[at] - edges[at - 1])
    expected = cdf[at - 1] + share * (cdf[at] - cdf[at - 1])
    rank = torch.arange(DRAWS, dtype=F64) / DRAWS
    gap = float(torch.maximum((rank - expected).abs(), (rank + 1 / DRAWS - expected).abs()).max())
    assert gap <= math.sqrt(math.log(2 / ALONE) / (2 * DRAWS)) + 5e-3  # and the grid's steps


@pytest.mark.parametrize("name", ALL)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_the_slope_of_every_misfit_is_its_derivative(name: str, data: Any) -> None:
    mechanism = data.draw(ALL[name])
    rng = torch.Generator().manual_seed(1)
    sent = torch.randn(200, generator=rng, dtype=F64)
    seen = mechanism.sample(sent[:, None].repeat(1, 3), rng, base=BASE)[:, 0]
    sent.requires_grad_()
    for softness in (0.0, 1e-3, 0.1, 1.0):
        loss, slope = misfit(mechanism, sent, seen, softness)
        assert bool(loss.isfinite().all())
        derivative = torch.zeros_like(sent)
        if loss.requires_grad:  # a law of steps has none
            derivative = torch.autograd.grad(loss.sum(), sent)[0]
        torch.testing.assert_close(slope.detach(), derivative, rtol=1e-6, atol=1e-8)


@given(epsilon=budgets, v=st.floats(-1, 1), count=st.integers(2, 30))
@settings(max_examples=25, deadline=None)
def test_the_law_of_a_mean_of_two_points_is_binomial(epsilon: float, v: float, count: int) -> None:
    """Up to a constant of what is seen, the binomial coefficient."""
    law = TwoPoint(of="weights", epsilon=epsilon, radius=0.5).of_mean(count)
    edge, ups = 0.5 / math.tanh(epsilon / 2), np.arange(count + 1)
    seen = torch.tensor(edge * (2 * ups / count - 1))[None]
    chance = 0.5 + v * math.tanh(epsilon / 2) / 2
    loss = law.misfit(torch.full_like(seen, 0.5 * v), seen)[0][0]
    expected = binom.logpmf(ups, count, chance) - np.log(comb(count, ups))
    assert -loss.numpy() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    sent = law.sample(torch.full((DRAWS, 1), 0.5 * v, dtype=F64), torch.Generator().manual_seed(0))
    counts = ((sent / edge + 1) / 2 * count).round()
    torch.testing.assert_close(counts, (sent / edge + 1) / 2 * count, rtol=0, atol=1e-6)
    share, reach = float(counts.mean()) / count, math.log(2 / ALONE) / (DRAWS * count)
    # Bernstein's bound.
    assert abs(share - chance) <= reach / 3 + math.sqrt(2 * reach * chance * (1 - chance)) + 1e-9
    assert law.variance == pytest.approx(edge * edge / count)


def test_clients_with_unlike_values_spread_no_more_than_the_law_of_their_mean() -> None:
    one = TwoPoint(of="weights", epsilon=1.0, radius=1.0)
    values = torch.tensor([-0.9, 0.2, 0.4, 0.7], dtype=F64)
    rng = torch.Generator().manual_seed(0)
    sent = one.sample(values.expand(DRAWS, 4), rng).mean(dim=1)
    told = one.of_mean(4).sample(values.mean().expand(DRAWS, 1), rng)[:, 0]
    error = 6.5 * float(told.std()) / math.sqrt(DRAWS)
    assert abs(float(sent.mean() - told.mean())) < 1.5 * error
    assert float(sent.var()) < float(told.var())


@given(keep=shares, low=levels, width=levels, add=st.floats(1e-6, 0.5))
@settings(max_examples=25, deadline=None)
def test_an_annealed_sign_likelihood_weighs_small_values_no_more_than_its_spread(
    keep: float, low: float, width: float, add: float
) -> None:
    """Without the additive spread the curvature is without bound as what was seen goes to 0."""
    mechanism = _signs(keep, low, width, None)
    seen = torch.tensor([[1e-12, 1.0, -2.0]], dtype=F64)
    sent = torch.zeros_like(seen)
    rms = float((seen / mechanism.mean_scale).square().mean().sqrt())

    def curvature(softness: float) -> float:
        up, down = (mechanism.misfit(sent + d, seen, softness)[1][0, 0] for d in (1e-9, -1e-9))
        return float(up - down) / 2e-9

    assert curvature(add) <= 1.01 / (add * rms) ** 2
    assert curvature(1e-12) > 1e6
    assert float(mechanism.misfit(sent, seen, add)[0].sum()) > 0


def test_the_usual_likelihoods_are_those_that_attacks_descend() -> None:
    """Rounded and annealed ones written out value by value, as an oracle of the vectorised forms;
    the others are those of the draws."""
    sent, seen = torch.tensor([0.3, -0.2], dtype=F64), torch.tensor([0.1, 0.25], dtype=F64)
    rests = [0.2, -0.45]
    laplace = LaplaceNoise(of="update", scale=0.5)
    rounded = [(math.hypot(r, 0.05) - 0.05) / 0.5 for r in rests]
    loss = laplace.misfit(sent, seen, laplace.softness())[0]
    torch.testing.assert_close(loss, torch.tensor(rounded, dtype=F64))
    for signs in (
        SignPerturbation(of="weights", keep=0.8, low=1.0, high=2.0),
        SignPerturbation(of="gradient", keep=0.6, low=1.0, high=12.0),
    ):
        soft = 0.1
        rms = math.hypot(*seen.tolist()) / 2**0.5
        expected = []
        for v, s in zip(sent.tolist(), seen.tolist(), strict=True):
            width = math.hypot(soft * rms, 1e-3 * s)  # of logistic noise on what was sent

            def chance(s: float, v: float, width: float = width, high: float = signs.high) -> float:
                one, other = (1 / (1 + math.exp((t * v - s) / width)) for t in (1.0, high))
                return width / (v * (high - 1)) * (one - other)

            expected.append(-math.log(signs.keep * chance(s, v) + (1 - signs.keep) * chance(-s, v)))
        loss = signs.misfit(sent[None], seen[None], soft)[0][0]
        torch.testing.assert_close(loss, torch.tensor(expected, dtype=F64), rtol=1e-6, atol=0)


def test_what_is_not_random_is_compared_by_squared_distance() -> None:
    sent, seen = torch.tensor([[0.3]]), torch.tensor([[0.1]])
    for exact in (
        Clip(of="update", norm=1.0),
        GaussianNoise(of="update", std=0.0),
        LaplaceNoise(of="update", scale=0.0),
        BernoulliMask(of="weights", clip=0.1, sampled=False),
    ):
        assert not exact.random
        assert exact.misfit(sent, seen) == squared_distance(seen).misfit(sent)
        assert float(exact.misfit(sent, seen)[0]) == pytest.approx(0.04)


@pytest.mark.parametrize("name", ALL)
@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_every_mechanism_comes_back_from_its_record_and_prepares_rows_to_choose(
    name: str, data: Any
) -> None:
    mechanism = data.draw(ALL[name])
    assert Mechanism.from_dict(mechanism.to_dict()) == mechanism
    assert mechanism.known_law
    rng = torch.Generator().manual_seed(2)
    sent = torch.randn(4, 3, generator=rng, dtype=F64)
    seen = mechanism.sample(sent, rng, base=BASE)
    some, soft = torch.tensor([2, 0, 2]), mechanism.softness()
    chosen = mechanism.prepared(seen, soft, base=BASE)[some].misfit(sent[some])
    for row, whole in zip(chosen, mechanism.misfit(sent, seen, soft, base=BASE), strict=True):
        torch.testing.assert_close(row, whole[some])


# --- estimates ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(set(ALL) - {"BernoulliMask"}))
@given(data=st.data(), value=st.floats(-0.4, 0.4))
@settings(max_examples=10, deadline=None)
def test_estimates_are_unbiased(name: str, data: Any, value: float) -> None:
    mechanism = data.draw(ALL[name])
    if isinstance(mechanism, AdaptiveTwoPoint | TwoPoint | Piecewise):
        centre, radius = mechanism.interval(BASE)
        value = centre + value * radius
    if isinstance(mechanism, SignPerturbation) and abs(mechanism.keep - 0.5) < 0.05:
        return
    estimates = mechanism.estimate(drawn(mechanism, value))
    error = float(estimates.std()) / math.sqrt(DRAWS)
    assert abs(float(estimates.mean()) - value) < 6.5 * error + 1e-9


@given(data=st.data(), theta=st.floats(0.05, 0.95))
@settings(max_examples=15, deadline=None)
def test_scores_are_estimated_without_bias_where_nothing_was_learnt(
    data: Any, theta: float
) -> None:
    mechanism = data.draw(RANDOM["BernoulliMask"])
    base = torch.full((1,), theta, dtype=F64)
    score = float(mechanism.received(base))
    gradient = mechanism.gradient(drawn(mechanism, score), base=base, step=0.5)
    variance = float(mechanism.gradient_variance(gradient, base=base, step=0.5))
    assert abs(float(gradient.mean())) < 6.5 * math.sqrt(variance / DRAWS)
    assert float(gradient.var()) == pytest.approx(variance, rel=0.35)


def test_scores_and_probabilities_are_not_noised_together() -> None:
    with pytest.raises(ValueError, match=r"score_std = 1.0 and theta_std = 0.2"):
        BernoulliMask(of="weights", clip=0.1, score_std=1.0, theta_std=0.2)


def test_weights_are_estimated_with_the_broadcasts_sign() -> None:
    mechanism = SignPerturbation(of="weights", keep=0.9, low=1.0, high=3.0)
    base = torch.tensor([0.5, -0.5])
    estimate = mechanism.estimate(torch.tensor([-1.0, -2.0]), base=base)
    assert estimate.tolist() == [0.5, -1.0]
    with pytest.raises(ValueError, match="broadcast"):
        mechanism.estimate(base)


# --- what is declared and what is drawn ----------------------------------------------------------
DECLARED: Mapping[str, Any] = {
    "gaussian": GaussianUpdate(noise_multiplier=0.3, clip_norm=1.0),
    "laplace": LaplaceUpdate(noise_multiplier=0.3, clip_norm=1.0),
    "spm printed": SPM(epsilon=1.0),
    "spm unbiased of gradients": SPM(epsilon=1.0, variant="unbiased", target="gradient"),
    "spm sign_rr": SPM(epsilon=1.0, variant="sign_rr"),
    "duchi of weights": Duchi(epsilon=0.5, bound=0.1, target="weights"),
    "pm_piecewise of updates": PMPiecewise(epsilon=3.0, bound=5e-4),
    "pnpm of gradients": PNPM(epsilon=2.0, bound=5e-4, target="gradient"),
    "PMPiecewise of sampled updates": PMPiecewise(epsilon=40.0, bound=1e-3, dimensions="sampled"),
    "sun_adaptive": SunAdaptive(epsilon=2.0),
    **{
        f"pm_sfl {n}, {v}": NoisedPMSFL(noise=n, variant=v, epsilon=20.0)  # type: ignore[arg-type]
        for n in ("local", "mask") for v in ("corrected", "printed")
    },
    "pm_sfl smashed": NoisedPMSFL(noise="smashed", epsilon=5.0),
    "splitfed_pm": SplitFedPM(),
    "splitfed_dp": SplitFedDP(
        epsilon=5.0, smashed_clip=1.0, update_clip=0.1, update_noise="laplace"
    ),
}  # fmt: skip


GROUNDS = {
    "split": Ground(protocol="splitfed", cut="block1", labels="shared"),
    "whole": Ground(protocol="fedsgd"),
}


SELDOM = {
    "gaussian", "laplace", "spm printed", "spm sign_rr", "pm_sfl smashed", "pm_sfl local, printed",
    "pm_sfl mask, printed",
}  # fmt: skip
"""Those whose draws have the stated moments by their own tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SELDOM)) for n in DECLARED]
)
def test_a_defenses_own_output_follows_its_declared_mechanism(name: str) -> None:
    told = mechanisms_on(GROUNDS["whole"], DECLARED[name])
    assert told
    pairs = cache(partial(pairs_of, DECLARED[name], **GROUNDS))
    for mechanism, (_, check) in zip(told, checks_of(told, pairs), strict=True):
        scales = mechanism.shrinkage(torch.zeros(1, 1)) is not None
        outcome = outcome_of(check)
        assert outcome[0] == "passed" or (scales and outcome[0] == "skipped"), outcome


def test_another_budget_than_the_declared_one_is_found() -> None:
    """Half the budget, a wider range, noise before bits: each by the same test."""

    def findings(drawing: Any, telling: Any) -> list[str]:
        told = mechanisms_on(GROUNDS["whole"], telling)
        checks = checks_of(told, partial(pairs_of, drawing, **GROUNDS))
        return [outcome_of(check)[0] for _, check in checks]

    pairs = (
        (Duchi(epsilon=1.0, bound=0.1), Duchi(epsilon=1.2, bound=0.1)),
        (PMPiecewise(epsilon=3.0, bound=5e-4), Duchi(epsilon=3.0, bound=5e-4)),
        (
            PMPiecewise(epsilon=99.0, bound=1e-3, dimensions="sampled"),
            PMPiecewise(epsilon=80.0, bound=1e-3, dimensions="sampled"),
        ),
        (PNPM(epsilon=2.0, bound=5e-4), PNPM(epsilon=2.0, bound=1.0)),
        (NoisedPMSFL(noise="mask", epsilon=20.0), NoisedPMSFL()),
        (SPM(epsilon=2.0, variant="sign_rr"), SPM(epsilon=2.0, variant="unbiased")),
    )
    for drawing, telling in pairs:
        assert findings(drawing, telling) == ["failed"], drawing


# --- records ------------------------------------------------------------------------------------
class Unlawful(Mechanism):
    """A plugin's own, of which nothing is known."""


class Uniform(Mechanism):
    """A plugin's own that gives a law and nothing else."""

    def misfit(
        self, sent: Tensor, seen: Tensor, softness: float = 0.0, *, base: Any = None
    ) -> tuple[Tensor, Tensor]:
        return (sent - seen).abs(), (sent - seen).sign()


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    kinds = dict(Mechanism.kinds)
    yield
    for name in set(Mechanism.kinds) - set(kinds):
        del Mechanism.kinds[name]


def test_a_random_mechanism_of_a_plugin_without_law_is_named_as_such() -> None:
    unknown = Unlawful(of="update")
    assert unknown.random
    assert not unknown.known_law
    assert without_law([Clip(of="update", norm=1.0), GaussianNoise(of="update", std=1.0)]) is None
    reason = without_law([GaussianNoise(of="update", std=1.0), unknown])
    assert reason is not None
    assert "Unlawful gives no likelihood" in reason
    with pytest.raises(NotImplementedError, match="Unlawful gives no likelihood"):
        unknown.misfit(torch.zeros(1), torch.zeros(1))
    ((_, check),) = checks_of([unknown], lambda of: ())
    assert outcome_of(check) == ("skipped", "it does not say what it samples")


def test_a_plugins_misfit_is_enough_for_a_law() -> None:
    own = Uniform(of="update")
    assert own.known_law
    assert without_law([own]) is None
    prepared = own.prepared(torch.tensor([[1.0], [2.0]]))
    assert prepared[torch.tensor([1])].misfit(torch.zeros(1, 1))[0].tolist() == [[2.0]]
