"""R-GAP: images through convolutions, and where it hands over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.judge import Likelihood
from attacks.r_gap import RGAP
from bench.contract.attack import Context, Seen
from bench.contract.defense import Defense
from bench.contract.messages import Part
from bench.data.dataset import Dataset
from bench.harness.cascade import EXPLAINED
from bench.models import build
from bench.protocols.observe import Truth
from bench.seeding import generator
from defenses.noise import GaussianUpdate
from tests import cnn6
from tests.conftest import context_for, require, seen_under
from tests.uploads import error

FILE = Path(cnn6.__file__).relative_to(Path.cwd())


def observed(
    data: Dataset, defense: Defense | None = None, *, model: str = f"{FILE}:Cnn6", seen: Any = None,
    **settings: Any,
) -> tuple[Seen, Truth, Context]:  # fmt: skip
    defense = defense or Defense()
    if model.endswith("Cnn6"):
        settings = {"layers": 3, "channels": 0.7, **settings}
    network = build(model, shape=data.shape, classes=data.classes, settings=settings)
    shown, truth = seen_under(data, network, defense, **{"clients": 2, **(seen or {})})
    return shown, truth, context_for(data, network, defense)


@pytest.mark.parametrize("activation", ["LeakyReLU", "Sigmoid", "Tanh", "Identity"])
def test_the_image_comes_back_through_invertible_activations(
    photos: Dataset, activation: str
) -> None:
    seen, truth, ctx = observed(photos, activation=activation)
    assert RGAP().applies(seen) is None
    answer = RGAP().run(seen, ctx)
    assert error(answer, truth) < 1e-10
    assert "rank 768 of 768, smallest singular value" in answer.notes[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "lenet", "init": 0.25},  # sigmoids
        {"model": "logistic"},
        {"layers": 1, "hidden": 40, "activation": "Tanh"},
    ],
)
def test_other_chains_give_their_image(photos: Dataset, settings: dict[str, Any]) -> None:
    seen, truth, ctx = observed(photos, **settings)
    answer = RGAP().run(seen, ctx)
    assert error(answer, truth) < 1e-10
    left = require(Likelihood().unexplained(seen, ctx, answer))
    assert float(left.max()) < EXPLAINED  # so that a cascade spares them


def test_a_clip_and_standardised_samples_change_nothing(photos: Dataset) -> None:
    defense = GaussianUpdate(noise_multiplier=0.0, clip_norm=0.01)
    seen, truth, ctx = observed(photos, defense, mean=0.4, std=0.25)
    assert error(RGAP().run(seen, ctx), truth) < 1e-9


def test_hidden_coordinates_drop_their_equations(photos: Dataset) -> None:
    seen, truth, ctx = observed(photos, channels=1.5)
    rng, messages = generator(0, "hidden"), []
    for message in seen.messages:
        parts = dict(message.parts)
        for name, part in parts.items():
            if name.endswith("weight"):
                there = torch.rand(part.values.shape, generator=rng) < 0.9
                hidden = torch.where(there, part.values, torch.nan)
                parts[name] = Part(values=hidden, present=there)
        messages.append(message.with_parts(parts) if message.sender in seen.clients else message)
    seen = replace(seen, messages=tuple(messages))
    assert error(RGAP().run(seen, ctx), truth) < 1e-9


def test_equations_that_contradict_each_other_are_noticed(photos: Dataset) -> None:
    seen, _, ctx = observed(photos)
    name = next(n for n in seen.before if n != seen.network["head"][0])
    for message in seen.of(seen.clients[0], "update"):
        message.parts[name].values.mul_(3)
    answer = RGAP().run(seen, ctx)
    assert require(answer.failed).tolist() == [True, False]


@pytest.mark.parametrize("hide", [False, True])
def test_a_victim_that_shows_nothing_is_failed(photos: Dataset, hide: bool) -> None:
    """A gradient of zeros, or one without the head's."""
    seen, truth, ctx = observed(photos)
    messages = []
    for message in seen.messages:
        parts = dict(message.parts)
        for name in parts if message.sender == seen.clients[0] else ():
            empty = torch.zeros_like(parts[name].values)
            if not hide:
                parts[name] = Part(values=empty)
            elif name in seen.network["head"]:
                parts[name] = Part(values=empty * torch.nan, present=empty.bool())
        messages.append(message.with_parts(parts))
    answer = RGAP().run(replace(seen, messages=tuple(messages)), ctx)
    assert require(answer.failed).tolist() == [True, False]
    assert torch.allclose(require(answer.images)[1], truth.x[1], atol=1e-4)


def test_too_few_equations_are_noticed(photos: Dataset) -> None:
    """Three channels at half the sides hold less than the image, and a gradient of 48 x 3 values
    does not make up for it."""
    seen, _, ctx = observed(photos, layers=1, channels=0.25)
    answer = RGAP().run(seen, ctx)
    assert require(answer.failed).all()
    rank = int(answer.notes[0].split("rank ")[1].split()[0])
    assert rank < 768


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"activation": "ReLU"}, "what follows body/0 cannot be inverted"),
        ({"pool": True}, "what follows body/0 cannot be inverted"),
        ({"model": "cnn_selective_shield"}, "batch statistics"),
        ({"model": "vit_small"}, "no chain of linear layers"),
    ],
)
def test_it_hands_over(photos: Dataset, settings: dict[str, Any], reason: str) -> None:
    seen, _, ctx = observed(photos, **settings)
    answer = RGAP().run(seen, ctx)
    assert require(answer.failed).all()
    assert reason in answer.notes[0]


def test_reasons_why_it_does_not_apply(photos: Dataset) -> None:
    def reason(defense: Defense | None = None, **seen: Any) -> str:
        return str(RGAP().applies(observed(photos, defense, seen=seen, layers=1)[0]))

    assert "2 sample(s) in 1 step(s)" in reason(batch=2)
    noised = GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0)
    assert "without noise" in reason(noised)
