"""Which trainings and cells of a recorded run belong to a submission."""

from __future__ import annotations

from collections.abc import Sequence

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


def choose(
    run: Run, kind: str, name: str, registry: Registry
) -> tuple[list[PlannedTraining], list[PlannedTraining]]:
    """The trainings of a defense, or with cells of an attack, and the undefended ones of the same
    tables.

    What ran under a defense from a file that is not given is none of an attack's submission.

    Raises:
        UserError: If the run lacks either, or names an attack whose file is not given.
    """
    usable = registry.usable
    trainings = [
        t
        for t in run.trainings
        if all(("defense", part) in usable for part in t.job.defense.split("+"))
    ]
    own = [
        t
        for t in trainings
        if (t.job.defense == name if kind == "defense" else any(c.attack == name for c in t.cells))
    ]
    if not own:
        raise UserError(
            f"the run has no row of {kind} '{name}'; run a suite that names it, with --plugin FILE."
        )
    plain = [t for t in trainings if registry.defense(t.job.defense, t.job.settings).is_reference]
    tables, mine = ({table_of(t) for t in these} for these in (plain, own))
    for training in own:
        if table_of(training) not in tables:
            raise UserError(
                f"the run has no undefended row (defense 'none') for {training.job.task.dataset}/"
                f"{training.job.task.model}, seed {training.job.seed}, to compare '{name}' with."
            )
    reference = [t for t in plain if table_of(t) in mine]
    for attack in {c.attack: None for t in (*own, *reference) for c in t.cells}:
        if ("attack", attack) not in usable:
            raise UserError(f"the run has the attack '{attack}'; give its file by --attack FILE.")
    return own, reference


def check_unchanged(
    own: Sequence[PlannedTraining], reference: Sequence[PlannedTraining], keys: Keys, kind: str
) -> None:
    """Raises UserError if a record was made by other source than is here now."""
    for training in [t for t in reference if kind == "attack" or t not in own]:
        if keys.train(training.job) != training.key:
            raise UserError(
                "leakbench itself, its device or its data set's files are not those of the run; "
                "run the suite again with this version."
            )
    changed = "the source of '{}' has changed since the run; run the suite again."
    for training in own:
        if keys.train(training.job) != training.key:
            raise UserError(changed.format(training.job.defense))
        for cell in training.cells:
            if keys.attack(cell.job) != cell.key:
                raise UserError(changed.format(cell.attack))
