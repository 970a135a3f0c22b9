"""Label counts of trained networks' batches, weighed on batches of public samples."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks.engine import weighed
from attacks.engine.counts import Counting, HeadGradient, PublicClasses, Restored, restore
from attacks.engine.observation import parse_view
from attacks.engine.restored import _compute, restore_counts
from attacks.engine.weighed import (
    HeadView,
    PublicSamples,
    best_counts,
    head_gradients,
    public_batches,
    weigh_counts,
)
from attacks.ilrg import ILRG
from bench.contract.attack import Context, Seen
from bench.contract.defense import Defense
from bench.contract.mechanisms import GaussianNoise, Mechanism
from bench.contract.messages import State
from bench.data.dataset import Dataset
from bench.models import Network
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator
from bench.toolkit.batches import class_means
from defenses.noise import GaussianUpdate
from tests.benchmarks.test_labels_speed import vectorised
from tests.conftest import context_for, network_for, require, seen_under

CLASSES, WIDTH = 10, 64


Sent = Callable[[HeadGradient], HeadGradient]
"""What is seen of head gradients."""


def unchanged(head: HeadGradient) -> HeadGradient:
    return head


class Trained:
    """A linear head, trained on samples that scatter around class centres, and public ones."""

    def __init__(self, *, seed: int = 0, spread: float = 1.2, steps: int = 300) -> None:
        rng = generator(seed, "trained head")
        centres = torch.rand(CLASSES, WIDTH, dtype=torch.float64, generator=rng)
        labels = torch.randint(CLASSES, (1500,), generator=rng)
        noise = torch.randn(1500, WIDTH, dtype=torch.float64, generator=rng)
        features = (centres[labels] + spread * 0.3 * noise).clamp_min(0)
        weight = torch.zeros(CLASSES, WIDTH, dtype=torch.float64)
        bias = torch.zeros(CLASSES, dtype=torch.float64)
        self.private = PublicSamples(features=features[500:], labels=labels[500:])
        self.samples = PublicSamples(features=features[:500], labels=labels[:500])
        target = torch.nn.functional.one_hot(self.private.labels, CLASSES)
        for _ in range(steps):
            logits = self.private.features @ weight.T + bias
            slope = (torch.softmax(logits, dim=-1) - target) / len(target)
            weight -= slope.mT @ self.private.features
            bias -= slope.sum(dim=0)
        probability = torch.softmax(self.samples.features @ weight.T + bias, dim=-1)
        labels = self.samples.labels
        self.public = PublicClasses(
            features=class_means(self.samples.features, labels, classes=CLASSES),
            probability=class_means(probability, labels, classes=CLASSES),
            share=torch.bincount(labels, minlength=CLASSES).double() / len(labels),
        )
        self.weight, self.bias = weight, bias

    def counting(self, total: int, *, refine: int = 3) -> Counting:
        return Counting(
            weight=self.weight,
            bias=self.bias,
            total=total,
            public=self.public,
            shrink=0.1,
            refine=refine,
        )

    def batches(self, victims: int, total: int) -> tuple[Tensor, HeadGradient]:
        chosen = public_batches(self.private, victims, total=total, rng=generator(7, "victims"))
        truth = torch.nn.functional.one_hot(self.private.labels[chosen], CLASSES).sum(dim=1)
        return truth, head_gradients(self.private, chosen, self.counting(total))

    def asked(
        self, head: HeadGradient, total: int, *, sent: Sent = unchanged, seed: int = 0
    ) -> Tensor | None:
        counting = self.counting(total)
        view = HeadView(
            head=head,
            restored=restore(head, counting),
            counting=counting,
            samples=self.samples,
            played=lambda chosen, _: sent(head_gradients(self.samples, chosen, counting)),
        )
        return weigh_counts([view], fewest=False, rng=generator(seed, "weighing"))

    def weighed(
        self, head: HeadGradient, total: int, *, sent: Sent = unchanged, seed: int = 0
    ) -> Tensor:
        found = require(self.asked(head, total, sent=sent, seed=seed))
        assert found.sum(dim=1).eq(total).all()
        return found


def lnacc(guess: Tensor, truth: Tensor) -> float:
    return float((guess == truth).double().mean())


# --- how good it is -------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [4, 8, 32])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_trained_batches_are_counted_better_than_by_the_paper_and_by_either_of_ours(
    total: int, seed: int
) -> None:
    trained = Trained(seed=seed)
    truth, head = trained.batches(100, total)
    counting = trained.counting(total)
    refined = lnacc(restore(head, counting).counts, truth)
    plain = lnacc(restore(head, trained.counting(total, refine=0)).counts, truth)
    arrays = trained.weight.numpy(), trained.bias.numpy(), total
    paper = [
        vectorised(w.numpy(), b.numpy(), *arrays)
        for w, b in zip(head.weight, head.bias, strict=True)
    ]
    others = refined, plain, lnacc(torch.tensor(np.stack(paper)), truth)
    assert lnacc(trained.weighed(head, total), truth) > max(others) + 0.04


@pytest.mark.parametrize("std", [0.01, 0.1])
def test_noise_is_met_by_noise_on_the_public_batches(std: float) -> None:
    trained = Trained()
    truth, head = trained.batches(100, 8)
    rng = generator(3, "noise")

    def noised(head: HeadGradient) -> HeadGradient:
        def drawn(value: Tensor) -> Tensor:
            return value + std * torch.randn(value.shape, dtype=value.dtype, generator=rng)

        return replace(head, weight=drawn(head.weight), bias=drawn(head.bias))

    seen = noised(head)
    today = lnacc(restore(seen, trained.counting(8)).counts, truth)
    assert lnacc(trained.weighed(seen, 8, sent=noised), truth) > today + 0.03


def test_with_hidden_coordinates_it_is_better_than_ilrg_too() -> None:
    trained = Trained()
    truth, head = trained.batches(60, 8)
    rng = generator(4, "hidden")

    def hidden(head: HeadGradient) -> HeadGradient:
        there = torch.rand(head.weight.shape, generator=rng) < 0.3
        weight = torch.where(there, head.weight, torch.nan)
        bias_seen = torch.rand(head.bias.shape, generator=rng) < 0.7
        return replace(head, weight=weight, weight_seen=there, bias_seen=bias_seen)

    seen = hidden(head)
    today = lnacc(restore(seen, trained.counting(8)).counts, truth)
    assert lnacc(trained.weighed(seen, 8, sent=hidden), truth) > today + 0.05


def test_where_refinement_is_right_on_public_batches_it_is_kept() -> None:
    """Batches of two of a network that is hardly trained are refined without a mistake."""
    trained = Trained(steps=20, spread=0.5)
    truth, head = trained.batches(100, 2)
    refined = restore(head, trained.counting(2)).counts
    assert lnacc(refined, truth) == 1.0
    assert torch.equal(trained.weighed(head, 2), refined)


def test_public_samples_of_a_few_classes_are_enough_to_answer() -> None:
    trained = Trained()
    few = trained.samples.labels < 4
    trained.samples = PublicSamples(
        features=trained.samples.features[few], labels=trained.samples.labels[few]
    )
    truth, head = trained.batches(10, 8)
    assert trained.weighed(head, 8).shape == truth.shape


def test_too_many_classes_are_left_to_ilrg(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()
    _, head = trained.batches(2, 8)
    monkeypatch.setattr(weighed, "_WORK", 1000)
    assert trained.asked(head, 8) is None


def test_the_same_generator_gives_the_same_counts() -> None:
    trained = Trained()
    _, head = trained.batches(20, 8)
    assert torch.equal(trained.weighed(head, 8, seed=1), trained.weighed(head, 8, seed=1))


# --- its parts ------------------------------------------------------------------------------------


def test_best_counts_equal_a_search_over_all_counts() -> None:
    rng = generator(0, "worth")
    worth = torch.randn(5, 4, 7, dtype=torch.float64, generator=rng)
    every = [c for c in itertools.product(range(7), repeat=4) if sum(c) == 6]
    for one, found in zip(worth, best_counts(worth, total=6), strict=True):
        sums = [sum(float(one[j, n]) for j, n in enumerate(c)) for c in every]
        assert tuple(found.tolist()) == every[int(np.argmax(sums))]


def test_refined_counts_are_left_only_for_surely_better_ones() -> None:
    base = torch.tensor([1.0, 2.0, 3.0, 2.0])
    chance = torch.tensor([2.0, -1.0, 1.0, -1.0])
    assert weighed._surely_best(torch.stack([base, base, base + chance])) == 0
    assert weighed._surely_best(torch.stack([base, base + 0.5 + 0.1 * chance, base])) == 1
    assert weighed._surely_best(torch.stack([base, base + 0.5, base + 1.0])) == 2


def test_head_gradients_are_those_of_the_mean_loss() -> None:
    trained = Trained()
    chosen = public_batches(trained.samples, 3, total=6, rng=generator(0, "batches"))
    head = head_gradients(trained.samples, chosen, trained.counting(6))
    for places, weight_grad, bias_grad in zip(chosen, head.weight, head.bias, strict=True):
        weight, bias = (t.clone().requires_grad_() for t in (trained.weight, trained.bias))
        logits = trained.samples.features[places] @ weight.T + bias
        torch.nn.functional.cross_entropy(logits, trained.samples.labels[places]).backward()
        assert weight.grad is not None
        assert bias.grad is not None
        assert torch.allclose(weight.grad, weight_grad, atol=1e-12)
        assert torch.allclose(bias.grad, bias_grad, atol=1e-12)


def test_public_batches_have_few_classes_or_many() -> None:
    """Shares are uniform: with K samples and C classes every vector of counts is as likely, so
    that a class is absent with probability (C - 1) / (K + C - 1)."""
    samples = PublicSamples(
        features=torch.zeros(30, 1).double(), labels=torch.arange(5).repeat_interleave(6)
    )
    chosen = public_batches(samples, 4000, total=8, rng=generator(0, "shares"))
    counts = torch.nn.functional.one_hot(samples.labels[chosen], 5).sum(dim=1)
    assert counts.sum(dim=1).eq(8).all()
    assert float((counts == 0).double().mean()) == pytest.approx(4 / 12, abs=0.01)


@pytest.mark.parametrize("few", [40, 64])
def test_discriminants_tell_class_means_apart_in_either_dimension(few: int) -> None:
    trained = Trained()
    samples = PublicSamples(
        features=trained.samples.features[:few], labels=trained.samples.labels[:few]
    )
    means = trained.public.features
    found = weighed._discriminants(means, samples)
    assert torch.allclose(means @ found, torch.eye(CLASSES).double(), atol=1e-2)
    inner = samples.features - means[samples.labels]
    scatter = inner.mT @ inner / few
    scatter.diagonal().add_(weighed._WITHIN * float(scatter.diagonal().mean()) + 1e-12)
    whitened = torch.linalg.solve(scatter, means.T)
    between = means @ whitened
    between.diagonal().add_(1e-6 * float(between.diagonal().mean()) + 1e-12)
    assert torch.allclose(found, whitened @ torch.linalg.inv(between), rtol=1e-6, atol=1e-9)


def test_public_batches_are_seen_under_the_public_noise_and_as_hidden(digits: Dataset) -> None:
    defense = GaussianUpdate(noise_multiplier=0.5, clip_norm=2.0)
    seen, _ = seen_under(digits, network_for(digits), defense, batch=4, lr=0.5)
    noise = [m for m in seen.known["mechanisms"] if m["kind"] == GaussianNoise.__name__]
    assert len(noise) == 1
    width = seen.before[seen.network["head"][0]].shape[1]
    weight = torch.zeros(CLASSES, width).double()
    samples = PublicSamples(
        features=torch.zeros(CLASSES, width).double(), labels=torch.arange(CLASSES)
    )
    public = PublicClasses(
        features=weight, probability=weight[:, :CLASSES], share=torch.ones(CLASSES).double()
    )
    counting = Counting(
        weight=weight, bias=weight[:, 0], total=4, public=public, shrink=0.1, refine=3
    )
    hidden = torch.arange(2)[:, None, None].expand(2, CLASSES, width) > 0
    whole = HeadGradient.whole(weight.expand(2, -1, -1), weight[:, 0].expand(2, -1))
    like = replace(whole, weight_seen=hidden)
    chosen = torch.zeros(200, 4, dtype=torch.int64)
    drawn = _compute(
        chosen,
        samples=samples,
        counting=counting,
        like=like,
        release=parse_view(seen)[-1],
        rng=generator(0, "drawn"),
    )
    expected = noise[0]["std"] / (1.0 if noise[0]["of"] == "gradient" else 0.5)
    assert float(drawn.weight.std()) == pytest.approx(expected, rel=0.01)
    assert float(drawn.bias.var(dim=0).mean().sqrt()) == pytest.approx(expected, rel=0.1)
    assert torch.equal(drawn.weight_seen, hidden.repeat(100, 1, 1))


# --- in the attack --------------------------------------------------------------------------------


NOTE = "counts of 8 of 8 victims weighed on public data"


def test_only_doubtful_batches_are_weighed(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_for(digits)
    seen, _ = seen_under(digits, network, Defense(), batch=8)
    context = context_for(digits, network, Defense())
    note = "counts of 4 of 8 victims weighed on public data"
    assert note not in restore_counts(parse_view(seen), context)[2]  # at init all are certain
    first = torch.arange(8) < 4
    monkeypatch.setattr(Restored, "unsettled", property(lambda found: first[: len(found.counts)]))
    before = ILRG(refine=0).run(seen, context)
    after = ILRG().run(seen, context)
    assert note in after.notes
    assert note not in before.notes  # the paper's attack
    assert torch.equal(require(after.label_counts)[4:], require(before.label_counts)[4:])


def rehearsing(context: Context, seen: Seen, defense: Defense) -> tuple[Context, list[int]]:
    """The context with a working shadow, and how many clients each of its calls had."""
    calls: list[int] = []

    def shadow(
        x: Tensor, y: Tensor, before: State | None = None, release: Seen | None = None
    ) -> Seen:
        calls.append(len(x))
        return Rehearsals(
            seen=seen, network=network_of(context), defense=defense,
            rng=generator(0, "shadow"), device=torch.device("cpu"),
        )(x, y)  # fmt: skip

    return replace(context, defense=defense, shadow=shadow), calls


def network_of(context: Context) -> Network:
    assert isinstance(context.network, Network)
    return context.network


def test_several_steps_are_rehearsed_through_the_whole_network(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), batch=2, local_steps=4)
    context, calls = rehearsing(context_for(digits, network, Defense()), seen, Defense())
    answer = ILRG().run(seen, context)
    assert answer.label_counts is not None
    assert sum(calls) == weighed._LEAST
    assert NOTE in answer.notes
    counts = torch.nn.functional.one_hot(truth.y.flatten(1), 10).sum(dim=1)
    plain = require(ILRG(refine=0).run(seen, context).label_counts)
    assert lnacc(answer.label_counts, counts) > lnacc(plain, counts) + 0.05


def test_a_mechanism_that_does_not_say_what_it_draws_is_rehearsed(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    defense = GaussianUpdate(noise_multiplier=0.5, clip_norm=2.0)
    network = network_for(digits)
    seen, _ = seen_under(digits, network, defense, batch=8)
    context, calls = rehearsing(context_for(digits, network, defense), seen, defense)
    assert NOTE in ILRG().run(seen, context).notes
    assert calls == []
    monkeypatch.setattr(GaussianNoise, "sample", Mechanism.sample)
    assert NOTE in ILRG().run(seen, context).notes
    assert sum(calls) == weighed._LEAST
