"""Audits: certified lower bounds on epsilon, and the verdicts on claims and proofs."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, norm
from typer.testing import CliRunner

from bench.cli import app
from bench.contract.defense import Client, Defense, Local
from bench.contract.events import Event, Facts, RandomisedResponse
from bench.contract.messages import SERVER, Message, Part, Stage
from bench.metrics.distinguish import cap, clopper_pearson, separate
from bench.registry import Registry
from bench.sandbox.audit import Audit, AuditFinding, audit
from bench.sandbox.neighbours import NeighbourPair, tabulate
from bench.seeding import numpy_generator
from bench.toolkit.vectors import replace_values, uniform_like
from defenses.noise import GaussianUpdate, LaplaceUpdate
from defenses.none import NoDefense
from defenses.pm_sfl_noised import NoisedPMSFL
from defenses.spm import SPM

# --- the estimator, on data of known epsilon ----------------------------------------------------


def responses(epsilon: float, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Randomised response of exactly `epsilon` on 1 and on -1."""
    keep = 1 / (1 + math.exp(-epsilon))
    a, b = (np.where(rng.random((n, 1)) < keep, 1.0, -1.0) for _ in range(2))
    return a, -b


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 3.0])
def test_the_bound_exceeds_a_true_epsilon_in_at_most_5_percent_and_reaches_three_quarters_of_it(
    epsilon: float,
) -> None:
    rng = numpy_generator(0, "responses", str(epsilon))
    bounds = [
        separate(*responses(epsilon, 4000, rng), confidence=0.95).epsilon() for _ in range(200)
    ]
    assert np.mean(np.array(bounds) > epsilon) <= 0.05
    assert np.mean(bounds) >= 0.75 * epsilon


def test_the_bound_of_gaussian_noise_comes_close_to_that_of_the_best_known_threshold() -> None:
    """Oracle: Clopper and Pearson at the expected counts of the best threshold on the direction,
    which the estimator has to find among 16 coordinates."""
    shift, n, delta, rng = 1.5, 4000, 1e-5, numpy_generator(0, "gaussian audit")
    half = n // 2
    best = 0.0
    for t in np.linspace(-3, 4, 141):
        likely, rare = (round(half * float(norm.sf(t - m))) for m in (shift, 0))
        low, high = (clopper_pearson(k, half, miss=0.025)[i] for i, k in enumerate((likely, rare)))
        best = max(best, math.log(max(low - delta, 1e-9) / high))
    direction = np.full(16, shift / 4)
    found = [
        separate(
            rng.normal(size=(n, 16)) + direction, rng.normal(size=(n, 16)), confidence=0.95,
            delta=delta,
        ).epsilon(delta)
        for _ in range(40)
    ]  # fmt: skip
    assert 0.7 * best <= np.mean(found) <= best


def test_equal_distributions_are_hardly_ever_told_apart() -> None:
    rng = numpy_generator(0, "equal")
    told = [
        separate(rng.normal(size=(400, 6)), rng.normal(size=(400, 6)), confidence=0.95).epsilon()
        for _ in range(100)
    ]
    assert np.mean(np.array(told) > 0) <= 0.05


def test_what_differs_for_certain_gives_the_largest_bound_and_constants_none() -> None:
    ones = np.ones((1000, 3))
    found = separate(ones, -ones, confidence=0.95)
    assert found.epsilon() == pytest.approx(found.cap)
    assert found.never
    assert found.cap == pytest.approx(math.log(500 / math.log(1 / 0.025)), abs=0.02)
    assert separate(ones, ones, confidence=0.95).epsilon() == 0


