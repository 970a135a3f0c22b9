"""Which trainings and cells of a recorded run belong to a submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.errors import UserError
from bench.harness.keys import Keys
from bench.harness.plan import expand
from bench.records import RUN, Job, PlannedTraining, Run, canonical
from bench.registry import Registry


def check_suite(run: Run) -> None:
    """Raises UserError if a run has a training that its own suite does not name."""
    plan = expand(run.suite)
    jobs: set[Job] = {*plan.trainings, *plan.cells}
    for training in run.trainings:
        if training.job not in jobs:
            raise UserError(
                f"{RUN} has a training of '{training.job.defense}' that its suite does not name; "
                "run the suite again."
            )
        for cell in training.cells:
            if cell.job not in jobs:
                raise UserError(
                    f"{RUN} has a cell {cell.label} {cell.checkpoint} {cell.threat} that its "
                    "suite does not name."
                )


def table_of(training: PlannedTraining) -> str:
    """Trainings with one text stand in the same tables."""
    job = training.job
    return canonical([job.task.model_dump(exclude={"protocol"}), job.protocol, job.seed])


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What of a run is submitted.

    Attributes:
        own: Trainings of the defense, or all that the attack ran on.
        reference: Undefended ones of the same tables.
    """

    own: Sequence[PlannedTraining]
    reference: Sequence[PlannedTraining]

    def all(self) -> list[PlannedTraining]:
        return [*self.own, *(r for r in self.reference if r not in self.own)]


def choose(run: Run, kind: str, name: str, registry: Registry) -> Choice:
    """The trainings of a defense, or with cells of an attack, and the undefended ones beside them.

    What ran under a defense from a file that is not given is none of an attack's submission.

    Raises:
        UserError: If the run lacks either, or names an attack whose file is not given.
    """
    trainings = [t for t in run.trainings if _is_known(t, registry)]
    if kind == "defense":
        own = [t for t in trainings if t.job.defense == name]
    else:
        own = [t for t in trainings if any(c.attack == name for c in t.cells)]
    if not own:
        raise UserError(
            f"the run has no row of {kind} '{name}'; run a suite that names it, with --plugin FILE."
        )
    plain = [t for t in trainings if registry.defense(t.job.defense, t.job.settings).is_reference]
    tables = {table_of(t) for t in plain}
    for training in own:
        if table_of(training) not in tables:
            raise UserError(
                f"the run has no undefended row (defense 'none') for {training.job.task.dataset}/"
                f"{training.job.task.model}, seed {training.job.seed}, to compare '{name}' with."
            )
    mine = {table_of(t) for t in own}
    choice = Choice(own=own, reference=[t for t in plain if table_of(t) in mine])
    for attack in {c.attack: None for t in choice.all() for c in t.cells}:
        if ("attack", attack) not in registry.usable:
            raise UserError(f"the run has the attack '{attack}'; give its file by --attack FILE.")
    return choice


def _is_known(training: PlannedTraining, registry: Registry) -> bool:
    return all(("defense", part) in registry.usable for part in training.job.defense.split("+"))


def check_unchanged(choice: Choice, keys: Keys, kind: str) -> None:
    """Raises UserError if a record was made by other source than is here now."""
    for training in [t for t in choice.reference if kind == "attack" or t not in choice.own]:
        if keys.train(training.job) != training.key:
            raise UserError(
                "leakbench itself, its device or its data set's files are not those of the run; "
                "run the suite again with this version."
            )
    changed = "the source of '{}' has changed since the run; run the suite again."
    for training in choice.own:
        if keys.train(training.job) != training.key:
            raise UserError(changed.format(training.job.defense))
        for cell in training.cells:
            if keys.attack(cell.job) != cell.key:
                raise UserError(changed.format(cell.attack))
