"""Records held against what run.json says was run, and against each other."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from math import isnan
from pathlib import Path

from bench.errors import UserError
from bench.metrics.named import FLOOR_SUFFIX, range_of
from bench.records.jobs import AttackJob, TrainJob
from bench.records.outcomes import (
    AttackInputs,
    AttackOutcome,
    AttackRecord,
    TrainOutcome,
    TrainRecord,
)
from bench.records.run import Cell, PlannedTraining


def check_record(
    record: TrainOutcome | AttackOutcome, planned: PlannedTraining | Cell, place: Path
) -> None:
    """Check that a record is of the job that run.json names, with figures that can be.

    Args:
        record: As it was read.
        planned: What run.json says of its key.
        place: Where it lies, for errors.

    Raises:
        UserError: Naming the first contradiction.
    """
    name = planned.job.name
    if record.key not in ("", planned.key):
        raise UserError(f"{place} is the record {record.key}, not {planned.key} of {name}.")
    job: TrainJob | AttackInputs
    job = AttackInputs.of(planned.job) if isinstance(planned.job, AttackJob) else planned.job
    if record.inputs is not None and record.inputs != job:
        raise UserError(f"{place} is the record of another job than {name}, which run.json names.")
    of = planned.train_key if isinstance(planned, Cell) else None
    if of and getattr(record, "train", None) not in (None, "", of):
        raise UserError(f"{place} is of another training than {of}, on which run.json has {name}.")
    if isinstance(record, TrainRecord) and isinstance(planned.job, TrainJob):
        wrong = _of_training(record, planned.job)
    elif isinstance(record, AttackRecord) and isinstance(planned.job, AttackJob):
        wrong = _of_attack(record, planned.job)
    else:
        return
    for what, holds in wrong.items():
        if not holds:
            raise UserError(f"{place} cannot be the record of {name}: {what}.")


def _of_training(record: TrainRecord, job: TrainJob) -> dict[str, bool]:
    """What must hold of a training's record, in words that say that it does not."""
    facts, protocol = record.facts, job.protocol
    shares = [record.class_chance, *(a for a in record.personal_accuracies if a is not None)]
    known = {t.name for t in job.threats}
    return {
        "it has seconds or bytes below 0": min(
            record.seconds, record.client_seconds, record.bytes_up, record.bytes_down
        )
        >= 0,
        "it has an accuracy beyond 0 to 1": all(0 <= share <= 1 for share in shares),
        f"it played {record.rounds_played} rounds of {protocol.rounds}": max(
            record.rounds_played, facts.rounds
        )
        <= protocol.rounds,
        "its facts have other clients, batches or participation than run.json": (
            (facts.clients, facts.batch, facts.participation)
            == (protocol.clients, protocol.batch, protocol.participation)
        ),
        "it has an epsilon below 0": record.ledger.eps_record >= 0
        and (record.ledger.eps_claimed or 0) >= 0,
        "it was observed at a checkpoint or under a threat that run.json does not name": all(
            checkpoint in job.checkpoints and looks.keys() <= known
            for checkpoint, looks in record.observations.items()
        ),
    }


def _of_attack(record: AttackRecord, job: AttackJob) -> dict[str, bool]:
    """The same of an attack's record."""
    again = record.doubled.values if record.doubled else {}
    odd = [
        f"{metric} {value:g}"
        for scores in (record.values, record.floors, again)
        for metric, values in scores.items()
        for value in values
        if not _can_be(value, metric)
    ]
    threat = job.threat
    return {
        f"it has the figure {odd[0] if odd else ''}": not odd,
        f"it has {record.victims} victims, run.json names {threat.victims}": (
            threat.recorded
            or record.victims == threat.victims
            # A sum shows the samples of all together.
            or (record.victims == 1 and record.samples % threat.victims == 0)
        ),
        "its views have other victims than the record": (
            not record.views or sum(record.views) == record.victims
        ),
        f"{record.failed} of its {record.victims} victims failed": (
            record.failed <= record.victims
        ),
        f"its budget is {record.budget}, that of run.json {job.budget}": (
            record.budget in (None, job.budget)
        ),
        f"it was run again at another budget than twice {job.budget}": (
            record.doubled is None or record.doubled.budget == 2 * job.budget
        ),
        "it has seconds below 0": record.seconds >= 0,
    }


def _can_be(value: float, metric: str) -> bool:
    """Whether a metric may have a value, up to rounding."""
    low, high = range_of(metric.removesuffix(FLOOR_SUFFIX))
    low = -1.0 if metric.startswith("ssim") else low
    return isnan(value) or low - 1e-6 <= value <= high + 1e-6


def check_together(
    records: Mapping[int, Iterable[AttackOutcome]], trained: Container[int], name: str
) -> None:
    """Check that all attacks on one observation had its victims, and two seeds other ones.

    Args:
        records: Seed -> the attacks on the observation of its training.
        trained: Seeds whose training is done.
        name: Of the row, for errors.

    Raises:
        UserError: Naming what contradicts.
    """
    seen: dict[tuple[float, ...], int] = {}
    for seed, outcomes in records.items():
        done = [r for r in outcomes if isinstance(r, AttackRecord)]
        if done and seed not in trained:
            raise UserError(f"{name}, seed {seed}, has attacks on a training that is not done.")
        if len({(r.victims, r.samples) for r in done}) > 1:
            counts = ", ".join(f"{r.victims} of {r.samples} samples" for r in done)
            raise UserError(
                f"attacks on one observation must have the same victims, got {counts} ({name}, "
                f"seed {seed})."
            )
        for metric in ("ssim", "mse"):
            floors = {tuple(r.floors[metric]) for r in done if metric in r.floors}
            if len(floors) > 1:
                raise UserError(
                    f"attacks on one observation have the same truth, but records of {name}, seed "
                    f"{seed}, have different baselines of {metric}."
                )
            for floor in floors:
                if len(floor) and seen.setdefault(floor, seed) != seed:
                    raise UserError(
                        f"seeds {seen[floor]} and {seed} of {name} have the same victims: one "
                        "training's records stand for both."
                    )


def check_apart(trained: Mapping[int, TrainOutcome], name: str) -> None:
    """Raises UserError if two seeds have one training's record, by its clock."""
    seen: dict[tuple[float, ...], int] = {}
    for seed, record in trained.items():
        if isinstance(record, TrainRecord):
            clock = (record.seconds, record.client_seconds)
            if record.seconds and seen.setdefault(clock, seed) != seed:
                raise UserError(
                    f"seeds {seen[clock]} and {seed} of {name} took the same time to the last "
                    "digit: one training's record stands for both."
                )