def test_a_wider_spread_or_a_hidden_interval_is_found_without_a_difference_of_means() -> None:
    rng = numpy_generator(0, "spread")
    wide, narrow = rng.normal(size=(2000, 2)) * 4, rng.normal(size=(2000, 2))
    assert separate(wide, narrow, confidence=0.95).epsilon() > 2
    inside, outside = rng.uniform(-1, 1, (2000, 1)), rng.uniform(1, 2, (2000, 1))
    outside *= rng.choice([-1, 1], (2000, 1))
    assert separate(inside, outside, confidence=0.95).epsilon() > 4


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), draws=st.integers(100, 300), columns=st.integers(0, 4),
    shift=st.floats(-1e6, 1e6), coarse=st.booleans(), confidence=st.floats(0.01, 0.999),
    delta=st.floats(0, 0.5),
)  # fmt: skip
def test_a_bound_is_never_negative_and_never_above_the_cap(
    seed: int, draws: int, columns: int, shift: float, coarse: bool, confidence: float,
    delta: float,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, draws, columns))
    a = a + shift
    if coarse:
        a, b = np.round(a), np.round(b)
    found = separate(a, b, confidence=confidence, delta=delta)
    assert 0 <= found.epsilon(delta) <= cap(draws, confidence=confidence) + 1e-9
    assert 0 <= found.delta(1.0) <= 1


@pytest.mark.parametrize(("hits", "draws"), [(0, 50), (3, 50), (50, 50), (400, 1000)])
def test_clopper_pearson_agrees_with_scipys_exact_interval(hits: int, draws: int) -> None:
    theirs = binomtest(hits, draws).proportion_ci(0.9, method="exact")
    assert clopper_pearson(hits, draws, miss=0.05) == pytest.approx((theirs.low, theirs.high))


def test_rows_of_different_shape_line_up_and_what_is_missing_differs_from_zero() -> None:
    one, two = torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    a, b = tabulate([{"m": one}, {"m": two}], [{"m": two, "n": one}, {}])
    assert a.shape == b.shape
    assert len(np.unique(np.concatenate([a, b]), axis=0)) == 4


# --- verdicts on real defenses ------------------------------------------------------------------


def finding(found: Audit, name: str) -> AuditFinding:
    return next(f for f in found.pairs if f.pair == name)


def test_spm_hides_a_sign_as_claimed_but_not_a_magnitude() -> None:
    found = audit(SPM(epsilon=2.5), draws=800)
    assert finding(found, "upload: one sign").verdict_claim == "consistent"
    assert finding(found, "upload: one sign").eps_lower > 1.5
    magnitude = finding(found, "upload: magnitude")
    assert magnitude.verdict_claim == found.verdict_claim == "violated"
    # The supports are disjoint (CLAIMS section 1), so no epsilon holds with a small delta.
    assert magnitude.at_least
    assert (magnitude.delta_at_claim or 0) > 0.7


def test_spms_magnitude_breaks_the_claim_of_3_9_with_enough_draws() -> None:
    found = audit(SPM(epsilon=3.9, variant="sign_rr"), draws=1000, parameters=2)
    assert finding(found, "upload: magnitude").verdict_claim == "violated"
    assert finding(found, "upload: one sign").verdict_claim == "consistent"


@pytest.mark.parametrize(
    "defense",
    [GaussianUpdate(noise_multiplier=2.0, clip_norm=3.0),
     LaplaceUpdate(noise_multiplier=0.8, clip_norm=0.5)],
)  # fmt: skip
def test_clipped_noise_is_not_accused_and_a_client_is_only_added_or_removed(
    defense: Defense,
) -> None:
    found = audit(defense, draws=800)
    assert found.verdict_claim == found.verdict_proof == "consistent"
    compared = [f.pair for f in found.pairs if f.claim is not None]
    assert compared == ["upload: zero"]
    assert finding(found, "upload: one sign").eps_lower > 0.3


def test_an_unprotected_release_shows_all_that_its_draws_can() -> None:
    found = audit(NoDefense(), draws=400)
    assert found.eps_audited == pytest.approx(found.pairs[0].cap, abs=1e-3)
    assert found.eps_at_least
    assert found.verdict_claim == "no claim"
    assert found.verdict_proof == "no proof"


