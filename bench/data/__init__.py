"""Datasets by name, split into clients' training data, test data and public auxiliary data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.arguments import checked_arguments
from bench.data import builtin, files, standard, tabular
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.names import did_you_mean

Loader = Callable[..., Dataset]

LOADERS: Mapping[str, Loader] = {
    "digits": builtin.digits,
    "photos": builtin.photos,
    "lfw_subset": builtin.lfw_subset,
    "breast_cancer": tabular.breast_cancer,
    "adult": tabular.adult,
    **{name: partial(standard.standard, name) for name in standard.TORCHVISION},
}
PATH_LOADERS: Mapping[str, Loader] = {"folder": files.folder, "npz": files.npz}
NO_DOWNLOAD = ("digits", "photos", "lfw_subset", "breast_cancer")


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
        options: Settings of the loader, such as size=16.

    Raises:
        UserError: For an unknown name or setting, or a file that is missing, truncated or of
            another shape.
    """
    prefix, _, path = name.partition(":")
    supplied: dict[str, Any] = {}
    if path:
        if prefix not in PATH_LOADERS:
            raise UserError(
                f"Unknown dataset prefix '{prefix}:'; expected folder:PATH or npz:PATH."
            )
        loader, supplied["path"] = PATH_LOADERS[prefix], Path(path)
    else:
        if name not in LOADERS:
            raise UserError(did_you_mean("dataset", name, [*LOADERS, "folder:PATH", "npz:PATH"]))
        loader = LOADERS[name]
        if name not in NO_DOWNLOAD:
            supplied |= {"data_dir": data_dir, "download": download}
    supplied["seed"] = seed
    own = checked_arguments(loader, options or {}, what=f"dataset {name}", supplied=tuple(supplied))
    return loader(**supplied, **own)


__all__ = ["LOADERS", "NO_DOWNLOAD", "PATH_LOADERS", "Dataset", "load_dataset"]
