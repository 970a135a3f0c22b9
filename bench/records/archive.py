"""All records of a run in one compressed file, small enough to be published beside its leaderboard.

A line of JSON per record, {"kind": ..., "record": ...}, in the order of the run.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.files import MOST_BYTES, read_bytes, sha256
from bench.records.files import outcome_of_json
from bench.records.outcomes import AttackOutcome, Kind, TrainOutcome
from bench.records.text import to_line

ARCHIVE = "records.jsonl.gz"
SUMS = "SHA256SUMS"
"""Lists the hashes of a published folder's files, as `sha256sum --check` reads them."""
Outcome = TrainOutcome | AttackOutcome


def packed(records: Iterable[tuple[Kind, Outcome]]) -> bytes:
    """The file's content: equal records give equal bytes."""
    lines = "".join(to_line({"kind": kind, "record": r}) + "\n" for kind, r in records)
    return gzip.compress(lines.encode(), mtime=0)


def sums(files: Mapping[str, bytes]) -> str:
    """The text of `SUMS` for files by name."""
    return "".join(f"{hashlib.sha256(c).hexdigest()}  {n}\n" for n, c in sorted(files.items()))


def check_sum(folder: Path, name: str) -> bool:
    """Whether a folder's `SUMS` lists a file. Raises UserError if the file is another."""
    try:
        lines = read_bytes(folder / SUMS).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return False
    listed = {n: found for found, _, n in (line.partition("  ") for line in lines)}
    if name in listed and listed[name] != sha256(folder / name):
        raise UserError(f"{folder / name} is not the file that {SUMS} lists: it was changed.")
    return name in listed


def unpacked(path: Path) -> dict[tuple[Kind, str], Outcome]:
    """The records of such a file by kind and key.

    Raises:
        FileNotFoundError: If there is none.
        UserError: If it is no such file, holds a record twice, or would fill the memory.
    """
    records: dict[tuple[Kind, str], Outcome] = {}
    for line in _lines(path):
        name, record = _record(line, path)
        if name in records:
            raise UserError(f"{path} holds the {name[0]} record {name[1]} twice.")
        records[name] = record
    return records


def _lines(path: Path) -> list[bytes]:
    try:
        with gzip.open(BytesIO(read_bytes(path))) as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise UserError(f"{path} is no readable gzip file ({error}).") from error
    if len(content) > MOST_BYTES:
        raise UserError(f"{path} holds more than the {MOST_BYTES:,} bytes that it may.")
    return content.splitlines()


def _record(line: bytes, path: Path) -> tuple[tuple[Kind, str], Outcome]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path} has a line that is no JSON ({error}).") from error
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if kind not in ("train", "attack"):
        raise UserError(f"{path} has a line that is no record of leakbench.")
    found = outcome_of_json(value.get("record"), kind, path)
    return (kind, found.key), found