@pytest.mark.slow
def test_dp_cutmixs_label_is_told_apart_beyond_the_printed_claim(registry: Registry) -> None:
    """Eq. 6 scales the label's term by lambda^2, but a client uploads its label unscaled
    (CLAIMS section 3). Printed epsilon: 1.81."""
    defense = registry.defense(
        "dp_cutmix", {"patches": 16, "group": 10, "clip": 0.2, "smashed_std": 1.0, "label_std": 1.0}
    )
    found = audit(defense, draws=2600)
    label = finding(found, "label")
    assert label.claim == pytest.approx(1.806, abs=0.01)
    assert label.verdict_claim == "violated"
    assert finding(found, "smashed data").verdict_claim == "consistent"
    assert finding(found, "upload: all signs").verdict_claim == "not covered"
    assert "coordination" in {s.channel for s in found.skipped}


@pytest.mark.slow
def test_selective_shields_masks_break_its_claim(registry: Registry) -> None:
    """With real ciphertexts: one replaced record moves the masks that go out in plain sight."""
    defense = registry.defense("selective_shield", {"noise_multiplier": 5.0})
    found = audit(defense, draws=800)
    assert found.verdict_claim == "violated"
    assert found.verdict_proof == "no proof"
    assert found.eps_audited > 2.0


def test_noise_before_the_upload_is_not_judged_by_the_upload_alone() -> None:
    found = audit(NoisedPMSFL(noise="local", epsilon=1.0), draws=400)
    assert [f.channel for f in found.pairs] == ["coordination"]
    assert {s.channel for s in found.skipped} == {"upload", "smashed"}
    assert found.verdict_claim == found.verdict_proof == "consistent"


# --- what clients say and leave out -------------------------------------------------------------


class Masked(Defense):
    """Uploads pure noise where a mask lets it; claims epsilon 1 for a record."""

    def __init__(self, *, adaptive: bool) -> None:
        self.adaptive = adaptive

    def _mask(self, name: str, update: torch.Tensor) -> torch.Tensor:
        fixed = torch.arange(update.numel()).view(update.shape) % 2 == 0
        return update.abs() > 0.3 if self.adaptive else fixed

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        out = []
        for message in messages:
            parts = {
                n: Part(
                    values=uniform_like(p.values, rng=client.rng["defense"]),
                    present=self._mask(n, p.values),
                )
                for n, p in message.parts.items()
            }
            out.append(message.with_parts(parts))
        return out

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        return 1.0, 1e-5, "record"


class MaskTold(Masked):
    """As `Masked`, but the mask goes to the server in a message before the upload."""

    def say(self, when: Stage, client: Client, local: Local | None, round: int) -> list[Message]:
        if when != "upload" or local is None:
            return []
        moved = {n: local.end[n] - local.broadcast[n] for n in local.end}
        parts = {n: Part(values=self._mask(n, v).float(), bits=1) for n, v in moved.items()}
        return [Message(kind="mask", sender=client.id, receiver=SERVER, round=round, parts=parts)]

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        rng = client.rng["defense"]
        return [
            replace_values(m, {n: uniform_like(p.values, rng=rng) for n, p in m.parts.items()})
            for m in messages
        ]


@pytest.mark.parametrize("kind", [Masked, pytest.param(MaskTold, marks=pytest.mark.slow)])
def test_a_mask_that_depends_on_the_data_is_found_and_a_fixed_one_is_not_accused(
    kind: type[Masked],
) -> None:
    told = audit(kind(adaptive=True), draws=400)
    assert told.verdict_claim == "violated"
    assert told.eps_at_least
    assert finding(told, "whole round").eps_lower > 2
    fixed = audit(kind(adaptive=False), draws=400)
    assert fixed.verdict_claim == "consistent"
    assert fixed.eps_audited < 0.2


# --- false accusations --------------------------------------------------------------------------


class Response(Defense):
    """Randomised response on one sign of the update: its claim and proof are exact."""

    requires = frozenset({"nothing"})  # whole rounds are not played
    epsilon = 1.5

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        sign = torch.sign(messages[0].parts["head.weight"].values[:, :1] + 0.0)
        sign = torch.where(sign == 0, 1.0, sign)
        keep = uniform_like(sign, rng=client.rng["defense"]) < 1 / (1 + math.exp(-self.epsilon))
        values = torch.zeros_like(messages[0].parts["head.weight"].values)
        values[:, :1] = torch.where(keep, sign, -sign)
        sent = {"head.weight": Part(values=values)}
        return [messages[0].with_parts(sent)]

    def claim(self, facts: Facts) -> tuple[float, float, str]:
        return self.epsilon, 0.0, "record"

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (
            RandomisedResponse(epsilon=self.epsilon, coordinates=1, covers="signs", unit="record"),
        )


