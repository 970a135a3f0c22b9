"""The user's own images: a folder with one subfolder per class, or an npz file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from bench.data.dataset import Dataset, carve, from_arrays
from bench.errors import UserError
from bench.seeding import numpy_generator

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


def read_npz(
    path: Path,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
    """Read a packaged data set.

    Images are uint8 [N, H, W] or [N, H, W, 1 or 3]; labels are integers [N].

    Returns:
        Train images, train labels, test images, test labels and class names.

    Raises:
        UserError: For a file that is missing or wrong, with what is wrong.
    """
    if not path.exists():
        raise UserError(f"no such file: {path}.")
    needed = ("train_images", "train_labels", "test_images", "test_labels")
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [k for k in needed if k not in archive.files]
            if missing:
                raise UserError(
                    f"{path} lacks the array(s) {', '.join(missing)}; expected "
                    f"{', '.join(needed)} and optionally class_names."
                )
            x, y, tx, ty = (archive[k] for k in needed)
            names = archive["class_names"] if "class_names" in archive.files else None
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(f"{path} is truncated or no npz file ({error}).") from error
    for label, images, labels in (("train", x, y), ("test", tx, ty)):
        if images.dtype != np.uint8 or not (
            images.ndim == 3 or (images.ndim == 4 and images.shape[-1] in (1, 3))
        ):
            raise UserError(
                f"{label}_images of {path} must be uint8 [N, H, W] or [N, H, W, 1 or 3], "
                f"got {images.dtype} {list(images.shape)}."
            )
        if labels.ndim != 1 or len(labels) != len(images) or labels.dtype.kind not in "iu":
            raise UserError(
                f"{label}_labels of {path} must be {len(images)} integers, "
                f"got {labels.dtype} {list(labels.shape)}."
            )
    count = int(max(y.max(initial=0), ty.max(initial=0))) + 1
    if min(y.min(initial=0), ty.min(initial=0)) < 0 or (names is not None and count > len(names)):
        raise UserError(f"{path} has labels outside its classes.")
    class_names = tuple(map(str, names)) if names is not None else tuple(map(str, range(count)))
    return x, y, tx, ty, class_names


def npz(*, path: Path, seed: int, size: int | None = None) -> Dataset:
    """An npz file with the arrays of `read_npz`; a fifth of its training part is auxiliary."""
    x, y, tx, ty, names = read_npz(path)
    aux, train = carve(y, fractions=(0.2,), rng=numpy_generator(seed, "split", "npz"))
    return from_arrays(
        name=f"npz:{path}",
        train=(x[train], y[train]),
        test=(tx, ty),
        aux=(x[aux], y[aux]),
        class_names=names,
        size=size,
    )


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
    x, y = np.stack(images), np.array([label for _, label in files])
    test, aux, train = carve(y, fractions=(0.2, 0.2), rng=numpy_generator(seed, "split", "folder"))
    return from_arrays(
        name=f"folder:{path}",
        train=(x[train], y[train]),
        test=(x[test], y[test]),
        aux=(x[aux], y[aux]),
        class_names=tuple(c.name for c in classes),
    )
