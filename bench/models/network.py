"""A network as pure functions of named parameters."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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
    """Raise UserError for a setting below 1."""
    for name, value in settings.items():
        if value < 1:
            raise UserError(f"{name} of model {model} must be >= 1, got {value}.")


class StaticBatchNorm(nn.Module):
    """Batch normalisation of [B, C, ...] without running estimates (static BN of HeteroFL).

    In mode "train" it normalises by the batch's own statistics, in mode "eval" by `mean` and `var`,
    which `Network.calibrate` computes once from public data, so that no client statistics travel.
    It is written with plain tensor arithmetic, so that double backward and vmap work.
    Source: Diao, Ding, Tarokh, arXiv:2010.01264, Sec. 3; used by PM-SFL and SelectiveShield.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("mean", torch.empty(channels))
        self.register_buffer("var", torch.empty(channels))
        self.mean: Tensor
        self.var: Tensor
        self.mode = "train"

    def forward(self, x: Tensor) -> Tensor:
        places = (1,) * (x.ndim - 2)
        mean, var = (self.mean, self.var) if self.mode == "eval" else moments(x)
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return x * scale.unflatten(0, (-1, *places)) + shift.unflatten(0, (-1, *places))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of [B, C, ...] by channel."""
    over = [d for d in range(x.ndim) if d != 1]
    mean = x.mean(dim=over)
    centre = mean.unflatten(0, (-1, *(1,) * (x.ndim - 2)))
    return mean, (x - centre).square().mean(dim=over)


def normalise(norm: Any, x: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) of eval mode, which a batch normalisation's weight
    multiplies."""
    own = isinstance(norm, StaticBatchNorm)
    mean, var = (norm.mean, norm.var) if own else (norm.running_mean, norm.running_var)
    places = (-1, *(1,) * (x.ndim - 2))
    inverse = torch.rsqrt(var + norm.eps).unflatten(0, places)
    return (x - mean.unflatten(0, places)) * inverse


