"""Rows of the leaderboard, from the records of a result folder."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.plan import expand
from bench.harness.store import Store, key_of
from bench.metrics.intervals import Interval, accuracy_interval, interval_of, share_interval
from bench.privacy.entry import Entry
from bench.protocols.settings import TRAINING, Checkpoint, describe_works
from bench.records import AttackOutcome, AuditSummary, CoursePoint, Workings, canonical
from bench.records.contradictions import check_together
from bench.records.outcomes import FALSE_POSITIVES, AttackRecord, TrainOutcome, TrainRecord
from bench.records.rows import CourseFigures, LedgerWords, MembershipFigures, Row
from bench.records.run import Cell, PlannedTraining, Run
from bench.report.costs import read_costs
from bench.report.entries import LEAK_METRICS, PENDING, entry_of, worst_case
from bench.report.errata import with_errata
from bench.report.marks import with_marks
from bench.report.verdicts import flags_of, sort_rows, with_first_round

Read = Callable[[Any, str], Any]
"""A store's way to read a record of a kind by its key."""


def load(folder: Path) -> list[Row]:
    """Return the rows of a result folder, made from its records; its errata flag some.

    Raises:
        UserError: If it is no result folder, or a record is not of its run.
    """
    return with_errata(rows(folder), folder)


def missing_words(store: Store, run: Run) -> list[str]:
    """Return a sentence for everything that readers may expect and that is not there: jobs of a run
    that was stopped, and what else of its suite was not run."""
    names, sentences = run.record_names, []
    if left := len(set(names) - store.names):
        sentences.append(
            f"{left} of {len(names)} jobs have not run yet: the same command goes on with them."
        )
    whole = expand(run.suite)
    planned = len(whole.trainings) + len(whole.cells)
    if len(names) >= planned:
        return sentences
    words = f"{len(names):,} of its {planned:,} jobs"
    return [*sentences, f"A part of suite {run.suite.name} was run: {words}."]


def row_id(row: Row) -> str:
    """Return what names a row among all: hash of suite, task, protocol, defense setting,
    checkpoint."""
    named = {
        "suite": row.suite,
        "protocol": row.protocol_settings.model_dump(),
        "dataset": [row.dataset, row.dataset_settings],
        "model": [row.model, row.model_settings],
        "defense": [row.defense, row.settings],
        "checkpoint": row.checkpoint,
    }
    return key_of(named)


def rows(folder: Path) -> list[Row]:
    """Return one row per defense setting and checkpoint, seeds together, the least leakage first.

    A table is a protocol x dataset x model x checkpoint. See `schema.json` beside this file. Every
    record is read once and kept until the tables of its task are done.

    Raises:
        UserError: If the folder holds no run.
    """
    run = Run.read(folder)
    return rows_of(run, Store(folder, run))


def rows_of(run: Run, store: Store, checkpoints: Sequence[Checkpoint] = ()) -> list[Row]:
    """`rows` of a run, at some of its checkpoints (none given: all)."""
    # The suite of an older run may name a checkpoint twice.
    chosen = tuple(dict.fromkeys(checkpoints or run.suite.checkpoints))
    by_task: dict[str, list[list[PlannedTraining]]] = {}
    for members in settings_of(run.trainings):
        job = members[0].job
        task = canonical([job.protocol, job.task.model_dump(exclude={"protocol"})])
        by_task.setdefault(task, []).append(members)
    rows_ = []
    for settings in by_task.values():
        read = cache(store.read)  # until its task is done
        check_together(chain.from_iterable(settings), read)
        tables = {c: _table(run, settings, read, c) for c in chosen}
        first = {canonical([r.defense, r.settings]): r for r in tables.get("init", ())}
        cells = [cell for members in settings for t in members for cell in t.cells]
        threats = {cell.threat: cell.job.threat for cell in cells}
        for checkpoint, table in tables.items():
            if checkpoint != "init":
                init = (first.get(canonical([row.defense, row.settings])) for row in table)
                table = [with_first_round(*pair, threats) for pair in zip(table, init, strict=True)]
            rows_ += with_marks(table)
    return rows_


def settings_of(trainings: Iterable[PlannedTraining]) -> list[list[PlannedTraining]]:
    """Trainings by what makes a row: those of one list differ in their seeds."""
    groups: dict[str, list[PlannedTraining]] = {}
    for training in trainings:
        job = training.job
        same = canonical([job.task, job.protocol, job.defense, job.settings])
        groups.setdefault(same, []).append(training)
    return list(groups.values())


