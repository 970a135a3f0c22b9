"""Modules by name that are not leakbench's own: a class in the user's file, models of torchvision
and timm, entry points of installed packages, and a module that the Python API was handed."""

import difflib
import hashlib
import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bench.arguments import check_arguments
from bench.errors import UserError
from bench.extensions import BrokenImport, list_installed, load_entry_point, load_file, origin_of
from bench.foreign import contain, in_one_line
from bench.models.network import Shape
from bench.names import MODELS, check_known, did_you_mean

Make = Callable[[], nn.Module]
LIBRARIES = ("torchvision", "timm")
_HANDED = "handed:"
_handed: dict[str, nn.Module] = {}
"""Modules that this process was handed, by name."""


def file_of(name: str) -> Path | None:
    """The file in a name such as FILE.py:Net, None where the name has none."""
    path, colon, _ = name.rpartition(":")
    return Path(path) if colon and path.endswith(".py") else None


def is_handed(name: str) -> bool:
    """Return whether it is a module that a process was handed."""
    return name.startswith(_HANDED)


def get_held(name: str) -> nn.Module | None:
    """The module of that name, None if this process was not handed it."""
    return _handed.get(name)


def module_of(name: str) -> str | None:
    """The Python module that decides what a model is, None for leakbench's own and libraries'.

    Raises:
        UserError: For a file that cannot be loaded.
    """
    if (path := file_of(name)) is not None:
        return _load(path).__name__
    point = list_installed(MODELS).get(name)
    return None if point is None else point.module


def is_named(name: str) -> bool:
    """Return whether this module knows the model, or who is to be asked for it."""
    library = name.partition(":")[0] in LIBRARIES
    return library or file_of(name) is not None or name in list_installed(MODELS) or is_handed(name)


def unwrap(module: nn.Module) -> nn.Module:
    """The module without the wrappers of data parallelism, torch.compile and Opacus around it."""
    while isinstance(inner := _inner(module), nn.Module):
        module = inner
    return module


def bare(module: nn.Module) -> nn.Module:
    """The same, without wrappers around its parts either, which are replaced in place."""
    module = unwrap(module)
    for name, part in list(module.named_modules()):
        part._compiled_call_impl = None
        if unwrap(part) is not part:
            module.set_submodule(name, bare(part))
    return module


def bare_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's parameters by the names that they have in `bare(module)`."""
    module = unwrap(module)
    parameters = dict(module.named_parameters(recurse=False))
    for name, part in module.named_children():
        parameters |= {f"{name}.{n}": p for n, p in bare_parameters(part).items()}
    return parameters


def _inner(module: nn.Module) -> Any:
    """Return what a wrapper holds, None for other modules."""
    wrappers = {"DataParallel": "module", "DistributedDataParallel": "module"}
    wrappers |= {"OptimizedModule": "_orig_mod", "GradSampleModule": "_module"}
    return getattr(module, wrappers.get(type(module).__name__, ""), None)


def hand(module: nn.Module) -> str:
    """Keep a copy of a module for this process, with the parameters that it has.

    Returns:
        A name for it, of its class and of a hash of its structure and numbers.
    """
    memo = {  # what a forward pass left on a module, as weight_norm does, cannot be copied
        id(v): v.detach().clone()
        for part in module.modules()
        for v in vars(part).values()
        if isinstance(v, torch.Tensor) and not v.is_leaf
    }
    wrapped = isinstance(_inner(module), nn.Module)
    module = bare(deepcopy(module, memo)).cpu()
    if wrapped:
        for part in module.modules():  # Opacus' watch ordinary backward passes
            for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
                hooks.clear()
    digest = hashlib.sha256(repr(module).encode())
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        if not is_lazy(tensor):
            digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    name = f"{_HANDED}{type(module).__name__}-{digest.hexdigest()[:12]}"
    _handed[name] = module
    return name


