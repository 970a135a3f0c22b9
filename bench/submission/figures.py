"""Which figures of a submitted record a rerun must give again, and how near."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
Figure = tuple[Any, float | None]
"""A number, text, None, or one number per victim; and its own tolerance, None for the caller's."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of one cell or training."""

    what: str
    figure: str
    submitted: str
    rerun: str
    verdict: Verdict


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
    first, again = (
        _of_training(r) if isinstance(r, TrainRecord) else _of_attack(r) for r in (submitted, rerun)
    )
    for name in {**first, **again}:
        (a, _), (b, own) = first.get(name, (None, None)), again.get(name, (None, None))
        verdict: Verdict = "differs"
        if name in first and name in again:
            # Squared errors lie far below 1, where an absolute tolerance would let all pass.
            squared = name.startswith("mse")
            verdict = _verdict(a, b, tolerance if own is None else own, relative=squared)
        yield Comparison(
            what=what, figure=name, submitted=_text(a), rerun=_text(b), verdict=verdict
        )


def _of_training(record: TrainRecord) -> dict[str, Figure]:
    """Utility, cost, ledger and audit."""
    ledger, audit = record.ledger, record.audit
    accuracy = None if record.correct is None else record.correct / max(1, record.test_samples)
    figures: dict[str, Figure] = {
        "accuracy": (accuracy, None),
        "own accuracy": (record.personal_accuracy, None),
        "diverged": ("no" if record.diverged is None else "yes", None),
        **_figures_by_name(
            record, 0.0, "test_samples", "rounds_played", "keeping_clients", "variant"
        ),
        **_figures_by_name(
            record, None, "class_chance", "personal_chance", "bytes_up", "bytes_down"
        ),
        "eps claimed": (ledger.eps_claimed, _EPSILON),
        "eps proven": (ledger.eps_record, _EPSILON),
        "unit of the claim": (ledger.unit, None),
        **{f"ledger {name}": (value, None) for name, value in ledger.constants.items()},
    }
    if audit:
        figures["audit"] = (audit.status, None)
    if isinstance(audit, AuditSummary):
        figures["eps audited"] = (audit.eps_audited, None)
        figures["audit of the claim"] = (audit.verdict_claim, None)
        figures["audit of the proof"] = (audit.verdict_proof, None)
    if record.membership:
        figures["membership"] = ([right for _, right in record.membership.curve], None)
    return figures


def _of_attack(record: AttackRecord) -> dict[str, Figure]:
    """Scores, their floors, and its spending."""
    doubled = record.doubled.values if record.doubled else {}
    scores = {"": record.values, " floor": record.floors, " at twice the budget": doubled}
    figures: dict[str, Figure] = {
        "failed victims": (record.failed, 0.0),
        **_figures_by_name(record, 0.0, "victims", "samples", "budget", "is_floor"),
        **_figures_by_name(record, _SPENDING, "gradient_evaluations"),
        **{f"{m}{at}": (value, None) for at, of in scores.items() for m, value in of.items()},
    }
    return figures if record.judged is None else figures | {"judged loss": (record.judged, None)}


def _figures_by_name(
    record: TrainRecord | AttackRecord, tolerance: float | None, *names: str
) -> dict[str, Figure]:
    return {name.replace("_", " "): (getattr(record, name), tolerance) for name in names}


def _verdict(a: Any, b: Any, tolerance: float, *, relative: bool) -> Verdict:
    """Equal to the last victim; or means that are as near as the tolerance, which grows with
    figures beyond 1, or is relative below it too. The judged loss of a victim that an attack failed
    on is infinite: it must be so in both, and the means are of the others."""
    if a == b:
        return "equal"
    xs, ys = _numbers(a), _numbers(b)
    if not (xs and ys) or list(map(_not_finite, xs)) != list(map(_not_finite, ys)):
        return "differs"
    if all(x == y or math.isnan(x) for x, y in zip(xs, ys, strict=True)):
        return "equal"
    x, y = (_mean([v for v in values if math.isfinite(v)] or [0.0]) for values in (xs, ys))
    near = tolerance * max(abs(x), abs(y), 0.0 if relative else 1.0)
    return "within tolerance" if abs(x - y) <= near + (_COPY if relative else 0.0) else "differs"


def _numbers(value: Any) -> list[float]:
    """A number, or one per victim, as a list; nothing of text and None."""
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return list(map(float, values)) if all(isinstance(v, (int, float)) for v in values) else []


def _not_finite(x: float) -> str:
    """inf, -inf or nan; empty for all other numbers."""
    return "" if math.isfinite(x) else str(x)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _text(value: Any) -> str:
    numbers = _numbers(value)
    if not numbers or math.isnan(_mean(numbers)):
        return "-" if value is None else str(value)[:80]
    each = f" (mean of {len(numbers)})" if isinstance(value, Sequence) else ""
    return f"{_mean(numbers):.4g}{each}"