def cells_by_row(run: Run) -> Iterator[tuple[str, Cell]]:
    """Yield all cells in the run's order, each after the `row_id` of its row."""
    for training in run.trainings:
        ids = {c: row_id(heading(run, training, c)) for c in run.suite.checkpoints}
        yield from ((ids[cell.checkpoint], cell) for cell in training.cells)


def heading(run: Run, training: PlannedTraining, checkpoint: Checkpoint) -> Row:
    """Return a row with only its identifying fields."""
    job = training.job
    return Row(
        suite=run.label,
        protocol=job.protocol.name,
        protocol_settings=job.protocol,
        **job.task.model_dump(exclude={"protocol"}),
        defense=job.defense,
        settings=job.settings,
        checkpoint=checkpoint,
        variant=str(job.settings.get("variant", "")),
        seeds=(job.seed,),
        delta=run.suite.delta,
    )


def _table(
    run: Run, settings: Sequence[Sequence[PlannedTraining]], read: Read, checkpoint: Checkpoint
) -> list[Row]:
    """Return the rows of one task at one checkpoint, from each setting's trainings."""
    drafts = []
    for members in settings:
        records = {t.job.seed: r for t in members if (r := read("train", t.key)) is not None}
        cells = [c for t in members for c in t.cells]
        if records and (not cells or any(c.checkpoint == checkpoint for c in cells)):
            row = _row_of_trainings(run, members, checkpoint, records)
            drafts.append((_add_attacks(row, members, read), [*records.values()]))
    # As measured on the undefended row, the first if several.
    entries = [named for row, _ in reversed(drafts) for named in row.attacks.items()]
    measured = {name: entry.convergence for name, entry in entries if entry.convergence}
    table = []
    for row, trained in drafts:
        attacks = {n: replace(e, convergence=measured.get(n)) for n, e in row.attacks.items()}
        row = replace(row, attacks=attacks)
        table.append(replace(row, flags=flags_of(row, trained)))
    return sort_rows(table)


def _row_of_trainings(
    run: Run,
    trainings: Sequence[PlannedTraining],
    checkpoint: Checkpoint,
    records: Mapping[int, TrainOutcome],
) -> Row:
    """Fill a row with the figures of its trainings. records: by seed."""
    row = heading(run, trainings[0], checkpoint)
    trained = {s: r for s, r in records.items() if isinstance(r, TrainRecord)}
    by_seed, done = trained.items(), list(trained.values())
    seeds = tuple(trained or (t.job.seed for t in trainings))
    row = replace(row, seeds=seeds, costs=read_costs(done))
    if not done:
        return row
    ledger = [r.ledger for r in done]
    # Of the seed that proves least; entries of older records have no sentences.
    least = max(ledger, key=lambda e: (e.eps_record, e.eps_claimed or 0))
    return replace(
        row,
        variant=done[0].variant,
        accuracy=_share([(r.correct, r.test_samples) for r in done]),
        accuracies={s: n / r.test_samples for s, r in by_seed if (n := r.correct) is not None},
        personal_accuracies={s: a for s, r in by_seed if (a := r.personal_accuracy) is not None},
        test_samples=min(r.test_samples for r in done),
        personal_accuracy=accuracy_interval([_values(r.personal_accuracies) for r in done]),
        personalised=any(r.keeping_clients for r in done),
        eps_claimed=_largest(e.eps_claimed for e in ledger),
        eps_record=max(e.eps_record for e in ledger),
        ledger=LedgerWords(words=tuple(least.words), reasons=tuple(least.reasons)),
        audit=_audit(done),
        unit=ledger[0].unit,
        course=_course(done),
        workings=_workings(done),
        membership=_membership(done, least) if checkpoint == TRAINING else None,
    )


