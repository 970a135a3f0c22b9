"""Label counts from partly visible, badly conditioned and broken head gradients."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attacks.engine import counts
from attacks.engine.counts import Counting, HeadGradient, PublicClasses, Restored, restore
from attacks.ilrg import ILRG
from bench.contract.attack import Reconstruction, Seen
from bench.contract.defense import Defense
from bench.contract.messages import Message, Part
from bench.data.dataset import Dataset
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import Truth
from bench.protocols.settings import ProtocolSettings
from bench.registry import Registry
from bench.seeding import generator
from bench.toolkit.counts import round_to_total
from tests.conftest import context_for, federation_of, network_for, observed_round, seen_under


def counts_of(labels: Tensor, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(labels, classes).sum(dim=1)


class Head:
    """A synthetic head with features around class centres, and the gradients of its batches."""

    def __init__(self, *, classes: int, width: int, spread: float = 0.1, seed: int = 0) -> None:
        self.rng, self.classes, self.spread = generator(seed, "head"), classes, spread
        self.centres = self._normal(classes, width).abs()
        self.weight = self._normal(classes, width) / width**0.5
        self.bias = self._normal(classes) / width**0.5

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.rng)

    def features(self, labels: Tensor) -> Tensor:
        centres = self.centres[labels]
        return (centres + self.spread * self._normal(*centres.shape)).clamp_min(0)

    def gradient(self, labels: Tensor) -> HeadGradient:
        """Of batches with labels int64 [V, K], by the softmax of every sample."""
        features = self.features(labels)
        slope = torch.softmax(features @ self.weight.T + self.bias, dim=-1)
        slope = slope - torch.nn.functional.one_hot(labels, self.classes)
        return HeadGradient.whole(slope.mT @ features / labels.shape[1], slope.mean(dim=1))

    def public(self) -> PublicClasses:
        labels = torch.arange(self.classes)[:, None].expand(-1, 50)
        features = self.features(labels)
        probability = torch.softmax(features @ self.weight.T + self.bias, dim=-1)
        return PublicClasses(
            features=features.mean(dim=1),
            probability=probability.mean(dim=1),
            share=torch.full((self.classes,), 1 / self.classes, dtype=torch.float64),
        )

    def labels(self, victims: int, samples: int) -> Tensor:
        return torch.randint(self.classes, (victims, samples), generator=self.rng)

    def restored(
        self, gradient: HeadGradient, total: int, *, shrink: float = 0.1, refine: int = 3
    ) -> Restored:
        counting = Counting(
            weight=self.weight, bias=self.bias, total=total, public=self.public(),
            shrink=shrink, refine=refine,
        )  # fmt: skip
        return restore(gradient, counting)


# --- the linear system ----------------------------------------------------------------------------


@given(
    classes=st.integers(2, 12), samples=st.integers(1, 40), scale=st.floats(0.1, 3),
    seed=st.integers(0, 10_000),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_lu_equals_the_papers_pseudo_inverse(
    classes: int, samples: int, scale: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight, bias = scale * rng.normal(size=(classes, 5)) / 2, rng.normal(size=classes)
    weight_grad, bias_grad = rng.normal(size=(classes, 5)), rng.normal(size=classes)
    logits = weight_grad / bias_grad[:, None] @ weight.T + bias
    probability = np.exp(logits - logits.max(axis=1, keepdims=True))
    probability /= probability.sum(axis=1, keepdims=True)
    system = np.vstack([probability.T - np.eye(classes), np.ones(classes)])
    singular = np.linalg.svd(system, compute_uv=False)
    expected = np.linalg.pinv(system) @ np.append(samples * bias_grad, samples)
    head = HeadGradient.whole(torch.tensor(weight_grad)[None], torch.tensor(bias_grad)[None])
    ours = counts._solve(
        torch.tensor(probability)[None],
        head.bias,
        torch.ones(1, classes, dtype=torch.bool),
        total=samples,
        share=torch.full((classes,), 1 / classes, dtype=torch.float64),
    )
    if singular[-1] > 1e-5:  # below, the two may differ by rounding
        assert ours[0].numpy() == pytest.approx(expected, abs=1e-8 * abs(expected).max())
    counting = Counting(
        weight=torch.tensor(weight),
        bias=torch.tensor(bias),
        total=samples,
        public=PublicClasses(
            features=torch.zeros(classes, 5, dtype=torch.float64),
            probability=torch.full((classes, classes), 1 / classes, dtype=torch.float64),
            share=torch.full((classes,), 1 / classes, dtype=torch.float64),
        ),
        shrink=0.0,
        refine=0,
    )
    found = restore(head, counting)
    rounded = round_to_total(torch.tensor(expected).clamp_min(0)[None], total=samples)
    distance = float((rounded[0] - torch.tensor(expected)).abs().max())
    if singular[-1] > 1e-5:
        assert float(found.doubt) == pytest.approx(distance, abs=1e-7 * abs(expected).max())
    assert int(found.counts.sum()) == samples


@pytest.mark.parametrize(("total", "expected"), [(10, [5, 3, 2]), (7, [4, 2, 1])])
def test_a_singular_system_falls_back_to_the_public_frequencies(
    total: int, expected: list[int]
) -> None:
    """Classes 0 and 1 predicted with certainty: nothing says how many of each there were."""
    eye = torch.eye(3, dtype=torch.float64)
    counting = Counting(
        weight=1e4 * eye,
        bias=torch.zeros(3, dtype=torch.float64),
        total=total,
        public=PublicClasses(
            features=eye, probability=eye, share=torch.tensor([0.5, 0.3, 0.2]).double()
        ),
        shrink=0.1,
        refine=3,
    )
    zero = HeadGradient.whole(torch.zeros(1, 3, 3).double(), torch.zeros(1, 3).double())
    found = restore(zero, counting)
    assert found.counts.tolist() == [expected]
    assert found.silent.tolist() == [True]


def test_victims_are_solved_alike_alone_and_together() -> None:
    head = Head(classes=7, width=16)
    gradient = head.gradient(head.labels(5, 20))
    public = head.public()
    head.public = lambda: public  # type: ignore[method-assign]
    together = head.restored(gradient, 20)
    for v in range(5):
        alone = head.restored(gradient.victims(slice(v, v + 1)), 20)
        assert torch.equal(alone.counts[0], together.counts[v])
        assert torch.allclose(alone.doubt[0], together.doubt[v], atol=1e-8)


def test_counts_of_a_thousand_classes_are_restored() -> None:
    head = Head(classes=1000, width=64)
    labels = head.labels(2, 64)
    found = head.restored(head.gradient(labels), 64)
    assert torch.equal(found.counts, counts_of(labels, 1000))
    assert found.doubt.max() < 0.5


@pytest.mark.parametrize(("classes", "samples"), [(10, 64), (100, 512)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_refinement_reads_batches_with_many_samples_of_unlike_classes(
    classes: int, samples: int, seed: int
) -> None:
    """dW / db is a class's embedding only where all classes' embeddings are alike."""
    head = Head(classes=classes, width=256, seed=seed)
    labels = head.labels(8, samples)
    gradient, truth = head.gradient(labels), counts_of(labels, classes)
    plain = head.restored(gradient, samples, refine=0)
    refined = head.restored(gradient, samples, refine=8)
    right = (refined.counts == truth).double().mean()
    assert float((plain.counts == truth).double().mean()) < 0.5
    assert float(right) > 0.9


# --- partly visible heads -------------------------------------------------------------------------


def with_head(seen: Seen, hide: Callable[[str, Part], Part | None]) -> Seen:
    """The same observation with parts of the head's tensors replaced or (None) left out."""

    def edited(message: Message) -> Message:
        parts = {}
        for name, part in message.parts.items():
            kept = hide(name, part) if name in seen.network["head"] else part
            if kept is not None:
                parts[name] = kept
        return message.with_parts(parts)

    return replace(seen, messages=tuple(edited(m) for m in seen.messages))


