"""Measure SPEAR on batches of a perceptron 784-200-200-10, as `results/published/spear.toml` says.

uv run python -m tests.spear_figures DATASET EPOCHS BATCH [--batches 20] [--dtype float32]
    [--noise 0] [--data-dir DIR]
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attacks.spear import SETS, separate
from bench.data import load_dataset
from bench.data.dataset import Dataset
from bench.seeding import generator

EXACT = 1e-4
"""Root mean squared error per pixel below which a batch counts as read."""


def perceptron(width: int, seed: int) -> nn.Sequential:
    """PyTorch's default initialisation of a perceptron with two hidden layers of 200."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(width, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()
        return nn.Sequential(*layers, nn.Linear(200, 10))


def train(network: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """SGD at rate .1 with momentum .9 in batches of 64."""
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    rng = generator(0, "figures")
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=rng).split(64):
            optimiser.zero_grad()
            cross_entropy(network(x[chosen]), y[chosen]).backward()
            optimiser.step()


def rmse(answer: Tensor, truth: Tensor) -> float:
    """Root mean squared error of the best pairing of samples [B, F], in any order."""
    error = torch.cdist(answer.nan_to_num().double(), truth.double()).square() / truth.shape[1]
    return float(error[linear_sum_assignment(error.numpy())].mean().sqrt())


def measure(
    data: Dataset, epochs: int, batch: int, *, batches: int = 20, dtype: str = "float32",
    noise: float = 0.0, budget: int = 100,
) -> dict[str, Any]:  # fmt: skip
    """Attack so many batches of a fresh network each, or of one trained for `epochs` on 20,000.

    noise: Standard deviation of Gaussian noise relative to the gradient's root mean square.
    """
    kind = getattr(torch, dtype)
    x, y, public = data.train_x.flatten(1), data.train_y, data.aux_x.flatten(1)
    errors, seconds, lacking = [], [], 0
    network = perceptron(x.shape[1], 0)
    train(network, x[:20000], y[:20000], epochs)
    for trial in range(batches):
        network = network if epochs else perceptron(x.shape[1], trial)
        rng = generator(trial, "figures")
        chosen = torch.randperm(len(x), generator=rng)[:batch]
        network.to(kind)
        first = network[0]
        assert isinstance(first, nn.Linear)
        loss = cross_entropy(network(x[chosen].to(kind)), y[chosen])
        grads = [g.double() for g in torch.autograd.grad(loss, [first.weight, first.bias])]
        size = noise * float(grads[0].square().mean().sqrt())
        grads = [g + size * torch.randn(g.shape, generator=rng).double() for g in grads]
        weight, bias = first.weight.detach().double(), first.bias.detach().double()
        inactive = (public.double() @ weight.T + bias <= 0).double().mean(dim=0)
        began = time.perf_counter()
        unmixed = separate(
            grads[0], grads[1], weight, bias, samples=batch, sets=budget * SETS, rng=rng,
            chances=inactive.square().clamp_min(0.02),
        )  # fmt: skip
        seconds.append(time.perf_counter() - began)
        lacking += unmixed.rank < batch
        answer = unmixed.inputs
        errors.append(torch.inf if answer is None else rmse(answer, x[chosen]))
    return {
        "exact": sum(e < EXACT for e in errors),
        "of": batches,
        "rank_lacking": lacking,
        "median_rmse": statistics.median(errors),
        "seconds": round(statistics.median(seconds), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("epochs", type=int)
    parser.add_argument("batch", type=int, nargs="+")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    data = load_dataset(given.dataset, seed=0, data_dir=given.data_dir)
    for batch in given.batch:
        figures = measure(
            data, given.epochs, batch, batches=given.batches, dtype=given.dtype, noise=given.noise
        )
        setting = f"{given.dataset}, {given.epochs} epochs, batch {batch}, noise {given.noise:g}"
        print(f"{setting}: {figures}", flush=True)


if __name__ == "__main__":
    main()
