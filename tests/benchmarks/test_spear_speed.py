"""SPEAR's cost as a ratio to the paper's sampling: rows drawn uniformly, null vectors by QR.
The cocktail party's is a ratio to SPEAR's, on one gradient of images with zeros.

    uv run pytest tests/benchmarks/test_spear_speed.py --benchmark-only -s

Both draw until their directions hold every sample's, from the same float64 gradients at
initialisation. `plain` is also batched, and its threshold is told the truth: it stops as soon as
each true direction was met, so the ratio flatters it. Ratios are printed, not asserted.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attacks.cocktail_party import CocktailParty
from attacks.spear import SETS, Spear, separate
from bench.contract.defense import Defense
from bench.data import load_dataset
from bench.models import build
from bench.seeding import generator
from tests.benchmarks.timing import TRIES, best_of
from tests.conftest import context_for, seen_under
from tests.spear_figures import perceptron
from tests.test_cocktail_party import with_zeros


def plain(left: Tensor, directions: Tensor) -> int:
    """Draw sets of B - 1 of the rows [O, B] until each of the unit directions [B, B] was met;
    return their number."""
    rng, met = generator(0, "plain"), torch.zeros(directions.shape[1], dtype=torch.bool)
    drawn, rank = 0, left.shape[1]
    while not met.all() and drawn < 100 * SETS:
        order = torch.rand(SETS, len(left), generator=rng).argsort(dim=1)[:, : rank - 1]
        q = torch.linalg.qr(left[order].mT, mode="complete")[0][..., -1]
        sparse = ((q @ left.T).abs() < 1e-7).sum(dim=1) >= rank
        met |= ((q[sparse] @ directions).abs() > 1 - 1e-6).any(dim=0)
        drawn += SETS
    return drawn


@pytest.mark.parametrize("batch", [6, 8, 10])
def test_spear_against_uniform_sets(benchmark: Any, batch: int) -> None:
    data = load_dataset("digits", seed=0)
    network = perceptron(data.train_x[0].numel(), 0).double()
    first = network[0]
    assert isinstance(first, nn.Linear)
    x, y = data.train_x[:batch].flatten(1).double(), data.train_y[:batch]
    outputs = first(x)
    by_output = torch.autograd.grad(cross_entropy(network[1:](outputs), y), outputs)[0]
    weight, bias = first.weight.detach(), first.bias.detach()
    grads = by_output.T @ x, by_output.sum(dim=0)
    left = torch.linalg.svd(grads[0], full_matrices=False)[0][:, :batch]
    directions = left.T @ by_output.T
    public = data.aux_x.flatten(1).double() @ weight.T + bias
    chances = (public <= 0).double().mean(dim=0).square().clamp_min(0.02)

    def ours() -> int:
        return separate(
            *grads, weight, bias, samples=batch, chances=chances, sets=100 * SETS,
            rng=generator(0, "ours"),
        ).sets  # fmt: skip

    slow, sets = best_of(
        lambda: plain(left[left.norm(dim=1) > 1e-12], directions / directions.norm(dim=0)), tries=1
    )
    own = benchmark.pedantic(ours, rounds=TRIES, warmup_rounds=1)
    seconds = benchmark.stats.stats.min
    print(
        f"\nSPEAR, batch {batch}: {own} sets in {seconds:.2f} s; uniform sets by QR "
        f"{sets} in {slow:.2f} s ({slow / seconds:.1f}x)"
    )


@pytest.mark.parametrize("batch", [6, 10, 14])
def test_cocktail_party_against_spear(benchmark: Any, batch: int) -> None:
    data = with_zeros()
    network = build("mlp_spm", shape=data.shape, classes=data.classes)
    seen, _ = seen_under(data, network, Defense(), clients=2, batch=batch, protocol="fedsgd")

    def attack(one: Any) -> Any:
        return one.run(seen, context_for(data, network, Defense()))

    slow, _ = best_of(lambda: attack(Spear()), tries=1)
    benchmark.pedantic(lambda: attack(CocktailParty()), rounds=TRIES, warmup_rounds=1)
    seconds = benchmark.stats.stats.min
    print(
        f"\ncocktail party, batch {batch}: {seconds:.2f} s; SPEAR {slow:.2f} s "
        f"({slow / seconds:.1f}x)"
    )
