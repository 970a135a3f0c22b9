"""The gradients that P candidate clients would compute, as one differentiable batch.

`Layered` is the fast way: the clients share the broadcast weights, so one forward and one
backward pass over all samples give each layer's input and output gradient, and a weight gradient
is their product per client. `Simulated` is the general way: the defense's own local steps, one
vmapped program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from bench.api import Defense, Layer, NetworkView, State
from bench.toolkit.batches import soft_cross_entropy


@dataclass(frozen=True, kw_only=True)
class Work:
    """One observed local training: weights it starts from, steps of `batch` samples, learning
    rate, normalisation mode and statistics, and the constants of the defense's variables."""

    start: State
    const: State
    buffers: State
    steps: int
    batch: int
    lr: float
    mode: str


class Simulated:
    """Mean gradient over the local steps, each on its own slice of the candidate samples."""

    def __init__(self, network: NetworkView, defense: Defense, work: Work) -> None:
        self.network, self.defense, self.work = network, defense, work

    def __call__(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x [P, K, *shape], soft labels y [P, K, C] -> [P, ...] by name."""
        return vmap(self._one)(x, y)

    def _one(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        work = self.work

        def loss(variables: State, x: Tensor, y: Tensor) -> Tensor:
            weights = self.defense.mean_realize(variables, work.const)
            logits = self.network.apply(weights, x, mode=work.mode, buffers=work.buffers)
            return soft_cross_entropy(logits, y)

        variables: State = work.start
        total: dict[str, Tensor] | None = None
        for step in range(work.steps):
            part = slice(step * work.batch, (step + 1) * work.batch)
            grads = self.defense.gradient(loss, variables, x[part], y[part], {})
            total = dict(grads) if total is None else {n: total[n] + g for n, g in grads.items()}
            if step + 1 < work.steps:
                variables = {n: v - work.lr * grads[n] for n, v in variables.items()}
        assert total is not None
        return {n: g / work.steps for n, g in total.items()}


class Layered:
    """One local step of the shared weights; see `layered` for when it may be used."""

    def __init__(self, network: NetworkView, work: Work) -> None:
        self.network, self.work = network, work

    def __call__(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x [P, K, *shape], soft labels y [P, K, C] -> mean gradients [P, ...] by name."""
        found: dict[str, Tensor] = {}
        for layer, delta in self.deltas(x, y):
            for name, value in parameter_gradients(layer, delta, len(x)).items():
                found[name] = found[name] + value if name in found else value
        return found

    def deltas(self, x: Tensor, y: Tensor) -> list[tuple[Layer, Tensor]]:
        """Every layer with the gradient of each client's mean loss by the layer's output."""
        work = self.work
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            logits, layers = self.network.trace(
                work.start, x.flatten(0, 1), mode=work.mode, buffers=work.buffers
            )
            loss = soft_cross_entropy(logits, y.flatten(0, 1)) * len(x)  # mean over K, sum over P
            outputs = [layer.output for layer in layers]
            deltas = torch.autograd.grad(loss, outputs, create_graph=True)
        return list(zip(layers, deltas, strict=True))


def layered(network: NetworkView, defense: Defense, work: Work) -> Layered | None:
    """The fast way, or None where it does not hold: several local steps, a defense with its own
    variables or gradient, samples tied by batch normalisation, or an unknown kind of layer."""
    own = {"variables", "gradient"} & defense.owns
    if work.steps > 1 or own or (work.mode == "train" and network.normalises):
        return None
    sample = next(iter(work.start.values())).new_zeros(1, *network.shape)
    with torch.no_grad():
        _, layers = network.trace(work.start, sample, mode=work.mode, buffers=work.buffers)
    covered = {name for layer in layers if _supported(layer) for name in _names(layer)}
    return Layered(network, work) if covered == set(work.start) else None


def _names(layer: Layer) -> list[str]:
    return [f"{layer.name}.{n}" for n, _ in layer.module.named_parameters(recurse=False)]


def _supported(layer: Layer) -> bool:
    module = layer.module
    if isinstance(module, nn.Conv2d):
        plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
        return plain and isinstance(module.padding, tuple)
    return layer.kind in ("linear", "affine")


def parameter_gradients(
    layer: Layer, delta: Tensor, problems: int, *, weight: bool = True
) -> dict[str, Tensor]:
    """Gradients [P, ...] by the layer's parameters, `weight`: or by its bias alone.
    delta [P * K, ...], grouped by problem."""
    found: dict[str, Tensor] = {}
    if weight:
        found[f"{layer.name}.weight"] = _weight_gradient(layer, delta, problems)
    bias = f"{layer.name}.bias"
    if bias in _names(layer):
        d = delta.unflatten(0, (problems, -1))
        channel = d.ndim - 1 if layer.kind == "linear" else 2
        found[bias] = d.sum(dim=[i for i in range(1, d.ndim) if i != channel])
    return found


def _weight_gradient(layer: Layer, delta: Tensor, problems: int) -> Tensor:
    if isinstance(layer.module, nn.Conv2d):
        flat = ConvWeightGradient.apply(delta, layer.input, problems, Geometry.of(layer.module))
        return flat.reshape(problems, *layer.module.weight.shape)
    if layer.kind == "affine":
        d, a = (t.unflatten(0, (problems, -1)) for t in (delta, layer.input))
        return (d * a).sum(dim=(1, 3, 4))
    a = layer.input.reshape(problems, -1, layer.input.shape[-1])
    return delta.reshape(problems, -1, delta.shape[-1]).mT @ a


@dataclass(frozen=True)
class Geometry:
    """Kernel, stride and padding of a convolution, (height, width) each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @staticmethod
    def of(module: nn.Conv2d) -> Geometry:
        padding = module.padding
        assert isinstance(padding, tuple)
        return Geometry(
            (module.kernel_size[0], module.kernel_size[1]),
            (module.stride[0], module.stride[1]),
            (padding[0], padding[1]),
        )

    def patches(self, a: Tensor, problems: int) -> Tensor:
        """Inputs under the kernel: [P * K, I, H, W] -> [P, I * kh * kw, K * L], one copy."""
        (kh, kw), (sh, sw), (ph, pw) = self.kernel, self.stride, self.padding
        padded = nn.functional.pad(a, (pw, pw, ph, ph))
        view = padded.unfold(2, kh, sh).unfold(3, kw, sw).unflatten(0, (problems, -1))
        moved = view.permute(0, 2, 5, 6, 1, 3, 4)  # P, I, kh, kw, K, h, w
        return moved.reshape(problems, a.shape[1] * kh * kw, -1)

    def spread(self, weight: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        """Transpose of `patches`, of weight' delta: weight [P, O, I * kh * kw], delta
        [P * K, O, h, w] -> the shape of `like` [P * K, I, H, W], by one grouped convolution."""
        problems, out = weight.shape[:2]
        (kh, kw), (sh, sw), (ph, pw) = self.kernel, self.stride, self.padding
        stacked = delta.unflatten(0, (problems, -1)).transpose(0, 1).flatten(1, 2)
        rest = ((like.shape[2] + 2 * ph - kh) % sh, (like.shape[3] + 2 * pw - kw) % sw)
        spread = nn.functional.conv_transpose2d(
            stacked, weight.reshape(problems * out, -1, kh, kw), stride=self.stride,
            padding=self.padding, output_padding=rest, groups=problems,
        )  # fmt: skip
        return spread.unflatten(1, (problems, -1)).transpose(0, 1).flatten(0, 1)


def by_output(delta: Tensor, problems: int) -> Tensor:
    """[P * K, O, h, w] -> [P, O, K * L], in the order of `Geometry.patches`."""
    return delta.unflatten(0, (problems, -1)).transpose(1, 2).flatten(2)


def _from_output(flat: Tensor, like: Tensor) -> Tensor:
    """Inverse of `by_output`."""
    problems, out = flat.shape[:2]
    shape = (problems, out, len(like) // problems, *like.shape[2:])
    return flat.reshape(shape).transpose(1, 2).flatten(0, 1)


class ConvWeightGradient(torch.autograd.Function):
    """Weight gradient of each problem, [P, O, I * kh * kw], as a product of matrices: vmapping
    the library's becomes a grouped convolution, several times slower on wide layers.

    Differentiable once by delta [P * K, O, h, w] and by the layer's input [P * K, I, H, W].
    """

    @staticmethod
    def forward(ctx: Any, delta: Tensor, a: Tensor, problems: int, geometry: Geometry) -> Tensor:
        patches = geometry.patches(a, problems)
        ctx.save_for_backward(delta, a, patches)
        ctx.geometry = geometry
        return by_output(delta, problems) @ patches.mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        delta, a, patches = ctx.saved_tensors
        by_delta = by_input = None
        if ctx.needs_input_grad[0]:
            by_delta = _from_output(weight @ patches, delta)
        if ctx.needs_input_grad[1]:
            by_input = ctx.geometry.spread(weight, delta, a)
        return by_delta, by_input, None, None


def as_vector(gradients: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """[P, ...] by name -> [P, D] in the order of `names`."""
    return torch.cat([gradients[n].flatten(1) for n in names], dim=1)
