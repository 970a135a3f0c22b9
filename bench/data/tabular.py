"""Tabular sets. Features are standardised by the auxiliary part, which is public."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from bench.data.dataset import Dataset, data_folder, from_features, split
from bench.errors import UserError
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
