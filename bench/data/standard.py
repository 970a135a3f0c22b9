"""Published data sets: images, the tables breast_cancer and Adult, and the signals of UCI HAR.

Images are npz files from the data folder, or torchvision's own files.

`DATA_DIR/NAME/NAME.npz` is taken if present; else torchvision reads (and only with
`download=True` fetches) the official files: of SVHN and STL-10 under `DATA_DIR/NAME`, of the others
under `DATA_DIR/torchvision`.
"""

from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from bench.data.dataset import Dataset, carve, data_folder, from_arrays, from_features, split
from bench.data.files import IMAGES, Packaged, read_npz
from bench.errors import UserError
from bench.extensions import in_one_line
from bench.files import check_plain
from bench.seeding import numpy_generator

_COLUMNS = (
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    "capital-gain capital-loss hours-per-week native-country income"
)
_NUMERIC = "age fnlwgt education-num capital-gain capital-loss hours-per-week"
ADULT_COLUMNS, ADULT_NUMERIC = tuple(_COLUMNS.split()), tuple(_NUMERIC.split())
_CATEGORIES = tuple(c for c in ADULT_COLUMNS[:-1] if c not in ADULT_NUMERIC)
_INCOMES = ("<=50K", ">50K", "<=50K.", ">50K.")
"""In the file's training part and, with a dot, in its test part."""


def breast_cancer(*, seed: int) -> Dataset:
    """Wisconsin breast cancer of scikit-learn: 569 records, 30 numeric features, 2 classes."""
    from sklearn.datasets import load_breast_cancer

    raw = load_breast_cancer()
    rng = numpy_generator(seed, "split", "breast_cancer")
    return split("breast_cancer", raw.data, raw.target, tuple(raw.target_names), rng)


def adult(
    *, seed: int, data_dir: Path | None, features: Literal["one_hot", "codes"] = "one_hot"
) -> Dataset:
    """UCI Adult from `DATA_DIR/adult/adult.data`: 6 numeric columns, 8 of categories.

    Missing values ("?") are a category of their own. The file is never downloaded.

    Args:
        features: `one_hot`: the numeric columns, then a group of one-hot columns for each other.
            `codes`: the file's 14 columns in its order, each one number, a category by its place
            among the sorted ones; all 14 are standardised.
    """
    import pandas as pd

    path = data_folder("adult", data_dir) / "adult" / "adult.data"
    try:
        check_plain(path, links=True)
    except FileNotFoundError as error:
        raise UserError(
            f"no such file: {path}; leakbench does not download it, fetch adult.data from the "
            "UCI repository."
        ) from error
    kinds = {c: np.float64 if c in ADULT_NUMERIC else str for c in ADULT_COLUMNS}
    try:
        table = pd.read_csv(
            path,
            header=None,
            names=list(ADULT_COLUMNS),
            skipinitialspace=True,
            index_col=False,
            dtype=kinds,
            keep_default_na=False,
        )
    except ValueError as error:
        raise UserError(f"{path} is truncated or not the UCI file ({error}).") from error
    if not table["income"].isin(_INCOMES).all() or len(table) < 100:
        raise UserError(
            f"{path} is truncated or not the UCI file: expected rows of {len(ADULT_COLUMNS)} "
            f"values, the last {' or '.join(_INCOMES[:2])}, got a table of {list(table.shape)}."
        )
    labels = (table["income"].str.startswith(">50K")).to_numpy(dtype=np.int64)
    groups, start = [], len(ADULT_NUMERIC)
    if features == "codes":
        coded = {c: pd.Categorical(table[c]).codes for c in _CATEGORIES}
        columns = table[list(ADULT_COLUMNS[:-1])].assign(**coded).to_numpy(dtype=np.float64)
    else:
        blocks = [table[list(ADULT_NUMERIC)].to_numpy(dtype=np.float64)]
        for column in _CATEGORIES:
            one_hot = pd.get_dummies(table[column]).to_numpy(dtype=np.float64)
            blocks.append(one_hot)
            groups.append((start, start + one_hot.shape[1]))
            start += one_hot.shape[1]
        columns = np.concatenate(blocks, axis=1)
    make = partial(from_features, categorical=tuple(groups))
    rng = numpy_generator(seed, "split", "adult")
    return split("adult", columns, labels, _INCOMES[:2], rng, make=make)


CHANNELS = tuple(
    f"{what}_{axis}" for what in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
LENGTH = 128
"""Values of a window: 2.56 s at 50 Hz."""
ACTIVITIES = ("walking", "upstairs", "downstairs", "sitting", "standing", "laying")


def uci_har(*, seed: int, data_dir: Path | None) -> Dataset:
    """Six activities of 30 people by a smartphone's sensors: signals of 9 channels, 128 values.

    Read are the publisher's files in `DATA_DIR/uci_har`, as they are or in a folder `UCI HAR
    Dataset`. Its test subjects are the test part, a fifth of its training subjects is auxiliary,
    and the others are the clients of `partition = "natural"`. A subject's windows overlap by half.
    Source: Anguita et al. 2013, "A public domain dataset for human activity recognition using
    smartphones" (ESANN).

    Raises:
        UserError: For files that are missing or of another form, or a single training subject.
    """
    folder = data_folder("uci_har", data_dir) / "uci_har"
    inner = folder / "UCI HAR Dataset"
    folder = inner if inner.is_dir() else folder
    x, y, subjects = _part(folder, "train")
    test_x, test_y, _ = _part(folder, "test")
    rng = numpy_generator(seed, "split", "uci_har")
    return split("uci_har", x, y, ACTIVITIES, rng, test=(test_x, test_y), clients=subjects)


def _part(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows [N, 9, 128], labels [N] from 0, and subjects [N]."""
    signals = folder / part / "Inertial Signals"
    x = np.stack([_table(signals / f"{c}_{part}.txt", LENGTH) for c in CHANNELS], axis=1)
    y, subjects = (
        _table(folder / part / f"{what}_{part}.txt", 1)[:, 0].astype(np.int64)
        for what in ("y", "subject")
    )
    if not len(x) == len(y) == len(subjects):
        raise UserError(
            f"the files of {folder / part} have {len(x)} windows, {len(y)} labels and "
            f"{len(subjects)} subjects, expected as many of each."
        )
    return x, y - 1, subjects


def _table(file: Path, columns: int) -> np.ndarray:
    """Read the numbers [N, columns] of a text file."""
    import pandas as pd

    if not file.is_file():
        raise UserError(
            f"no such file: {file}; leakbench does not download it, fetch the UCI HAR Dataset from "
            "the UCI repository."
        )
    try:
        values = pd.read_csv(file, sep=r"\s+", header=None, dtype=np.float64).to_numpy()
    except ValueError as error:
        raise UserError(f"{file} is truncated or no table of numbers ({error}).") from error
    if values.shape[1] != columns or not np.isfinite(values).all():
        raise UserError(
            f"{file} is truncated or of another form: expected rows of {columns} finite number(s), "
            f"got a table {list(values.shape)}."
        )
    return values


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
    aux, train = carve(y, fractions=(min(0.2, 5000 / len(y)),), rng=rng)
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
    return Packaged(x=x, y=y, test_x=tx, test_y=ty, class_names=tuple(map(str, names)))
