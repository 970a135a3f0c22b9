"""Gaussian and Laplace noise on clipped updates."""

from __future__ import annotations

import math

import pytest
import torch

from bench.seeding import generator
from defenses.noise import GaussianUpdate, LaplaceUpdate
from tests.conftest import network_for, seen_under
from tests.uploads import upload_of

SIZE = 100_000


def uploaded(defense: GaussianUpdate | LaplaceUpdate, update: torch.Tensor) -> torch.Tensor:
    return upload_of(defense, update, generator(0, "noise")).parts["p"].values.double()


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


def test_the_real_upload_of_a_federation_is_within_the_clip(digits) -> None:  # type: ignore[no-untyped-def]
    network = network_for(digits, "mlp_spm")
    defense = GaussianUpdate(noise_multiplier=0.0, clip_norm=0.01)
    seen, _ = seen_under(digits, network, defense)
    values, _ = seen.stack("update", seen.clients)
    norms = torch.cat([v.flatten(1) for v in values.values()], dim=1).norm(dim=1)
    assert torch.allclose(norms, torch.full_like(norms, 0.01), rtol=1e-4)
