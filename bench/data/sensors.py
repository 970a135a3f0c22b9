"""UCI HAR in its publisher's files: what a smartphone at the waist measures of six activities."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.data.dataset import Dataset, data_folder, split
from bench.errors import UserError
from bench.seeding import numpy_generator

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
    y, subjects = (_whole(folder / part / f"{what}_{part}.txt") for what in ("y", "subject"))
    if not len(x) == len(y) == len(subjects):
        raise UserError(
            f"the files of {folder / part} have {len(x)} windows, {len(y)} labels and "
            f"{len(subjects)} subjects, expected as many of each."
        )
    return x, y - 1, subjects


def _whole(file: Path) -> np.ndarray:
    """Read the whole numbers [N] of a text file."""
    numbers = _table(file, 1)[:, 0]
    if not ((numbers == np.floor(numbers)) & (np.abs(numbers) < 1e6)).all():
        raise UserError(f"{file} must hold whole numbers below a million, one a line.")
    return numbers.astype(np.int64)


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
