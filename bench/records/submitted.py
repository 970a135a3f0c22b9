"""What a submission says of itself, and what `leakbench verify` found of a folder."""

import hashlib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bench.errors import UserError
from bench.files import sha256
from bench.names import FileName, count_of
from bench.records.files import ARCHIVE, check_value, read_json
from bench.records.run import RUN_FILES

SCHEMA = 1
MANIFEST, SUBMISSION = "manifest.json", "submission.json"
_DECIDING = (*RUN_FILES, ARCHIVE, MANIFEST, "source/*", "records/*/*.json")
_STRICT = ConfigDict(extra="forbid", frozen=True)
_DAY = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
_MOST_BYTES = 64 * 2**20
"""Of one file: records and sources are small."""


class PluginSource(BaseModel):
    """A plugin that the run needs.

    Attributes:
        kind: Defense or attack.
        name: Its registered name.
        file: Its copy in the folder; None for one that an installed package brings, which must
            then be installed where it is rerun.
        origin: Where it came from.
        sources: Hash of its source.
    """

    model_config = _STRICT

    kind: Literal["defense", "attack"]
    name: str
    file: str | None
    origin: str
    sources: str


class Submission(BaseModel):
    """What is submitted, by whom, and how it was made."""

    model_config = _STRICT

    schema_: int = Field(alias="schema", ge=1, le=SCHEMA)
    kind: Literal["defense", "attack"]
    name: FileName = Field(pattern=r"^[a-z][a-z0-9_+]{0,63}$")
    author: str
    date: str = Field(pattern=_DAY)
    leakbench: str
    command: str
    settings: list[dict[str, Any]]
    plugins: list[PluginSource] = Field(min_length=1)
    failed_cells: list[str]
    environment: dict[str, str]


class Verified(BaseModel):
    """What `leakbench verify --json` tells of a rerun. Reviewers keep it beside the folder.

    Attributes:
        digest: Of the folder, see `digest_of`.
        date: Of the rerun.
        cells: How many were run again.
        seed: That they were drawn with.
        passed: Whether figures were compared, none differed, and the rerun came to its end.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    digest: str
    date: str = Field(pattern=_DAY)
    cells: int = Field(ge=1)
    seed: int
    passed: bool


def read_file(path: Path) -> Any:
    """A JSON file of a submission. Raises UserError if it is missing, too large or no JSON."""
    try:
        return read_json(path, most=_MOST_BYTES)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing.") from error


def is_submission(folder: Path) -> bool:
    """Return whether a folder says that it is one, by either of its own files."""
    return any((folder / name).exists() for name in (MANIFEST, SUBMISSION))


def read_submission(folder: Path) -> Submission:
    """Read the submission. Raises UserError naming the key that is wrong."""
    path = folder / SUBMISSION
    return check_value(Submission, read_file(path), path)


def digest_of(folder: Path) -> str:
    """SHA-256 over the files that decide what a result folder or submission shows."""
    files = sorted(p for name in _DECIDING for p in folder.glob(name))
    lines = (f"{p.relative_to(folder).as_posix()} {sha256(p)}\n" for p in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def verification_path(folder: Path) -> Path:
    """Return where reviewers keep what `leakbench verify --json` printed: beside the folder, in
    which a submission may hold only its author's files."""
    return folder.with_name(f"{folder.name}.verified.json")


def read_verified(folder: Path) -> Verified | None:
    """Return the passed rerun of a folder whose files have not changed since; None if there is
    none.

    Raises UserError for a file that is none.
    """
    path = verification_path(folder)
    if not path.is_file():
        return None
    verified = check_value(Verified, read_file(path), path)
    return verified if verified.passed and verified.digest == digest_of(folder) else None


def standing(verified: Verified | None) -> str:
    """Return, in a sentence, whether anybody made a folder's figures again."""
    if verified is None:
        return "Unverified: nobody made these figures again by a rerun, as leakbench verify does."
    return (
        f"Verified on {verified.date}: {count_of(verified.cells, 'drawn cell')} came out so again "
        "by leakbench verify."
    )
