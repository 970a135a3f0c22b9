"""Which figures of a submitted record a rerun must give again, and how near."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.records import (
    AttackOutcome,
    AttackRecord,
    AuditSummary,
    DoneRecord,
    TrainOutcome,
    TrainRecord,
)

_EPSILON = 1e-6
"""Of what is computed from public numbers alone."""
_SPENDING = 0.2
"""Of gradient evaluations: when an optimiser stops follows rounding."""
_COPY = 1e-10
"""MSE below which a copy counts as exact, as PSNR is capped there too."""
Verdict = Literal["equal", "within tolerance", "differs"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of one cell or training."""

    what: str
    figure: str
    submitted: str
    rerun: str
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class ComparedFigure:
    """A figure of a record.

    Attributes:
        name: What it is.
        value: A number, text, None, or one number per victim.
        tolerance: Its own, None for the caller's.
        relative: Whether the tolerance is relative for values below 1 too.
    """

    name: str
    value: Any
    tolerance: float | None = None
    relative: bool = False


def compare(
    what: str,
    submitted: TrainOutcome | AttackOutcome | None,
    rerun: TrainOutcome | AttackOutcome | None,
    tolerance: float,
) -> Iterator[Comparison]:
    """Every figure of either record, None where there is none; `what` names the training or attack,
    `tolerance` is that of means, where a figure has none of its own.

    One that only one of them has differs. Of records that are not both done, the status.
    """
    if not (isinstance(submitted, DoneRecord) and isinstance(rerun, DoneRecord)):
        one, other = ("none" if r is None else r.status for r in (submitted, rerun))
        yield Comparison(
            what=what,
            figure="status",
            submitted=f"{one} ({submitted.reason})" if submitted and submitted.reason else one,
            rerun=f"{other} ({rerun.reason})" if rerun and rerun.reason else other,
            verdict="equal" if one == other else "differs",
        )
        return
    first, again = ({f.name: f for f in _figures(r)} for r in (submitted, rerun))
    for name in {**first, **again}:
        a, b = first.get(name), again.get(name)
        yield Comparison(
            what=what,
            figure=name,
            submitted=_shown(a),
            rerun=_shown(b),
            verdict="differs" if a is None or b is None else _verdict(a, b, tolerance),
        )


def _figures(record: TrainRecord | AttackRecord) -> Iterator[ComparedFigure]:
    return _of_training(record) if isinstance(record, TrainRecord) else _of_attack(record)


def _of_training(record: TrainRecord) -> Iterator[ComparedFigure]:
    """Utility, cost, ledger and audit."""
    accuracy = None if record.correct is None else record.correct / max(1, record.test_samples)
    yield ComparedFigure(name="accuracy", value=accuracy)
    yield ComparedFigure(name="own accuracy", value=record.personal_accuracy)
    yield ComparedFigure(name="diverged", value="no" if record.diverged is None else "yes")
    exact = ("test_samples", "rounds_played", "keeping_clients", "variant")
    yield from _named(record, *exact, tolerance=0.0)
    yield from _named(record, "class_chance", "personal_chance", "bytes_up", "bytes_down")
    ledger = record.ledger
    yield ComparedFigure(name="eps claimed", value=ledger.eps_claimed, tolerance=_EPSILON)
    yield ComparedFigure(name="eps proven", value=ledger.eps_record, tolerance=_EPSILON)
    yield ComparedFigure(name="unit of the claim", value=ledger.unit)
    for name, value in ledger.constants.items():
        yield ComparedFigure(name=f"ledger {name}", value=value)
    if record.audit:
        yield ComparedFigure(name="audit", value=record.audit.status)
    if isinstance(record.audit, AuditSummary):
        yield ComparedFigure(name="eps audited", value=record.audit.eps_audited)
        yield ComparedFigure(name="audit of the claim", value=record.audit.verdict_claim)
        yield ComparedFigure(name="audit of the proof", value=record.audit.verdict_proof)


def _of_attack(record: AttackRecord) -> Iterator[ComparedFigure]:
    """Scores, their floors, and its spending."""
    yield ComparedFigure(name="failed victims", value=record.failed, tolerance=0.0)
    yield from _named(record, "victims", "samples", "budget", "is_floor", tolerance=0.0)
    yield from _named(record, "gradient_evaluations", tolerance=_SPENDING)
    yield from _scores(record.values, "")
    yield from _scores(record.floors, " floor")
    if record.judged is not None:
        yield ComparedFigure(name="judged loss", value=record.judged)
    yield from _scores(record.doubled.values if record.doubled else {}, " at twice the budget")


def _named(
    record: TrainRecord | AttackRecord, *names: str, tolerance: float | None = None
) -> Iterator[ComparedFigure]:
    for name in names:
        value = getattr(record, name)
        yield ComparedFigure(name=name.replace("_", " "), value=value, tolerance=tolerance)


def _scores(values: Mapping[str, Sequence[float]], suffix: str) -> Iterator[ComparedFigure]:
    for metric, value in values.items():
        # Squared errors lie far below 1, where an absolute tolerance would let all pass.
        squared = metric.startswith("mse")
        yield ComparedFigure(name=f"{metric}{suffix}", value=value, relative=squared)


def _verdict(a: ComparedFigure, b: ComparedFigure, tolerance: float) -> Verdict:
    """Equal to the last victim; or means that are as near as the tolerance, which grows with
    figures beyond 1. The judged loss of a victim that an attack failed on is infinite: it must be
    so in both, and the means are of the others."""
    if a.value == b.value:
        return "equal"
    if _count(a.value) != _count(b.value) or not (_is_numeric(a.value) and _is_numeric(b.value)):
        return "differs"
    xs, ys = _numbers(a.value), _numbers(b.value)
    if [*map(_not_finite, xs)] != [*map(_not_finite, ys)]:
        return "differs"
    if all(x == y or math.isnan(x) for x, y in zip(xs, ys, strict=True)):
        return "equal"
    x, y = (_mean([v for v in values if math.isfinite(v)] or [0.0]) for values in (xs, ys))
    allowed = tolerance if b.tolerance is None else b.tolerance
    near = allowed * max(abs(x), abs(y), 0.0 if b.relative else 1.0)
    return "within tolerance" if abs(x - y) <= near + (_COPY if b.relative else 0.0) else "differs"


def _is_numeric(value: Any) -> bool:
    """Whether it is a number, or one per victim."""
    values = [value] if _count(value) is None else value
    return all(isinstance(v, (int, float)) for v in values)


def _numbers(value: Any) -> list[float]:
    return [_number(v) for v in ([value] if _count(value) is None else value)]


def _not_finite(x: float) -> str:
    """inf, -inf or nan; empty for all other numbers."""
    return "" if math.isfinite(x) else str(x)


def _count(value: Any) -> int | None:
    return len(value) if isinstance(value, Sequence) and not isinstance(value, str) else None


def _mean(value: Any) -> float:
    """NaN where the value is no number."""
    if _count(value) is None:
        return _number(value)
    return sum(map(_number, value)) / len(value) if value else math.nan


def _number(value: Any) -> float:
    """NaN for text, and for none."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def _shown(figure: ComparedFigure | None) -> str:
    if figure is None or figure.value is None:
        return "-"
    value, mean = figure.value, _mean(figure.value)
    if math.isnan(mean):
        return str(value)[:80]
    return f"{mean:.4g}" + ("" if _count(value) is None else f" (mean of {len(value)})")
