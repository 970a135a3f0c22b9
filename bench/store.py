"""Records on disk: one JSON file per training and per attack cell, written whole or not at all.

DIR/run.json                  suite, command, versions, device
DIR/records/train/KEY.json    accuracy, cost, ledger, where the observations lie
DIR/records/attack/KEY.json   scores per victim, floors
DIR/artifacts/KEY/            observations and truth, or reconstructions (safetensors)
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

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
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def to_json(value: Any) -> str:
    """Strict JSON: infinities and NaN become the strings "inf", "-inf" and "nan"."""
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


class Store:
    """A result folder. Raises ValueError if it cannot be written."""

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
            raise ValueError(
                f"cannot write results to {self.folder} ({error.strerror or error})."
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder: a second driver on it is refused with ValueError."""
        with (self.folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(
                    f"another leakbench run is writing to {self.folder}; wait for it or give "
                    "another --out."
                ) from error
            yield

    def artifacts(self, key: str) -> Path:
        return self.folder / "artifacts" / key

    def path(self, kind: Kind, key: str) -> Path:
        return self.folder / "records" / kind / f"{key}.json"

    def write(self, kind: Kind, key: str, record: Mapping[str, Any]) -> None:
        write_whole(self.path(kind, key), to_json({"schema": SCHEMA, "key": key, **record}))

    def read(self, kind: Kind, key: str) -> dict[str, Any] | None:
        """The record, or None if there is none or it is unreadable (then it is run again)."""
        return read_record(self.path(kind, key))


def read_record(path: Path) -> dict[str, Any] | None:
    """A record file of this or an older schema; None if missing, truncated or foreign."""
    try:
        record = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(record, dict) or record.get("schema") not in range(1, SCHEMA + 1):
        return None
    return record
