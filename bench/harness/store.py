"""Records on disk: one JSON file per training and per attack, written whole or not at all.

DIR/run.json                  suite, command, versions, device
DIR/records/train/KEY.json    accuracy, cost, ledger, where the observations lie
DIR/records/attack/KEY.json   scores per victim, floors
DIR/artifacts/KEY/            observations and truth, or reconstructions (safetensors)
DIR/scratch/                  files of jobs that are under way

A published folder has DIR/run.json.gz, all records in DIR/records.jsonl.gz, and no artifacts.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, overload

from bench import records
from bench.errors import UserError
from bench.files import check_plain, no_link, sha256


def key_of(inputs: Mapping[str, Any]) -> str:
    """Hash of canonical inputs: equal inputs, equal key, whatever their order."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _to_disk(path.parent)


@contextmanager
def stage_folder(place: Path) -> Iterator[Path]:
    """A folder that becomes `place` by one rename; nothing is left of it where filling it fails.

    A folder that is there already is replaced.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    stage = _beside(place)
    stage.mkdir()
    try:
        yield stage
        old = stage.with_name(f"{stage.name}.old")
        if place.exists():
            os.replace(place, old)
        os.replace(stage, place)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _beside(path: Path) -> Path:
    """A name for what is to become `path`. What is made there is readable by whom the umask says,
    unlike the files of `tempfile`."""
    return path.with_name(f".{path.name}.{token_hex(4)}")


def _to_disk(path: Path) -> None:
    """A file's or folder's content outlives a power cut from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Store:
    """A result folder, or a published one, whose records lie in one file.

    Args:
        folder: Where it lies.
        run: The run that its records belong to: each is held against it when it is read.
    """

    def __init__(self, folder: Path, run: records.Run | None = None) -> None:
        self.folder = folder
        self._checked: set[records.Kind] = set()
        self._trained: tuple[str, records.TrainOutcome | None] = ("", None)
        self.hold(run)

    def hold(self, run: records.Run | None) -> None:
        """Hold records against this run from now on; None: against none."""
        self._devices = "" if run is None else run.device
        self._trainings = {t.key: t for t in run.trainings} if run else {}
        self._cells = {c.key: c for c in run.cells} if run else {}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make and hold the folder. Raises UserError where that cannot be, or another driver holds
        it."""
        place = no_link(self.folder, ".lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(place, flags, 0o666)
        except OSError as error:
            raise UserError(
                f"cannot write results to {self.folder} ({error.strerror or error})."
            ) from error
        with os.fdopen(handle, "r+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(
                    f"another leakbench run is writing to {self.folder}; wait for it or give "
                    "another --out."
                ) from error
            yield

    @property
    def names(self) -> set[tuple[records.Kind, str]]:
        """Kind and key of every record."""
        kinds: tuple[records.Kind, ...] = ("train", "attack")
        places = ((k, self.folder / "records" / k) for k in kinds)
        own = {(k, p.stem) for k, folder in places for p in folder.glob("*.json")}
        return own or set(self._archived)

    @cached_property
    def _archived(self) -> Mapping[tuple[records.Kind, str], Any]:
        """The records of published results; none of a run's own folder."""
        if (self.folder / "records").is_dir() or not (self.folder / records.ARCHIVE).is_file():
            return {}
        return records.unpack(self.folder / records.ARCHIVE)

    def artifacts(self, key: str) -> Path:
        """Return where a job's files lie. Raises UserError if that is a link."""
        return no_link(self.folder, "artifacts", key)

    def path(self, kind: records.Kind, key: str) -> Path:
        """Return where a record lies. Raises UserError if its folder is a link."""
        if kind not in self._checked:
            no_link(self.folder, "records", kind)
            self._checked.add(kind)
        return Path(f"{self.folder}/records/{kind}/{key}.json")  # joining takes 1.6x the time

    def scratch(self, key: str) -> Path:
        """Return where the job of that key leaves its files, until `keep` puts them in their place.
        Raises UserError if that is a link."""
        return no_link(self.folder, "scratch", key)

    def sweep(self) -> None:
        """Remove what jobs of a killed run left behind. Only while holding the folder."""
        shutil.rmtree(self.folder / "scratch", ignore_errors=True)

    def keep(self, kind: records.Kind, key: str, record: records.Record) -> None:
        """Put a finished job's files and its record in their places, the record last, with the
        sizes and hashes of the files. Raises OSError if that fails: then there is no record."""
        place = self.artifacts(key)
        self.path(kind, key).unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        record = self._with_files(key, replace(record, files={}, hashes={}))
        shutil.rmtree(self.scratch(key), ignore_errors=True)
        self.write(kind, key, record)

    def keep_scored(self, key: str, record: records.AttackOutcome) -> None:
        """As `keep`, of an attack that was scored: its files stay, the score's join them."""
        self.write("attack", key, self._with_files(key, record))

    def _with_files(self, key: str, record: records.Record) -> Any:
        """The record with the sizes and hashes of its job's files, which are put in their place; as
        it is where the job was not done."""
        if not isinstance(record, records.DoneRecord):
            return record
        scratch, place = self.scratch(key), self.artifacts(key)
        files, hashes = dict(record.files or {}), dict(record.hashes or {})
        if scratch.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            for path in sorted(scratch.iterdir()):
                files[path.name], hashes[path.name] = check_plain(path), sha256(path)
                _to_disk(path)
                os.replace(path, place / path.name)
            scratch.rmdir()
            _to_disk(place)
            _to_disk(place.parent)
        return replace(record, files=files, hashes=hashes)

    def write(self, kind: records.Kind, key: str, record: records.Record) -> None:
        """Write a record alone."""
        self._trained = "", None
        write_whole(self.path(kind, key), records.to_json(replace(record, key=key)))

    def damage(self, key: str, record: records.Record) -> str | None:
        """Return what `check_kept` says of all the record's files; None if nothing is wrong."""
        try:
            records.check_kept(self.artifacts(key), record)
        except UserError as error:
            return str(error)
        return None

    @overload
    def read(
        self, kind: Literal["train"], key: str, *, lenient: bool = False, unscored: bool = False
    ) -> records.TrainOutcome | None: ...
    @overload
    def read(
        self, kind: Literal["attack"], key: str, *, lenient: bool = False, unscored: bool = False
    ) -> records.AttackOutcome | None: ...
    def read(
        self, kind: records.Kind, key: str, *, lenient: bool = False, unscored: bool = False
    ) -> records.TrainOutcome | records.AttackOutcome | None:
        """The record of a training or attack, None if there is none.

        Args:
            kind: Of the record.
            key: Its name.
            lenient: Whether a file that is no record counts as none, so that its job is run again.
            unscored: Whether an attack's record that has no scores yet counts as one.

        Raises:
            UserError: For a file that is no record, or one that contradicts its run.
        """
        try:
            record = self._read(kind, key)
        except UserError:
            if lenient:
                return None
            raise
        waits = isinstance(record, records.AttackRecord) and not record.is_scored
        return None if waits and not unscored else record

    def _read(self, kind: records.Kind, key: str) -> Any:
        try:
            record: Any = records.read_outcome(self.path(kind, key), kind)
        except FileNotFoundError:
            record = self._archived.get((kind, key))
        if record is None:
            return None
        if kind == "train" and key in self._trainings:
            records.check_training(record, self._trainings[key], self._devices)
            self._trained = key, record
        elif kind == "attack" and (cell := self._cells.get(key)):
            if self._trained[0] != cell.train_key:
                self._trained = cell.train_key, self._read("train", cell.train_key)
            records.check_attack(record, cell, self._trained[1], self._devices)
        return record