KINDS: Mapping[type[nn.Module], LayerKind] = {
    nn.Linear: "linear",
    nn.Conv2d: "conv",
    StaticBatchNorm: "affine",
    nn.BatchNorm1d: "affine",
    nn.BatchNorm2d: "affine",
    nn.BatchNorm3d: "affine",
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


IDENTITY: Initial = dict.fromkeys(
    (StaticBatchNorm, nn.modules.batchnorm._BatchNorm, nn.LayerNorm), _identity
)
"""Normalisations that begin by changing nothing."""
_INITIAL: Initial = {nn.Module: uniform(), **IDENTITY}


class Network:
    """Named stages, pure in their parameters.

    Modules live on the meta device and hold no numbers: parameters are always passed in. Each is
    named `STAGE.REST`, where the stage's own name has no dot. `ChainNetwork` runs stages that
    follow each other, `ModuleNetwork` any module.

    Args:
        stages: All stages in order; the last is the head, a linear layer with weight [C, F] and
            bias [C].
        parameters: Names of all parameters, and what they are called in `module`.
        norms: The same of batch normalisations whose statistics are those of the batch in training.

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
        module: nn.Module,
        stages: Sequence[str],
        parameters: Mapping[str, str],
        norms: Mapping[str, str],
    ) -> None:
        self.name, self.settings, self.shape, self.classes = name, dict(settings), shape, classes
        self.stages = tuple(stages)
        self.cuts = self.stages[:-1]
        self.head = (f"{self.stages[-1]}.weight", f"{self.stages[-1]}.bias")
        self._module, self._inner = module, dict(parameters)
        self._norms: dict[str, Any] = {n: module.get_submodule(inner) for n, inner in norms.items()}
        self._own = frozenset(parameters)

    @property
    def normalises(self) -> bool:
        """Whether it has batch normalisation, so that train and eval mode differ."""
        return bool(self._norms)

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self._module.parameters())

    def describe(self) -> dict[str, Any]:
        """Return what is needed to build it again, and the names of the head's tensors."""
        return {
            "name": self.name,
            "settings": self.settings,
            "shape": list(self.shape),
            "classes": self.classes,
            "head": list(self.head),
        }

    def check(self) -> None:
        """Raise UserError for a network that lacks the needed derivatives."""

    def init(self, rng: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters by name."""
        raise NotImplementedError

    def _segment(
        self, params: State, buffers: State, x: Tensor, low: int, high: int, mode: str
    ) -> Tensor:
        """Run the stages with numbers low to high - 1 on the input of the first of them, with those
        stages' parameters and all buffers by name."""
        raise NotImplementedError

    def _layers(self) -> Iterator[tuple[str, nn.Module, LayerKind]]:
        """Modules with parameters of their own, by the prefix of their names: all of a kind that
        is not "other"."""
        raise NotImplementedError

    def apply(
        self, params: State, x: Tensor, *, mode: str = "eval", buffers: State | None = None
    ) -> Tensor:
        """Logits [B, C] of samples x [B, *shape]. See `run` for mode and buffers."""
        return self.run(params, x, mode=mode, buffers=buffers)

    def features(
        self, params: State, x: Tensor, *, mode: str = "eval", buffers: State | None = None
    ) -> Tensor:
        """The head's input [B, F] of samples x [B, *shape]."""
        return self.run(params, x, last=self.stages[-2], mode=mode, buffers=buffers)

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
            if stage is not None and stage not in self.stages:
                raise ValueError(
                    f"model {self.name} has no stage '{stage}'; it has {', '.join(self.stages)}."
                )
        if self._norms and mode == "eval" and buffers is None:
            raise ValueError(f"model {self.name} needs normalisation buffers in eval mode.")
        low = self.stages.index(first) if first else 0
        high = self.stages.index(last) + 1 if last else len(self.stages)
        prefixes = tuple(f"{n}." for n in self.stages[low:high])
        own = {k: v for k, v in params.items() if k in self._own and k.startswith(prefixes)}
        return self._segment(own, buffers or {}, x, low, high, mode)

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

        def record(name: str, kind: LayerKind) -> Any:
            def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                given = normalise(module, inputs[0]) if kind == "affine" else inputs[0]
                layers.append(
                    Layer(name=name, kind=kind, module=module, input=given, output=output)
                )
                return self._next_input(output)

            return hook

        with ExitStack() as stack:
            for name, module, kind in self._layers():
                stack.enter_context(module.register_forward_hook(record(name, kind)))
            return self.run(params, x, mode=mode, buffers=buffers), layers

    def _next_input(self, output: Tensor) -> Tensor:
        """Return the input of the next layer where a layer's output is recorded."""
        return output

    def calibrate(self, params: State, x: Tensor) -> dict[str, Tensor]:
        """Buffers for eval mode: each normalisation's statistics over x [N, ...]."""
        if not self._norms:
            return {}
        calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self._norms}

        def record(name: str) -> Any:
            return lambda _, args: calls[name].append(moments(args[0]))

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for name, norm in self._norms.items():
                stack.enter_context(norm.register_forward_pre_hook(record(name)))
            self.run(params, x, mode="train")
        buffers: dict[str, Tensor] = {}
        for name, each in calls.items():
            mean, var = (torch.stack(values).mean(dim=0) for values in zip(*each, strict=True))
            buffers |= {f"{name}.mean": mean, f"{name}.var": var}
        return buffers


class ChainNetwork(Network):
    """A network of stages that follow each other, with a linear layer after them.

    Args:
        build: Makes the stages before the head, which is the linear layer.
        initial: How kinds of modules begin where that is not PyTorch's default,
            U(-1/sqrt(fan_in), 1/sqrt(fan_in)), or, of a normalisation, weight 1 and bias 0.
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
        self._initial: Initial = {**_INITIAL, **(initial or {})}
        with torch.device("meta"):
            stages = build()
            width = nn.Sequential(stages)(torch.empty(2, *shape)).shape[-1]
            chained = nn.Sequential(stages | OrderedDict(head=nn.Linear(width, classes)))
        self._chained = chained
        super().__init__(
            name=name,
            settings=settings,
            shape=shape,
            classes=classes,
            module=chained,
            stages=[n for n, _ in chained.named_children()],
            parameters={n: n for n, _ in chained.named_parameters()},
            norms={n: n for n, m in chained.named_modules() if isinstance(m, StaticBatchNorm)},
        )

    def init(self, rng: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters, drawn in the order of `named_parameters`."""
        return draw_parameters(self._chained, self._initial, rng)

    def _segment(
        self, params: State, buffers: State, x: Tensor, low: int, high: int, mode: str
    ) -> Tensor:
        stages = tuple(f"{n}." for n in self.stages[low:high])
        given = dict(params)
        for norm in self._norms.values():
            norm.mode = mode
        if mode == "eval":
            given |= {k: v for k, v in buffers.items() if k.startswith(stages)}
        return functional_call(self._chained[low:high], given, (x,))

    def _layers(self) -> Iterator[tuple[str, nn.Module, LayerKind]]:
        for name, module in self._chained.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                yield name, module, KINDS.get(type(module), "other")


def draw_parameters(module: nn.Module, initial: Initial, rng: torch.Generator) -> dict[str, Tensor]:
    """Draw the values of all of a module's parameters in their order."""
    params: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        draw = next(initial[t] for t in type(part).__mro__ if t in initial)
        for name, _ in part.named_parameters(recurse=False):
            params[f"{prefix}.{name}".lstrip(".")] = draw(part, name, rng)
    return params
