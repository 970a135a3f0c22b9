"""The public network as defenses and attacks may use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from bench.contract.messages import State


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One parametrised layer of a forward pass of B samples.

    name: prefix of its parameters, `{name}.weight` and, with a bias, `{name}.bias`. kind: linear
    (output = input W' + b), conv (`module` tells stride, padding and so on), affine (output =
    input * weight + bias per channel; `input` is the normalised one) or other. input, output:
    [B, ...], part of the autograd graph.
    """

    name: str
    kind: Literal["linear", "conv", "affine", "other"]
    module: torch.nn.Module
    input: Tensor
    output: Tensor


class NetworkView(Protocol):
    """The public network as an attack may use it. `cuts`: stages after which it may be cut."""

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
