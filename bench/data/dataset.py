"""The dataset value object and the checks that every loader ends with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bench.errors import UserError
from bench.seeding import numpy_generator


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples in three disjoint parts: of the clients, for tests, and public.

    Images are float32 [N, channels, height, width] in [0, 1]. Tabular samples are float32
    [N, features], standardised by the mean and std of the public part. Labels are int64 [N].

    Attributes:
        train_x: The clients' samples.
        aux_x: Public samples, which the attacker has.
        categorical: Groups of one-hot columns of tabular data, as (first, last + 1).
    """

    name: str
    task: Literal["image", "tabular"]
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    aux_x: Tensor
    aux_y: Tensor
    class_names: tuple[str, ...]
    categorical: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train_x.shape[1:])

    @property
    def classes(self) -> int:
        return len(self.class_names)


def data_folder(name: str, folder: Path | None) -> Path:
    """The folder of what is not embedded, without which the data set cannot be loaded."""
    if folder is None:
        raise UserError(
            f"dataset {name} needs a data folder: give --data-dir DIR or set LEAKBENCH_DATA."
        )
    return folder


def from_arrays(
    *,
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    aux: tuple[np.ndarray, np.ndarray],
    class_names: tuple[str, ...],
    size: int | None = None,
) -> Dataset:
    """Make a data set of images [N, H, W] or [N, H, W, 1 or 3], uint8 or float in [0, 1].

    Args:
        size: Side to resize to (antialiased bilinear), or None to keep.

    Raises:
        UserError: For a part without samples, a label without class, or too small a side.
    """
    parts = [(images_to_tensor(x, size=size), labels_to_tensor(y)) for x, y in (train, test, aux)]
    for label, (x, y) in zip(("train", "test", "auxiliary"), parts, strict=True):
        if len(x) == 0:
            raise UserError(f"dataset {name} has no {label} samples left after splitting.")
        if len(y) and int(y.max()) >= len(class_names):
            raise UserError(
                f"dataset {name} has label {int(y.max())}, expected 0..{len(class_names) - 1}."
            )
    (tx, ty), (vx, vy), (ax, ay) = parts
    return Dataset(
        name=name,
        task="image",
        train_x=tx,
        train_y=ty,
        test_x=vx,
        test_y=vy,
        aux_x=ax,
        aux_y=ay,
        class_names=class_names,
    )


def split_by_class(
    name: str,
    images: np.ndarray,
    labels: np.ndarray,
    class_names: tuple[str, ...],
    *,
    seed: int,
    size: int | None = None,
) -> Dataset:
    """A data set of images of which a fifth of every class is test and a fifth auxiliary."""
    stream = numpy_generator(seed, "split", name.partition(":")[0])
    parts = carve(labels, fractions=(0.2, 0.2), rng=stream)
    test, aux, train = ((images[p], labels[p]) for p in parts)
    return from_arrays(
        name=name, train=train, test=test, aux=aux, class_names=class_names, size=size
    )


def images_to_tensor(images: np.ndarray, *, size: int | None) -> Tensor:
    """Images [N, H, W(, C)], uint8 or float in [0, 1], as float32 [N, C, size, size]."""
    if size is not None and size < 11:
        raise UserError(f"image size must be >= 11 (the SSIM window), got {size}.")
    x = torch.from_numpy(np.ascontiguousarray(images))
    x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
    x = x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)
    if size is not None and len(x) and x.shape[-2:] != (size, size):
        x = torch.nn.functional.interpolate(
            x, size=(size, size), mode="bilinear", align_corners=False, antialias=True
        )
    return x.clamp(0, 1).contiguous()


def labels_to_tensor(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(labels).astype(np.int64))


def carve(
    y: np.ndarray, *, fractions: tuple[float, ...], rng: np.random.Generator
) -> list[np.ndarray]:
    """Part indices class by class.

    Args:
        fractions: About the share of every class in each part.

    Returns:
        Disjoint index arrays, one per fraction, and last one of the rest.
    """
    out: list[list[np.ndarray]] = [[] for _ in range(len(fractions) + 1)]
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        cuts = np.round(np.cumsum(fractions) * len(members)).astype(int)
        for bucket, piece in zip(out, np.split(members, cuts), strict=True):
            bucket.append(piece)
    return [rng.permutation(np.concatenate(b)) for b in out]
