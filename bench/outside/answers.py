"""An outside program's answer: its file, read and checked in one sentence each."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bench.contract.attack import Reconstruction
from bench.errors import UserError
from bench.files import check_plain
from bench.metrics.answers import FIELDS, checked
from bench.names import did_you_mean

_ROUNDING = 1e-6
"""By which an image may leave [0, 1]."""


_UNREADABLE = (
    OSError,
    EOFError,
    TypeError,
    ValueError,
    SafetensorError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What damaged files and foreign ones raise; TypeError: numbers that torch has no type for."""


def read_answer(path: Path, *, x: Tensor, y: Tensor, classes: int) -> Reconstruction:
    """Read the answer in a file.

    Args:
        path: A safetensors or npz file; code in it is never run.
        x: The private samples [V, K, ...], which give the shapes.
        y: Their labels [V, K].
        classes: Their number.

    Raises:
        UserError: For a file that cannot be read or does not answer; it names the file.
    """
    tensors = _tensors(path)
    try:
        return checked(_answer(tensors, x, y, classes), tuple(x.shape), classes)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix not in (".safetensors", ".npz"):
        raise UserError(f"a reconstruction is a .safetensors or .npz file, got {path.name}.")
    try:
        check_plain(path, links=True)
        if path.suffix == ".safetensors":
            tensors: dict[str, Tensor] = load_file(path)
        else:
            loaded = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise UserError("it holds one array without a name, not those of numpy.savez.")
            with loaded as arrays:
                if len(set(arrays.files)) < len(arrays.files):
                    raise UserError("it has two arrays of one name.")
                tensors = {name: _tensor(name, arrays[name]) for name in arrays.files}
    except _UNREADABLE as error:
        raise UserError(f"cannot read {path}: {error}") from error
    for name in tensors:
        if name not in FIELDS:
            raise UserError(did_you_mean("array", name, FIELDS, where=str(path)))
    if not set(tensors) - {"failed"}:
        raise UserError(f"{path} holds no images, labels or label_counts.")
    return tensors


def _tensor(name: str, array: Any) -> Tensor:
    if not isinstance(array, np.ndarray):  # a zip file's other members are bytes
        raise UserError(f"{name} is no array.")
    if array.dtype.kind not in "fiub":
        raise UserError(f"{name} must hold numbers, got {array.dtype}.")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))


def _answer(tensors: Mapping[str, Tensor], x: Tensor, y: Tensor, classes: int) -> Reconstruction:
    victims, samples = y.shape
    failed = tensors.get("failed")
    if failed is not None and (failed.dtype != torch.bool or tuple(failed.shape) != (victims,)):
        raise UserError(
            f"failed must be bool [{victims}], got {failed.dtype} {list(failed.shape)}."
        )
    missing = torch.zeros(victims, dtype=torch.bool) if failed is None else failed
    images, labels, counts = (tensors.get(k) for k in ("images", "labels", "label_counts"))
    if images is not None:
        images = _check_images(_stack("images", images, x.shape), missing, is_image=x.ndim == 5)
    if labels is not None:
        labels = _whole_numbers("labels", _stack("labels", labels, y.shape))
    if counts is not None:
        if tuple(counts.shape) != (victims, classes):
            raise UserError(
                f"label_counts must have shape [{victims}, {classes}] (victims, classes), got "
                f"{list(counts.shape)}."
            )
        counts = _check_counts(_whole_numbers("label_counts", counts), missing, samples)
    return Reconstruction(images=images, labels=labels, label_counts=counts, failed=failed)


def _check_counts(counts: Tensor, missing: Tensor, samples: int) -> Tensor:
    """Counts of victims without an answer name no label."""
    kept = counts[~missing]
    if bool((kept < 0).any()) or bool((kept > samples).any()):
        raise UserError(
            f"label_counts must lie in 0..{samples}, got {int(kept.min())} to {int(kept.max())}."
        )
    sums = counts.sum(dim=1)
    wrong = ((sums != samples) & ~missing).nonzero().flatten().tolist()
    if wrong:
        raise UserError(
            f"label_counts of a victim must add up to its {samples} sample(s), got "
            f"{', '.join(f'{sums[i]} of victim {i}' for i in wrong)}; mark victims without an "
            "answer in a bool array 'failed'."
        )
    return torch.where(missing[:, None], 0, counts)


def _stack(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    """[V, K, ...]; K = 1 may have been left out."""
    if shape[1] == 1 and tuple(value.shape) == (shape[0], *shape[2:]):
        value = value.unsqueeze(1)
    if value.shape != shape:
        raise UserError(
            f"{name} must have shape {list(shape)} (victims, samples each, one sample), got "
            f"{list(value.shape)}."
        )
    return value


def _whole_numbers(name: str, value: Tensor) -> Tensor:
    if value.is_floating_point() or value.dtype == torch.bool:
        raise UserError(f"{name} must be whole numbers, got {value.dtype}.")
    return value.long()


def _check_images(images: Tensor, missing: Tensor, *, is_image: bool) -> Tensor:
    if not images.is_floating_point():
        hint = " of bytes divided by 255" if images.dtype == torch.uint8 else ""
        raise UserError(f"images must be floating-point numbers{hint}, got {images.dtype}.")
    bad = ~torch.isfinite(images).flatten(1).all(dim=1) & ~missing
    if bool(bad.any()):
        which = ", ".join(str(int(i)) for i in bad.nonzero().flatten())
        raise UserError(
            f"images of victim(s) {which} hold NaN or infinities; mark victims without an answer "
            "in a bool array 'failed'."
        )
    kept = images[~missing]
    if is_image and kept.numel():
        low, high = float(kept.min()), float(kept.max())
        if low < -_ROUNDING or high > 1 + _ROUNDING:
            raise UserError(f"images must lie in [0, 1], got values from {low:.4g} to {high:.4g}.")
    return images
