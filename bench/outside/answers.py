"""An outside program's answer: its file, read and checked in one sentence each."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.arrays import read_arrays
from bench.contract.attack import Reconstruction
from bench.errors import UserError
from bench.metrics.answers import FIELDS, answer_of, check_values, validate_answer
from bench.names import check_known
from bench.protocols.export import UNREADABLE, load_tensors


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
    tensors = _read_tensors(path)
    for name, like in (("images", x), ("labels", y)):
        if y.shape[1] == 1 and name in tensors and tensors[name].ndim == like.ndim - 1:
            tensors[name] = tensors[name].unsqueeze(1)  # K = 1 may be left out
    try:
        answer = validate_answer(answer_of(tensors), tuple(x.shape), classes)
        check_values(answer, is_image=x.ndim == 5, beyond=1e-6)
        return _count_whole(answer, *y.shape)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".npz":
        tensors = {name: _as_tensor(path, name, a) for name, a in read_arrays(path).items()}
    elif path.suffix == ".safetensors":
        try:
            tensors = load_tensors(path)
        except UNREADABLE as error:
            raise UserError(f"cannot read {path}: {error}") from error
    else:
        raise UserError(f"a reconstruction is a .safetensors or .npz file, got {path.name}.")
    for name in tensors:
        check_known("array", name, FIELDS, where=str(path))
    if not set(tensors) - {"failed"}:
        raise UserError(f"{path} holds no images, labels or label_counts.")
    return tensors


def _as_tensor(path: Path, name: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise UserError(f"{path}: {name} must hold numbers, got {array.dtype}.")
    wide = array.dtype.kind == "u" and array.dtype.itemsize > 1
    dtype = np.dtype(np.int64) if wide else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))


def _count_whole(answer: Reconstruction, victims: int, samples: int) -> Reconstruction:
    """Return the answer with whole numbers as int64; counts of victims without an answer name no
    label."""
    missing = torch.zeros(victims, dtype=torch.bool) if answer.failed is None else answer.failed
    labels, counts = (v if v is None else v.long() for v in (answer.labels, answer.label_counts))
    if counts is not None:
        sums = counts.sum(dim=1)
        if wrong := ((sums != samples) & ~missing).nonzero().flatten().tolist():
            raise UserError(
                f"label_counts of a victim must add up to its {samples} sample(s), got "
                f"{', '.join(f'{sums[i]} of victim {i}' for i in wrong)}; mark victims without an "
                "answer in a bool array 'failed'."
            )
        counts = torch.where(missing[:, None], 0, counts)
    return replace(answer, labels=labels, label_counts=counts)
