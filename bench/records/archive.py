"""All records of a run in one compressed file, small enough to be published.

A line of JSON per record, {"kind": ..., "record": ...}, in the order of the run.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.files import read_gzip
from bench.records.files import outcome_of_json
from bench.records.outcomes import AttackOutcome, Kind, TrainOutcome
from bench.records.text import to_line

ARCHIVE = "records.jsonl.gz"
Outcome = TrainOutcome | AttackOutcome


def pack(records: Iterable[tuple[Kind, Outcome]]) -> bytes:
    """Return the file's content: equal records give equal bytes."""
    lines = "".join(to_line({"kind": kind, "record": r}) + "\n" for kind, r in records)
    return gzip.compress(lines.encode(), mtime=0)


def unpack(path: Path) -> dict[tuple[Kind, str], Outcome]:
    """Return the records of an archive by kind and key.

    Raises:
        FileNotFoundError: If there is none.
        UserError: If it is no such file, holds a record twice, or would fill the memory.
    """
    records: dict[tuple[Kind, str], Outcome] = {}
    for line in read_gzip(path).splitlines():
        name, record = _record(line, path)
        if name in records:
            raise UserError(f"{path} holds the {name[0]} record {name[1]} twice.")
        records[name] = record
    return records


def _record(line: bytes, path: Path) -> tuple[tuple[Kind, str], Outcome]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path} has a line that is no JSON ({error}).") from error
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if kind not in ("train", "attack"):
        raise UserError(f"{path} has a line that is no record of leakbench.")
    record = outcome_of_json(value.get("record"), kind, path)
    return (kind, record.key), record
