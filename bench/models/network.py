"""A network as pure functions of named parameters."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bench.contract.messages import State
from bench.contract.network import Layer, LayerKind
from bench.errors import UserError

Stages = OrderedDict[str, nn.Module]
Shape = tuple[int, ...]
"""Of one sample."""
_EPSILON = 1e-5


def chain(**layers: nn.Module) -> nn.Sequential:
    """Named layers, one after another."""
    return nn.Sequential(OrderedDict(layers))


def image_sides(model: str, shape: Shape, *, multiple: int = 1) -> tuple[int, int, int]:
    """(channels, height, width) of samples that a model can take.

    Raises:
        UserError: For samples that are no images, or whose sides are no multiples.
    """
    if len(shape) != 3 or shape[1] % multiple or shape[2] % multiple:
        sides = f" with sides divisible by {multiple}" if multiple > 1 else ""
        raise UserError(
            f"model {model} takes images [channels, height, width]{sides}, got samples of shape "
            f"{list(shape)}."
        )
    return shape[0], shape[1], shape[2]


def positive(model: str, **settings: int) -> None:
    """Raises UserError for a setting below 1."""
    for name, value in settings.items():
        if value < 1:
            raise UserError(f"{name} of model {model} must be >= 1, got {value}.")


class StaticBatchNorm(nn.Module):
    """Batch normalisation without running estimates (static BN of HeteroFL).

    In mode "train" it normalises by the batch's own statistics, in mode "eval" by `mean` and `var`,
    which `Network.calibrate` computes once from public data, so that no client statistics travel.
    It is written with plain tensor arithmetic, so that double backward and vmap work.
    Source: Diao, Ding, Tarokh, arXiv:2010.01264, Sec. 3; used by PM-SFL and SelectiveShield.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("mean", torch.empty(channels))
        self.register_buffer("var", torch.empty(channels))
        self.mean: Tensor
        self.var: Tensor
        self.mode = "train"
        self.recorded: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "eval":
            mean, var = self.mean, self.var
        else:
            mean = x.mean(dim=(0, 2, 3))
            var = (x - mean[:, None, None]).square().mean(dim=(0, 2, 3))
            if self.mode == "calibrate":
                self.recorded = (mean.detach(), var.detach())
        scale = self.weight * torch.rsqrt(var + _EPSILON)
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]

    def normalised(self, x: Tensor) -> Tensor:
        """(x - mean) / sqrt(var + eps) of eval mode, which `weight` multiplies."""
        return (x - self.mean[:, None, None]) * torch.rsqrt(self.var + _EPSILON)[:, None, None]


_KINDS: Mapping[type[nn.Module], LayerKind] = {
    nn.Linear: "linear",
    nn.Conv2d: "conv",
    StaticBatchNorm: "affine",
}
Draw = Callable[[nn.Module, str, torch.Generator], Tensor]
"""Makes the initial value of a module's own parameter of that name."""
Initial = Mapping[type[nn.Module], Draw]
"""How kinds of modules begin; the nearest class in a module's ancestry counts."""


def uniform(bound: float | None = None) -> Draw:
    """Draw from U(-bound, bound), by default PyTorch's 1/sqrt(fan_in) with the weight's fan_in."""

    def draw(module: nn.Module, name: str, rng: torch.Generator) -> Tensor:
        limit = bound or 1 / math.sqrt(module.get_parameter("weight")[0].numel())
        value = torch.empty(module.get_parameter(name).shape)
        return value.uniform_(-limit, limit, generator=rng)

    return draw


def _identity(module: nn.Module, name: str, rng: torch.Generator) -> Tensor:
    return torch.full(module.get_parameter(name).shape, 1.0 if name == "weight" else 0.0)


_INITIAL: Initial = {nn.Module: uniform(), StaticBatchNorm: _identity, nn.LayerNorm: _identity}


