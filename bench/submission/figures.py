"""Which figures of a submitted record a rerun must give again, and how near."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
class Figure:
    """value: a number, "inf", text, None, or one number per victim. tolerance: its own, None for
    the caller's. relative: whether it is relative for values below 1 too."""

    name: str
    value: Any
    tolerance: float | None = None
    relative: bool = False


def compare(
    what: str,
    submitted: Mapping[str, Any] | None,
    rerun: Mapping[str, Any] | None,
    figures: Callable[[Mapping[str, Any]], Iterator[Figure]],
    tolerance: float,
) -> Iterator[Comparison]:
    """Every figure of either record; one that only one of them has differs. Of records that are
    not both done, the status."""
    status = [("none" if r is None else str(r.get("status"))) for r in (submitted, rerun)]
    if submitted is None or rerun is None or status != ["done", "done"]:
        shown = [
            s if r is None or not r.get("reason") else f"{s} ({r['reason']})"
            for s, r in zip(status, (submitted, rerun), strict=True)
        ]
        yield Comparison(
            what=what, figure="status", submitted=shown[0], rerun=shown[1],
            verdict="equal" if status[0] == status[1] else "differs",
        )  # fmt: skip
        return
    again = {f.name: f for f in figures(rerun)}
    try:
        first = {f.name: f for f in figures(submitted)}
    except (LookupError, TypeError, AttributeError) as error:
        yield Comparison(
            what=what, figure="record", submitted=f"not the form of a record ({error!r})",
            rerun="done", verdict="differs",
        )  # fmt: skip
        return
    for name in {**first, **again}:
        a, b = first.get(name), again.get(name)
        yield Comparison(
            what=what, figure=name, submitted=_shown(a), rerun=_shown(b),
            verdict="differs" if a is None or b is None else _verdict(a, b, tolerance),
        )  # fmt: skip


def of_training(record: Mapping[str, Any]) -> Iterator[Figure]:
    """Utility, cost, ledger and audit of a training that is done."""
    correct, audit = record["correct"], record.get("audit") or {}
    accuracy = None if correct is None else _number(correct) / _number(record["test_samples"])
    yield Figure(name="accuracy", value=accuracy)
    yield Figure(name="own accuracy", value=record.get("personal_accuracy"))
    yield Figure(name="diverged", value="no" if record["diverged"] is None else "yes")
    for name in ("test_samples", "rounds_played", "keeping_clients", "variant"):
        yield Figure(name=name.replace("_", " "), value=record.get(name), tolerance=0.0)
    for name in ("class_chance", "personal_chance", "bytes_up", "bytes_down"):
        yield Figure(name=name.replace("_", " "), value=record.get(name))
    ledger = record["ledger"]
    yield Figure(name="eps claimed", value=ledger["eps_claimed"], tolerance=_EPSILON)
    yield Figure(name="eps proven", value=ledger["eps_record"], tolerance=_EPSILON)
    yield Figure(name="unit of the claim", value=ledger["unit"])
    for name, value in (ledger.get("constants") or {}).items():
        yield Figure(name=f"ledger {name}", value=value)
    if audit:
        yield Figure(name="audit", value=audit["status"])
        yield Figure(name="eps audited", value=audit.get("eps_audited"))
        yield Figure(name="audit of the claim", value=audit.get("verdict_claim"))
        yield Figure(name="audit of the proof", value=audit.get("verdict_proof"))


def of_cell(record: Mapping[str, Any]) -> Iterator[Figure]:
    """Scores of a cell that is done, their floors, and its spending."""
    yield Figure(name="failed victims", value=record["failed"], tolerance=0.0)
    for name in ("victims", "samples", "budget", "is_floor"):
        yield Figure(name=name.replace("_", " "), value=record.get(name), tolerance=0.0)
    spent = record.get("gradient_evaluations")
    yield Figure(name="gradient evaluations", value=spent, tolerance=_SPENDING)
    yield from _scores(record["values"], "")
    yield from _scores(record["floors"], " floor")
    yield from _scores((record.get("doubled") or {}).get("values") or {}, " at twice the budget")


def _scores(values: Mapping[str, Any], suffix: str) -> Iterator[Figure]:
    for metric, value in values.items():
        # Squared errors lie far below 1, where an absolute tolerance would let all pass.
        squared = metric.startswith("mse")
        yield Figure(name=f"{metric}{suffix}", value=value, relative=squared)


def _verdict(a: Figure, b: Figure, tolerance: float) -> Verdict:
    """Equal to the last victim; or means that are as near as the tolerance, which grows with
    figures beyond 1."""
    if a.value == b.value:
        return "equal"
    if _count(a.value) != _count(b.value):
        return "differs"
    x, y = _mean(a.value), _mean(b.value)
    if not (math.isfinite(x) and math.isfinite(y)):
        return "differs"
    allowed = tolerance if b.tolerance is None else b.tolerance
    near = allowed * max(abs(x), abs(y), 0.0 if b.relative else 1.0)
    return "within tolerance" if abs(x - y) <= near + (_COPY if b.relative else 0.0) else "differs"


def _count(value: Any) -> int | None:
    return len(value) if isinstance(value, Sequence) and not isinstance(value, str) else None


def _mean(value: Any) -> float:
    """NaN where the value is no number."""
    if _count(value) is None:
        return _number(value)
    return sum(map(_number, value)) / len(value) if value else math.nan


def _number(value: Any) -> float:
    """NaN for what a submitted record says in place of a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _shown(figure: Figure | None) -> str:
    if figure is None or figure.value is None:
        return "-"
    value, mean = figure.value, _mean(figure.value)
    if math.isnan(mean):
        return str(value)[:80]
    return f"{mean:.4g}" + ("" if _count(value) is None else f" (mean of {len(value)})")
