"""The user's own data: a folder of images with one subfolder per class, or an npz file of images,
tables or signals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.arrays import check_memory, read_arrays
from bench.data import dataset
from bench.errors import UserError
from bench.extensions import in_one_line
from bench.seeding import numpy_generator

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""What a file of such a name is read as: other readers of Pillow call programs."""

IMAGES = ("train_images", "train_labels", "test_images", "test_labels")
FEATURES = ("train_x", "train_y", "test_x", "test_y")
_MORE = ("class_names", "train_clients", "categorical")
_IDS = "iuUS"
"""Kinds of arrays of whole numbers and texts."""


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
    arrays = read_arrays(path, (*IMAGES, *FEATURES, *_MORE))
    needed = FEATURES if "train_x" in arrays else IMAGES
    if missing := [k for k in needed if k not in arrays]:
        raise UserError(
            f"{path} lacks the array(s) {', '.join(missing)}; expected "
            f"{', '.join(IMAGES)}, or {', '.join(FEATURES)}, and optionally "
            f"{', '.join(_MORE)}."
        )
    _check_arrays(arrays, needed, place=str(path))
    x, tx = arrays[needed[0]], arrays[needed[2]]
    y, ty = dataset.flat(arrays[needed[1]]), dataset.flat(arrays[needed[3]])
    clients, groups = arrays.get("train_clients"), arrays.get("categorical")
    return Packaged(
        x=x,
        y=y,
        test_x=tx,
        test_y=ty,
        class_names=dataset.classes_of((y, ty), _texts(arrays.get("class_names")), place=str(path)),
        clients=None if clients is None else dataset.numbered(clients),
        categorical=() if groups is None else tuple((int(a), int(b)) for a, b in groups),
    )


def _check_arrays(arrays: Mapping[str, np.ndarray], needed: Sequence[str], *, place: str) -> None:
    """Raise UserError for an array of another shape or type than `Packaged` has.

    needed: Names of training samples and labels, test samples and labels.
    """

    def check(name: str, fits: bool, expected: str) -> None:
        if not fits:
            got = f"{arrays[name].dtype} {list(arrays[name].shape)}"
            raise UserError(f"{name} of {place} must be {expected}, got {got}.")

    for samples, labels in (needed[:2], needed[2:]):
        x, y = arrays[samples], arrays[labels]
        if needed is IMAGES:
            fits = x.dtype == np.uint8 and (x.ndim == 3 or x.shape[3:] in ((1,), (3,)))
            check(samples, fits, "uint8 [N, H, W] or [N, H, W, 1 or 3]")
        else:
            expected = "[N, features] or [N, channels, length] (images are train_images)"
            fits = x.dtype.kind == "f" and x.ndim in (2, 3)
            check(samples, fits, f"floating-point numbers {expected}")
        fits = y.shape in ((len(x),), (len(x), 1)) and y.dtype.kind in "iu"
        check(labels, fits, f"{len(x)} integers")
    x = arrays[needed[0]]
    if (names := arrays.get("class_names")) is not None:
        check("class_names", names.ndim == 1 and names.dtype.kind in _IDS, "texts [classes]")
    if (owners := arrays.get("train_clients")) is not None:
        fits = owners.shape == x.shape[:1] and owners.dtype.kind in _IDS
        check("train_clients", fits, f"{len(x)} integers or texts")
    if (groups := arrays.get("categorical")) is not None:
        fits = x.ndim == groups.ndim == 2 and groups.shape[1] == 2 and groups.dtype.kind in "iu"
        check("categorical", fits, "integers [G, 2], columns of a table")


def _texts(names: np.ndarray | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    return tuple(n.decode(errors="replace") if isinstance(n, bytes) else str(n) for n in names)


def npz(*, path: Path, seed: int, size: int | None = None) -> dataset.Dataset:
    """An npz file of images, a table or signals; a fifth of its training part is auxiliary."""
    packaged = read_npz(path)
    if size is not None and not packaged.is_image:
        raise UserError(f"size is of images, but {path} holds none: leave it out.")
    make = partial(dataset.from_arrays, size=size)
    if not packaged.is_image:
        make = partial(dataset.from_features, categorical=packaged.categorical)
    return dataset.split(
        f"npz:{path}",
        packaged.x,
        packaged.y,
        packaged.class_names,
        numpy_generator(seed, "split", "npz"),
        make=make,
        test=(packaged.test_x, packaged.test_y),
        clients=packaged.clients,
    )


def folder(*, path: Path, seed: int, size: int = 32, gray: bool = False) -> dataset.Dataset:
    """Images in `path/CLASS/*`, centre-cropped to a square and resized to size x size.

    A fifth of every class is test, a fifth auxiliary. Of an animation the first image is taken;
    transparent parts are white, and 16 bits are rounded to 8.

    Raises:
        UserError: For an image that cannot be read, or too few of them.
    """
    from PIL import ImageOps

    if not path.is_dir():
        raise UserError(f"no such folder of images: {path}.")
    dataset.check_side(size)
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
    check_memory(len(files) * size**2 * (1 if gray else 3), f"images of size {size}")
    images = [
        np.asarray(ImageOps.fit(_open_image(file).convert("L" if gray else "RGB"), (size, size)))
        for file, _ in files
    ]
    labels = np.array([label for _, label in files])
    names, rng = tuple(c.name for c in classes), numpy_generator(seed, "split", "folder")
    return dataset.split(
        f"folder:{path}", np.stack(images), labels, names, rng, make=dataset.from_arrays
    )


def _open_image(file: Path) -> Image:
    """Open the image in a file with 8 bits per channel as viewers show it: turned as its EXIF
    orientation says, 16 bits rounded to 8, and transparent pixels on white.

    Raises UserError for a file that cannot be read, and for an image of floats or of 32 bits, of
    which nobody says what white is.
    """
    from PIL import Image

    if not file.is_file():
        raise UserError(f"cannot read the image {file} (there is no such file).")
    try:
        with Image.open(file, formats=_FORMATS) as opened:
            return _convert_to_eight_bits(opened)
    except Exception as error:  # a damaged file makes Pillow's readers raise whatever they hit
        reason = error if isinstance(error, UserError) else in_one_line(error)
        raise UserError(f"cannot read the image {file} ({reason}).") from error


def _convert_to_eight_bits(image: Image) -> Image:
    from PIL import Image, ImageOps

    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UserError("it has 32 bits per value, where 8 or 16 are expected")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    image.load()
    return image
