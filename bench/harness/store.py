"""Records on disk: one JSON file per training and per attack cell, written whole or not at all.

DIR/run.json                  suite, command, versions, device
DIR/records/train/KEY.json    accuracy, cost, ledger, where the observations lie
DIR/records/attack/KEY.json   scores per victim, floors
DIR/artifacts/KEY/            observations and truth, or reconstructions (safetensors)
DIR/scratch/                  files of jobs that are under way
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from bench.errors import UserError

SCHEMA = 1
Kind = Literal["train", "attack"]


def key_of(inputs: Mapping[str, Any]) -> str:
    """Hash of canonical inputs: equal inputs, equal key, whatever their order."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    """A file's or folder's content outlives a power cut from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_json(value: Any) -> str:
    """Strict JSON: infinities and NaN become the strings "inf", "-inf" and "nan"."""
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def to_line(value: Any) -> str:
    """The same without line breaks."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


class Store:
    """A result folder. Raises UserError if it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Create the folder and check that it can be written."""
        try:
            (self.folder / "records").mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".probe"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"cannot write results to {self.folder} ({error.strerror or error})."
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder: a second driver on it is refused with ValueError."""
        with (self.folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(
                    f"another leakbench run is writing to {self.folder}; wait for it or give "
                    "another --out."
                ) from error
            yield

    def artifacts(self, key: str) -> Path:
        return self.folder / "artifacts" / key

    def path(self, kind: Kind, key: str) -> Path:
        return Path(f"{self.folder}/records/{kind}/{key}.json")  # joining takes 1.6x the time

    def scratch(self, key: str) -> Path:
        """Where the job of that key leaves its files, until `keep` puts them in their place."""
        return self.folder / "scratch" / key

    def sweep(self) -> None:
        """Remove what jobs of a killed run left behind. Only while holding the folder."""
        shutil.rmtree(self.folder / "scratch", ignore_errors=True)

    def keep(self, kind: Kind, key: str, record: Mapping[str, Any]) -> None:
        """Put a finished job's files and its record in their places; the record, written last,
        lists them with their sizes. Raises OSError if that fails: then there is no record."""
        scratch, place = self.scratch(key), self.artifacts(key)
        self.path(kind, key).unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        files = {}
        if record["status"] == "done" and scratch.is_dir():
            for path in sorted(scratch.iterdir()):
                files[path.name] = path.stat().st_size
                _to_disk(path)
            _to_disk(scratch)
            place.parent.mkdir(parents=True, exist_ok=True)
            scratch.rename(place)
            _to_disk(place.parent)
        else:
            shutil.rmtree(scratch, ignore_errors=True)
        self.write(kind, key, {**record, "files": files})

    def write(self, kind: Kind, key: str, record: Mapping[str, Any]) -> None:
        """Write a record alone."""
        write_whole(self.path(kind, key), to_json({"schema": SCHEMA, "key": key, **record}))

    def intact(self, key: str, record: Mapping[str, Any]) -> bool:
        """Whether the record's files are there at their full size; True for records of older
        versions, which do not list them."""
        for name, size in record.get("files", {}).items():
            try:
                if (self.artifacts(key) / name).stat().st_size != size:
                    return False
            except OSError:
                return False
        return True

    def read(self, kind: Kind, key: str) -> dict[str, Any] | None:
        """The record, or None if there is none or it is unreadable (then it is run again)."""
        return read_record(self.path(kind, key))


def read_record(path: Path | str) -> dict[str, Any] | None:
    """A record file of this or an older schema; None if missing, truncated or foreign."""
    try:
        with open(path, "rb", buffering=0) as file:
            record = json.loads(file.read())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(record, dict) or record.get("schema") not in range(1, SCHEMA + 1):
        return None
    return record
