"""Inner products of candidate gradients with observed ones, without forming wide gradients.

A layer's weight gradient for one client is D U' with D [O, R] the output gradients and U [I, R]
the inputs at R = samples x positions places. Where R is small against O and I, |D U'|^2 is the
sum of (D'D) * (U'U), and the inner product with an observed gradient of the same low rank, A B',
is the sum of (A'D) * (B'U): far fewer numbers than O x I. That makes the late layers of a
ResNet and wide hidden layers cheap.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attacks.engine.convolutions import Geometry, Patches, by_output
from attacks.engine.gradients import Layered, Traced, parameter_gradients

_WORTH = 0.5
"""Largest R (O + I) / (O I) at which products of factors are used."""
_EXACT = 1e-4
"""Largest relative error of an observed gradient's factors, a hundredth of what a cosine near
1 can tell apart in float32 (errors enter squared)."""


_Factors = tuple[Tensor, Tensor]
"""Observed weight gradients [V, O, I] as left right': [V, O, R] and [V, I, R]."""


class Products:
    """Inner products with V victims' gradients, [V, ...] by name, all coordinates visible.

    samples: behind one gradient. Gradients that are not of low rank (noise was added) are
    multiplied out.
    """

    def __init__(self, model: Layered, observed: Mapping[str, Tensor], *, samples: int) -> None:
        self.model, self.observed = model, observed
        self.factors: dict[str, _Factors] = {}
        some = next(iter(observed.values()))
        sample = some.new_zeros(1, 1, *model.network.shape)
        classes = some.new_full((1, 1, model.network.classes), 1 / model.network.classes)
        layers = [traced.layer for traced in model.deltas(sample, classes)]
        names = [layer.name for layer in layers]
        for layer in layers:
            if layer.kind not in ("linear", "conv") or names.count(layer.name) > 1:
                continue
            gradient = observed[f"{layer.name}.weight"].flatten(2)
            out, inputs = gradient.shape[1:]
            rank = samples * (layer.output.numel() // out)
            if rank * (out + inputs) <= _WORTH * out * inputs:
                factors = _factorised(gradient, rank)
                if factors is not None:
                    self.factors[layer.name] = factors

    def __call__(self, x: Tensor, y: Tensor, victims: Tensor) -> tuple[Tensor, Tensor]:
        """Of candidates x [P, K, *shape], soft labels y [P, K, C] and the victims int [P] whose
        gradients they are compared with: inner product [P] and squared length [P]."""
        inner = square = x.new_zeros(len(x))
        whole: dict[str, Tensor] = {}
        for traced in self.model.deltas(x, y):
            factors = self.factors.get(traced.layer.name)
            found = parameter_gradients(traced, len(x), weight=factors is None)
            for name, value in found.items():
                whole[name] = whole[name] + value if name in whole else value
            if factors is not None:
                d, u = _matrices(traced, len(x))
                square = square + ((d.mT @ d) * (u.mT @ u)).sum(dim=(1, 2))
                left, right = (factor[victims] for factor in factors)
                inner = inner + ((left.mT @ d) * (right.mT @ u)).sum(dim=(1, 2))
        for name, value in whole.items():
            flat, seen = value.flatten(1), self.observed[name].flatten(1)[victims]
            square, inner = square + flat.square().sum(dim=1), inner + (flat * seen).sum(dim=1)
        return inner, square


def _factorised(gradient: Tensor, rank: int) -> _Factors | None:
    """Factors of gradients [V, O, I] of at most `rank`, or None if their rank is higher.

    Range finder of Halko, Martinsson, Tropp 2011, Alg. 4.1, with fixed directions: the outcome
    is checked, so they need not be random.
    """
    rng = torch.Generator().manual_seed(0)
    directions = torch.randn(gradient.shape[2], rank + 8, generator=rng).to(gradient)
    left = torch.linalg.qr(gradient @ directions).Q
    right = gradient.mT @ left
    rest = (gradient - left @ right.mT).flatten(1).norm(dim=1)
    exact = rest <= _EXACT * gradient.flatten(1).norm(dim=1)
    return (left, right) if bool(exact.all()) else None


def _matrices(traced: Traced, problems: int) -> tuple[Tensor, Tensor]:
    """D [P, O, R] and U [P, I, R] of a layer."""
    layer, delta = traced.layer, traced.delta
    if isinstance(layer.module, nn.Conv2d):
        u = traced.patches
        if u is None:
            u = Patches.apply(layer.input, problems, Geometry.of(layer.module))
        return by_output(delta, problems), u
    d = delta.reshape(problems, -1, delta.shape[-1])
    return d.mT, layer.input.reshape(problems, -1, layer.input.shape[-1]).mT
