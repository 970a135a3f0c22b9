"""Draws from the posterior under noise, and what attacks answer by them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from attacks.dlg import DLG
from attacks.engine import deep_leakage
from attacks.engine.encoding import Encoding, shrunk_means
from attacks.engine.posterior import ClassPrior, NoisyMessages, draw_samples, find_noisy_messages
from attacks.idlg import IDLG
from bench.contract.attack import Attack
from bench.contract.defense import Defense
from bench.data import load_dataset
from bench.data.dataset import Dataset
from defenses.ms_pafl import MSPAFL
from defenses.noise import GaussianUpdate, LaplaceUpdate
from defenses.quantise import Quantise
from defenses.splitfed import SplitFedDP
from defenses.spm import SPM
from tests.conftest import context_for, network_for, require, seen_under
from tests.matchers import evidence_for
from tests.test_releases import at_init, context, similarity, uploads

GAUSSIAN = GaussianUpdate(noise_multiplier=0.03, clip_norm=1.0)
BOTH = SplitFedDP(epsilon=300.0, smashed_clip=100.0, update_clip=1.0, update_epsilon=200.0)


@pytest.mark.parametrize(
    ("attack", "defense", "threat", "rounds"),
    [
        (IDLG(), GAUSSIAN, {}, 1),
        (IDLG(), GaussianUpdate(noise_multiplier=0.01, clip_norm=1.0), {"batch": 2}, 1),
        (DLG(), LaplaceUpdate(noise_multiplier=0.002, clip_norm=1.0), {}, 1),
        (IDLG(), BOTH, {"split": True}, 1),
        pytest.param(
            *(IDLG(), GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0), {}, 3),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_most_like_the_posterior_is_nearer_than_the_likeliest(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch, attack: Attack, defense: Defense,
    threat: dict[str, Any], rounds: int,
) -> None:  # fmt: skip
    network = network_for(digits)
    seen, truth = at_init(digits, network, defense, rounds, **threat)
    ctx = context(digits, network, defense, seen, budget=40)
    answered = similarity(attack, seen, ctx, truth)
    monkeypatch.setattr(deep_leakage, "answer_by_posterior", lambda *given: None)
    ctx = context(digits, network, defense, seen, budget=40)
    likeliest = similarity(attack, seen, ctx, truth)
    assert answered > likeliest + 0.02


@pytest.mark.parametrize(
    ("defense", "located"),
    [
        (GAUSSIAN, True),
        (LaplaceUpdate(noise_multiplier=0.002, clip_norm=1.0), True),
        (Defense(), False),
        (SPM(epsilon=1.5), False),
        (Quantise(how="int8"), False),
        (MSPAFL(epsilon=0.5), True),
    ],
)
def test_only_gaussian_and_laplace_noise_has_a_linear_model(
    digits: Dataset, defense: Defense, located: bool
) -> None:
    network = network_for(digits)
    seen, _ = at_init(digits, network, defense, 1)
    evidence = evidence_for(seen, context(digits, network, defense, seen))
    assert (find_noisy_messages(evidence) is not None) == located


def test_a_record_is_the_mean_over_its_labels() -> None:
    """Against the closed form: gradients of a network of zeros are linear in the record."""
    data, std = load_dataset("breast_cancer", seed=0), 2.0
    network = network_for(data, "logistic", init=1e-9)
    defense = GaussianUpdate(noise_multiplier=std / 100, clip_norm=100.0)
    seen, _ = seen_under(data, network, defense, lr=1.0)
    ctx = context_for(data, network, defense)
    answer = IDLG().run(seen, ctx).images
    frame = Encoding(ctx, samples=1, dtype=torch.float64, framed=True).frame
    covariance, eye = frame.within @ frame.within.mT, torch.eye(30, dtype=torch.float64)
    upload = uploads(seen).double()
    means, scores = [], []
    for label, centre in enumerate(frame.class_means):
        slope = torch.eye(2, dtype=torch.float64)[label] - 0.5
        rows = torch.cat([torch.kron(slope[:, None], eye), torch.zeros(2, 30)])
        expected = rows @ centre + torch.cat([torch.zeros(60), slope])
        spread = rows @ covariance @ rows.mT + std**2 * torch.eye(62)
        gain = covariance @ rows.mT @ spread.inverse()
        means.append(centre + (upload - expected) @ gain.mT)
        frequency = ((data.aux_y == label).sum() + 1).log()
        scores.append(frequency + MultivariateNormal(expected, spread).log_prob(upload))
    share = torch.stack(scores).softmax(dim=0)
    mean = (share[..., None] * torch.stack(means)).sum(dim=0)
    assert answer is not None
    assert int((share.amin(dim=0) > 0.1).sum()) >= 3
    assert torch.allclose(answer.squeeze(1).double(), mean, atol=0.01)


def linear_messages(rows: torch.Tensor, x: torch.Tensor, std: float) -> NoisyMessages:
    """A victim that sends `rows` @ x with noise, of which this draw is 0."""
    seen = x.flatten(1) @ rows.mT

    def misfit(sent: torch.Tensor, victims: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rest = (sent - seen) / std**2
        return rest.square() * std**2 / 2, rest

    return NoisyMessages(
        send=lambda x, y, victims: x.flatten(1) @ rows.mT,
        misfit=misfit,
        information=torch.full((1, len(rows)), std**-2),
    )


def test_draws_have_the_mean_and_covariance_of_a_linear_posterior() -> None:
    """Against the closed form of Gaussians; four standard errors of 4,096 draws."""
    rng = torch.Generator().manual_seed(0)
    mix = torch.randn(12, 12, generator=rng)
    x = (torch.randn(3000, 12, generator=rng) @ mix + 3.0).view(-1, 1, 3, 4)
    prior = ClassPrior(x, torch.zeros(len(x), dtype=torch.int64), 1)
    rows, std = torch.randn(5, 12, generator=rng), 2.0
    message = linear_messages(rows, x[:1], std)
    start, labels = x[1:2], torch.zeros(1, dtype=torch.int64)
    parts: list[torch.Tensor] = []
    for _ in range(16):
        part, spent = draw_samples([message], prior, start, labels, 0, rng, numbers_each=1)
        assert spent == 13  # the start, and a step along each direction
        parts.append(require(part).flatten(1))
    drawn = torch.cat(parts)
    covariance = prior.covariances.of(0 if prior.own else None)
    precision = covariance.inverse() + rows.mT @ rows / std**2
    expected = precision.inverse()
    told = rows.mT @ (rows @ x[0].flatten()) / std**2
    centre = expected @ (covariance.inverse() @ prior.covariances.means[0] + told)
    error = (expected.diagonal() / len(drawn)).sqrt()
    assert ((drawn.mean(dim=0) - centre).abs() < 4 * error).all()
    ratio = drawn.var(dim=0) / expected.diagonal()
    assert ((ratio - 1).abs() < 4 * (2 / len(drawn)) ** 0.5 + 0.05).all()


def test_draws_are_none_where_the_linear_model_does_not_hold() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1, 2, 2, generator=rng)
    prior = ClassPrior(x, torch.zeros(len(x), dtype=torch.int64), 1)
    linear = linear_messages(torch.eye(4), x[:1], 0.1)
    bent = NoisyMessages(
        send=lambda x, y, victims: (3 * linear.send(x, y, victims)).exp(),
        misfit=linear.misfit,
        information=linear.information,
    )
    labels = torch.zeros(1, dtype=torch.int64)
    far = x[:1] - 1
    assert draw_samples([bent], prior, far, labels, 0, rng, numbers_each=1)[0] is None
    assert draw_samples([linear], prior, far, labels, 0, rng, numbers_each=1)[0] is not None


def test_copies_are_moved_where_that_explains_left_out_samples(digits: Dataset) -> None:
    """Bars stand at three places, digits all in the middle."""
    rng = torch.Generator().manual_seed(0)
    place = torch.randint(3, (80,), generator=rng) + 5
    bars = (torch.arange(14) == place[:, None]).float()[:, None, None].expand(-1, 1, 14, 14)
    bars = bars + 0.1 * torch.randn(80, 1, 14, 14, generator=rng)
    y = torch.zeros(80, dtype=torch.int64)
    assert ClassPrior(bars, y, 1).way[0] > 0
    assert ClassPrior(digits.aux_x, digits.aux_y, digits.classes).way == (0, False)


def test_a_class_without_public_samples_has_the_prior_of_all(digits: Dataset) -> None:
    prior = ClassPrior(digits.aux_x, digits.aux_y.clamp_max(8), 10)
    mean = digits.aux_x.flatten(1).mean(dim=0)
    assert torch.allclose(prior.covariances.means[9], mean, atol=0.1)
    drawn = prior.draw(9, torch.Generator().manual_seed(0))
    assert drawn.unique(dim=0).shape[0] > 20


@pytest.mark.parametrize("aux", ["few", "equal"])
def test_public_samples_that_tell_nothing_leave_a_finite_answer(digits: Dataset, aux: str) -> None:
    network = network_for(digits)
    seen, _ = at_init(digits, network, GAUSSIAN, 1)
    ctx = context(digits, network, GAUSSIAN, seen)
    few = {"aux_x": ctx.aux_x[:5], "aux_y": ctx.aux_y[:5]}
    equal = {"aux_x": ctx.aux_x[:1].expand_as(ctx.aux_x)}
    answer = IDLG().run(seen, replace(ctx, budget=20, **(few if aux == "few" else equal)))
    assert bool(require(answer.images).isfinite().all())


def test_means_of_few_samples_lie_as_near_to_the_classes_as_the_posterior_mean() -> None:
    """Closed form: a mean of n samples errs by the variance W / n; drawn to the mean of all, by
    the posterior variance 1 / (1 / B + n / W)."""
    rng, few, classes = torch.Generator().manual_seed(0), 4, 500
    true = 0.5 * torch.randn(classes, 20, generator=rng)
    y = torch.arange(classes).repeat(few)
    x = true[y] + torch.randn(len(y), 20, generator=rng)
    means, by_others = shrunk_means(x, y, classes)
    assert float((means - true).square().mean()) == pytest.approx(1 / (4 + few), rel=0.05)
    spread = 1 + 1 / (4 + few - 1)  # of a sample around what the others tell
    assert float((x - by_others).square().mean()) == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("y", [torch.arange(6), torch.zeros(6, dtype=torch.int64)])
def test_classes_that_are_not_told_apart_have_the_mean_of_all(y: Tensor) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    means, by_others = shrunk_means(x, y, 7)
    torch.testing.assert_close(means, x.mean(dim=0).expand(7, 3))
    assert by_others.isfinite().all()


def test_a_class_without_public_images_is_read_under_noise(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_leakage, "_TRIED", 2)
    network = network_for(digits)
    seen, truth = at_init(digits, network, GAUSSIAN, 1)
    known = digits.aux_y != truth.y[0, 0]
    data = replace(digits, aux_x=digits.aux_x[known], aux_y=digits.aux_y[known])
    answer = IDLG().run(seen, context(data, network, GAUSSIAN, seen, budget=40))
    assert require(answer.labels)[0, 0] == truth.y[0, 0]
