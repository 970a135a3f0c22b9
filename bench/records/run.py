"""A run: what run.json says was planned, how it was made, and which records belong to it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from bench.errors import UserError
from bench.protocols.settings import RECORDED, Checkpoint
from bench.records.files import check_value, read_json
from bench.records.jobs import AttackJob, TrainJob, canonical
from bench.records.outcomes import Kind
from bench.suite import AttackSettings, Suite, changes

SCHEMA: Literal[1] = 1
"""Of run.json and of records."""
RUN = "run.json"
PACKED_RUN = "run.json.gz"
"""In published folders."""
RUN_FILES = (RUN, PACKED_RUN)
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{24}$")]
"""Names a record, and so becomes a file's name."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """An attack of a run: its record's key, and what it is.

    Attributes:
        key: Of its record.
        train_key: Of its training's record.
        job: The attack, with its training.
    """

    key: str
    train_key: str
    job: AttackJob

    protocol = property(attrgetter("job.train.protocol.name"))
    dataset = property(attrgetter("job.train.task.dataset"))
    model = property(attrgetter("job.train.task.model"))
    defense = property(attrgetter("job.train.defense"))
    setting = property(attrgetter("job.train.setting"))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The defense's."""
        return self.job.train.settings

    @property
    def seed(self) -> int:
        return self.job.train.seed

    @property
    def attack(self) -> str:
        return self.job.attack

    @property
    def label(self) -> str:
        return self.job.label

    @property
    def checkpoint(self) -> Checkpoint:
        return self.job.checkpoint

    @property
    def threat(self) -> str:
        return self.job.threat.name

    @property
    def name(self) -> str:
        """digits/lenet/spm(epsilon=1.5)/dlg/final, unique up to protocol and seed."""
        return self.job.name

    @property
    def words(self) -> frozenset[str]:
        """Whatever a reader may call it by."""
        where = (self.protocol, self.dataset, self.model, self.defense, self.setting)
        what = (self.label, self.attack, self.checkpoint, self.threat, f"seed={self.seed}")
        return frozenset(where + what)


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """A training of a run: its record's key, what it is, and the attacks on it."""

    key: str
    job: TrainJob
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class CellEntry:
    """An attack as run.json lists it; its settings and budget stand in the suite."""

    key: Key
    label: str
    attack: str
    checkpoint: Checkpoint
    threat: str


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingEntry(TrainJob):
    """A training as run.json lists it: its inputs, its key, and the attacks on it."""

    key: Key
    cells: tuple[CellEntry, ...]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """How a run was made.

    Attributes:
        suite: What was asked for.
        command: How to make it again.
        commands: Those of merged parts; empty without them.
        device: Where it ran: cpu, cuda, or both of merged parts.
        versions: Of the packages that move numbers.
        plugins: Files of defenses and attacks.
        code: Hashes of the source that decides numbers, by what it belongs to.
    """

    suite: Suite
    command: str = ""
    commands: tuple[str, ...] = ()
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """The same by name, without the trainings."""
        return {f.name: getattr(self, f.name) for f in fields(RunFacts)}


@dataclass(frozen=True, kw_only=True)
class RunFile(RunFacts):
    """run.json as it stands in the file."""

    trainings: tuple[TrainingEntry, ...]
    schema: Literal[1] = SCHEMA


