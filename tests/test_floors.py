"""An answer that looks at nothing is at its floor or below."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.contract.attack import Reconstruction
from bench.data import LOADERS, load_dataset
from bench.data.dataset import Dataset
from bench.data.partition import Dealing
from bench.errors import UserError
from bench.metrics.floors import floors
from bench.metrics.named import FLOOR_SUFFIX, sign_of
from bench.metrics.score import score
from bench.seeding import generator, numpy_generator
from bench.toolkit import images
from bench.toolkit.batches import class_means
from bench.toolkit.counts import round_to_total

SURE = 4.0
"""Standard errors by which a mean over victims may lie above its floor: by chance it does once in
30,000 comparisons, of which there are some thousand."""
SAMPLING, PUBLIC = 0.01, 0.25
"""By which an answer may be better for the private samples than for the public ones, as a share of
the metric's way from 0 to 1: a floor is fitted to N public samples, of which some hundred at most
are used, so its expectation is known to about PUBLIC / sqrt(N) and no better than SAMPLING."""
SKEWED = Dealing(how="dirichlet", clients=10, alpha=0.3, least=8)
ONE_LABEL = Dealing(how="shards", clients=10, each=1)


@cache
def dataset(name: str) -> Dataset:
    folder = os.environ.get("LEAKBENCH_DATA")
    try:
        return load_dataset(name, seed=0, data_dir=Path(folder) if folder else None)
    except UserError as error:
        pytest.skip(str(error))


def batches(data: Dataset, samples: int, dealing: Dealing | None) -> Tensor:
    """Places of private samples [V, K], as clients have them."""
    rng = numpy_generator(1, "private", samples)
    labels, found = data.train_y.numpy(), []
    number = max(12, 256 // samples)
    while len(found) < number:
        shares = dealing.deal(labels, rng) if dealing else [np.arange(len(labels))]
        found += [rng.choice(s, size=samples, replace=False) for s in shares if len(s) >= samples]
    return torch.from_numpy(np.stack(found[:number]))


def blind(data: Dataset, victims: int, samples: int) -> Iterator[tuple[str, Reconstruction]]:
    """Answers that read nothing but public data."""
    rng, shape = generator(0, "blind"), data.shape
    commonest = int(torch.bincount(data.aux_y).argmax())
    frequency = torch.bincount(data.aux_y, minlength=data.classes).double()
    likely = round_to_total(frequency[None], total=samples)[0]
    spread = torch.repeat_interleave(torch.arange(data.classes), likely)
    some = torch.randint(len(data.aux_y), (samples,), generator=rng)
    answers = {
        "mean": (data.aux_x.mean(dim=0).expand(samples, *shape), torch.full((samples,), commonest)),
        "black": (torch.zeros(samples, *shape), spread),
        "gray": (torch.full((samples, *shape), 0.5), spread),
        "noise": (torch.rand(samples, *shape, generator=rng), spread),
        "class means": (class_means(data.aux_x, data.aux_y, classes=data.classes)[spread], spread),
        "public samples": (data.aux_x[some], data.aux_y[some]),
    }
    counts = {
        "no label": torch.zeros(data.classes),
        "every label": torch.ones(data.classes),
        "every label for each": torch.full((data.classes,), samples),
        "one label": torch.nn.functional.one_hot(torch.tensor(commonest), data.classes) * samples,
        "likely labels": likely,
    }
    for name, (x, y) in answers.items():
        yield (
            name,
            Reconstruction(images=x.expand(victims, *x.shape), labels=y.expand(victims, samples)),
        )
    for name, given in counts.items():
        yield name, Reconstruction(label_counts=given.long().expand(victims, -1))


def check(data: Dataset, samples: int, dealing: Dealing | None) -> None:
    places = batches(data, samples, dealing)
    truth = {
        "x": data.train_x[places], "y": data.train_y[places], "classes": data.classes,
        "aux_x": data.aux_x, "categorical": data.categorical,
    }  # fmt: skip
    lowest = floors(**truth, aux_y=data.aux_y, dealing=dealing)
    open_ = max(SAMPLING, PUBLIC / len(data.aux_y) ** 0.5)
    above = []
    for name, answer in blind(data, *places.shape):
        for metric, values in score(answer, **truth).values.items():
            gap = sign_of(metric) * (np.array(values) - np.array(lowest[metric]))
            unit = max(1.0, float(np.abs(lowest[metric]).mean()))  # decibels, errors
            allowed = SURE * gap.std(ddof=1) / len(gap) ** 0.5 + open_ * unit
            if gap.mean() > allowed:
                above.append(f"{name} {metric}: {gap.mean():.3f} above, {allowed:.3f} allowed")
    assert not above
    for metric, values in lowest.items():
        if metric.endswith(FLOOR_SUFFIX):
            name = metric.removesuffix(FLOOR_SUFFIX)
            plain = lowest[name]
            gap = sign_of(name) * (np.mean(plain) - np.mean(values))
            assert gap <= 0.08 * max(1.0, float(np.abs(plain).mean())), metric


@pytest.mark.parametrize("samples", [1, 2, 8, 64])
@pytest.mark.parametrize("name", ["digits", "breast_cancer"])
def test_an_answer_that_reads_nothing_is_at_its_floor_or_below(name: str, samples: int) -> None:
    check(dataset(name), samples, None)


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("dealing", [SKEWED, ONE_LABEL], ids=["skewed", "one label"])
def test_so_it_is_where_clients_have_few_labels(samples: int, dealing: Dealing) -> None:
    check(dataset("digits"), samples, dealing)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4, 16, 64])
@pytest.mark.parametrize("name", sorted({*LOADERS} - {"digits", "breast_cancer"}))
def test_so_it_is_on_every_data_set(name: str, samples: int) -> None:
    check(dataset(name), samples, None)


def test_counts_that_name_no_label_are_at_the_floor_where_that_is_best() -> None:
    """Of single samples among ten classes, naming none has nine of ten counts right."""
    data = dataset("digits")
    places = batches(data, 1, None)
    truth = {"x": data.train_x[places], "y": data.train_y[places], "classes": 10}
    lowest = floors(**truth, aux_x=data.aux_x, aux_y=data.aux_y)
    assert lowest["lnacc"] == pytest.approx([0.9] * len(places))
    assert lowest["leacc"] == pytest.approx([0.9] * len(places))


def test_granted_labels_leak_nothing_and_raise_the_floor_of_images() -> None:
    data = dataset("digits")
    places = batches(data, 4, None)
    truth = {"x": data.train_x[places], "y": data.train_y[places], "classes": 10}
    both = {"aux_x": data.aux_x, "aux_y": data.aux_y}
    plain, granted = floors(**truth, **both), floors(**truth, **both, granted=True)
    assert granted["ssim"] == plain["ssim_class_mean"]
    assert np.mean(granted["ssim"]) > np.mean(plain["ssim"])
    for metric in ("lnacc", "leacc", "irec", "label_accuracy"):
        assert granted[metric] == [1.0] * len(places)


def test_a_floor_depends_on_public_data_and_the_victim_alone_and_is_the_same_again() -> None:
    data = dataset("digits")
    places = batches(data, 2, SKEWED)[:6]
    both = {"classes": 10, "aux_x": data.aux_x, "aux_y": data.aux_y, "dealing": SKEWED}
    whole = floors(x=data.train_x[places], y=data.train_y[places], **both)
    some = floors(x=data.train_x[places[2:4]], y=data.train_y[places[2:4]], **both)
    assert all(whole[name][2:4] == pytest.approx(values) for name, values in some.items())


def test_few_public_samples_and_absent_classes_are_no_obstacle() -> None:
    data = dataset("digits")
    x, y = data.train_x[:6].view(3, 2, 1, 16, 16), data.train_y[:6].view(3, 2)
    for number in (1, 3):
        found = floors(x=x, y=y, classes=10, aux_x=data.aux_x[:number], aux_y=data.aux_y[:number])
        assert all(np.isfinite(v).all() and len(v) == 3 for v in found.values())


def test_ssim_with_its_gradient_is_ssim() -> None:
    rng = generator(0, "similar")
    x, y = torch.rand(5, 3, 12, 15, generator=rng), torch.rand(2, 3, 12, 15, generator=rng)
    slots = torch.tensor([0, 1, 1, 0, 1])
    guess = y.double().requires_grad_()
    found = images.similar_to(x)(guess, slots)
    assert found.tolist() == pytest.approx(images.ssim(y[slots], x).tolist(), abs=1e-6)
    assert torch.autograd.grad(found.sum(), guess)[0].abs().max() > 0


def test_the_best_constant_image_beats_the_mean_image() -> None:
    data = dataset("digits")
    places = batches(data, 1, None)
    truth = {"x": data.train_x[places], "y": data.train_y[places], "classes": 10}
    lowest = floors(**truth, aux_x=data.aux_x, aux_y=data.aux_y)
    mean = data.aux_x.mean(dim=0).expand_as(truth["x"])  # type: ignore[arg-type]
    plain = images.ssim(mean, truth["x"]).mean()  # type: ignore[arg-type]
    assert np.mean(lowest["ssim"]) > float(plain) + 0.05
