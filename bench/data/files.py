"""The user's own data: a folder of images with one subfolder per class, or an npz file of images,
tables or signals."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.data.dataset import (
    Dataset,
    carve,
    carve_clients,
    from_arrays,
    from_features,
    numbered,
    split_by_class,
)
from bench.errors import UserError
from bench.seeding import numpy_generator

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


IMAGES = ("train_images", "train_labels", "test_images", "test_labels")
FEATURES = ("train_x", "train_y", "test_x", "test_y")
_MORE = ("class_names", "train_clients", "categorical")


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """A packaged data set: images uint8 [N, H, W] or [N, H, W, 1 or 3], or, `x` being float, a
    table [N, F] or signals [N, channels, length].

    Attributes:
        clients: Whose each training sample is, int64 [N], None where the file does not say.
        categorical: Groups of one-hot columns of a table.
    """

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    class_names: tuple[str, ...]
    clients: np.ndarray | None = None
    categorical: tuple[tuple[int, int], ...] = ()

    @property
    def is_image(self) -> bool:
        return self.x.dtype == np.uint8


def read_npz(path: Path) -> Packaged:
    """Read a packaged data set.

    It has the arrays IMAGES or FEATURES, and may have class_names, train_clients (numbers or texts)
    and, of a table, categorical, whole numbers [G, 2]: first and last + 1 of each one-hot group.

    Raises:
        UserError: For a file that is missing or wrong, with what is wrong.
    """
    if not path.exists():
        raise UserError(f"no such file: {path}.")
    try:
        with np.load(path, allow_pickle=False) as archive:
            needed = FEATURES if "train_x" in archive.files else IMAGES
            missing = [k for k in needed if k not in archive.files]
            if missing:
                raise UserError(
                    f"{path} lacks the array(s) {', '.join(missing)}; expected "
                    f"{', '.join(IMAGES)}, or {', '.join(FEATURES)}, and optionally "
                    f"{', '.join(_MORE)}."
                )
            x, y, tx, ty = (archive[k] for k in needed)
            names, clients, groups = (archive[k] if k in archive.files else None for k in _MORE)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(f"{path} is truncated or no npz file ({error}).") from error
    for samples, labels, what, kind in ((x, y, needed[0], needed[1]), (tx, ty, *needed[2:])):
        (_check_images if needed is IMAGES else _check_features)(samples, f"{what} of {path}")
        if labels.ndim != 1 or len(labels) != len(samples) or labels.dtype.kind not in "iu":
            raise UserError(
                f"{kind} of {path} must be {len(samples)} integers, "
                f"got {labels.dtype} {list(labels.shape)}."
            )
    count = int(max(y.max(initial=0), ty.max(initial=0))) + 1
    if min(y.min(initial=0), ty.min(initial=0)) < 0 or (names is not None and count > len(names)):
        raise UserError(f"{path} has labels outside its classes.")
    if clients is not None and (clients.shape != y.shape or clients.dtype.kind not in "iuUS"):
        raise UserError(
            f"train_clients of {path} must be {len(y)} integers or texts, got {clients.dtype} "
            f"{list(clients.shape)}."
        )
    if groups is not None and not (
        x.ndim == 2 and groups.ndim == 2 and groups.shape[1] == 2 and groups.dtype.kind in "iu"
    ):
        raise UserError(
            f"categorical of {path} must be integers [G, 2], columns of a table, got "
            f"{groups.dtype} {list(groups.shape)} with samples {list(x.shape[1:])}."
        )
    return Packaged(
        x=x,
        y=y,
        test_x=tx,
        test_y=ty,
        class_names=tuple(map(str, range(count) if names is None else names)),
        clients=None if clients is None else numbered(clients),
        categorical=() if groups is None else tuple((int(a), int(b)) for a, b in groups),
    )


def _check_images(images: np.ndarray, what: str) -> None:
    if images.dtype != np.uint8 or not (
        images.ndim == 3 or (images.ndim == 4 and images.shape[-1] in (1, 3))
    ):
        raise UserError(
            f"{what} must be uint8 [N, H, W] or [N, H, W, 1 or 3], "
            f"got {images.dtype} {list(images.shape)}."
        )


def _check_features(samples: np.ndarray, what: str) -> None:
    if samples.dtype.kind != "f" or samples.ndim not in (2, 3):
        raise UserError(
            f"{what} must be floating-point numbers [N, features] or [N, channels, length] "
            f"(images are {IMAGES[0]}), got {samples.dtype} {list(samples.shape)}."
        )


def npz(*, path: Path, seed: int, size: int | None = None) -> Dataset:
    """An npz file of images, a table or signals; a fifth of its training part is auxiliary."""
    packaged = read_npz(path)
    if size is not None and not packaged.is_image:
        raise UserError(f"size is of images, but {path} holds none: leave it out.")
    return with_auxiliary(
        packaged, name=f"npz:{path}", size=size, rng=numpy_generator(seed, "split", "npz")
    )


def with_auxiliary(
    found: Packaged, *, name: str, size: int | None, rng: np.random.Generator
) -> Dataset:
    """A packaged data set of whose training part a fifth is made auxiliary: of every class, or, if
    it has clients, of these, so that public samples are of other clients than private ones."""
    if found.clients is None:
        aux, train = carve(found.y, fractions=(0.2,), rng=rng)
    else:
        aux, train = carve_clients(found.clients, fractions=(0.2,), rng=rng)
    x, y, owners = found.x, found.y, found.clients
    parts: dict[str, Any] = {
        "name": name,
        "train": (x[train], y[train]),
        "test": (found.test_x, found.test_y),
        "aux": (x[aux], y[aux]),
        "class_names": found.class_names,
        "train_clients": None if owners is None else owners[train],
        "aux_clients": None if owners is None else owners[aux],
    }
    if found.is_image:
        return from_arrays(**parts, size=size)
    return from_features(**parts, categorical=found.categorical)


def folder(*, path: Path, seed: int, size: int = 32, gray: bool = False) -> Dataset:
    """Images in `path/CLASS/*`, centre-cropped to a square and resized to size x size.

    A fifth of every class is test, a fifth auxiliary.

    Raises:
        UserError: For an image that cannot be read, or too few of them.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not path.is_dir():
        raise UserError(f"no such folder of images: {path}.")
    if size < 11:
        raise UserError(f"size must be >= 11 (the SSIM window), got {size}.")
    classes = sorted(p for p in path.iterdir() if p.is_dir())
    files = [
        (file, label)
        for label, sub in enumerate(classes)
        for file in sorted(sub.iterdir())
        if file.suffix.lower() in EXTENSIONS
    ]
    counts = np.bincount([label for _, label in files], minlength=max(1, len(classes)))
    if len(classes) < 2 or counts.min() < 5:
        raise UserError(
            f"{path} must hold at least 2 subfolders (one per class) of at least 5 images, got "
            f"{ {c.name: int(n) for c, n in zip(classes, counts, strict=False)} }."
        )
    images = []
    for file, _ in files:
        try:
            with Image.open(file) as opened:
                square = ImageOps.fit(opened.convert("L" if gray else "RGB"), (size, size))
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
            raise UserError(f"cannot read the image {file} ({error}).") from error
        images.append(np.asarray(square))
    labels = np.array([label for _, label in files])
    names = tuple(c.name for c in classes)
    return split_by_class(f"folder:{path}", np.stack(images), labels, names, seed=seed)
