"""What makes the worst case worse: annealed likelihoods, every label tried, sums, one judge."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import avg_pool2d

from attacks.dlg import DLG
from attacks.engine import deep_leakage
from attacks.engine.evidence import Evidence
from attacks.engine.joint import best_labels, give_to_owners
from attacks.engine.observation import find_opened_mean, parse_view
from attacks.engine.terms import Candidate, UploadSum
from attacks.idlg import IDLG
from attacks.judge import Likelihood, Posterior
from bench.api import Context, Defense, Part, Reconstruction, Seen, SignPerturbation
from bench.data.dataset import Dataset
from bench.models import Network
from bench.protocols.observe import Truth
from bench.protocols.settings import ProtocolSettings
from bench.seeding import generator
from bench.toolkit.batches import class_means
from bench.toolkit.images import ssim
from defenses.bounded_ldp import PNPM
from defenses.fedml_he import FedMLHE
from defenses.lg_fedavg import LGFedAvg
from defenses.mask_crypt import MaskCrypt
from defenses.noise import GaussianUpdate
from defenses.none import NoDefense
from defenses.quantise import Quantise
from defenses.selective_shield import SelectiveShield
from defenses.spm import SPM
from tests.conftest import context_for, federation_of, network_for, observed_round, seen_under
from tests.matchers import matcher_for

F64 = torch.float64
GAUSSIAN = GaussianUpdate(noise_multiplier=0.03, clip_norm=1.0)


def similarity(answer: Reconstruction, truth: Truth) -> float:
    assert answer.images is not None
    return float(ssim(answer.images, truth.x).mean())


def trained(digits: Dataset, network: Network, defense: Defense) -> tuple[Seen, Truth]:
    """One observed step of four clients of a network that has learnt the public samples."""
    federation = federation_of(digits, network, defense, clients=4)
    weights = {n: v.clone().requires_grad_() for n, v in federation.state.items()}
    rng = torch.Generator().manual_seed(0)
    for _ in range(150):
        pick = torch.randint(len(digits.aux_y), (32,), generator=rng)
        logits = network.apply(weights, digits.aux_x[pick], mode="train")
        loss = torch.nn.functional.cross_entropy(logits, digits.aux_y[pick])
        for value, slope in zip(
            weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True
        ):
            value.data -= 0.3 * slope
    federation.state = {n: v.detach() for n, v in weights.items()}
    settings = ProtocolSettings(name="fedavg", clients=4, local_steps=1, lr=0.5)
    return observed_round(federation, digits, settings, name="final")


# --- annealed likelihoods -------------------------------------------------------------------------
@pytest.mark.parametrize("of", ["weights", "update", "gradient"])
def test_softness_falls_with_the_heat(of: Any) -> None:
    signs = SignPerturbation(of=of, keep=0.8, low=1.0, high=2.0)
    levels = [signs.softness(heat) for heat in (1.0, 0.5, 0.0)]
    assert levels == sorted(levels, reverse=True)
    assert levels[1] == pytest.approx((levels[0] * levels[2]) ** 0.5)


def test_softness_bounds_what_values_near_0_weigh() -> None:
    signs = SignPerturbation(of="gradient", keep=0.8, low=1.0, high=2.0)
    seen = torch.tensor([[1.0, 1e-9]], dtype=F64)
    slope = signs.misfit(seen.new_tensor([[1.0, 0.1]]), seen, 0.1)[1]
    assert float(slope.abs().max()) < 100


@pytest.mark.parametrize(
    "defense",
    [
        SPM(epsilon=1.5, variant="sign_rr", target="gradient"),
        pytest.param(SPM(epsilon=3.9, variant="unbiased"), marks=pytest.mark.slow),
        # Factors from 1 to 11.
        pytest.param(PNPM(epsilon=0.33, bound=0.01), marks=pytest.mark.slow),
    ],
    ids=type,
)
def test_perturbed_signs_of_a_trained_network_are_seen_through(
    digits: Dataset, defense: Defense
) -> None:
    network = network_for(digits)
    seen, truth = trained(digits, network, defense)
    answer = IDLG().run(seen, context_for(digits, network, defense, budget=100))
    assert answer.labels is not None
    assert answer.labels.equal(truth.y)
    assert similarity(answer, truth) > 0.95


# --- sums -----------------------------------------------------------------------------------------
HEARS: dict[str, Any] = {"hears": "every_broadcast"}
"""The server learns the next model, and in it the sum of what was encrypted."""


@pytest.fixture(scope="module")
def shielded(digits: Dataset) -> tuple[Seen, Truth, Context]:
    network = network_for(digits)
    defense = SelectiveShield(tau=0.05, rho=0.5, noise_multiplier=0.02, clip_norm=1.0)
    seen, truth = seen_under(digits, network, defense, clients=4, **HEARS)
    return seen, truth, context_for(digits, network, defense)


def test_the_sum_of_the_encrypted_zone_opens_the_images(
    shielded: tuple[Seen, Truth, Context],
) -> None:
    seen, truth, ctx = shielded
    ctx = replace(ctx, budget=30)
    alone = IDLG().run(replace(seen, after=None), ctx)
    together = IDLG().run(seen, ctx)
    assert similarity(together, truth) > max(0.9, 0.1 + similarity(alone, truth))


def test_true_images_explain_the_sum(shielded: tuple[Seen, Truth, Context]) -> None:
    seen, truth, ctx = shielded
    (term,) = Evidence(parse_view(seen), ctx, dtype=F64).sums
    y = torch.nn.functional.one_hot(truth.y, 10).double()
    right = Candidate(x=truth.x.double(), y=y, vectors=truth.x)
    wrong = Candidate(x=truth.x.double().flip(3), y=y, vectors=truth.x)
    with torch.no_grad():
        left = float(term.share_unexplained(right))
        assert left < 1e-8
        assert float(term.share_unexplained(wrong)) > 1e4 * left


def test_sums_that_nothing_explains_count_alike(
    shielded: tuple[Seen, Truth, Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, truth, ctx = shielded
    matcher = matcher_for(seen, ctx, dtype=F64)
    judged = {}
    for share in (0.05, 0.3, 0.9):
        left = torch.tensor(share, dtype=F64)
        monkeypatch.setattr(UploadSum, "share_unexplained", lambda *_, left=left: left)
        judged[share] = float(matcher.judge(truth.x.double(), truth.y).sum())
    assert judged[0.3] == judged[0.9]
    assert judged[0.05] < judged[0.3] - 1


def test_the_noise_that_suits_an_answer_is_at_least_the_known_one(digits: Dataset) -> None:
    """N/2 (r / v + log v), v the larger of the answer's mean square r and the noise's variance."""
    network, defense = network_for(digits), GaussianUpdate(noise_multiplier=1e-4, clip_norm=5.0)
    seen, truth = seen_under(digits, network, defense, clients=2)
    uploads = matcher_for(seen, context_for(digits, network, defense), dtype=F64).evidence.uploads
    assert uploads is not None
    everyone, known = torch.arange(2), uploads.known
    y = torch.nn.functional.one_hot(truth.y, 10).double()
    for images, beyond in ((truth.x.double(), False), (torch.zeros_like(truth.x).double(), True)):
        missed = uploads.misfit(images, y, everyone)
        assert bool(((missed > 1.1 * known) == beyond).all())
        variance = missed.maximum(known)
        expected = uploads.values.shape[1] / 2 * (missed / variance + variance.log())
        assert torch.allclose(uploads.surprise(images, y, everyone), expected)


@pytest.mark.parametrize("defense", [FedMLHE(share=0.5), MaskCrypt(share=0.5)])
def test_other_encrypted_zones_show_their_sum_too(digits: Dataset, defense: Defense) -> None:
    network = network_for(digits)
    seen, _ = seen_under(digits, network, defense, clients=3, **HEARS)
    found = find_opened_mean(parse_view(seen)[-1], dtype=F64)
    assert found is not None
    covers, mean = found
    assert len(mean) == sum(int(c.sum()) for c in covers.values())
    assert find_opened_mean(parse_view(replace(seen, after=None))[-1], dtype=F64) is None


def test_a_sum_with_strangers_in_it_or_no_plain_mean_is_left_alone(
    shielded: tuple[Seen, Truth, Context],
) -> None:
    seen, _, _ = shielded
    assert find_opened_mean(parse_view(seen)[-1], dtype=F64) is not None
    assert (
        find_opened_mean(parse_view(replace(seen, clients=seen.clients[:3]))[-1], dtype=F64) is None
    )
    assert seen.after is not None
    moved = {n: v + (v - seen.before[n]) for n, v in seen.after.items()}
    assert find_opened_mean(parse_view(replace(seen, after=moved))[-1], dtype=F64) is None


def test_labels_are_searched_by_what_is_known_of_all_victims(
    shielded: tuple[Seen, Truth, Context],
) -> None:
    seen, truth, ctx = shielded
    matcher = matcher_for(seen, ctx, dtype=F64)
    wrong = (truth.y + 3) % 10
    assert best_labels(matcher, truth.x.double(), wrong).equal(truth.y)


@pytest.mark.slow
def test_images_that_a_sum_tells_go_to_those_whose_messages_they_suit(digits: Dataset) -> None:
    network, defense = network_for(digits, "mlp_spm"), MaskCrypt(share=0.5)
    seen, truth = seen_under(digits, network, defense, clients=4, **HEARS)
    ctx = context_for(digits, network, defense)
    order = torch.tensor([2, 0, 1, 3])
    matcher = matcher_for(seen, ctx, dtype=F64)
    images, labels = give_to_owners(matcher, truth.x[order].double(), truth.y[order])
    assert images.equal(truth.x.double())
    assert labels.equal(truth.y)
    for attack in (IDLG(), DLG()):
        assert similarity(attack.run(seen, ctx), truth) > 0.99


# --- signs ----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_an_image_that_sends_almost_nothing_explains_no_signs(digits: Dataset) -> None:
    network, defense = network_for(digits, "mlp_spm"), Quantise(how="sign")
    seen, truth = seen_under(digits, network, defense)
    ctx = context_for(digits, network, defense)
    answer = IDLG().run(seen, ctx)
    assert similarity(answer, truth) > 0.75
    dark = Likelihood().losses(seen, ctx, Reconstruction(images=truth.x / 20, labels=truth.y))
    near, found = (truth.x + 0.05).clamp(0, 1), Likelihood().losses(seen, ctx, answer)
    close = Likelihood().losses(seen, ctx, Reconstruction(images=near, labels=truth.y))
    assert dark is not None
    assert found is not None
    assert close is not None
    assert bool((found < dark).all())
    assert bool((close < dark).all())


# --- the judge ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "defense",
    [
        NoDefense(),
        SPM(epsilon=3.9, variant="unbiased"),
        SPM(epsilon=1.5, variant="sign_rr", target="gradient"),
        SelectiveShield(tau=0.05, rho=0.5, noise_multiplier=0.02, clip_norm=1.0),
    ],
    ids=["none", "spm weights", "spm gradient", "selective_shield"],
)
def test_the_judge_prefers_the_truth_to_blurs_class_means_and_others(
    digits: Dataset, defense: Defense
) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, defense, clients=4, **HEARS)
    ctx, judge = context_for(digits, network, defense), Likelihood()
    means = class_means(digits.aux_x, digits.aux_y, classes=10)[truth.y]
    answers = {
        "truth": Reconstruction(images=truth.x, labels=truth.y),
        "truth, labels untold": Reconstruction(images=truth.x),
        "half": Reconstruction(images=(truth.x + means) / 2, labels=truth.y),
        "class mean": Reconstruction(images=means, labels=truth.y),
        "labels": Reconstruction(labels=truth.y),
        "others": Reconstruction(images=truth.x.roll(1, 0), labels=truth.y.roll(1, 0)),
        "nothing": Reconstruction(images=digits.aux_x.mean(dim=0).expand_as(truth.x)),
    }
    losses = {n: judge.losses(seen, ctx, a) for n, a in answers.items()}
    assert all(v is not None and v.shape == (4,) for v in losses.values())
    total = {n: float(v.sum()) for n, v in losses.items() if v is not None}
    assert total["truth"] == pytest.approx(total["truth, labels untold"])
    assert total["truth"] < total["half"] < total["class mean"]
    assert total["truth"] < total["others"]
    assert total["half"] < total["nothing"]
    assert total["labels"] == pytest.approx(total["class mean"])


def noisy(digits: Dataset) -> tuple[Seen, Truth, Context]:
    """What two clients send under noise."""
    network = network_for(digits)
    seen, truth = seen_under(digits, network, GAUSSIAN, clients=2)
    return seen, truth, context_for(digits, network, GAUSSIAN, budget=60)


def likeliest(seen: Seen, ctx: Context, monkeypatch: pytest.MonkeyPatch) -> Reconstruction:
    monkeypatch.setattr(deep_leakage, "answer_by_posterior", lambda *given: None)
    return IDLG().run(seen, ctx)


def test_under_noise_the_judge_prefers_what_is_most_like_the_posterior(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, truth, ctx = noisy(digits)
    answers = {
        "blur": Reconstruction(images=avg_pool2d(truth.x.squeeze(1), 3, 1, 1)[:, None]),
        "labels": Reconstruction(labels=truth.y),
        "posterior": IDLG().run(seen, ctx),
    }
    answers["likeliest"] = likeliest(seen, ctx, monkeypatch)
    losses = {n: Likelihood().losses(seen, ctx, a) for n, a in answers.items()}
    best = losses.pop("posterior")
    assert best is not None
    for name, loss in losses.items():
        assert loss is not None
        assert bool((best < loss).all()), name


def test_the_order_of_samples_does_not_count() -> None:
    images = torch.rand(3, 1, 12, 12, generator=generator(0, "images"))
    draws = images.roll(1, 0).expand(4, *images.shape)
    assert Posterior(draws=draws, least=0.0).similarity(images) == pytest.approx(1.0)


def test_what_is_likelier_than_the_likeliest_found_comes_first(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, _, ctx = noisy(digits)
    answer = likeliest(seen, ctx, monkeypatch)
    drawn = Likelihood().losses(seen, ctx, answer)
    monkeypatch.setattr("attacks.judge._EVALUATIONS", 1)
    losses = Likelihood().losses(seen, ctx, answer)
    assert drawn is not None
    assert losses is not None
    assert bool((losses < -1).all())
    assert bool((losses < drawn).all())
    assert bool((drawn > -1).all())


def test_a_rough_answer_that_explains_nearly_all_comes_before_a_smooth_one(digits: Dataset) -> None:
    """Noise of .05 makes images that a Gaussian of public ones takes for next to impossible."""
    network = network_for(digits, "mlp_spm")
    seen, truth = seen_under(digits, network, NoDefense(), victims=4, batch=4)
    ctx, judge = context_for(digits, network, NoDefense()), Likelihood()
    noise = 0.05 * torch.randn(truth.x.shape, generator=generator(0, "rough"))
    mean = digits.aux_x.mean(dim=0).expand_as(truth.x)
    rough, smooth = (Reconstruction(images=x, labels=truth.y) for x in (truth.x + noise, mean))
    left = [judge.unexplained(seen, ctx, answer) for answer in (rough, smooth)]
    assert left[0] is not None
    assert left[1] is not None
    assert bool((left[0] < left[1] / 2).all())
    first, second = (judge.losses(seen, ctx, answer) for answer in (rough, smooth))
    assert first is not None
    assert second is not None
    assert bool((first < second).all())


def test_a_victim_without_an_answer_is_never_chosen(digits: Dataset) -> None:
    network, defense = network_for(digits), NoDefense()
    seen, truth = seen_under(digits, network, defense, clients=2)
    images = truth.x.clone()
    images[1] = torch.nan
    answer = Reconstruction(images=images, failed=torch.tensor([True, False]))
    losses = Likelihood().losses(seen, context_for(digits, network, defense), answer)
    assert losses is not None
    assert losses.isinf().all()


def test_what_tells_nothing_is_not_judged(digits: Dataset) -> None:
    network, defense = network_for(digits), NoDefense()
    seen, truth = seen_under(digits, network, defense, clients=2)
    hidden = tuple(
        m.with_parts(
            {
                n: Part(values=p.values, present=torch.zeros_like(p.values, dtype=torch.bool))
                for n, p in m.parts.items()
            }
        )
        for m in seen.messages
    )
    blind = replace(seen, messages=hidden)
    ctx = context_for(digits, network, defense)
    assert Likelihood().losses(blind, ctx, Reconstruction(images=truth.x)) is None


@pytest.mark.parametrize("kind", ["update", "smashed"])
def test_values_that_are_not_finite_are_not_judged(digits: Dataset, kind: str) -> None:
    """No answer explains them, but the answer of an attack that looks at nothing stands."""
    network, defense = network_for(digits), NoDefense()
    split = {"protocol": "splitfed", "split": {"cut": network.stages[0], "labels": "private"}}
    seen, truth = seen_under(
        digits, network, defense, clients=2, **(split if kind == "smashed" else {})
    )
    messages = list(seen.messages)
    place = next(i for i, m in enumerate(messages) if m.kind == kind)
    name, part = next(iter(messages[place].parts.items()))
    values = part.values.clone()
    values.view(-1)[0] = torch.nan
    messages[place] = messages[place].with_parts(
        {**messages[place].parts, name: replace(part, values=values)}
    )
    ctx, answer = context_for(digits, network, defense), Reconstruction(images=truth.x)
    assert Likelihood().losses(seen, ctx, answer) is not None
    assert Likelihood().losses(replace(seen, messages=tuple(messages)), ctx, answer) is None


# --- first layers that are never sent -------------------------------------------------------------
def test_of_all_images_that_later_layers_may_have_seen_the_likeliest_is_taken(
    digits: Dataset,
) -> None:
    """Of a narrow network the upper half is sent, exactly: fewer numbers reach it than pixels."""
    network = network_for(digits, "lenet", init=0.25)
    defense = LGFedAvg(keep=0.5)
    seen, truth = seen_under(digits, network, defense, clients=3)
    answer = IDLG().run(seen, context_for(digits, network, defense, budget=100))
    assert similarity(answer, truth) > 0.995
