"""Convolutions that a batch of candidate clients share, and their weight gradients per client.

Gradient matching differentiates a backward pass. The library's own derivative of a
convolution's backward pass also computes one by the shared weights, which nobody asks for, and
its transposed convolutions are slow for images of few channels; the functions here do neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d, conv_transpose2d
from torch.overrides import TorchFunctionMode

_NARROW = 4
"""Input channels per cell of the stride, below which oneDNN's transposed convolution loses to a
product and a fold on a CPU."""


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

    def fold(self, patches: Tensor, size: torch.Size) -> Tensor:
        """Transpose of `patches`: [P, I * kh * kw, K * L] -> `size`, [P * K, I, H, W]. First the
        kernel's rows are added up, then its columns: a third of the library's time."""
        (kh, kw), (sh, sw), (ph, pw) = self.kernel, self.stride, self.padding
        problems, (count, channels, height, width) = len(patches), size
        h, w = (height + 2 * ph - kh) // sh + 1, (width + 2 * pw - kw) // sw + 1
        each = count // problems
        taps = patches.view(problems, channels, kh, kw, each, h, w)
        rows = taps.new_zeros(problems, channels, kw, each, height + 2 * ph, w)
        for i in range(kh):
            rows[..., i : i + sh * (h - 1) + 1 : sh, :] += taps[:, :, i]
        rows = rows[..., ph : ph + height, :]
        out = taps.new_zeros(problems, channels, each, height, width + 2 * pw)
        for j in range(kw):
            out[..., j : j + sw * (w - 1) + 1 : sw] += rows[:, :, j]
        return out[..., pw : pw + width].transpose(1, 2).flatten(0, 1)

    def transposed(self, delta: Tensor, weight: Tensor, size: torch.Size, groups: int) -> Tensor:
        """Transpose of a convolution, of delta [B, O, h, w], to the height and width of `size`."""
        (kh, kw), (sh, sw), (ph, pw) = self.kernel, self.stride, self.padding
        rest = ((size[2] + 2 * ph - kh) % sh, (size[3] + 2 * pw - kw) % sw)
        return conv_transpose2d(
            delta,
            weight,
            stride=self.stride,
            padding=self.padding,
            output_padding=rest,
            groups=groups,
        )

    def spread(self, weight: Tensor, delta: Tensor, size: torch.Size) -> Tensor:
        """Transpose of `patches`, of weight' delta: weight [P, O, I * kh * kw], delta
        [P * K, O, h, w] -> `size`, [P * K, I, H, W], by one grouped convolution."""
        problems, out = weight.shape[:2]
        stacked = delta.unflatten(0, (problems, -1)).transpose(0, 1).flatten(1, 2)
        kernels = weight.reshape(problems * out, -1, *self.kernel)
        found = self.transposed(stacked, kernels, size, problems)
        return found.unflatten(1, (problems, -1)).transpose(0, 1).flatten(0, 1)


def covers(module: nn.Conv2d) -> bool:
    """Whether these functions hold for it: no groups, no dilation, zero padding by numbers."""
    plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
    return plain and isinstance(module.padding, tuple)


def by_output(delta: Tensor, problems: int) -> Tensor:
    """[P * K, O, h, w] -> [P, O, K * L], in the order of `Geometry.patches`."""
    return delta.unflatten(0, (problems, -1)).transpose(1, 2).flatten(2)


def _from_output(flat: Tensor, like: Tensor) -> Tensor:
    """Inverse of `by_output`."""
    problems, out = flat.shape[:2]
    shape = (problems, out, len(like) // problems, *like.shape[2:])
    return flat.reshape(shape).transpose(1, 2).flatten(0, 1)


class SharedConvolutions(TorchFunctionMode):
    """Within it, every conv2d is one of a network that P clients share: its backward pass may be
    differentiated once more, by everything but the weights.

    The patches [P, I * kh * kw, K * L] that narrow ones read are kept, for their weight gradient.
    """

    def __init__(self, problems: int) -> None:
        super().__init__()
        self.problems = problems
        self._patches: list[tuple[Tensor, Tensor]] = []

    def patches(self, output: Tensor) -> Tensor | None:
        """What the convolution with this very output read, differentiable; None for wide ones."""
        return next((u for known, u in self._patches if known is output), None)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not conv2d:
            return func(*args, **(kwargs or {}))
        return self._convolution(*args, **(kwargs or {}))

    def _convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
        *_: Any,
    ) -> Tensor:
        geometry = Geometry((weight.shape[2], weight.shape[3]), stride, padding)
        narrow = x.shape[1] < _NARROW * stride[0] * stride[1] and x.device.type == "cpu"
        problems = self.problems if narrow else None
        output, patches = _Convolution.apply(x, weight, bias, geometry, problems)
        if patches is not None:
            self._patches.append((output, patches))
        return output


class _Convolution(torch.autograd.Function):
    """Convolution [B, O, h, w] and, where `problems` are given, the patches it reads: the slopes
    by both then go back through one fold."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        problems: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.size = geometry, x.shape
        output = conv2d(x, weight, bias, geometry.stride, geometry.padding)
        return output, None if problems is None else geometry.patches(x, problems)

    @staticmethod
    def backward(
        ctx: Any, slope: Tensor | None, by_patches: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        (weight,), geometry = ctx.saved_tensors, ctx.geometry
        found: Tensor | None = None
        if by_patches is None and slope is not None:
            found = _Transposed.apply(slope, weight, geometry, ctx.size)
        elif by_patches is not None:
            if slope is not None:
                problems = len(by_patches)
                kernels = weight.flatten(1).mT.expand(problems, -1, -1)
                by_patches = torch.baddbmm(by_patches, kernels, by_output(slope, problems))
            found = geometry.fold(by_patches, ctx.size)
        return found, None, None, None, None


class _Transposed(torch.autograd.Function):
    """Gradient by a convolution's input, differentiable once by that of its output."""

    @staticmethod
    def forward(
        ctx: Any, delta: Tensor, weight: Tensor, geometry: Geometry, size: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry = geometry
        return geometry.transposed(delta, weight, size, groups=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,), geometry = ctx.saved_tensors, ctx.geometry
        found = conv2d(slope, weight, stride=geometry.stride, padding=geometry.padding)
        return found, None, None, None


class WeightGradient(torch.autograd.Function):
    """Weight gradient of each problem, [P, O, I * kh * kw], as a product of matrices: vmapping
    the library's becomes a grouped convolution, several times slower on wide layers.

    Differentiable once by delta [P * K, O, h, w] and by the layer's input [P * K, I, H, W].
    """

    @staticmethod
    def forward(ctx: Any, delta: Tensor, a: Tensor, problems: int, geometry: Geometry) -> Tensor:
        patches = geometry.patches(a, problems)
        ctx.save_for_backward(delta, patches)
        ctx.geometry, ctx.size = geometry, a.shape
        return by_output(delta, problems) @ patches.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        delta, patches = ctx.saved_tensors
        by_delta = by_input = None
        if ctx.needs_input_grad[0]:
            by_delta = _from_output(weight @ patches, delta)
        if ctx.needs_input_grad[1]:
            by_input = ctx.geometry.spread(weight, delta, ctx.size)
        return by_delta, by_input, None, None


class PatchProduct(torch.autograd.Function):
    """D U' of D [P, O, R] and U [P, I, R]; the library's derivative by U would be transposed."""

    @staticmethod
    def forward(ctx: Any, d: Tensor, u: Tensor) -> Tensor:
        ctx.save_for_backward(d, u)
        return d @ u.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        d, u = ctx.saved_tensors
        return slope @ u, slope.mT @ d