class Network:
    """Named stages, pure in their parameters.

    The modules live on the meta device and hold no numbers: parameters are always passed in.

    Args:
        initial: How kinds of modules begin where that is not PyTorch's default,
            U(-1/sqrt(fan_in), 1/sqrt(fan_in)), or, of a normalisation, weight 1 and bias 0.

    Attributes:
        cuts: Stages after which a split protocol may cut.
        head: Names of the last layer's weight [C, F] and bias [C].
    """

    def __init__(
        self,
        *,
        name: str,
        settings: Mapping[str, Any],
        shape: Shape,
        classes: int,
        build: Callable[[], Stages],
        initial: Initial | None = None,
    ) -> None:
        self.name, self.settings, self.shape, self.classes = name, dict(settings), shape, classes
        self._initial: Initial = {**_INITIAL, **(initial or {})}
        with torch.device("meta"):
            self._stages = nn.Sequential(build())
            width = self._stages[:-1](torch.empty(2, *shape)).shape[-1]
            self._stages[-1] = nn.Linear(width, classes)
        self._names = [n for n, _ in self._stages.named_children()]
        self.cuts = tuple(self._names[:-1])
        self.head = (f"{self._names[-1]}.weight", f"{self._names[-1]}.bias")
        self._own = frozenset(n for n, _ in self._stages.named_parameters())
        self._norms = {
            n: m for n, m in self._stages.named_modules() if isinstance(m, StaticBatchNorm)
        }

    @property
    def normalises(self) -> bool:
        """Whether it has batch normalisation, so that train and eval mode differ."""
        return bool(self._norms)

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of all stages in order; the last is the head."""
        return tuple(self._names)

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self._stages.parameters())

    def describe(self) -> dict[str, Any]:
        """What is needed to build it again, and the names of the head's tensors."""
        return {
            "name": self.name,
            "settings": self.settings,
            "shape": list(self.shape),
            "classes": self.classes,
            "head": list(self.head),
        }

    def init(self, rng: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters, drawn in the order of `named_parameters`."""
        params: dict[str, Tensor] = {}
        for prefix, module in self._stages.named_modules():
            draw = next(self._initial[t] for t in type(module).__mro__ if t in self._initial)
            for name, _ in module.named_parameters(recurse=False):
                params[f"{prefix}.{name}"] = draw(module, name, rng)
        return params

    def apply(
        self, params: State, x: Tensor, *, mode: str = "eval", buffers: State | None = None
    ) -> Tensor:
        """Logits [B, C] of samples x [B, *shape]. See `run` for mode and buffers."""
        return self.run(params, x, mode=mode, buffers=buffers)

    def features(
        self, params: State, x: Tensor, *, mode: str = "eval", buffers: State | None = None
    ) -> Tensor:
        """The head's input [B, F] of samples x [B, *shape]."""
        return self.run(params, x, last=self._names[-2], mode=mode, buffers=buffers)

    def run(
        self,
        params: State,
        x: Tensor,
        *,
        first: str | None = None,
        last: str | None = None,
        mode: str = "eval",
        buffers: State | None = None,
    ) -> Tensor:
        """Run the stages from `first` to `last`, both included.

        Args:
            params: Parameters by name; those that are not the network's are left alone.
            x: Input of the first stage [B, ...].
            first: Name of a stage, or None for the first.
            last: Name of a stage, or None for the last.
            mode: "train" normalises by the batch, "eval" by `buffers`; a network without batch
                normalisation ignores both.
            buffers: Statistics that `calibrate` gave.

        Raises:
            ValueError: For an unknown stage, or eval mode without buffers where they are needed.
        """
        for stage in (first, last):
            if stage is not None and stage not in self._names:
                raise ValueError(
                    f"model {self.name} has no stage '{stage}'; it has {', '.join(self._names)}."
                )
        if self._norms and mode == "eval" and buffers is None:
            raise ValueError(f"model {self.name} needs normalisation buffers in eval mode.")
        low = self._names.index(first) if first else 0
        high = self._names.index(last) + 1 if last else len(self._names)
        part = self._stages[low:high]
        prefixes = tuple(f"{n}." for n in self._names[low:high])
        tensors = {k: v for k, v in params.items() if k in self._own and k.startswith(prefixes)}
        for norm in self._norms.values():
            norm.mode = mode
        if self._norms and mode == "eval" and buffers is not None:
            tensors |= {k: v for k, v in buffers.items() if k.startswith(prefixes)}
        return functional_call(part, tensors, (x,))

    def trace(
        self, params: State, x: Tensor, *, mode: str = "eval", buffers: State | None = None
    ) -> tuple[Tensor, list[Layer]]:
        """Logits of samples, and every parametrised layer's input and output in order.

        From them follow per-sample weight gradients of a shared network without one copy of the
        weights per sample.

        Raises:
            ValueError: For train mode with batch normalisation, which ties a batch's samples.
        """
        if self._norms and mode == "train":
            raise ValueError(f"model {self.name} cannot be traced in train mode.")
        layers: list[Layer] = []

        def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                given, kind = inputs[0], _KINDS.get(type(module), "other")
                if isinstance(module, StaticBatchNorm):
                    given = module.normalised(given)
                layers.append(
                    Layer(name=name, kind=kind, module=module, input=given, output=output)
                )

            return hook

        handles = [
            module.register_forward_hook(record(name))
            for name, module in self._stages.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        ]
        try:
            return self.run(params, x, mode=mode, buffers=buffers), layers
        finally:
            for handle in handles:
                handle.remove()

    def calibrate(self, params: State, x: Tensor) -> dict[str, Tensor]:
        """Normalisation buffers for eval mode: each layer's statistics over x [N, ...]."""
        if not self._norms:
            return {}
        with torch.no_grad():
            self.run(params, x, mode="calibrate")
        buffers = {}
        for name, norm in self._norms.items():
            assert norm.recorded is not None
            buffers[f"{name}.mean"], buffers[f"{name}.var"] = norm.recorded
            norm.recorded = None
        return buffers
