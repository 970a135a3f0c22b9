"""Arrays of npz files: what they declare is read, and what they would take, before they are."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import psutil

from bench.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Shape and type of an array that has not been read."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def declared_arrays(path: Path, wanted: Collection[str]) -> dict[str, Declared]:
    """Return what the headers of an npz file say of the wanted arrays; nothing else is read.

    Raises UserError for a file that is missing or no npz file.
    """
    headers = {}
    try:
        if not path.is_file():
            raise UserError(f"no such file: {path}.")
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                name = member.removesuffix(".npy")
                if name in headers:
                    raise ValueError(f"it has two arrays named {name}")
                if name in wanted:
                    with archive.open(member) as file:
                        headers[name] = _read_header(file)
    except UserError:
        raise
    except Exception as error:  # a damaged file makes zipfile and numpy raise whatever it hits
        raise _read_error(path, error) from error
    return headers


def _read_header(file: IO[bytes]) -> Declared:
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"its arrays are of version {version}, not 1.0 or 2.0")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never loaded")
    if not all(isinstance(side, int) and side >= 0 for side in shape):
        raise ValueError(f"an array's shape is {shape}")
    return Declared(shape=shape, dtype=dtype)


def read_arrays(
    path: Path, wanted: Iterable[str], declared: Mapping[str, Declared]
) -> list[np.ndarray]:
    """The wanted arrays of an npz file, which `declared_arrays` found in it.

    Raises UserError for a file that is damaged, or arrays that this machine's memory does not hold.
    """
    names = list(wanted)
    check_memory(sum(declared[n].n_bytes for n in names), f"the arrays of {path}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return [archive[name] for name in names]
    except Exception as error:  # as above
        raise _read_error(path, error) from error


def _read_error(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(f"{path} is truncated or no npz file ({reason or type(error).__name__}).")


def check_memory(n_bytes: float, what: str) -> None:
    """Raise UserError if something takes more bytes than this machine's memory has left."""
    left = psutil.virtual_memory().available
    if n_bytes > left:
        raise UserError(
            f"{what} would take {n_bytes / 1e9:.3g} GB, but this machine has {left / 1e9:.3g} GB "
            "of memory left."
        )