def masked(part: Part, present: Tensor) -> Part:
    """Only the present values; the others become NaN, so that reading one would show."""
    values = torch.where(present, part.values, torch.nan)
    return replace(part, values=values, present=present)


@pytest.fixture(scope="module")
def observed(digits: Dataset) -> tuple[Seen, Truth]:
    return seen_under(digits, network_for(digits), Defense(), batch=8)


def attacked(seen: Seen, digits: Dataset, attack: ILRG | None = None) -> Reconstruction:
    return (attack or ILRG()).run(seen, context_for(digits, network_for(digits), Defense()))


def share_right(answer: Reconstruction, truth: Truth) -> float:
    assert answer.label_counts is not None
    assert answer.label_counts.sum(dim=1).tolist() == [8] * 8
    return float((answer.label_counts == counts_of(truth.y, 10)).double().mean())


def test_nine_tenths_of_the_weights_may_be_hidden(
    observed: tuple[Seen, Truth], digits: Dataset
) -> None:
    rng = generator(0, "hide")

    def hide(name: str, part: Part) -> Part:
        if name == "head.bias":
            return part
        return masked(part, torch.rand(part.values.shape, generator=rng) < 0.1)

    answer = attacked(with_head(observed[0], hide), digits)
    assert share_right(answer, observed[1]) == 1.0
    assert answer.notes == ("10% of head weights visible",)


