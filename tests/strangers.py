"""Modules as users bring them: written without leakbench in mind, each with something odd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # as its users write it
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block with a functional activation, and an addition and an activation in place."""

    def __init__(self, inputs: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, planes, 1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


class Residual(nn.Module):
    """A residual network of three blocks with its head behind a functional pooling."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width), Block(width, width))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2))
        self.linear = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        x = F.avg_pool2d(x, x.shape[-1])
        return self.linear(x.view(x.size(0), -1))


class Plain(nn.Module):
    """The convolutional network of PyTorch's own tutorial, with a log-softmax at the end."""

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.fc1 = nn.Linear(8 * ((image_size - 4) // 2) ** 2, 16)
        self.fc2 = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


class Attentive(nn.Module):
    """Attention whose weights no layer of its own applies, positions of the module's own, group and
    layer normalisation, a frozen layer and a constant."""

    scale: Tensor

    def __init__(self, classes: int, in_channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_channels, 8, 4, stride=4), nn.GroupNorm(2, 8))
        self.positions = nn.Parameter(0.1 * torch.randn(16, 8))
        self.norm = nn.LayerNorm(8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, classes))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).mT + self.positions
        normed = self.norm(tokens)
        mixed, _ = self.mix(normed, normed, normed, need_weights=False)
        return self.head(self.frozen((tokens + self.scale * mixed).mean(dim=1)))


class Sensing(nn.Module):
    """One-dimensional convolutions with batch normalisation of [B, C, L] and of [B, C]."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(shape[0], 6, 5, stride=2),
            nn.BatchNorm1d(6),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.LazyLinear(12),
            nn.BatchNorm1d(12, affine=False),
        )
        self.body(torch.zeros(2, *shape))
        self.out = nn.Linear(12, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


class Tied(nn.Module):
    """A layer that is used twice, with another between."""

    def __init__(self, num_classes: int, in_features: int) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, 8)
        self.again = nn.Linear(8, 8)
        self.between = nn.Linear(8, 8)
        self.last = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(self.first(x.flatten(1))))
        x = torch.tanh(self.again(self.between(x)))
        return self.last(x)


STRANGERS: dict[str, tuple[int, ...]] = {
    "Residual": (2, 16, 16),
    "Plain": (1, 12, 12),
    "Attentive": (1, 16, 16),
    "Sensing": (3, 32),
    "Tied": (7,),
}
"""Classes above, and the shape of a sample that each takes."""


# --- what changes easily under a harness's hands -------------------------------------------------


class NormAct(nn.BatchNorm2d):
    """A normalisation with its activation, as timm has it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class Branch(nn.Module):
    """A residual branch that begins in place, so the shortcut reads what it changed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        made = self.branch(x)
        return x + made


class Kept(nn.Sequential):
    """With a normalisation that stays in evaluation."""

    def train(self, mode: bool = True) -> Kept:
        super().train(mode)
        self[1].eval()
        return self


class Repeated(nn.Module):
    """With one batch normalisation for two places."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(256, 8), nn.Linear(8, 8)
        self.norm, self.fc = nn.BatchNorm1d(8), nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.one(x.flatten(1)))
        return self.fc(self.norm(self.two(x)))


