"""Networks by name. Each is a chain of named stages; a split protocol may cut after any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from bench.arguments import checked_arguments
from bench.errors import UserError
from bench.models import convolutional, dense, transformers
from bench.models.network import Initial, Network, Stages, uniform
from bench.names import did_you_mean

BUILDERS: Mapping[str, Callable[..., Stages]] = {
    builder.__name__: builder
    for builder in (
        *(dense.logistic, dense.mlp3, dense.mlp_spm, convolutional.lenet),
        *(convolutional.cnn_selective_shield, convolutional.cnn_spm, convolutional.resnet18),
        *(convolutional.vgg16, transformers.vit_small, transformers.vit_tiny),
        transformers.pit_tiny,
    )
}
INITIAL: Mapping[str, Initial] = {
    "vit_small": transformers.SMALL_INITIAL,
    "vit_tiny": transformers.VIT_INITIAL,
    "pit_tiny": transformers.PIT_INITIAL,
}
"""How the networks begin that do not begin with PyTorch's default."""


def build(
    name: str, *, shape: tuple[int, ...], classes: int, settings: Mapping[str, Any] | None = None
) -> Network:
    """Build a network.

    Args:
        settings: The builder's settings, and `init`: absent for the network's own default
            (PyTorch's U(-1/sqrt(fan_in), 1/sqrt(fan_in)), but see `INITIAL`), or a for U(-a, a).

    Raises:
        UserError: For an unknown name or setting, or a shape that the network cannot take.
    """
    if name not in BUILDERS:
        raise UserError(did_you_mean("model", name, list(BUILDERS)))
    given = dict(settings or {})
    init = given.pop("init", None)
    builder = BUILDERS[name]
    given = checked_arguments(
        builder, given, what=f"model {name}", supplied=("shape", "classes"), besides=("init",)
    )
    number = isinstance(init, int | float) and not isinstance(init, bool)
    if init is not None and not (number and init > 0):
        raise UserError(f"init of model {name} must be a number > 0 or absent, got {init!r}.")
    return Network(
        name=name,
        settings=dict(settings or {}),
        shape=tuple(shape),
        classes=classes,
        build=lambda: builder(shape=tuple(shape), classes=classes, **given),
        initial=INITIAL.get(name) if init is None else {nn.Module: uniform(init)},
    )


__all__ = ["BUILDERS", "Network", "build"]