def test_hidden_coordinates_are_taken_from_the_public_features() -> None:
    """Where every sample is its class's public feature, that makes the system exact, although
    classes lie so far apart that an embedding of any other kind misleads."""
    head = Head(classes=10, width=64, spread=0.0)
    labels = head.labels(8, 40)
    gradient = head.gradient(labels)
    hidden = torch.zeros_like(gradient.weight, dtype=torch.bool)
    blind = replace(
        gradient, weight=torch.full_like(gradient.weight, torch.nan), weight_seen=hidden
    )
    found = head.restored(blind, 40, refine=0)
    assert torch.equal(found.counts, counts_of(labels, 10))
    assert float(found.doubt.max()) < 1e-6


def test_counts_are_read_from_the_bias_alone(observed: tuple[Seen, Truth], digits: Dataset) -> None:
    seen = with_head(observed[0], lambda name, part: part if name == "head.bias" else None)
    answer = attacked(seen, digits)
    assert share_right(answer, observed[1]) == 1.0
    assert answer.notes == ("0% of head weights visible",)


def test_a_hidden_bias_is_estimated_from_the_weights_and_said_so(
    observed: tuple[Seen, Truth], digits: Dataset
) -> None:
    seen = with_head(observed[0], lambda name, part: None if name == "head.bias" else part)
    assert ILRG().applies(seen) is None
    answer = attacked(seen, digits)
    assert share_right(answer, observed[1]) >= 0.95
    assert "hidden bias gradients estimated from the weights'" in answer.notes

    def some_rows(name: str, part: Part) -> Part:
        if name == "head.weight":
            return part
        return masked(part, torch.arange(10) >= 4)

    assert share_right(attacked(with_head(observed[0], some_rows), digits), observed[1]) >= 0.95


def test_one_hidden_row_is_no_loss_and_more_are_shared_out(
    observed: tuple[Seen, Truth], digits: Dataset
) -> None:
    def rows_from(first: int) -> Callable[[str, Part], Part]:
        def hide(name: str, part: Part) -> Part:
            rows = torch.arange(10) >= first
            shape = part.values.shape
            return masked(part, rows.view(-1, *[1] * (len(shape) - 1)).expand(shape))

        return hide

    one = attacked(with_head(observed[0], rows_from(1)), digits)
    assert share_right(one, observed[1]) == 1.0
    assert "9 of 10 head rows visible" in one.notes
    four = attacked(with_head(observed[0], rows_from(4)), digits)
    assert share_right(four, observed[1]) > 0.7
    assert "6 of 10 head rows visible" in four.notes
    assert four.label_counts is not None
    seen_rows = four.label_counts[:, 4:] == counts_of(observed[1].y, 10)[:, 4:]
    assert float(seen_rows.double().mean()) > 0.9


def test_only_a_head_of_which_nothing_is_visible_is_refused(observed: tuple[Seen, Truth]) -> None:
    clause = "no value of the head's weight or bias was sent in the clear"
    assert ILRG().applies(with_head(observed[0], lambda name, part: None)) == clause

    def nothing(name: str, part: Part) -> Part:
        return masked(part, torch.zeros_like(part.values, dtype=torch.bool))

    def one_value(name: str, part: Part) -> Part:
        present = torch.zeros_like(part.values, dtype=torch.bool)
        present.view(-1)[0] = True
        return masked(part, present)

    assert ILRG().applies(with_head(observed[0], nothing)) == clause
    assert ILRG().applies(with_head(observed[0], one_value)) is None


@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("bound", [0.3, 0.01])
def test_a_clip_hides_the_length_and_not_the_counts(
    digits: Dataset, registry: Registry, bound: float, batch: int
) -> None:
    clip = registry.defense("gaussian", {"noise_multiplier": 0.0, "clip_norm": bound})
    seen, truth = seen_under(digits, network_for(digits), clip, batch=batch)
    uploads = [m for m in seen.messages if m.kind == "update"]
    for message in uploads:
        values = torch.cat([p.values.flatten() for p in message.parts.values()])
        assert float(values.norm()) == pytest.approx(bound, rel=1e-5)
    answer = ILRG().run(seen, context_for(digits, network_for(digits), clip))
    assert answer.label_counts is not None
    right = (answer.label_counts == counts_of(truth.y, 10)).double().mean()
    assert float(right) > 0.98
    assert answer.notes == ()