class FastGaussian(GaussianUpdate):
    requires = frozenset({"nothing"})


class FastLaplace(LaplaceUpdate):
    requires = frozenset({"nothing"})


def accusations(defense: Defense, seeds: Sequence[int]) -> int:
    found = [audit(defense, draws=400, parameters=2, seed=s) for s in seeds]
    return sum("violated" in (f.verdict_claim, f.verdict_proof) for f in found)


def test_correct_mechanisms_are_not_accused_in_a_few_audits() -> None:
    assert accusations(Response(), range(8)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "defense",
    [Response(), FastGaussian(noise_multiplier=1.0, clip_norm=1.0),
     FastLaplace(noise_multiplier=0.5, clip_norm=1.0)],
    ids=["response", "gaussian", "laplace"],
)  # fmt: skip
def test_correct_mechanisms_are_accused_in_at_most_a_handful_of_100_audits(
    defense: Defense,
) -> None:
    assert accusations(defense, range(100)) <= 5


# --- reproducible, and in the terminal ----------------------------------------------------------


class Forgetful(FastGaussian):
    """Claims for any number of rounds what one costs."""

    def claim(self, facts: Facts) -> tuple[float, float, Any] | None:
        return super().claim(replace(facts, rounds=1))


def test_a_draw_of_several_rounds_is_the_mean_over_its_releases() -> None:
    def release(second: bool, draws: int, rng: torch.Generator) -> list[dict[str, torch.Tensor]]:
        return [{"v": torch.randn(3, generator=rng)} for _ in range(draws)]

    pair = NeighbourPair(
        name="p", channel="upload", units=frozenset({"record"}), what="", release=release,
        facts=Facts(parameters=3),
    )  # fmt: skip
    single, _ = pair.outputs(8, seed=0)
    grouped, _ = pair.outputs(2, seed=0, rounds=4)
    assert grouped.shape == (2, 6)
    np.testing.assert_allclose(grouped[1, :3], single[4:].mean(axis=0))
    np.testing.assert_allclose(grouped[1, 3:], np.abs(single[4:]).mean(axis=0))


@pytest.mark.slow
def test_several_rounds_refute_what_one_cannot() -> None:
    settings: dict[str, Any] = {"noise_multiplier": 4.0, "clip_norm": 1.0}
    one, many, honest, loud = (
        audit(defense, draws=800, parameters=2, rounds=rounds)
        for defense, rounds in (
            (Forgetful(**settings), 1),
            (Forgetful(**settings), 25),
            (FastGaussian(**settings), 25),
            (FastGaussian(noise_multiplier=4 * 25**0.5, clip_norm=1.0), 25),
        )
    )
    assert one.verdict_claim == "consistent"
    assert many.verdict_claim == "violated"
    assert (honest.verdict_claim, honest.verdict_proof) == ("consistent", "consistent")
    assert many.eps_audited > 1.5 * one.eps_audited
    # Twenty-five releases under noise that is five times as large tell no more than one.
    assert loud.eps_audited < 1.5 * one.eps_audited


def test_equal_seeds_give_equal_numbers_and_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    runs = [audit(Response(), draws=200, seed=s) for s in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    "wrong", [{"draws": 99}, {"confidence": 1.0}, {"confidence": 0.0}, {"parameters": 1}]
)
def test_impossible_settings_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        audit(NoDefense(), **wrong)


def test_the_command_prints_a_table_or_json_and_a_violated_claim_is_no_error() -> None:
    asked = ["audit", "spm", "--set", "epsilon=1.5", "--draws", "200"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0
    assert "violated" in shown.output
    assert "upload: magnitude" in shown.output
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    assert told["verdict_claim"] == "violated"
    assert told["pairs"][0]["eps_record"] == "inf"
