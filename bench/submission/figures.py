"""Which figures of a submitted record a rerun must give again, and how near."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bench.records import AttackOutcome, DoneRecord, TrainOutcome, TrainRecord

_EPSILON = 1e-6
"""Of what is computed from public numbers alone."""
_SPENDING = 0.2
"""Of gradient evaluations: when an optimiser stops follows rounding."""
_COPY = 1e-10
"""MSE below which a copy counts as exact, as PSNR is capped there too."""
Verdict = Literal["equal", "within tolerance", "differs"]
_NO_FIGURES = (
    *("schema", "key", "inputs", "train", "files", "hashes", "scoring", "status", "reason"),
    *("device", "versions", "memory", "seconds", "client_seconds", "workings"),
    *("facts", "observations", "course", "personal_accuracies", "correct"),
    *("notes", "words", "reasons", "undeclared", "loss"),
)
"""Fields of records: what a record is of, the machine and its clock, what other fields follow from
or sum up, and words."""


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
    first, again = _figures_of(submitted), _figures_of(rerun)
    for key in {**first, **again}:
        a, b = first.get(key), again.get(key)
        verdict: Verdict = "differs"
        if key in first and key in again:
            # Squared errors lie far below 1, where an absolute tolerance would let all pass.
            verdict = _verdict(a, b, _tolerance(key, b, tolerance), relative="mse" in key)
        yield Comparison(what=what, figure=key, submitted=_text(a), rerun=_text(b), verdict=verdict)


def _figures_of(record: DoneRecord) -> dict[str, Any]:
    """Return a record's figures by their places: numbers, texts, None, or one number per victim."""
    values = asdict(record)
    if isinstance(record, TrainRecord):
        right = record.correct
        values["accuracy"] = None if right is None else right / max(1, record.test_samples)
        values["diverged"] = record.diverged is not None
        told = record.membership
        values["membership"] = None if told is None else [right for _, right in told.curve]
    return dict(_flatten(values))


def _flatten(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and name not in _NO_FIGURES:
            yield from _flatten(value, f"{place}{name}.")
        elif name not in _NO_FIGURES:
            yield f"{place}{name}", value


def _tolerance(name: str, value: Any, of_means: float) -> float:
    """Return that of a figure; counts must be equal."""
    if name.endswith("gradient_evaluations"):
        return _SPENDING
    if name.startswith("ledger."):
        return _EPSILON
    return 0.0 if isinstance(value, int) else of_means


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
