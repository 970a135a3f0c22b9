"""Records read from their files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal, overload

from pydantic import TypeAdapter, ValidationError

from bench.errors import UserError
from bench.records.files import checked, read_bytes, read_json
from bench.records.outcomes import (
    AttackOutcome,
    AttackRecord,
    Kind,
    NoResult,
    TrainOutcome,
    TrainRecord,
)


@cache
def _adapter(kind: Kind, done: bool) -> TypeAdapter[Any]:
    return TypeAdapter((TrainRecord if kind == "train" else AttackRecord) if done else NoResult)


@overload
def read_outcome(path: Path | str, kind: Literal["train"]) -> TrainOutcome: ...
@overload
def read_outcome(path: Path | str, kind: Literal["attack"]) -> AttackOutcome: ...
def read_outcome(path: Path | str, kind: Kind) -> TrainOutcome | AttackOutcome:
    """The record in a file of this or an older version.

    Args:
        path: The file.
        kind: Of its job.

    Raises:
        FileNotFoundError: If there is none.
        UserError: If it is no such record.
    """
    content = read_bytes(path)
    found: TrainOutcome | AttackOutcome
    for done in (True, False):
        try:
            found = _adapter(kind, done).validate_json(content)
        except ValidationError:
            continue
        return found
    value = read_json(path)  # also holds what the quick way cannot: halves of characters
    if not isinstance(value, dict) or "status" not in value:
        raise UserError(f"{path} is no record of leakbench.")
    adapter: TypeAdapter[TrainOutcome | AttackOutcome] = _adapter(kind, value["status"] == "done")
    return checked(adapter, value, path)
