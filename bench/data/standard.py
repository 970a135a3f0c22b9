"""Published image sets: npz files from the data folder, or torchvision's own files.

`DATA_DIR/NAME/NAME.npz` is taken if present; else torchvision reads (and only with
`download=True` fetches) the official files under `DATA_DIR/torchvision`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.data.dataset import Dataset, carve, data_folder, from_arrays
from bench.data.files import read_npz
from bench.errors import UserError
from bench.seeding import numpy_generator

TORCHVISION = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}


def standard(
    name: str,
    *,
    seed: int,
    data_dir: Path | None,
    download: bool,
    size: int | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
) -> Dataset:
    """The publisher's or the packaged split; a fifth of its training part is auxiliary.

    The auxiliary part has at most 5000 samples.
    """
    x, y, tx, ty, names = _read(name, data_dir, download)
    rng = numpy_generator(seed, "split", name)
    aux_share = min(0.2, 5000 / len(y))
    aux, train = carve(y, fractions=(aux_share,), rng=rng)
    train = _first(train, train_size, "train_size")
    test = _first(rng.permutation(len(ty)), test_size, "test_size")
    return from_arrays(
        name=name,
        train=(x[train], y[train]),
        test=(tx[test], ty[test]),
        aux=(x[aux], y[aux]),
        class_names=names,
        size=size,
    )


def _first(indices: np.ndarray, count: int | None, what: str) -> np.ndarray:
    if count is None:
        return indices
    if not 1 <= count <= len(indices):
        raise UserError(f"{what} must lie in [1, {len(indices)}], got {count}.")
    return indices[:count]


def _read(
    name: str, data_dir: Path | None, download: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
    data_dir = data_folder(name, data_dir)
    packaged = data_dir / name / f"{name}.npz"
    if packaged.exists():
        return read_npz(packaged)
    from torchvision import datasets

    root = data_dir / "torchvision"
    try:
        parts = [
            getattr(datasets, TORCHVISION[name])(root, train=train, download=download)
            for train in (True, False)
        ]
    except RuntimeError as error:
        raise UserError(
            f"dataset {name} is not in {data_dir} (expected {packaged} or torchvision's files "
            f"under {root}); add --download to fetch it. ({error})"
        ) from error
    train, test = ((np.asarray(p.data), np.asarray(p.targets)) for p in parts)
    return *train, *test, tuple(str(c) for c in parts[0].classes)
