"""What is to be said of a row: its flags, and its rank within its table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.metrics.intervals import Interval
from bench.metrics.named import sign_of
from bench.records import (
    AttackEntry,
    AuditFailure,
    AuditSummary,
    Flag,
    FlagCode,
    Row,
    TrainOutcome,
    WorstCase,
    canonical,
)

_REFUTES = (
    (FlagCode.AUDIT_REFUTES_CLAIM, "verdict_claim"),
    (FlagCode.AUDIT_REFUTES_PROOF, "verdict_proof"),
)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What flags are made from, of a training's record, which would be too much to keep."""

    status: str
    reason: str | None = None
    diverged: str | None = None
    audit: AuditSummary | AuditFailure | None = None
    class_chance: float = 0.0
    personal_chance: float = 0.0

    @classmethod
    def of(cls, record: TrainOutcome) -> Trained:
        """What is kept of a record."""
        if record.status != "done":
            return cls(status=record.status, reason=record.reason)
        return cls(
            status="done",
            diverged=record.diverged,
            audit=record.audit,
            class_chance=record.class_chance,
            personal_chance=record.personal_chance or 0.0,
        )


def flags_of(row: Row, trained: Sequence[Trained]) -> tuple[Flag, ...]:
    """The flags, each once, of a row that has none yet, from its trainings of every seed."""
    # Not a set: the order is part of the files.
    return tuple(dict.fromkeys(_flags(row, trained)))


def _flags(row: Row, trained: Sequence[Trained]) -> Iterator[Flag]:
    for found in trained:
        if found.status != "done":
            code = FlagCode(f"training_{found.status}")
            yield Flag(code=code, values={"reason": str(found.reason)})
        elif found.diverged:
            yield Flag(code=FlagCode.DIVERGED, values={"reason": found.diverged})
    if at_chance(row, [t for t in trained if t.status == "done"]):
        yield Flag(code=FlagCode.AT_CHANCE)
    if row.eps_claimed is not None and row.eps_record == float("inf"):
        yield Flag(code=FlagCode.CLAIMED_NOT_PROVEN)
    if row.unit is not None and row.unit != "record":
        yield Flag(code=FlagCode.CLAIM_UNIT, subject=row.unit)
    for code, verdict in _REFUTES:
        if row.audit and getattr(row.audit, verdict) == "violated":
            yield Flag(code=code, values={"epsilon": row.audit.eps_audited})
    for found in trained:
        if isinstance(found.audit, AuditFailure):
            yield Flag(code=FlagCode.AUDIT_FAILED, values={"reason": found.audit.reason})
    for name, entry in row.attacks.items():
        if entry.status in ("failed", "timeout"):
            yield Flag(code=FlagCode(f"attack_{entry.status}"), subject=name)
    if row.worst and _below_floor(row.worst, row.attacks[row.worst.attack]):
        yield Flag(code=FlagCode.BELOW_FLOOR, subject=row.worst.attack)
    for name, entry in row.attacks.items():
        grown = entry.convergence
        if grown and not grown.converged and entry.status == "done":
            yield Flag(code=FlagCode.CUT_SHORT, subject=name, values={"gain": grown.gain})


def _below_floor(worst: WorstCase, entry: AttackEntry) -> bool:
    """Whether the worst case leaks less than the mean public sample."""
    floor = entry.floor.get(worst.metric)
    return floor is not None and worst.leak < sign_of(worst.metric) * floor


def at_chance(row: Row, done: Sequence[Trained]) -> bool:
    """Whether neither the one model nor, where clients keep something, their own networks beat
    a guess; a method whose clients keep the first stages has no use for the one model."""
    judged: list[tuple[Interval, float]] = []
    if row.accuracy:
        judged.append((row.accuracy, max(t.class_chance for t in done)))
    if row.personalised and row.personal_accuracy:
        judged.append((row.personal_accuracy, max(t.personal_chance for t in done)))
    return bool(judged) and all(accuracy.lo <= chance for accuracy, chance in judged)


def ranked(found: Sequence[Row]) -> list[Row]:
    """Sorted by table, then by worst-case SSIM (MSE of records): the less leaks, the better. A
    row without utility (diverged, at chance) or without a figure has no rank and stands last."""
    tables: dict[str, list[Row]] = {}
    for row in found:
        tables.setdefault(network(row), []).append(row)
    out = []
    for members in tables.values():
        leaks = {
            i: r.worst.leak
            for i, r in enumerate(members)
            if r.worst and not any(f.costs_rank for f in r.flags)
        }
        able = sorted(leaks, key=leaks.__getitem__)
        out += [replace(members[i], rank=place) for place, i in enumerate(able, start=1)]
        out += [replace(r, rank=None) for i, r in enumerate(members) if i not in leaks]
    return out


def network(row: Row) -> str:
    """What rows of one table have in common: network, how it is trained, and checkpoint."""
    data, model = (row.dataset, row.dataset_settings), (row.model, row.model_settings)
    return canonical([row.protocol_settings, *data, *model, row.checkpoint])
