"""Published image sets: npz files from the data folder, or torchvision's own files.

`DATA_DIR/NAME/NAME.npz` is taken if present; else torchvision reads (and only with
`download=True` fetches) the official files: of SVHN and STL-10 under `DATA_DIR/NAME`, of the others
under `DATA_DIR/torchvision`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from bench.data.dataset import Dataset, carve, data_folder, from_arrays
from bench.data.files import IMAGES, Packaged, check_parts, read_npz
from bench.errors import UserError
from bench.extensions import in_one_line
from bench.seeding import numpy_generator

TORCHVISION = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
    "stl10": "STL10",
}
BY_SPLIT = ("svhn", "stl10")
"""Those whose readers take split="train" for train=True and give images [N, C, H, W]."""


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
    packaged = _read(name, data_dir, download)
    x, y = packaged.x, packaged.y
    rng = numpy_generator(seed, "split", name)
    aux_share = min(0.2, 5000 / len(y))
    aux, train = carve(y, fractions=(aux_share,), rng=rng)
    train = _first(train, train_size, "train_size")
    test = _first(rng.permutation(len(packaged.test_y)), test_size, "test_size")
    return from_arrays(
        name=name,
        train=(x[train], y[train]),
        test=(packaged.test_x[test], packaged.test_y[test]),
        aux=(x[aux], y[aux]),
        class_names=packaged.class_names,
        size=size,
    )


def _first(indices: np.ndarray, count: int | None, what: str) -> np.ndarray:
    if count is None:
        return indices
    if not 1 <= count <= len(indices):
        raise UserError(f"{what} must lie in [1, {len(indices)}], got {count}.")
    return indices[:count]


def _read(name: str, data_dir: Path | None, download: bool) -> Packaged:
    data_dir = data_folder(name, data_dir)
    file = data_dir / name / f"{name}.npz"
    if file.exists():
        packaged = read_npz(file)
        if not packaged.is_image:
            raise UserError(f"{file} must hold images, the arrays {', '.join(IMAGES)}.")
        return packaged
    from torchvision import datasets

    by_split = name in BY_SPLIT
    root = data_dir / (name if by_split else "torchvision")
    reader = partial(getattr(datasets, TORCHVISION[name]), root, download=download)
    try:
        train, test = (
            reader(split=part) if by_split else reader(train=part == "train")
            for part in ("train", "test")
        )
    except RuntimeError as error:
        raise UserError(
            f"dataset {name} is not in {data_dir} (expected {file} or torchvision's files "
            f"under {root}); add --download to fetch it. ({error})"
        ) from error
    except Exception as error:  # a damaged file makes torchvision's readers raise whatever they hit
        raise UserError(
            f"torchvision's files of {name} under {root} are truncated or broken "
            f"({in_one_line(error)})."
        ) from error
    (x, y), (tx, ty) = (
        (p.data.transpose(0, 2, 3, 1), p.labels)
        if by_split
        else (np.asarray(p.data), np.asarray(p.targets))
        for p in (train, test)
    )
    names = getattr(train, "classes", range(10))  # SVHN's are digits
    check_parts((x, y, tx, ty), names=IMAGES, place=f"torchvision's files under {root}")
    return Packaged(x=x, y=y, test_x=tx, test_y=ty, class_names=tuple(map(str, names)))