def _add_attacks(row: Row, trainings: Sequence[PlannedTraining], read: Read) -> Row:
    """Add a row's attacks and worst cases, from the records of every seed."""
    cells = [c for t in trainings for c in t.cells if c.checkpoint == row.checkpoint]
    outcomes: dict[str, list[AttackOutcome]] = {}
    observed: dict[str, dict[int, dict[str, AttackRecord]]] = {}
    for cell in cells:
        record = read("attack", cell.key) or PENDING
        outcomes.setdefault(cell.label, []).append(record)
        by_seed = observed.setdefault(cell.threat, {})
        if isinstance(record, AttackRecord):
            by_seed.setdefault(cell.seed, {})[cell.label] = record
    placed = {cell.label: cell.job.threat for cell in cells}
    entries = {label: entry_of(outcomes[label], threat) for label, threat in placed.items()}
    used = {threat.name: threat for threat in placed.values()}
    worst, choice = (
        next((c for m in LEAK_METRICS if (c := worst_case(observed, m, by_truth=truth))), None)
        for truth in (True, False)
    )
    named = {n: t.describe_work(row.protocol_settings) for n, t in used.items()}
    ranking = choice or worst
    return replace(
        row,
        threat="; ".join(t.describe() for t in used.values()),
        observed=describe_works(named),
        attacks=entries,
        worst=worst and worst[0],
        choice=choice and choice[0],
        leaks=ranking and ranking[1],
    )


def _share(counts: Sequence[tuple[int | None, int]]) -> Interval | None:
    """Return the accuracy over seeds from (right answers, test samples), without seeds that have no
    common model."""
    whole = [(c, n) for c, n in counts if c is not None]
    return share_interval([c for c, _ in whole], [n for _, n in whole])


def _course(done: Sequence[TrainRecord]) -> tuple[CourseFigures, ...]:
    """Return the figures over seeds after each round that all seeds measured."""
    by_rounds: dict[int, list[tuple[TrainRecord, CoursePoint]]] = {}
    for record in done:
        for point in record.course:
            by_rounds.setdefault(point.rounds, []).append((record, point))
    return tuple(
        CourseFigures(
            rounds=rounds,
            accuracy=_share([(p.correct, r.test_samples) for r, p in pairs]),
            personal_accuracy=accuracy_interval([_values(p.personal_accuracies) for _, p in pairs]),
            eps_claimed=_largest(p.eps_claimed for _, p in pairs),
            eps_record=max(p.eps_record for _, p in pairs),
        )
        for rounds, pairs in sorted(by_rounds.items())
        if len(pairs) == len(done)
    )


def _largest(figures: Iterable[float | None]) -> float | None:
    return max((f for f in figures if f is not None), default=None)


def _workings(done: Sequence[TrainRecord]) -> Workings | None:
    workings = [r.workings for r in done if r.workings]
    if not workings:
        return None
    return Workings(
        **{f.name: float(np.mean([getattr(w, f.name) for w in workings])) for f in fields(Workings)}
    )


def _membership(done: Sequence[TrainRecord], ledger: Entry) -> MembershipFigures | None:
    """Return membership inference over seeds, None where the suite asks for none. ledger: of the
    seed that proves least.

    Of two records that replace each other, epsilon and delta bound the true positives at any share
    of false ones: Kairouz, Oh, Viswanath, arXiv:1311.0776.
    """
    from pandas import DataFrame

    known = [r.membership for r in done if r.membership and r.membership.curve]
    if not known:
        reasons = [r.membership.reason for r in done if r.membership]
        return MembershipFigures(rate=None, reason=reasons[0]) if reasons else None
    told = [np.arange(m.members) < round(m.members * dict(m.curve)[FALSE_POSITIVES]) for m in known]
    bound = math.exp(min(ledger.eps_record, 100.0)) * FALSE_POSITIVES + ledger.delta
    return MembershipFigures(
        rate=interval_of([each.astype(float) for each in told], (0.0, 1.0)),
        bound=bound if bound < 1 else None,
        curve=DataFrame([dict(m.curve) for m in known]).dropna(axis=1).mean().to_dict(),  # type: ignore[arg-type]
    )


def _audit(done: Sequence[TrainRecord]) -> AuditSummary | None:
    """Return the audit with the largest epsilon over seeds, with the worst verdicts of all seeds;
    None without an audit (older records).

    A verdict is over all pairs of inputs, its epsilon over pairs of records: the seed that violates
    a claim need not be the one whose epsilon is the largest.
    """
    audits = [r.audit for r in done if isinstance(r.audit, AuditSummary)]
    if not audits:
        return None
    most = max(audits, key=lambda a: a.eps_audited)
    if any(a.verdict_claim == "violated" for a in audits):
        most = replace(most, verdict_claim="violated")
    if any(a.verdict_proof == "violated" for a in audits):
        most = replace(most, verdict_proof="violated")
    return most


def _values(accuracies: Sequence[float | None]) -> np.ndarray:
    return np.array([a for a in accuracies if a is not None])
