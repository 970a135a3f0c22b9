"""The public network as defenses and attacks may use it."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from bench.contract.messages import State

LayerKind = Literal["linear", "conv", "affine", "other"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One parametrised layer of a forward pass of B samples.

    Attributes:
        name: The prefix of its parameters, `{name}.weight` and, with a bias, `{name}.bias`.
        kind: "linear" (output = input W' + b), "conv" (`module` has stride, padding and so on),
            "affine" (output = input * weight + bias per channel, of a normalised input) or "other".
        module: The layer itself.
        input: What went in, [B, ...], part of the autograd graph.
        output: What came out, [B, ...], part of the autograd graph.
    """

    name: str
    kind: LayerKind
    module: torch.nn.Module
    input: Tensor
    output: Tensor


class NetworkView(Protocol):
    """The public network as an attack may use it. `bench.models.Network` has the methods' texts.

    Attributes:
        shape: Shape of one sample.
        classes: Number of classes.
        head: Names of the head's weight and bias.
        cuts: Stages after which a split protocol may cut.
    """

    shape: tuple[int, ...]
    classes: int
    head: tuple[str, str]
    cuts: tuple[str, ...]

    @property
    def normalises(self) -> bool: ...

    def apply(
        self, params: State, x: Tensor, *, mode: str = "eval", buffers: State | None = None
    ) -> Tensor: ...

    def features(
        self, params: State, x: Tensor, *, mode: str = "eval", buffers: State | None = None
    ) -> Tensor: ...

    def run(
        self,
        params: State,
        x: Tensor,
        *,
        first: str | None = None,
        last: str | None = None,
        mode: str = "eval",
        buffers: State | None = None,
    ) -> Tensor: ...

    def trace(
        self, params: State, x: Tensor, *, mode: str = "eval", buffers: State | None = None
    ) -> tuple[Tensor, list[Layer]]: ...