def maker_of(name: str, shape: Shape, classes: int, settings: Mapping[str, Any]) -> Make:
    """Return the maker of a named module for samples of a shape.

    A class or function gets the settings, and of these what its signature has and the settings
    lack: `shape` or `input_shape`; `classes`, `num_classes` or `n_classes`; `in_channels` or
    `in_chans`; `img_size` or `image_size`; `in_features` or `input_dim`.

    Raises:
        UserError: For a name that is none, a setting that it has not, or a class that raises.
    """
    what, given = f"model {name}", dict(settings)
    if is_handed(name):
        return _maker_of_handed(name, given)
    library, colon, inner = name.partition(":")
    if colon and library in LIBRARIES:
        make, given = _library_maker(library, inner, shape, classes, given)
    else:
        made_by = _file_maker(name) if file_of(name) is not None else _entry_point_maker(name)
        offered = _common_arguments(shape, classes)
        parameters = inspect.signature(made_by).parameters
        more = {n: v for n, v in offered.items() if n in parameters and n not in given}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            given = check_arguments(made_by, given, what=what, supplied=tuple(more))
        given |= more
        make = made_by

    def build() -> nn.Module:
        try:
            with contain():
                module = make(**given)
        except UserError:
            raise
        except Exception as error:  # whatever a foreign class raises for these settings
            text = ", ".join(f"{k}={v!r}" for k, v in given.items())
            raise UserError(f"{what} cannot be made with {text}: {in_one_line(error)}.") from error
        if not isinstance(module, nn.Module):
            raise UserError(f"{what} must give a torch.nn.Module, got {type(module).__name__}.")
        return bare(module).train()

    return build


def _common_arguments(shape: Shape, classes: int) -> dict[str, Any]:
    """Return arguments by the names that models commonly have for them."""
    arguments: dict[str, Any] = {"shape": shape, "input_shape": shape}
    arguments |= dict.fromkeys(("classes", "num_classes", "n_classes"), classes)
    arguments |= dict.fromkeys(("in_features", "input_dim"), prod(shape))
    if len(shape) == 3:
        side = shape[1] if shape[1] == shape[2] else shape[1:]
        arguments |= dict.fromkeys(("in_channels", "in_chans"), shape[0])
        arguments |= dict.fromkeys(("img_size", "image_size"), side)
    return arguments


def _maker_of_handed(name: str, settings: Mapping[str, Any]) -> Make:
    if name not in _handed:
        raise UserError(
            f"model {name} was handed to another process; give it to bench.run again, or write it "
            "into a file and name it FILE.py:Net."
        )
    if settings:
        raise UserError(
            f"model {name} is made already and takes no setting {next(iter(settings))}."
        )
    held = _handed[name]  # in training mode, it keeps the modes that its parts have
    return lambda: deepcopy(held) if held.training else deepcopy(held).train()


def _file_maker(name: str) -> Callable[..., Any]:
    path, _, inner = name.rpartition(":")
    if not inner.isidentifier():
        raise UserError(
            f"a model of a file is FILE.py:NAME, with the name of a class, got '{name}'."
        )
    module = _load(Path(path))
    maker = getattr(module, inner, None)
    if maker is None:
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(did_you_mean("class or function", inner, own, where=path))
    if not callable(maker) or isinstance(maker, nn.Module):
        raise UserError(
            f"{name} must be a class or function that makes a torch.nn.Module, got "
            f"{type(maker).__name__}."
        )
    return maker


def _load(path: Path) -> ModuleType:
    try:
        return load_file(path)
    except BrokenImport as error:
        raise UserError(f"{path} cannot be loaded: {error}") from error


def _entry_point_maker(name: str) -> Callable[..., Any]:
    point = list_installed(MODELS)[name]
    try:
        maker: Callable[..., Any] = load_entry_point(point, callable, "a class or function")
    except BrokenImport as error:
        raise UserError(f"model {name} ({origin_of(point)}) is broken: {error}") from error
    return maker


def _library_maker(
    library: str, name: str, shape: Shape, classes: int, settings: Mapping[str, Any]
) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """Return what makes an untrained model of a library, and its arguments."""
    given = {"num_classes": classes, **settings}
    if library == "torchvision":
        from torchvision import models

        known = models.list_models(module=models)
        check_known("model of torchvision", name, known)
        if len(shape) != 3 or shape[0] != 3:
            raise UserError(
                f"model torchvision:{name} takes images of 3 channels, got samples of shape "
                f"{list(shape)}; timm's models take any number."
            )
        if name.startswith("vit_"):
            given = {"image_size": shape[1], **given}
        return lambda **more: models.get_model(name, weights=None, **more), given
    import timm

    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=8, cutoff=0.0)
        raise UserError(f"Unknown model of timm '{name}'. Nearest: {', '.join(near)}.")
    if len(shape) != 3:
        raise UserError(f"model timm:{name} takes images, got samples of shape {list(shape)}.")
    given = {"in_chans": shape[0], **given}
    sized = {"img_size": tuple(shape[1:]), **given}

    def make(**more: Any) -> nn.Module:
        try:
            return timm.create_model(name, pretrained=False, **more)
        except TypeError as error:
            if "img_size" not in str(error) or "img_size" in settings:
                raise
            return timm.create_model(name, pretrained=False, **given)

    return make, sized
