"""Files that others may have made: they are read where they are plain, and through no link that
leads out of the folder that was named.

A pipe, a device or a socket in a file's place would hang a reader, and a link would have it read,
or written, anywhere.
"""

import gzip
import hashlib
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from bench.errors import UserError

MOST_BYTES = 2**29
"""Of one file that is read whole: a leaderboard of ten thousand rows has a tenth of that."""


def read_bytes(path: Path | str, *, most: int = MOST_BYTES, links: bool = False) -> bytes:
    """Return a file's content, if it is a plain file within a size limit.

    Args:
        path: The file; folders above it are not looked at, see `no_link`.
        most: Bytes.
        links: Whether it may be a link to a plain file, as a file that a user names may.

    Raises:
        FileNotFoundError: If there is none.
        UserError: If it is a link, a device, a pipe or a folder, too large, or cannot be read.
    """
    with _open(path, links=links) as handle:
        size = os.fstat(handle).st_size
        if size > most:
            raise UserError(
                f"{path} has {size:,} bytes, more than the {most:,} that such a file may have."
            )
        with os.fdopen(handle, "rb", buffering=0, closefd=False) as file:
            return file.read()


def read_gzip(path: Path | str) -> bytes:
    """The content of a gzip file. Raises as `read_bytes`, also where it holds more than that."""
    try:
        with gzip.open(BytesIO(read_bytes(path))) as file:
            content = file.read(MOST_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is no readable gzip file ({error}).") from error
    if len(content) > MOST_BYTES:
        raise UserError(f"{path} holds more than the {MOST_BYTES:,} bytes that it may.")
    return content


def check_plain(path: Path | str, *, links: bool = False) -> int:
    """The size of a file that a library is to open by its name. Raises as `read_bytes`."""
    with _open(path, links=links) as handle:
        return os.fstat(handle).st_size


def sha256(path: Path | str) -> str:
    """The hash of a file of any size. Raises as `read_bytes`."""
    with _open(path, links=False) as handle, os.fdopen(handle, "rb", closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def no_link(folder: Path, *names: str) -> Path:
    """Return a path within a folder. Raises UserError for a link below the folder; the path need
    not exist."""
    path = folder
    for name in names:
        path = path / name
        if path.is_symlink():
            raise UserError(f"{path} is a link, and links in result folders are not followed.")
    return path


@contextmanager
def _open(path: Path | str, *, links: bool) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block
    try:
        handle = os.open(path, flags if links else flags | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise UserError(f"{path} is no plain file.")
            yield handle
        finally:
            os.close(handle)
    except (FileNotFoundError, UserError):
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(f"{path} does not exist.") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        if not links and os.path.islink(path):
            raise UserError(
                f"{path} is a link, and links in result folders are not followed."
            ) from error
        raise UserError(f"cannot read {path} ({getattr(error, 'strerror', error)}).") from error
