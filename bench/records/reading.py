"""Records read from their files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast, overload

from pydantic import Field, TypeAdapter, ValidationError

from bench.errors import UserError
from bench.records.files import checked, read_bytes, read_json
from bench.records.outcomes import AttackOutcome, Kind, TrainOutcome


@cache
def _adapter(kind: Kind) -> TypeAdapter[Any]:
    by_status = Field(discriminator="status")
    if kind == "train":
        return TypeAdapter(Annotated[TrainOutcome, by_status])
    return TypeAdapter(Annotated[AttackOutcome, by_status])


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
    try:
        return cast(TrainOutcome | AttackOutcome, _adapter(kind).validate_json(read_bytes(path)))
    except ValidationError:
        value = read_json(path)  # also holds what the quick way cannot: halves of characters
    if not isinstance(value, dict) or "status" not in value:
        raise UserError(f"{path} is no record of leakbench.")
    return cast(TrainOutcome | AttackOutcome, checked(_adapter(kind), value, path))
