"""Rows of the leaderboard, from the records of a result folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from bench.errors import UserError
from bench.harness.store import Store, key_of
from bench.metrics.intervals import Interval, bootstrap_shares
from bench.protocols.settings import Checkpoint, ThreatSettings
from bench.records import (
    LEADERBOARD,
    AttackRecord,
    AuditSummary,
    Cell,
    Convergence,
    LedgerEntry,
    LedgerWords,
    PlannedTraining,
    Row,
    Run,
    TrainRecord,
    canonical,
    read_rows,
)
from bench.report.entries import (
    Awaited,
    CaseDraft,
    EntryDraft,
    Intervals,
    LeakMetric,
    Victims,
    draft_entry,
    values_of,
    worst_cases,
    worst_of,
)
from bench.report.verdicts import Trained, flags_of, network, ranked


def load(folder: Path) -> list[Row]:
    """Rows made from the folder's records, or, where it holds none (as published results do), as
    its leaderboard.json has them.

    Raises:
        UserError: If it has neither, or a file that is not what it should be.
    """
    if (folder / "records").is_dir():
        return rows(folder)
    try:
        return read_rows(folder / LEADERBOARD)
    except FileNotFoundError as error:
        raise UserError(f"{folder} has neither records nor a readable {LEADERBOARD}.") from error


def row_id(row: Row) -> str:
    """What names a row among all: hash of suite, task, protocol, defense setting, checkpoint."""
    return key_of(
        {
            "suite": row.suite,
            "protocol": row.protocol_settings.model_dump(),
            "dataset": [row.dataset, row.dataset_settings],
            "model": [row.model, row.model_settings],
            "defense": [row.defense, row.settings],
            "checkpoint": row.checkpoint,
        }
    )


def rows(folder: Path) -> list[Row]:
    """One row per defense setting and checkpoint, seeds together, ranked within each table.

    A table is a protocol x dataset x model x checkpoint. See `schema.json` beside this file. Every
    record is read once, and no more of it is kept than its row shows.

    Raises:
        UserError: If the folder holds no run.
    """
    run = Run.read(folder)
    return rows_of(run, run.trainings, Store(folder))


def rows_of(
    run: Run,
    trainings: Iterable[PlannedTraining],
    records: Store,
    checkpoints: Sequence[Checkpoint] | None = None,
) -> list[Row]:
    """`rows` of some trainings of a run alone, at some of its checkpoints (None: all)."""
    intervals = Intervals()
    # The suite of an older run may name a checkpoint twice.
    shown = tuple(dict.fromkeys(checkpoints or run.suite.checkpoints))
    source = _Source(run, records, shown, intervals)
    networks: dict[str, list[_Draft]] = {}
    for members in settings_of(trainings):
        for draft in _drafts(source, members):
            networks.setdefault(network(draft.row), []).append(draft)
    intervals.fill()
    measured = {name: _measured(drafts) for name, drafts in networks.items()}
    return ranked([_finished(d, measured[n]) for n, drafts in networks.items() for d in drafts])


def settings_of(trainings: Iterable[PlannedTraining]) -> list[list[PlannedTraining]]:
    """Trainings by what makes a row: those of one list differ in their seeds."""
    groups: dict[str, list[PlannedTraining]] = {}
    for training in trainings:
        job = training.job
        same = canonical([job.task, job.protocol, job.defense, job.settings])
        groups.setdefault(same, []).append(training)
    return list(groups.values())


def cells_by_row(run: Run) -> Iterator[tuple[str, Cell]]:
    """All cells in the run's order, each after the `row_id` of its row."""
    for training in run.trainings:
        ids = {c: row_id(heading(run, training, c)) for c in run.suite.checkpoints}
        yield from ((ids[cell.checkpoint], cell) for cell in training.cells)


def heading(run: Run, training: PlannedTraining, checkpoint: Checkpoint) -> Row:
    """A row of which nothing is known but what it is called by."""
    job = training.job
    return Row(
        suite=run.label,
        protocol=job.protocol.name,
        protocol_settings=job.protocol,
        dataset=job.task.dataset,
        dataset_settings=job.task.dataset_settings,
        model=job.task.model,
        model_settings=job.task.model_settings,
        defense=job.defense,
        settings=job.settings,
        checkpoint=checkpoint,
        variant=str(job.settings.get("variant", "")),
        threat="",
        seeds=(job.seed,),
        accuracy=None,
        eps_claimed=None,
        eps_record=None,
        delta=run.suite.delta,
        unit=None,
        bytes_up=None,
        bytes_down=None,
        client_seconds=None,
        attacks={},
        worst=None,
        flags=(),
        rank=None,
    )


