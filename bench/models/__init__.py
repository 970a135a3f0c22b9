# ruff: noqa: F401 -- some of what is imported here the package hands on
"""Networks by name: leakbench's own, which are chains of named stages, and any torch module."""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from torch import nn

from bench.arguments import check_arguments
from bench.errors import UserError
from bench.extensions import list_installed
from bench.models import convolutional, dense, named, sensors, transformers
from bench.models.module import CONSTANT, ModuleNetwork, Scale
from bench.models.named import bare_parameters, hand, unwrap
from bench.models.network import IDENTITY, ChainNetwork, Initial, Network, Stages, uniform
from bench.names import MODELS, did_you_mean

BUILDERS: Mapping[str, Callable[..., Stages]] = {
    builder.__name__: builder
    for builder in (
        *(dense.logistic, dense.mlp3, dense.mlp_spm, convolutional.lenet),
        *(convolutional.cnn_selective_shield, convolutional.cnn_spm, convolutional.resnet18),
        *(convolutional.vgg16, transformers.vit_small, transformers.vit_tiny),
        *(transformers.pit_tiny, sensors.har_transformer),
    )
}
INITIAL: Mapping[str, Initial] = {
    "vit_small": transformers.SMALL_INITIAL,
    "vit_tiny": transformers.VIT_INITIAL,
    "pit_tiny": transformers.PIT_INITIAL,
    "har_transformer": transformers.SMALL_INITIAL,
}
"""How the networks begin that do not begin with PyTorch's default."""
OWN: Mapping[str, str] = {
    "FILE.py:Net": "a class or function in a file of yours that makes a torch.nn.Module",
    "torchvision:NAME": "an untrained model of torchvision, such as torchvision:resnet18",
    "timm:NAME": "an untrained model of timm, such as timm:vit_tiny_patch16_224",
}
"""Models that are not leakbench's own, by how they are named."""


def build(
    name: str, *, shape: tuple[int, ...], classes: int, settings: Mapping[str, Any] | None = None
) -> Network:
    """Build a network.

    Args:
        name: One of `BUILDERS`, an entry point, FILE.py:Net, torchvision:NAME or timm:NAME.
        settings: The builder's settings, and `init`: absent for the network's own default
            (PyTorch's U(-1/sqrt(fan_in), 1/sqrt(fan_in)), but see `INITIAL`), or a for U(-a, a).
            A model that is not leakbench's own also takes `without_dropout`, and `mean` and `std`
            of each channel, by which samples in [0, 1] are standardised before it.

    Raises:
        UserError: For an unknown name or setting, a shape that the network cannot take, or a
            module that cannot be used (see `ModuleNetwork`).
    """
    given = dict(settings or {})
    init = given.pop("init", None)
    number = isinstance(init, int | float) and not isinstance(init, bool)
    if init is not None and not (number and init > 0):
        raise UserError(f"init of model {name} must be a number > 0 or absent, got {init!r}.")
    common: dict[str, Any] = {"name": name, "settings": dict(settings or {})}
    common |= {"shape": tuple(shape), "classes": classes}
    if name not in BUILDERS:
        if not named.is_named(name):
            raise UserError(did_you_mean("model", name, [*BUILDERS, *list_installed(MODELS), *OWN]))
        without = given.pop("without_dropout", False)
        if not isinstance(without, bool):
            raise UserError(
                f"without_dropout of model {name} must be true or false, got {without!r}."
            )
        scale = _scale(name, given.pop("mean", None), given.pop("std", None), shape[0])
        return ModuleNetwork(
            **common,
            scale=scale,
            make=named.maker_of(name, tuple(shape), classes, given),
            initial=None if init is None else {**IDENTITY, nn.Module: uniform(init)},
            without_dropout=without,
        )
    builder = BUILDERS[name]
    given = check_arguments(
        builder, given, what=f"model {name}", supplied=("shape", "classes"), besides=("init",)
    )
    return ChainNetwork(
        **common,
        build=lambda: builder(shape=tuple(shape), classes=classes, **given),
        initial=INITIAL.get(name) if init is None else {nn.Module: uniform(init)},
    )


def _scale(name: str, mean: Any, std: Any, channels: int) -> Scale | None:
    """Return mean and std for each channel; one number applies to all channels."""
    if mean is None and std is None:
        return None
    pair = []
    for what, value, least in (("mean", mean, -inf), ("std", std, 0.0)):
        each = value if isinstance(value, list | tuple) else [value] * channels
        numbers = all(isinstance(v, int | float) and least < v < inf for v in each)
        if len(each) != channels or not numbers:
            raise UserError(
                f"mean and std of model {name} must be given together, each a number (std > 0) "
                f"or one for each of {channels} channels; got {what}={value!r}."
            )
        pair.append(tuple(float(v) for v in each))
    return pair[0], pair[1]
