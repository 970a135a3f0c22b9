"""Parameter-efficient training as plain modules: a head on a frozen body, and low-rank adapters.

In a suite, as the model of a task (docs/parameter-efficient.md):

    model = "docs/parameter_efficient.py:Perceptron"
    model_settings = { train = "adapters", body = "pretrained", rank = 4 }

Nothing is imported from leakbench: copy what you need. Parameters that need no gradient are neither
trained nor sent.
"""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

WIDTHS = (64, 64)
"""Of the hidden layers."""
FEATURES = 16 * 16
CLASSES = 10


class LowRank(nn.Module):
    """A frozen linear layer and a trained addition of low rank: W x + B A x, B at first 0.

    Source: Hu et al., arXiv:2106.09685, with a scale of 1.

    Args:
        layer: The layer that is frozen.
        rank: Of the addition.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


class Perceptron(nn.Module):
    """Two hidden layers on images of 16 x 16 pixels, of which all or some parameters are trained.

    Args:
        train: all; head, the last layer alone; adapters, the head and an addition of low rank to
            each hidden layer.
        body: random, or pretrained on scikit-learn's digits.
        rank: Of the adapters.
    """

    def __init__(self, train: str = "all", body: str = "random", rank: int = 4) -> None:
        super().__init__()
        self.body, self.head = make_body(), nn.Linear(WIDTHS[-1], CLASSES)
        if body == "pretrained":
            self.body.load_state_dict(pretrain())
        if train != "all":
            self.body.requires_grad_(False)
        if train == "adapters":
            for place, layer in enumerate(self.body):
                if isinstance(layer, nn.Linear):
                    self.body[place] = LowRank(layer, rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def make_body() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in zip((FEATURES, *WIDTHS), WIDTHS, strict=False):
        layers += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*layers)


@cache
def pretrain(steps: int = 100, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a body trained on scikit-learn's digits, the same for every seed of a run."""
    raw = load_digits()
    x = torch.from_numpy(raw.images / 16).float()[:, None]
    x, y = interpolate(x, size=16, mode="bilinear"), torch.from_numpy(raw.target).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(make_body(), nn.Linear(WIDTHS[-1], CLASSES))
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            cross_entropy(net(x), y).backward()
            optimiser.step()
    return {n: v.detach() for n, v in net[0].state_dict().items()}
