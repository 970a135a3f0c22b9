"""Patches of a transformer's sample from the gradients of its embedding and position table."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attacks.analytic import Analytic
from attacks.engine.position_table import find_table
from attacks.judge import Likelihood
from bench.contract.attack import Context, Seen
from bench.contract.defense import Defense
from bench.contract.messages import Part
from bench.data.dataset import Dataset
from bench.harness.cascade import EXPLAINED
from bench.models import build
from bench.protocols.observe import Truth
from bench.seeding import generator
from defenses.fedml_he import FedMLHE
from defenses.noise import GaussianUpdate
from tests.conftest import context_for, network_for, require, seen_under
from tests.uploads import error

TIMM = {"mean": 0.4, "std": 0.25, "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1,
        "num_heads": 2}  # fmt: skip


def observed(
    data: Dataset, defense: Defense | None = None, *, model: str = "vit_small", dim: int = 32,
    **more: Any,
) -> tuple[Seen, Truth, Context]:  # fmt: skip
    defense = defense or Defense()
    own = {"dim": dim, "depth": 1} if model == "vit_small" else TIMM
    network = build(model, shape=data.shape, classes=data.classes, settings=own)
    seen, truth = seen_under(data, network, defense, **{"clients": 3, **more})
    return seen, truth, context_for(data, network, defense)


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("clip_norm", [0.01, 1e9])
def test_the_table_gives_the_image_through_a_clip(
    photos: Dataset, protocol: str, clip_norm: float
) -> None:
    defense = GaussianUpdate(noise_multiplier=0.0, clip_norm=clip_norm)
    seen, truth, ctx = observed(photos, defense, protocol=protocol)
    assert Analytic().applies(seen) is None
    answer = Analytic().run(seen, ctx)
    assert error(answer, truth) < 1e-10
    assert answer.notes == ("position table: rank 16 for 16 patches",)


def test_layer_norm_leaves_a_rank_less_than_the_width(photos: Dataset) -> None:
    seen, _, ctx = observed(photos, dim=16)
    answer = Analytic().run(seen, ctx)
    assert require(answer.failed).all()
    assert answer.notes == ("position table: rank 15 for 16 patches",)


def test_a_class_token_and_standardised_samples_change_nothing(photos: Dataset) -> None:
    seen, truth, ctx = observed(photos, model="timm:vit_tiny_patch16_224")
    assert find_table(seen) is not None
    answer = Analytic().run(seen, ctx)
    assert error(answer, truth) < 1e-9
    left = require(Likelihood().unexplained(seen, ctx, answer))
    assert float(left.max()) < EXPLAINED  # so that a cascade spares them


def test_hidden_coordinates_drop_equations(photos: Dataset) -> None:
    seen, truth, ctx = observed(photos, dim=64)
    names = require(find_table(seen))
    rng, messages = generator(0, "hidden"), []
    for message in seen.messages:
        parts = dict(message.parts)
        if names[0] in parts:
            value = parts[names[0]].values
            there = torch.rand(value.shape, generator=rng) < 0.6
            parts[names[0]] = Part(values=torch.where(there, value, torch.nan), present=there)
            table = parts[names[1]].values
            rows = (torch.arange(64) % 8 > 0).expand_as(table)
            parts[names[1]] = Part(values=torch.where(rows, table, torch.nan), present=rows)
        messages.append(message.with_parts(parts))
    answer = Analytic().run(replace(seen, messages=tuple(messages)), ctx)
    assert error(answer, truth) < 1e-9


def test_partly_encrypted_uploads_give_their_image(photos: Dataset) -> None:
    seen, truth, ctx = observed(photos, FedMLHE(share=0.05), dim=64, clients=4, victims=4)
    assert error(Analytic().run(seen, ctx), truth) < 1e-8


def test_a_table_that_is_not_added_to_the_patches_is_noticed(photos: Dataset) -> None:
    seen, _, ctx = observed(photos)
    names = require(find_table(seen))
    for message in seen.of(seen.clients[0], "update"):
        message.parts[names[1]].values.mul_(2)
    answer = Analytic().run(seen, ctx)
    assert require(answer.failed).tolist() == [True, False, False]
    assert answer.notes == ("position table: rank 0 for 16 patches",)


def test_reasons_why_the_equations_do_not_hold(photos: Dataset) -> None:
    seen, _, _ = observed(photos, batch=2)
    assert "but 2 were used" in str(Analytic().applies(seen))
    noised = GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0)
    assert "without noise" in str(Analytic().applies(observed(photos, noised)[0]))
    seen, _, _ = observed(photos)
    names = find_table(seen)
    hidden = [
        m.with_parts({n: p for n, p in m.parts.items() if names is None or n != names[1]})
        for m in seen.messages
    ]
    assert "were not both sent" in str(Analytic().applies(replace(seen, messages=tuple(hidden))))
    assert find_table(seen_under(photos, network_for(photos), Defense(), clients=2)[0]) is None
