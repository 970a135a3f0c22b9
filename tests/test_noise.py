"""Gaussian and Laplace noise on clipped updates."""

from __future__ import annotations

import math

import pytest
import torch

from bench.contract.defense import Client, Local
from bench.contract.messages import Message, Part
from bench.seeding import generator
from defenses.noise import GaussianUpdate, LaplaceUpdate
from tests.conftest import network_for, seen_under

SIZE = 100_000


def uploaded(defense: GaussianUpdate | LaplaceUpdate, update: torch.Tensor) -> torch.Tensor:
    zero = {"p": torch.zeros_like(update)}
    local = Local(
        broadcast=zero, start=zero, end={"p": update}, const={}, grad_sum={"p": -update}, lr=1.0,
        steps=1,
    )  # fmt: skip
    client = Client(id="c", x=update, y=update, rng={"defense": generator(0, "noise")})
    sent = Message(
        kind="update", sender="c", receiver="server", round=0, parts={"p": Part(values=update)}
    )
    (upload,) = defense.upload([sent], local, client)
    return upload.parts["p"].values.double()


def test_gaussian_noise_has_the_stated_std_and_an_update_is_clipped_first() -> None:
    update = torch.full((SIZE,), 1.0)
    defense = GaussianUpdate(noise_multiplier=0.02, clip_norm=5.0)
    out = uploaded(defense, update)
    clipped = 5.0 / math.sqrt(SIZE)
    assert abs(float(out.mean()) - clipped) < 5 * 0.1 / math.sqrt(SIZE)
    assert float(out.std()) == pytest.approx(0.1, rel=5 / math.sqrt(2 * SIZE))


def test_laplace_noise_has_the_stated_scale_and_an_update_is_clipped_in_l1() -> None:
    update = torch.full((SIZE,), 1.0)
    out = uploaded(LaplaceUpdate(noise_multiplier=0.001, clip_norm=100.0), update)
    clipped, scale = 100.0 / SIZE, 0.1
    spread = scale * math.sqrt(2)
    assert abs(float(out.mean()) - clipped) < 5 * spread / math.sqrt(SIZE)
    assert float(out.std()) == pytest.approx(spread, rel=0.02)
    assert float((out - clipped).abs().mean()) == pytest.approx(scale, rel=0.02)


@pytest.mark.parametrize("kind", [GaussianUpdate, LaplaceUpdate])
def test_a_short_update_without_noise_passes_unchanged(
    kind: type[GaussianUpdate] | type[LaplaceUpdate],
) -> None:
    update = torch.linspace(-1, 1, 50)
    out = uploaded(kind(noise_multiplier=0.0, clip_norm=100.0), update)
    assert torch.equal(out, update.double())


@pytest.mark.parametrize("kind", [GaussianUpdate, LaplaceUpdate])
def test_bad_settings_are_refused(kind: type[GaussianUpdate] | type[LaplaceUpdate]) -> None:
    with pytest.raises(ValueError, match=r"clip_norm must be > 0"):
        kind(noise_multiplier=1.0, clip_norm=0.0)
    with pytest.raises(ValueError, match=r"noise_multiplier must be >= 0"):
        kind(noise_multiplier=math.nan, clip_norm=1.0)


def test_the_real_upload_of_a_federation_is_within_the_clip(digits) -> None:  # type: ignore[no-untyped-def]
    network = network_for(digits, "mlp_spm")
    defense = GaussianUpdate(noise_multiplier=0.0, clip_norm=0.01)
    seen, _ = seen_under(digits, network, defense)
    values, _ = seen.stack("update", seen.clients)
    norms = torch.cat([v.flatten(1) for v in values.values()], dim=1).norm(dim=1)
    assert torch.allclose(norms, torch.full_like(norms, 0.01), rtol=1e-4)
