"""How the records of a result folder are read, from JSON files or from the packed file of a
published one, and how the files of jobs are checked."""

import gzip
import json
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from pydantic import TypeAdapter, ValidationError

from bench.errors import UserError, problem
from bench.files import MOST_BYTES, check_plain, read_bytes, read_gzip, sha256
from bench.protocols.settings import RECORDED
from bench.records.outcomes import (
    AttackOutcome,
    AttackRecord,
    Kind,
    NoResult,
    Record,
    TrainOutcome,
    TrainRecord,
)
from bench.records.text import sound_text, to_line

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


RECONSTRUCTION = "reconstruction.safetensors"
"""Among what an attack that rebuilds samples left: `images` and `truth` [V, K, ...]."""
T = TypeVar("T")


def read_json(path: Path | str, *, most: int = MOST_BYTES, links: bool = False) -> Any:
    """The value of a JSON file, its texts as UTF-8 can hold them; most, links: see `read_bytes`.
    A file whose name ends in .gz is unpacked.

    Raises:
        FileNotFoundError: If there is none.
        UserError: If it cannot be read or is no JSON.
    """
    packed = str(path).endswith(".gz")
    content = read_gzip(path) if packed else read_bytes(path, most=most, links=links)
    try:
        return _sound(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no readable JSON ({error}).") from error


def _sound(value: Any) -> Any:
    """The value without halves of characters, which no file can be written with."""
    if isinstance(value, str):
        return value if value.isascii() else sound_text(value)
    if isinstance(value, dict):
        return {_sound(k): _sound(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_sound(v) for v in value]
    return value


@cache
def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check_value(kind: type[T], value: Any, place: Path | str, *, context: Any = None) -> T:
    """A value of `read_json` as a type; `context` is for its validators.

    Raises UserError naming the place and the first thing that is wrong there.
    """
    try:
        return _adapter_of(kind).validate_python(value, context=context)  # type: ignore[arg-type]
    except ValidationError as error:
        raise UserError(f"{place}: {problem(error)}") from error
    except (OverflowError, RecursionError) as error:
        raise UserError(f"{place} holds a value that is out of range ({error}).") from error


def read_toml(path: Path, kind: type[T]) -> T:
    """The value of a TOML file as a type. Raises UserError if it cannot be read or is no such."""
    try:
        value = tomllib.loads(read_bytes(path).decode())
    except ValueError as error:
        raise UserError(f"{path} is no readable TOML ({error}).") from error
    return check_value(kind, value, path)


@overload
def read_outcome(path: Path | str, kind: Literal["train"]) -> TrainOutcome: ...
@overload
def read_outcome(path: Path | str, kind: Literal["attack"]) -> AttackOutcome: ...
def read_outcome(path: Path | str, kind: Kind) -> TrainOutcome | AttackOutcome:
    """The record in a file of this or an older version.

    Raises:
        FileNotFoundError: If there is none.
        UserError: If it is no such record.
    """
    return outcome_of_json(read_json(path), kind, path)


def outcome_of_json(value: Any, kind: Kind, place: Path | str) -> TrainOutcome | AttackOutcome:
    """Return the record that a JSON value stands for. Raises UserError, naming the place, if
    none."""
    if not isinstance(value, dict) or "status" not in value:
        raise UserError(f"{place} is no record of leakbench.")
    done: Any = TrainRecord if kind == "train" else AttackRecord
    made = done if value["status"] == "done" else NoResult
    return check_value(made, value, place, context=RECORDED)


def check_kept(folder: Path, record: Record, begins: str = "") -> None:
    """Check a job's files whose names begin with `begins` in its artifact folder: they exist, are
    plain, and match the record.

    Records of older versions list no files or no hashes; these are then not compared.

    Raises:
        UserError: Naming the first file that is not what was written.
    """
    sizes, hashes = record.files or {}, record.hashes or {}
    there = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    for name in sorted(n for n in there | sizes.keys() if n.startswith(begins)):
        path = folder / name
        try:
            size = check_plain(path)
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing, which its record lists.") from error
        if size != sizes.get(name, size):
            raise UserError(
                f"{path} has {size:,} bytes, but its record lists {sizes[name]:,}: it was changed."
            )
        if name in hashes and sha256(path) != hashes[name]:
            raise UserError(f"{path} is not the file whose hash its record lists: it was changed.")