# --- trained networks -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_after_some_training_refinement_helps_and_doubtful_counts_are_told(
    digits: Dataset, seed: int
) -> None:
    network = network_for(digits, "cnn_selective_shield")
    federation = federation_of(digits, network, Defense(), clients=16, each=40, seed=seed)
    everyone = [c.id for c in federation.clients]
    for _ in range(4):
        federation.play(LocalWork(protocol="fedavg", batch=16, lr=0.1, local_steps=3), everyone)
    settings = ProtocolSettings(name="fedavg", clients=16, local_steps=1, lr=0.1)
    seen, truth = observed_round(federation, digits, settings, name="trained", batch=8)
    context = context_for(digits, network, Defense())
    right = {}
    for refine in (0, 3):
        answer = ILRG(refine=refine).run(seen, context)
        assert answer.label_counts is not None
        right[refine] = float((answer.label_counts == counts_of(truth.y, 10)).double().mean())
    assert right[3] > right[0] + 0.1
    assert any(note.startswith("counts uncertain: ") for note in answer.notes)


@pytest.mark.parametrize("seed", range(4))
def test_counts_without_doubt_are_right(seed: int) -> None:
    head = Head(classes=10, width=64, spread=0.5, seed=seed)
    labels = head.labels(64, 32)
    found = head.restored(head.gradient(labels), 32)
    right = (found.counts == counts_of(labels, 10)).all(dim=1)
    sure = ~found.doubtful
    assert 0 < int(sure.sum()) < len(sure)
    assert float(right[sure].double().mean()) > 0.9
    assert float(right[~sure].double().mean()) < 0.9


# --- unusual and bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 10])
def test_a_batch_of_one_class_only(classes: int) -> None:
    head = Head(classes=classes, width=32)
    labels = torch.full((3, 6), classes - 1)
    assert torch.equal(head.restored(head.gradient(labels), 6).counts, counts_of(labels, classes))


@pytest.mark.parametrize("samples", [1, 2, 9, 16])
def test_two_classes(samples: int) -> None:
    head = Head(classes=2, width=64)
    labels = head.labels(16, samples)
    right = head.restored(head.gradient(labels), samples).counts == counts_of(labels, 2)
    assert float(right.double().mean()) > 0.9


def test_dead_features_leave_the_bias_to_decide() -> None:
    head = Head(classes=10, width=32)
    head.centres, head.spread = torch.zeros_like(head.centres), 0.0
    labels = head.labels(4, 16)
    gradient = head.gradient(labels)
    assert not bool(gradient.weight.any())
    assert torch.equal(head.restored(gradient, 16).counts, counts_of(labels, 10))


def test_a_gradient_of_zero_is_a_failure_and_not_an_answer(
    observed: tuple[Seen, Truth], digits: Dataset
) -> None:
    first = observed[0].messages[0].sender

    def silenced(message: Message) -> Message:
        if message.sender != first:
            return message
        zero = {n: replace(p, values=torch.zeros_like(p.values)) for n, p in message.parts.items()}
        return message.with_parts(zero)

    seen = replace(observed[0], messages=tuple(silenced(m) for m in observed[0].messages))
    answer = attacked(seen, digits)
    assert answer.failed is not None
    assert answer.failed.tolist() == [client == first for client in seen.clients]
    assert any("1 of 8 victims showed no head gradient but 0" in note for note in answer.notes)
    assert answer.label_counts is not None
    assert answer.label_counts.sum(dim=1).tolist() == [8] * 8


def test_batches_larger_than_any_classes_public_count(digits: Dataset) -> None:
    few = replace(digits, aux_x=digits.aux_x[:12], aux_y=digits.aux_y[:12])
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), batch=24)
    answer = ILRG().run(seen, context_for(few, network, Defense()))
    assert answer.label_counts is not None
    assert torch.equal(answer.label_counts, counts_of(truth.y, 10))


def test_values_that_are_not_finite_are_refused(
    observed: tuple[Seen, Truth], digits: Dataset
) -> None:
    def broken(name: str, part: Part) -> Part:
        return replace(part, values=torch.full_like(part.values, torch.nan))

    with pytest.raises(ValueError, match=r"'head\.\w+' of client-\d holds non-finite"):
        attacked(with_head(observed[0], broken), digits)
