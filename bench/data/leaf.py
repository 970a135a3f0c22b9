"""FEMNIST in the JSON files of LEAF's scripts: handwritten characters with their writers."""

import json
import string
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.data.dataset import Dataset, data_folder, flat, from_arrays, numbered, split
from bench.errors import UserError
from bench.files import check_plain
from bench.seeding import numpy_generator

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
"""As LEAF numbers them."""
SIDE = 28
Samples = tuple[str, np.ndarray, np.ndarray]
"""A writer's name, images [n, 28, 28] in [0, 1] and labels [n]."""


def femnist(
    *, seed: int, data_dir: Path | None, size: int | None = None, writers: int | None = None
) -> Dataset:
    """Handwritten digits and letters with their writers, in LEAF's JSON format: 62 classes, 28x28.

    Read are `all_data_*.json` in `DATA_DIR/femnist` or its folder `all_data`, else the folders
    `train` and `test` together. A fifth of the writers is test, a fifth auxiliary.
    Source: Caldas et al., arXiv:1812.01097.

    Args:
        size: Side to resize to.
        writers: Number of writers that the seed draws before the split; None: all.

    Raises:
        UserError: For files that are missing or of another form, or too few writers.
    """
    folder = data_folder("femnist", data_dir) / "femnist"
    whole = [*folder.glob("all_data_*.json"), *folder.glob("all_data/*.json")]
    files = sorted(whole or [*folder.glob("train/*.json"), *folder.glob("test/*.json")])
    if not files:
        raise UserError(
            f"{folder} holds neither LEAF's all_data_*.json nor its folders train and test; "
            "leakbench does not download them: make them with LEAF's scripts."
        )
    parts = [samples for file in files for samples in _writers(file)]
    rng = numpy_generator(seed, "split", "femnist")
    known = sorted({name for name, *_ in parts})
    if writers is not None:
        if not 3 <= writers <= len(known):
            raise UserError(f"writers of femnist must lie in [3, {len(known)}], got {writers}.")
        chosen = set(rng.choice(known, size=writers, replace=False))
        parts = [samples for samples in parts if samples[0] in chosen]
    owners = numbered(np.repeat([name for name, *_ in parts], [len(y) for *_, y in parts]))
    x, y = (np.concatenate([samples[i] for samples in parts]) for i in (1, 2))
    make = partial(from_arrays, size=size)
    return split("femnist", x, y, CLASSES, rng, make=make, clients=owners)


def _writers(file: Path) -> Iterator[Samples]:
    """Yield the samples of each writer in one of LEAF's files."""
    try:
        check_plain(file, links=True)
        content = json.loads(file.read_bytes())
        users, numbers, data = content["users"], content["num_samples"], content["user_data"]
        if len(set(users)) < len(users) or not all(isinstance(u, str) for u in users):
            raise ValueError("users must be different texts")
        for user, number in zip(users, numbers, strict=True):
            yield user, *_samples(data[user]["x"], data[user]["y"], number)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError) as error:
        raise UserError(
            f"{file} is truncated or not in LEAF's format of users, num_samples and user_data "
            f"({type(error).__name__}: {error})."
        ) from error


def _samples(x: Any, y: Any, number: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = np.asarray(x, dtype=np.float32), flat(np.asarray(y))
    if images.shape != (number, SIDE * SIDE) or labels.shape != (number,):
        raise ValueError(
            f"x must be {number} lists of {SIDE * SIDE} numbers and y {number} numbers, got "
            f"{list(images.shape)} and {list(labels.shape)}"
        )
    if labels.dtype.kind != "i" or not 0 <= labels.min() <= labels.max() < len(CLASSES):
        raise ValueError(f"y must be whole numbers in 0..{len(CLASSES) - 1}")
    if not (images.min() >= 0 and images.max() <= 1):
        raise ValueError("x must lie in [0, 1]")
    return images.reshape(-1, SIDE, SIDE), labels