class LowRank(nn.Module):
    """A frozen head with a trained addition of low rank, at first nothing."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inner.in_features) / 10)
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.a.T @ self.b.T


def flat(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.Sigmoid(), nn.Linear(32, num_classes))


class OwnLinear(nn.Linear):
    pass


def _image_net(*middle: nn.Module, classes: int = 5) -> list[nn.Module]:
    first = nn.Conv2d(1, 6, 3, stride=2, padding=1)
    return [first, *middle, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(96, classes)]


def frozen_body(num_classes: int) -> nn.Module:
    made = nn.Sequential(*_image_net(nn.BatchNorm2d(6), nn.ReLU(), classes=num_classes))
    made[0].requires_grad_(False)
    made[1].requires_grad_(False)
    return made


def _headed(head: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), head)


def frozen_bias(num_classes: int) -> nn.Module:
    head = nn.Linear(32, num_classes)
    head.bias.requires_grad_(False)
    return _headed(head)


def passed_weight_norm(num_classes: int) -> nn.Module:
    """As weight_norm leaves a module after a pass."""
    made = _headed(nn.utils.weight_norm(nn.Linear(32, num_classes)))
    made(torch.rand(2, 1, 16, 16))
    return made


HANDLED: dict[str, Any] = {
    "norm_act": lambda num_classes: nn.Sequential(*_image_net(NormAct(6), classes=num_classes)),
    "in_place": lambda num_classes: nn.Sequential(*_image_net(Branch(6), classes=num_classes)),
    "repeated": Repeated,
    "kept": lambda num_classes: Kept(*_image_net(nn.BatchNorm2d(6), classes=num_classes)),
    "batch_statistics": lambda num_classes: nn.Sequential(
        *_image_net(nn.BatchNorm2d(6, track_running_stats=False), classes=num_classes)
    ),
    "frozen_body": frozen_body,
    "data_parallel": lambda num_classes: nn.DataParallel(_headed(nn.Linear(32, num_classes))),
    "compiled_part": lambda num_classes: nn.Sequential(
        nn.Flatten(), torch.compile(nn.Linear(256, 8), backend="eager"), nn.Linear(8, num_classes)
    ),
    "lazy": lambda num_classes: nn.Sequential(
        nn.LazyConv2d(8, 3, stride=2),
        nn.LazyBatchNorm2d(),
        nn.Flatten(),
        nn.LazyLinear(num_classes),
    ),
    "frozen_head": lambda num_classes: _headed(nn.Linear(32, num_classes).requires_grad_(False)),
    "frozen_bias": frozen_bias,
    "no_bias": lambda num_classes: _headed(nn.Linear(32, num_classes, bias=False)),
    "low_rank_head": lambda num_classes: _headed(LowRank(nn.Linear(32, num_classes))),
    "own_linear": lambda num_classes: _headed(OwnLinear(32, num_classes)),
    "weight_norm": passed_weight_norm,
    "parametrised": lambda num_classes: _headed(
        nn.utils.parametrizations.weight_norm(nn.Linear(32, num_classes))
    ),
}
"""Makers of modules for images of 16 x 16 that must run as they are, by name."""
globals().update(HANDLED)  # found by FILE.py:NAME


# --- what is refused ---------------------------------------------------------------------------


def dropping(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, num_classes))


def narrow() -> nn.Module:
    """With a number of classes of its own."""
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 3))


class Noisy(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.fc(x + torch.randn_like(x))


class TwoFaced(Noisy):
    """With an auxiliary output in training."""

    def forward(self, x: Tensor) -> Any:
        out = self.fc(x.flatten(1))
        return (out, out) if self.training else out


class Rounded(nn.Module):
    """With a branch on a sample's value, which no batch of clients can take together."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.fc(x if x.sum() > 0 else -x)


class Probe(nn.Module):
    """Features without a gradient, a head that is trained."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(256, 32), nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)).detach())


class Coded(nn.Module):
    """Records whose second column is a code behind an embedding."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.codes, self.out = nn.Embedding(2, 4), nn.Linear(10, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        rest = torch.cat([x[:, :1], x[:, 2:]], dim=1)
        return self.out(torch.cat([rest, self.codes(x[:, 1].long())], dim=1))


class Cosine(nn.Module):
    """A head that is no linear map."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_classes, 256))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x.flatten(1)) @ F.normalize(self.weight).T


def scripted(num_classes: int) -> nn.Module:
    part = torch.jit.script(nn.Sequential(nn.Linear(256, 16), nn.ReLU()))
    return nn.Sequential(nn.Flatten(), part, nn.Linear(16, num_classes))


def spectral(num_classes: int) -> nn.Module:
    return _headed(nn.utils.parametrizations.spectral_norm(nn.Linear(32, num_classes)))


def diverged(num_classes: int) -> nn.Module:
    made = _headed(nn.Linear(32, num_classes))
    with torch.no_grad():
        made[1].weight[0, 0] = torch.nan
    return made


def all_frozen(num_classes: int) -> nn.Module:
    return _headed(nn.Linear(32, num_classes)).requires_grad_(False)


def failing(num_classes: int) -> nn.Module:
    raise RuntimeError("no such weights")


def number(num_classes: int) -> int:
    return num_classes


shared = nn.Linear(1, 1)
"""Made already."""
