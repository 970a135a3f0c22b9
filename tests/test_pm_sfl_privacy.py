"""PM-SFL's personal masks, noised variants and ledger."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.api import BernoulliMask, Defense, Facts, Round, State, Unprotected
from bench.data.dataset import Dataset
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.privacy.ledger import account
from bench.protocols.evaluate import evaluate
from bench.registry import Registry
from bench.seeding import generator
from defenses.pm_sfl import INDICATOR, PERSONAL, PMSFL, personal_share, rank_changes
from defenses.pm_sfl_noised import NoisedPMSFL
from tests.conftest import federation_of, network_for, require
from tests.oracle import pm_sfl as oracle
from tests.uploads import assert_moments, make_client, play, uploads_of

FACTS = Facts(parameters=100, rounds=10, clients=10, batch=32, records=100, local_steps=5)

WORK: dict[str, Any] = {"batch": 20, "lr": 0.1, "local_steps": 10}


# --- personal masks -----------------------------------------------------------------------------


def test_the_personal_share_grows_by_equal_steps_after_the_agreement_rounds() -> None:
    shares = [personal_share(t, share=0.5, agreement_rounds=2, growth_rounds=4) for t in range(8)]
    assert shares == [0.0, 0.0, 0.125, 0.25, 0.375, 0.5, 0.5, 0.5]


def test_personal_masks_stay_personal_and_their_pattern_costs_a_message() -> None:
    defense = PMSFL(personal=0.5, agreement_rounds=1, growth_rounds=2)
    client, rng = make_client("personal"), generator(0, "scores")
    before: Tensor | None = None
    for round, count in enumerate([0, 5, 10, 10]):
        scores = {"a": torch.randn(4, 3, generator=rng), "b": torch.randn(8, generator=rng)}
        start = {n: torch.randn(v.shape, generator=rng) for n, v in scores.items()}
        moved = {n: v - start[n] for n, v in scores.items()}
        sent = uploads_of(defense, moved, client, base=start, const=scores, round=round)
        withheld = torch.cat([~p.presence().flatten() for p in sent[0].parts.values()])
        assert int(withheld.sum()) == count
        if not count:
            assert [m.kind for m in sent] == ["weights"]
            assert sent[0].n_bytes == 2 + 1
            continue
        mask, indicator = sent
        assert (indicator.kind, indicator.receiver) == (INDICATOR, "server")
        assert indicator.n_bytes == 2 + 1
        assert set(indicator.parts) == {PERSONAL + "a", PERSONAL + "b"}
        told = torch.cat([p.values.flatten() for p in indicator.parts.values()])
        assert torch.equal(told.bool(), withheld)
        assert mask.n_bytes == sum(-(-int(p.presence().sum()) // 8) for p in mask.parts.values())
        if before is None:
            order = rank_changes(
                torch.cat([v.flatten() for v in start.values()]),
                torch.cat([v.flatten() for v in scores.values()]),
            )[2]
            assert set(order[:count].tolist()) == set(withheld.nonzero().flatten().tolist())
        else:
            assert bool((withheld | ~before).all())
        before = withheld


def masks_on(digits: Dataset, defense: Defense, *, model: str = "logistic", **more: Any) -> Any:
    given = {"clients": 2, "each": 60, **more}
    return federation_of(digits, network_for(digits, model), defense, **given)


def test_clients_keep_their_personal_scores_across_rounds(digits: Dataset) -> None:
    """A round at a learning rate of almost 0 leaves scores where it began: at their own."""
    defense = PMSFL(lr_scale=100.0, personal=0.5, agreement_rounds=0, growth_rounds=2)
    federation = masks_on(digits, defense)
    still = {**WORK, "lr": 1e-30, "local_steps": 1}
    for work, share in ((WORK, 0.25), (still, 0.5), (WORK, 0.5), (still, 0.5)):
        earlier = {c.id: (c.own, c.kept) for c in federation.clients}
        play(federation, **work)
        for client in federation.clients:
            assert client.own is not None
            assert client.kept is not None
            total = sum(k.numel() for k in client.kept.values())
            assert sum(int(k.sum()) for k in client.kept.values()) == math.floor(share * total)
            own, kept = earlier[client.id]
            if work is still:
                assert own is not None
                assert kept is not None
                assert all(torch.equal(client.own[n][k], own[n][k]) for n, k in kept.items())


@pytest.mark.parametrize("settings", [{"variant": "printed"}, {"personal": 0.3}])
def test_two_clients_train_an_mlp_on_digits(digits: Dataset, settings: dict[str, Any]) -> None:
    """Chance is 10 %; the frozen weights stay as they were drawn."""
    defense = PMSFL(lr_scale=5000.0, agreement_rounds=3, growth_rounds=3, **settings)
    federation = masks_on(digits, defense, each=200, model="mlp_spm")
    frozen = {n: v.clone() for n, v in federation.const.items()}
    play(federation, rounds=8, **WORK)
    correct = require(evaluate(federation, digits, has_global=True).correct)
    assert correct > 0.4 * len(digits.test_y)
    assert all(torch.equal(frozen[n], v) for n, v in federation.const.items())


# --- noised variants -----------------------------------------------------------------------------


def test_local_noise_clips_each_sample_and_adds_the_theorems_std() -> None:
    rng = generator(0, "local")
    x, y = torch.randn(32, 50, generator=rng), torch.randn(32, 1, generator=rng)
    const = {"w": torch.randn(400, 50, generator=rng)}
    defense = NoisedPMSFL(
        noise="local", epsilon=1.0, local_steps=25, clip_norm=0.5, lr_scale=10.0
    )  # fmt: skip
    assert defense.owns == {"variables", "gradient", "aggregate"}
    scores = {"w": torch.zeros(400, 50)}

    def loss(v: State, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ defense.realize(v, const, draw)["w"].T - y) ** 2).mean()

    draw = defense.draw(scores, const, generator(0, "draw"))
    quiet = defense.gradient(loss, scores, x, y, {})["w"]
    each = torch.stack(
        [torch.func.grad(loss)(scores, a[None], b[None])["w"] for a, b in zip(x, y, strict=True)]
    )
    norms = each.flatten(1).norm(dim=1) / 10
    assert bool((norms > 0.5).any())
    slow = (each * (0.5 / norms).clamp_max(1)[:, None, None]).mean(dim=0)
    assert torch.allclose(quiet, slow, atol=1e-6)
    added = (defense.gradient(loss, scores, x, y, draw)["w"] - quiet) / 10
    noise = oracle.local_noise(1.0, delta=1e-5, steps=25, clip_norm=0.5, batch=32)
    assert_moments(added, mean=0, variance=noise["sigma2"])


def test_smashed_noise_clips_in_l1_and_lets_gradients_pass() -> None:
    defense = NoisedPMSFL(noise="smashed", epsilon=1e6, clip_norm=3.0)
    assert defense.requires == {"cut", "smashed"}
    q = torch.randn(6, 4, 5, generator=generator(0, "q"), requires_grad=True)
    part = defense.smashed(q, make_client("smashed"))
    assert bool((part.values.flatten(1).abs().sum(dim=1) <= 3.0 + 1e-3).all())
    small = q.detach() * 0.01
    assert torch.allclose(defense.smashed(small, make_client("s")).values, small, atol=1e-3)
    part.values.sum().backward()
    assert bool((require(q.grad) != 0).any())
    noisy = NoisedPMSFL(noise="smashed", epsilon=2.0, clip_norm=3.0)
    values = noisy.smashed(torch.zeros(1000, 100), make_client("l")).values
    assert float(values.abs().mean()) == pytest.approx(3.0, rel=5 / math.sqrt(1e5))
    assert PMSFL().smashed(q, make_client()).values is q


def test_noise_of_a_defense_before_it_enters_the_masks(digits: Dataset, registry: Registry) -> None:
    """Scores end at about +-4.6 or 0; noise of std 1000 makes every bit a fair coin."""
    defense = registry.defense(
        "gaussian+pm_sfl", {"gaussian.noise_multiplier": 1e6, "gaussian.clip_norm": 1e-3}
    )
    federation = masks_on(digits, defense, clients=1)
    federation.state = {n: torch.full_like(v, 0.99) for n, v in federation.state.items()}
    play(federation, **WORK)
    ones = torch.cat([v.flatten() for v in federation.state.values()])
    assert abs(float(ones.mean()) - 0.5) < 5 * math.sqrt(0.25 / len(ones)) + 0.01


# --- the ledger --------------------------------------------------------------------------------


def test_without_noise_nothing_is_claimed_or_proven(registry: Registry) -> None:
    defense = registry.defense("pm_sfl", {"lr_scale": 10.0})
    entry = account(defense, FACTS)
    assert entry.eps_claimed is None
    assert entry.eps_record == math.inf
    assert any("masks" in reason for reason in entry.reasons)
    assert entry.constants["collapse_probability_at_0.9"] == pytest.approx(0.348678, rel=1e-5)
    assert entry.constants["log10_c_pow_d"] == pytest.approx(-200)
    (mechanism,) = defense.mechanisms_in(Round())
    assert mechanism == BernoulliMask(of="weights", clip=0.01)


def test_local_noise_is_composed_over_steps_and_rounds_for_replacing_a_record() -> None:
    """Reference case R = 25, eps = 1: replace-one 1.62756 for one round."""
    defense = NoisedPMSFL(noise="local", epsilon=1.0, local_steps=25)
    once = Facts(parameters=100, batch=32, records=100, local_steps=25)
    entry = account(defense, once)
    assert entry.eps_claimed == 1.0
    assert entry.eps_record == pytest.approx(1.62756, rel=1e-5)
    assert entry.constants["eps_one_round_replace"] == pytest.approx(1.62756, rel=1e-5)
    hundred = account(
        defense, Facts(parameters=100, rounds=100, batch=32, records=100, local_steps=25)
    )
    exact = exact_gaussian_epsilon(mu=10 * 2 / math.sqrt(2 * math.log(1e5)), delta=1e-5)
    assert hundred.eps_record == pytest.approx(exact)


def test_noise_on_masks_proves_the_better_of_noise_and_sampling() -> None:
    facts = Facts(parameters=100)
    printed = NoisedPMSFL(clip=0.1, noise="mask", epsilon=1.0, variant="printed")
    entry = account(printed, facts)
    assert entry.eps_claimed == 1.0
    assert entry.eps_record == pytest.approx(13.7449, rel=1e-4)
    assert entry.constants["eps_one_round"] == pytest.approx(13.7449, rel=1e-4)
    corrected = account(NoisedPMSFL(clip=0.1, noise="mask", epsilon=1.0), facts)
    assert corrected.eps_record < 1.0
    assert corrected.constants["noise_std"] == pytest.approx(38.7584, rel=1e-4)
    bits = account(NoisedPMSFL(clip=0.499, noise="mask", epsilon=5.0, variant="printed"), facts)
    # The claim adds up; independent bits compose to less at delta = 1e-5.
    assert bits.eps_claimed == pytest.approx(100 * math.log(0.501 / 0.499))
    assert 0.1 < bits.eps_record < bits.eps_claimed
    personal = NoisedPMSFL(clip=0.1, noise="mask", epsilon=1.0, personal=0.5)
    assert account(personal, facts).eps_record == math.inf


def test_noise_on_smashed_data_leaves_the_masks_unprotected() -> None:
    defense = NoisedPMSFL(clip=0.1, noise="smashed", epsilon=1.0)
    entry = account(defense, Facts(parameters=1, rounds=10, local_steps=5))
    assert entry.eps_claimed == pytest.approx(0.934702, rel=1e-5)
    assert entry.eps_record == math.inf
    assert entry.constants["eps_smashed_all_rounds"] == 50.0
    assert any(isinstance(e, Unprotected) for e in defense.guarantee(FACTS))
    assert [type(m).__name__ for m in defense.mechanisms_in(Round())] == [
        "Clip", "LaplaceNoise", "BernoulliMask",
    ]  # fmt: skip


def test_layers_that_not_all_clients_hold_follow_eq_8(digits: Dataset) -> None:
    """theta = (1 - K_l / K) server + K_l / K clients, in the probabilities of block 2."""
    network = network_for(digits, "cnn_spm")
    defense = PMSFL(lr_scale=300.0)
    run = federation_of(
        digits, network, defense, protocol="splitfed", cuts=("block1", "block1", "block2"),
        labels="private", clients=3,
    )  # fmt: skip
    work: dict[str, Any] = {"protocol": "splitfed", "lr": 0.5, "local_steps": 2}
    result = play(run, **work)
    name = "block2.conv.weight"
    (sent,) = [
        m.parts[name].values
        for m in result.wire.messages_for("server")
        if m.kind == "weights" and name in m.parts
    ]
    assert set(sent.unique().tolist()) <= {0.0, 1.0}
    own = torch.sigmoid(run.server[name])  # type: ignore[attr-defined]
    assert float((own - result.before[name]).abs().max()) > 0  # the server trained its scores
    assert torch.allclose(run.state[name], 2 / 3 * own + 1 / 3 * sent)
    # When only shallow clients take part, the server's copy is all there is.
    play(run, clients=["client-0", "client-1"], **work)
    assert torch.allclose(run.state[name], torch.sigmoid(run.server[name]))  # type: ignore[attr-defined]
    assert 0 <= float(run.state[name].min()) <= float(run.state[name].max()) <= 1


def test_probabilities_rounded_to_certainty_tell_no_score() -> None:
    """A float32 probability of exactly 1 has no finite score: it counts as not sent."""
    mask = BernoulliMask(of="weights", clip=0.1, sampled=False)
    scores, told = mask.read(torch.tensor([0.0, 0.25, 1.0, float("nan")]).double())
    assert told.tolist() == [False, True, False, True]
    assert float(scores[1]) == pytest.approx(math.log(1 / 3))
    assert bool(scores[3].isnan())