@dataclass(frozen=True, kw_only=True)
class Run(RunFacts):
    """A run of a suite, of a part of one, or of parts that were merged: its trainings, with keys,
    in the plan's order."""

    trainings: tuple[PlannedTraining, ...]

    @property
    def cells(self) -> list[Cell]:
        """All attacks, in their order."""
        return [c for t in self.trainings for c in t.cells]

    @property
    def record_names(self) -> list[tuple[Kind, str]]:
        """Kind and key of every record that belongs to the run."""
        trainings: list[tuple[Kind, str]] = [("train", t.key) for t in self.trainings]
        return trainings + [("attack", c.key) for c in self.cells]

    @property
    def seeds(self) -> list[int]:
        """Those of the trainings: a part of a suite may have fewer than the suite."""
        return sorted({t.job.seed for t in self.trainings}) or list(self.suite.seeds)

    @property
    def label(self) -> str:
        """quick v5."""
        return f"{self.suite.name} v{self.suite.version}"

    @property
    def title(self) -> str:
        """The label; of a suite that is not what ships by that name and version with the keys that
        differ: quick v5 (changed: seeds)."""
        differing = ", ".join(changes(self.suite))
        return f"{self.label} (changed: {differing})" if differing else self.label

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The run of a result folder.

        Raises UserError if it is none, or its run.json is no run of its own suite.
        """
        place = next((folder / n for n in RUN_FILES if (folder / n).exists()), folder / RUN)
        try:
            return cls.of(read_json(place), place)
        except FileNotFoundError as error:
            raise UserError(f"{folder} is no result folder of leakbench (no {RUN}).") from error

    @classmethod
    def of(cls, value: Any, place: Path) -> Self:
        """Return the run that a run.json describes; `place` is the file, for errors.

        Raises UserError if that is no run, or not one of its own suite.
        """
        if isinstance(value, dict) and not {"suite", "trainings"} <= value.keys():
            raise UserError(f"{place} must hold a suite and its trainings.")
        file = check_value(RunFile, value, place, context=RECORDED)
        return cls(trainings=_drop_repeats(_plan_trainings(file, place), place), **file.facts())

    def to_json_value(self) -> dict[str, Any]:
        """As run.json holds it."""
        facts = self.facts()
        if not self.commands:
            del facts["commands"]
        names = [f.name for f in fields(CellEntry)]
        trainings = [
            {"key": t.key, **t.job.inputs()}
            | {"cells": [{name: getattr(cell, name) for name in names} for cell in t.cells]}
            for t in self.trainings
        ]
        return {"schema": SCHEMA, **facts, "trainings": trainings}


def _plan_trainings(file: RunFile, place: Path) -> Iterable[PlannedTraining]:
    known = labels(file.suite)
    for entry in file.trainings:
        job = TrainJob(**{f.name: getattr(entry, f.name) for f in fields(TrainJob)})
        threats = {t.name for t in job.threats}
        cells = []
        for cell in entry.cells:
            attack = known.get(cell.label)
            threat = attack and (attack.threat or file.suite.threats[0].name)
            if attack is None or threat != cell.threat or cell.threat not in threats:
                raise UserError(
                    f"{place} has a cell {cell.label} {cell.checkpoint} {cell.threat} that its "
                    "suite does not name."
                )
            inputs = attack_job(job, file.suite, known, cell.label, cell.checkpoint)
            cells.append(Cell(key=cell.key, train_key=entry.key, job=inputs))
        yield PlannedTraining(key=entry.key, job=job, cells=tuple(dict.fromkeys(cells)))


def _drop_repeats(trainings: Iterable[PlannedTraining], place: Path) -> tuple[PlannedTraining, ...]:
    """Drop trainings that are listed again, which would count victims twice.

    Raises UserError if two records are of one training or attack, or two of these have one record.
    """
    once = tuple(dict.fromkeys(trainings))
    keys: set[str] = set()
    takers: set[tuple[str, ...]] = set()

    def give(key: str, name: str, *taker: str) -> None:
        if key in keys:
            raise UserError(f"{place} gives {name} the record {key}, which is another's too.")
        if taker in takers:
            raise UserError(f"{place} gives {name} a second record, {key}.")
        keys.add(key)
        takers.add(taker)

    for training in once:
        facts = training.job.inputs()
        telling = ("task", "protocol", "defense", "settings", "seed")
        taker = canonical({k: facts[k] for k in telling})
        give(training.key, training.job.name, taker)
        for cell in training.cells:
            give(cell.key, f"{cell.name}/seed={cell.seed}", taker, cell.label, cell.checkpoint)
    return once


def labels(suite: Suite) -> dict[str, AttackSettings]:
    """A suite's attacks by their columns: the name, with the threat where a name is there twice."""
    first = suite.threats[0].name
    names = [a.name for a in suite.attacks]
    return {
        a.name if names.count(a.name) == 1 else f"{a.name}@{a.threat or first}": a
        for a in suite.attacks
    }


def attack_job(
    train: TrainJob,
    suite: Suite,
    known: Mapping[str, AttackSettings],
    label: str,
    checkpoint: Checkpoint,
) -> AttackJob:
    """The attack that a suite makes of its column `label`; `known` are all its `labels`."""
    attack = known[label]
    first = suite.threats[0].name
    threat = attack.threat or first
    after = [
        attack_job(train, suite, known, name, checkpoint)
        for name, entry in known.items()
        if entry.name in attack.after and (entry.threat or first) == threat
    ]
    return AttackJob(
        train=train,
        attack=attack.name,
        label=label,
        settings=attack.settings,
        after=tuple(after),
        threat=train.threat(threat),
        checkpoint=checkpoint,
        budget=suite.budget if attack.budget is None else attack.budget,
    )
