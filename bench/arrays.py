"""Arrays of npz files, and whether this machine's memory holds what is to be made."""

import zipfile
from collections.abc import Collection
from pathlib import Path

import numpy as np
import psutil

from bench.errors import UserError
from bench.foreign import in_one_line


def read_arrays(path: Path, wanted: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Read those of the wanted arrays, by default all, that an npz file has.

    Raises UserError for a file that is missing, damaged or no npz file, and for arrays that this
    machine's memory does not hold.
    """
    try:
        if not path.is_file():
            raise UserError(f"no such file: {path}.")
        with zipfile.ZipFile(path) as archive:
            members = [(m.filename.removesuffix(".npy"), m.file_size) for m in archive.infolist()]
        names = [name for name, _ in members if wanted is None or name in wanted]
        if len(set(names)) < len(names):
            raise ValueError(f"it has two arrays named {max(names, key=names.count)}")
        n_bytes = sum(size for name, size in members if name in names)
        check_memory(n_bytes, f"the arrays of {path}")
        with np.load(path, allow_pickle=False) as arrays:
            return {n: np.asarray(arrays[n]) for n in names}
    except UserError:
        raise
    except Exception as error:  # a damaged file makes zipfile and numpy raise whatever it hits
        raise UserError(
            f"{path} is truncated or no npz file ({in_one_line(error, 200)})."
        ) from error


def check_memory(n_bytes: float, what: str) -> None:
    """Raise UserError if something takes more bytes than this machine's memory has left."""
    left = psutil.virtual_memory().available
    if n_bytes > left:
        raise UserError(
            f"{what} would take {n_bytes / 1e9:.3g} GB, but this machine has {left / 1e9:.3g} GB "
            "of memory left."
        )
