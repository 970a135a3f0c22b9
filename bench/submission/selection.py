"""Which trainings and cells of a recorded run belong to a submission."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from bench.errors import UserError
from bench.harness.keys import Keys
from bench.harness.plan import AttackCell, Plan, TrainJob, expand
from bench.harness.store import to_json
from bench.registry import Registry
from bench.suite import Suite

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A training of a run.json with its job, and its cells with theirs."""

    entry: Entry
    job: TrainJob
    cells: Sequence[tuple[Entry, AttackCell]]


def recorded(run: Mapping[str, Any]) -> tuple[Suite, list[Recorded]]:
    """The run's suite and its trainings as jobs. Raises UserError if run.json does not fit its
    own suite."""
    try:
        suite = Suite.model_validate(run["suite"])
        plan = expand(suite)
        entries = [(_inputs(t), t) for t in run["trainings"]]
    except (KeyError, TypeError, ValidationError) as error:
        raise UserError(f"run.json does not describe a run of leakbench ({error}).") from error
    jobs = {_text(job.inputs()): job for job in plan.trainings}
    found = []
    for inputs, entry in entries:
        job = jobs.get(_text(inputs))
        if job is None:
            raise UserError(
                f"run.json has a training of '{entry.get('defense')}' that its suite does not "
                "name; run the suite again."
            )
        found.append(Recorded(entry=entry, job=job, cells=_cells(entry, job, plan)))
    return suite, found


def _inputs(entry: Entry) -> Entry:
    return {k: v for k, v in entry.items() if k not in ("key", "cells")}


def _text(inputs: Mapping[str, Any]) -> str:
    return json.dumps(json.loads(to_json(inputs)), sort_keys=True)


def _cells(entry: Entry, job: TrainJob, plan: Plan) -> list[tuple[Entry, AttackCell]]:
    mine = {
        (c.label, c.checkpoint, c.threat.name): c for c in plan.cells if c.train is job
    }  # fmt: skip
    pairs = []
    for cell in entry["cells"]:
        place = (cell["label"], cell["checkpoint"], cell["threat"])
        if place not in mine:
            raise UserError(f"run.json has a cell {' '.join(place)} that its suite does not name.")
        pairs.append((cell, mine[place]))
    return pairs


def table_of(recorded: Recorded) -> str:
    """Trainings with one text stand in the same tables."""
    return _text({k: recorded.entry[k] for k in ("task", "protocol", "seed")})


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What of a run is submitted. own: trainings of the defense, or all that the attack ran on;
    reference: undefended ones of the same tables."""

    own: Sequence[Recorded]
    reference: Sequence[Recorded]

    def all(self) -> list[Recorded]:
        return [*self.own, *(r for r in self.reference if r not in self.own)]


def choose(trainings: Sequence[Recorded], kind: str, name: str, registry: Registry) -> Choice:
    """The trainings of a defense, or with cells of an attack, and the undefended ones beside them.
    What ran under a defense from a file that is not given is none of an attack's submission.

    Raises UserError if the run lacks either, or names an attack whose file is not given.
    """
    trainings = [t for t in trainings if _is_known(t, registry)]
    if kind == "defense":
        own = [t for t in trainings if t.job.defense == name]
    else:
        own = [t for t in trainings if any(c.attack == name for _, c in t.cells)]
    if not own:
        raise UserError(
            f"the run has no row of {kind} '{name}'; run a suite that names it, with --plugin FILE."
        )
    plain = [
        t for t in trainings
        if registry.defense(t.job.defense, t.job.settings).is_reference
    ]  # fmt: skip
    tables = {table_of(t) for t in plain}
    for training in own:
        if table_of(training) not in tables:
            raise UserError(
                f"the run has no undefended row (defense 'none') for {training.job.task.dataset}/"
                f"{training.job.task.model}, seed {training.job.seed}, to compare '{name}' with."
            )
    mine = {table_of(t) for t in own}
    choice = Choice(own=own, reference=[t for t in plain if table_of(t) in mine])
    for attack in {c.attack: None for t in choice.all() for _, c in t.cells}:
        if ("attack", attack) not in registry.usable:
            raise UserError(f"the run has the attack '{attack}'; give its file by --attack FILE.")
    return choice


def _is_known(training: Recorded, registry: Registry) -> bool:
    return all(("defense", part) in registry.usable for part in training.job.defense.split("+"))


def check_unchanged(choice: Choice, keys: Keys, name: str, kind: str) -> None:
    """Raises UserError if a record was made by other source than is here now."""
    for training in choice.reference:
        if training in choice.own and kind == "defense":
            continue
        if keys.train(training.job) != training.entry["key"]:
            raise UserError(
                "leakbench itself, its device or its data set's files are not those of the run; "
                "run the suite again with this version."
            )
    for training in choice.own:
        if keys.train(training.job) != training.entry["key"]:
            raise UserError(
                f"the source of '{training.job.defense}' has changed since the run; run the suite "
                "again."
            )
        for entry, cell in training.cells:
            if keys.attack(cell) != entry["key"]:
                raise UserError(
                    f"the source of '{cell.attack}' has changed since the run; run the suite again."
                )
