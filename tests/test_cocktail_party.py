"""Samples that a first linear layer mixed: exact where they have zeros, near elsewhere."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.cocktail_party import CocktailParty
from attacks.engine.records import read_pixels
from bench.contract.attack import Reconstruction
from bench.contract.defense import Defense
from bench.contract.messages import Message
from bench.data import load_dataset
from bench.data.dataset import Dataset
from bench.models import build
from bench.protocols.observe import Truth
from bench.registry import discover
from bench.seeding import generator
from bench.toolkit import images
from defenses.fedml_he import FedMLHE
from defenses.mask_crypt import MaskCrypt
from defenses.noise import GaussianUpdate
from defenses.secure_aggregation import SecureAggregation
from tests.conftest import context_for, rehearsing_context, require, seen_under


def with_zeros(share: float = 0.7) -> Dataset:
    """Images whose pixels are 0 with this chance, else anywhere in [0, 1]."""
    rng = generator(0, "images with zeros")

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x, kept = torch.rand(2, count, 1, 12, 12, generator=rng)
        return x * (kept > share), torch.randint(4, (count,), generator=rng)

    parts = {n: draw(200) for n in ("train", "test", "aux")}
    fields = {f"{n}_{'xy'[i]}": v for n, part in parts.items() for i, v in enumerate(part)}
    names: Any = {"class_names": tuple("abcd")}
    return Dataset(name="zeros", task="image", **names, **fields)


def attacked(
    data: Dataset, *, defense: Defense | None = None, model: str = "mlp_spm", **how: Any
) -> tuple[Reconstruction, Truth]:
    network = build(model, shape=data.shape, classes=data.classes)
    defense = defense or Defense()
    seen, truth = seen_under(data, network, defense, clients=3, lr=0.1, **how)
    attack = CocktailParty()
    assert attack.applies(seen) is None
    return attack.run(seen, context_for(data, network, defense)), truth


def worst(answer: Reconstruction, truth: Truth) -> float:
    """The largest distance of a private sample to the nearest answer of its victim."""
    away = torch.cdist(truth.x.flatten(2), require(answer.images).flatten(2))
    return float(away.min(dim=2).values.max())


@pytest.mark.parametrize(("batch", "steps"), [(8, 1), (4, 2)])
def test_samples_with_zeros_are_exact_over_batches_and_steps(batch: int, steps: int) -> None:
    answer, truth = attacked(with_zeros(), batch=batch, local_steps=steps)
    assert worst(answer, truth) < 1e-3
    assert not require(answer.failed).any()


def test_labels_are_those_of_the_samples() -> None:
    answer, truth = attacked(with_zeros(), batch=6, protocol="fedsgd")
    assert answer.images is not None
    assert answer.labels is not None
    away = torch.cdist(truth.x.flatten(2), answer.images.flatten(2))
    assert torch.equal(answer.labels.gather(1, away.argmin(dim=2)), truth.y)


def test_a_sum_over_clients_hides_nothing() -> None:
    answer, truth = attacked(with_zeros(), defense=SecureAggregation(), batch=3)
    assert truth.x.shape[:2] == (1, 9)
    assert worst(answer, truth) < 0.2  # sums are rounded to fixed point; a sample's norm is 4


@pytest.mark.parametrize(
    ("defense", "how"),
    [
        (FedMLHE(share=0.1), {"batch": 6}),
        (FedMLHE(share=0.1), {"batch": 3, "local_steps": 2}),
        (MaskCrypt(share=0.1), {"batch": 6}),
    ],
)
def test_a_tenth_encrypted_hides_nothing(defense: Defense, how: dict[str, Any]) -> None:
    answer, truth = attacked(with_zeros(), defense=defense, **how)
    assert worst(answer, truth) < 1e-2


def sent_in_part(data: Dataset, place: int, sent: Tensor) -> tuple[Reconstruction, Tensor, Tensor]:
    """The answer to batches of three of which the weight (0) or bias (1) was not sent in full, the
    samples, and the public mean [F]."""
    network = build("mlp_spm", shape=data.shape, classes=data.classes)
    seen, truth = seen_under(data, network, Defense(), clients=2, batch=3, lr=0.1)
    name, messages = list(seen.before)[place], list[Message]()
    for message in seen.messages:
        parts = dict(message.parts)
        if name in parts:
            parts[name] = replace(parts[name], present=sent)
        messages.append(message.with_parts(parts))
    context, attack = context_for(data, network, Defense()), CocktailParty()
    seen = replace(seen, messages=tuple(messages))
    assert attack.applies(seen) is None
    mean = context.aux_x.double().mean(dim=0).flatten().float()
    return attack.run(seen, context), truth.x, mean


def test_without_the_bias_no_image_has_a_scale() -> None:
    answer, _, mean = sent_in_part(with_zeros(), 1, torch.zeros(256, dtype=torch.bool))
    assert answer.images is not None
    assert require(answer.failed).all()
    assert torch.equal(answer.images.flatten(2), mean.expand(2, 3, -1))


def test_pixels_that_the_sent_part_does_not_tell_are_the_likeliest() -> None:
    sent = torch.ones(256, 144, dtype=torch.bool)
    sent[:, 10:14] = False
    data = with_zeros()
    answer, x, mean = sent_in_part(data, 0, sent)
    values, told = require(answer.images).flatten(2), sent.all(dim=0)
    spread = data.aux_x.flatten(1).double().T.cov() + 0.01 * torch.eye(144)
    slope = torch.linalg.solve(spread[told][:, told], spread[told][:, ~told])
    expected = mean[~told] + (values - mean)[..., told].double() @ slope
    assert torch.allclose(values[..., ~told].double(), expected.clamp(0, 1), atol=1e-5)
    away = torch.cdist(x.flatten(2)[..., told], values[..., told])
    assert float(away.min(dim=2).values.max()) < 1e-3


def test_half_encrypted_whole_images_are_read_off_single_units() -> None:
    answer, truth = attacked(load_dataset("digits", seed=0), defense=FedMLHE(share=0.5), batch=4)
    away = torch.cdist(truth.x.flatten(2), require(answer.images).flatten(2))
    assert int((away.min(dim=2).values < 1e-3).sum()) >= 3


def test_units_of_several_images_and_few_pixels_are_not_read() -> None:
    public = torch.arange(256.0)[None].double() / 255
    images = torch.tensor([[0, 9, 3, 250, 47, 47, 102], [9, 0, 31, 8, 0, 71, 102]]).double() / 255
    mixes = torch.tensor([[0.03, 0], [0, -1e-4], [0.5, 0.2]]).double()
    beside = torch.tensor([[1, 2, 3, 4, 5, 0.002, 0]]).double()  # too small for a pixel
    grad, told = torch.cat([mixes @ images, beside, mixes[:1] @ images]), torch.ones(5, 7) > 0
    told[4, 2:5] = False  # three values that differ
    x, which = read_pixels(grad, told, public)
    assert torch.allclose(x, images, atol=1e-12)
    assert bool(which.all())


def test_photos_without_zeros_are_near() -> None:
    answer, truth = attacked(load_dataset("photos", seed=0), batch=3)
    assert answer.images is not None
    away = torch.cdist(truth.x.flatten(2), answer.images.flatten(2)).argmin(dim=2)
    guess = answer.images[torch.arange(3)[:, None], away]
    assert float(images.ssim(guess, truth.x).mean()) > 0.6


def test_little_noise_leaves_components() -> None:
    data = with_zeros()
    answer, truth = attacked(
        data, defense=GaussianUpdate(noise_multiplier=1e-5, clip_norm=1.0), batch=3
    )
    middle = data.aux_x.mean(dim=0).expand_as(truth.x)
    assert worst(answer, truth) < 0.5 * worst(Reconstruction(images=middle), truth)


def test_matching_begins_at_what_is_unmixed() -> None:
    """Far below the budget that it needs from a public start."""
    data = with_zeros(0.3)
    network = build("mlp_spm", shape=data.shape, classes=data.classes)
    seen, truth = seen_under(data, network, Defense(), clients=2, batch=4, labels=True)
    context = rehearsing_context(data, network, Defense(), seen, budget=20)
    answer = discover().attack("idlg", {"restarts": 0}).run(seen, context)
    assert worst(answer, truth) < 1e-2


def test_what_is_not_mixed_is_refused() -> None:
    data = with_zeros()
    attack = CocktailParty()
    for model, batch, reason in (
        ("lenet", 3, "does not begin with a linear layer"),
        ("logistic", 5, "5 samples are mixed in 4 rows"),
    ):
        network = build(model, shape=data.shape, classes=data.classes)
        seen, _ = seen_under(data, network, Defense(), clients=2, batch=batch)
        assert reason in str(attack.applies(seen))