@dataclass(frozen=True)
class _Source:
    """What rows are made from. intervals: those that wait to be computed."""

    run: Run
    records: Store
    checkpoints: Sequence[Checkpoint]
    intervals: Intervals


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A row whose intervals wait. cases: worst cases, those by SSIM and those by MSE."""

    row: Row
    personal: Awaited
    entries: Mapping[str, EntryDraft]
    cases: Sequence[Sequence[CaseDraft]]
    trained: Sequence[Trained]


def _drafts(source: _Source, trainings: Sequence[PlannedTraining]) -> Iterator[_Draft]:
    """The rows of one defense setting, one per checkpoint, from its trainings of all seeds."""
    found = [r for t in trainings if (r := source.records.read("train", t.key)) is not None]
    if not found:
        return
    done = [r for r in found if isinstance(r, TrainRecord)]
    trained = [Trained.of(r) for r in found]
    cells: dict[str, dict[str, list[Cell]]] = {}
    for training in trainings:
        for cell in training.cells:
            cells.setdefault(cell.checkpoint, {}).setdefault(cell.label, []).append(cell)
    personal = source.intervals.ask([_personal(r) for r in done])
    for checkpoint in source.checkpoints:
        if checkpoint in cells or not cells:
            row = _trained_row(source, trainings, checkpoint, done)
            yield _attacked(source, row, cells.get(checkpoint, {}), personal, trained)


def _trained_row(
    source: _Source,
    trainings: Sequence[PlannedTraining],
    checkpoint: Checkpoint,
    done: Sequence[TrainRecord],
) -> Row:
    """A row with all that its trainings tell."""
    row = heading(source.run, trainings[0], checkpoint)
    seeds = tuple(t.job.seed for t in trainings)
    if not done:
        return replace(row, seeds=seeds)
    ledger = [r.ledger for r in done]
    return replace(
        row,
        variant=done[0].variant,
        seeds=seeds,
        accuracy=_accuracy(done),
        personalised=any(r.keeping_clients for r in done),
        eps_claimed=max((e.eps_claimed for e in ledger if e.eps_claimed is not None), default=None),
        eps_record=max(e.eps_record for e in ledger),
        ledger=_ledger(ledger),
        audit=_audit(done),
        unit=ledger[0].unit,
        bytes_up=float(np.mean([r.bytes_up for r in done])),
        bytes_down=float(np.mean([r.bytes_down for r in done])),
        client_seconds=float(np.mean([r.client_seconds for r in done])),
    )


def _attacked(
    source: _Source,
    row: Row,
    cells: Mapping[str, Sequence[Cell]],
    personal: Awaited,
    trained: Sequence[Trained],
) -> _Draft:
    """The draft of a row. cells: by label, one per seed."""
    threats: dict[str, None] = {}
    entries = {}
    by_metric: dict[LeakMetric, dict[str, Victims]] = {"ssim": {}, "mse": {}}
    for label, placed in cells.items():
        threat = placed[0].job.threat
        threats[_described(threat)] = None
        found = [(c.seed, source.records.read("attack", c.key)) for c in placed]
        entries[label] = draft_entry([r for _, r in found], threat, source.intervals)
        for metric, by_threat in by_metric.items():
            values = {
                seed: values_of(r, metric)
                for seed, r in found
                if isinstance(r, AttackRecord) and not r.is_floor and metric in r.values
            }
            if values:
                by_threat.setdefault(threat.name, {})[label] = values
    return _Draft(
        row=replace(row, threat="; ".join(threats)),
        personal=personal,
        entries=entries,
        cases=[worst_cases(found, m, source.intervals) for m, found in by_metric.items()],
        trained=trained,
    )


def _measured(drafts: Sequence[_Draft]) -> dict[str, Convergence]:
    """The convergence of each attack, as measured on the undefended row of one network and
    checkpoint (the first, if several)."""
    return {
        name: drafted.entry.convergence
        for draft in reversed(drafts)
        for name, drafted in draft.entries.items()
        if drafted.entry.convergence
    }


def _finished(draft: _Draft, measured: Mapping[str, Convergence]) -> Row:
    """The row with what follows from its intervals, which are known by now."""
    found = (worst_of(cases) for cases in draft.cases)
    row = replace(
        draft.row,
        personal_accuracy=draft.personal.value,
        attacks={n: e.finished(measured.get(n)) for n, e in draft.entries.items()},
        worst=next((worst for worst in found if worst), None),
    )
    return replace(row, flags=flags_of(row, draft.trained))


def _accuracy(done: Sequence[TrainRecord]) -> Interval | None:
    whole = [(r.correct, r.test_samples) for r in done if r.correct is not None]
    return bootstrap_shares(tuple(c for c, _ in whole), tuple(n for _, n in whole))


def _ledger(entries: Sequence[LedgerEntry]) -> LedgerWords:
    """Sentences and reasons of the entry that proves least, over seeds. Entries of older records
    have no sentences."""
    least = max(entries, key=lambda e: (e.eps_record, e.eps_claimed or 0))
    return LedgerWords(words=tuple(least.words), reasons=tuple(least.reasons))


def _audit(done: Sequence[TrainRecord]) -> AuditSummary | None:
    """The audit that found most, over seeds; None where none was made (older records)."""
    made = [r.audit for r in done if isinstance(r.audit, AuditSummary)]
    return max(made, key=lambda a: a.eps_audited, default=None)


@cache
def _described(threat: ThreatSettings) -> str:
    return threat.describe()


def _personal(record: TrainRecord) -> np.ndarray:
    """Accuracy of each client's network; none in records of older versions."""
    return np.array([a for a in record.personal_accuracies if a is not None])
