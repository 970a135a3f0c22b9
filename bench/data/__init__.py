"""Data sets by name, split into clients' training data, test data and public auxiliary data.

A package brings one of its own by an entry point of the group `leakbench.datasets`: a function with
the keyword argument `seed` and, if it reads files, `data_dir` and `download`, that returns a
`Dataset`. What it needs for that stands here: `Dataset`, `from_arrays`, `from_features`, `carve`,
`carve_clients`, `numbered` and `data_folder`.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from bench.arguments import check_arguments
from bench.data import builtin, files, leaf, standard
from bench.data.dataset import Dataset as Dataset
from bench.data.dataset import carve as carve
from bench.data.dataset import carve_clients as carve_clients
from bench.data.dataset import check_dataset, validation_part
from bench.data.dataset import data_folder as data_folder
from bench.data.dataset import from_arrays as from_arrays
from bench.data.dataset import from_features as from_features
from bench.data.dataset import numbered as numbered
from bench.errors import UserError
from bench.extensions import BrokenImport, list_installed, load_entry_point, origin_of
from bench.foreign import contain, in_one_line
from bench.names import DATASETS, did_you_mean

Loader = Callable[..., Dataset]

LOADERS: Mapping[str, Loader] = {
    "digits": builtin.digits,
    "photos": builtin.photos,
    "breast_cancer": standard.breast_cancer,
    "adult": standard.adult,
    "femnist": leaf.femnist,
    "uci_har": standard.uci_har,
    **{name: partial(standard.standard, name) for name in standard.TORCHVISION},
}
PATH_LOADERS: Mapping[str, Loader] = {"folder": files.folder, "npz": files.npz}


def foreign() -> dict[str, EntryPoint]:
    """Data sets of installed packages by name; one of leakbench's own goes before one of its
    name."""
    return list_installed(DATASETS)


def foreign_loader(point: EntryPoint) -> Loader:
    """Return the loader of an entry point.

    Raises:
        BrokenImport: If its name is taken, it cannot be imported, or is no such function.
    """
    if point.name in LOADERS:
        raise BrokenImport("the name is taken by a data set of leakbench itself.")
    loader: Loader = load_entry_point(
        point,
        lambda value: "seed" in inspect.signature(value, eval_str=True).parameters,
        "a function with a keyword argument seed",
    )
    return loader


def has_files(name: str) -> bool:
    """Return whether a data set of that name is read from the data folder: its loader has
    `data_dir`."""
    loader = LOADERS.get(name)
    if loader is None and name in (points := foreign()):
        loader = _loader_of(points[name])
    return loader is not None and "data_dir" in inspect.signature(loader).parameters


def load_dataset(
    name: str,
    *,
    seed: int,
    data_dir: Path | None = None,
    download: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Load a data set.

    Args:
        name: Name of the data set, `folder:PATH` or `npz:PATH`.
        seed: Decides every split that is not the publisher's.
        data_dir: Folder of what is not embedded.
        download: Whether what is missing may be fetched into it.
        options: Settings of the loader, such as size=16. validation=True works with every loader:
            a fifth of the clients' samples takes the place of the test samples.

    Raises:
        UserError: For an unknown name or setting, a file that is missing, truncated or of another
            shape, and for a foreign loader that fails or returns no sound `Dataset`.
    """
    prefix, _, path = name.partition(":")
    supplied: dict[str, Any] = {"seed": seed}
    point = None
    if path:
        if prefix not in PATH_LOADERS:
            raise UserError(
                f"Unknown dataset prefix '{prefix}:'; expected folder:PATH or npz:PATH."
            )
        loader, supplied["path"] = PATH_LOADERS[prefix], Path(path)
    elif name in LOADERS:
        loader = LOADERS[name]
    else:
        points = foreign()
        if name not in points:
            known = [*LOADERS, *points, "folder:PATH", "npz:PATH"]
            raise UserError(did_you_mean("dataset", name, known))
        point = points[name]
        loader = _loader_of(point)
    accepted = inspect.signature(loader).parameters
    offered = {"data_dir": data_dir, "download": download}
    supplied |= {key: value for key, value in offered.items() if key in accepted}
    settings = dict(options or {})
    validation = settings.pop("validation", False)
    if not isinstance(validation, bool):
        raise UserError(f"validation of dataset {name} must be true or false, got {validation!r}.")
    own = check_arguments(loader, settings, what=f"dataset {name}", supplied=tuple(supplied))
    what = f"dataset {name}" if point is None else _describe(point)
    try:
        with contain():
            loaded = loader(**supplied, **own)
    except UserError:
        raise
    except Exception as error:  # as at import
        if point is None:
            raise
        raise UserError(f"{what} cannot be loaded: {in_one_line(error)}") from error
    dataset = check_dataset(loaded, what=what)
    return validation_part(dataset, seed) if validation else dataset


def _loader_of(point: EntryPoint) -> Loader:
    try:
        return foreign_loader(point)
    except BrokenImport as error:
        raise UserError(f"{_describe(point)} is broken: {error}") from error


def _describe(point: EntryPoint) -> str:
    return f"dataset '{point.name}' ({origin_of(point)})"
