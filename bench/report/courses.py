"""How trainings went, round by round: what plots over the rounds show, computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bench.metrics.intervals import Interval
from bench.protocols.settings import rounds_before
from bench.records import CourseFigures, Row
from bench.report.plots import (
    Lines,
    Points,
    Scale,
    exact,
    groups,
    linear,
    logarithmic,
    same_training,
)

LEAST = 3
"""Points from which a line tells something."""


def courses(table: Sequence[Row], rows: Sequence[Row]) -> list[Lines]:
    """Return the plots of a table at its last checkpoint, none where fewer than three rounds were
    measured.

    Args:
        table: Its rows.
        rows: All of the report: leaks after fewer rounds stand in other tables.
    """
    first, task = table[0], _task(table[0])
    same_task = [r for r in rows if _task(r) == task]
    if any(_played(r) > _played(first) for r in same_task):
        return []
    trainings: dict[str, list[Row]] = {}
    for row in same_task:
        trainings.setdefault(same_training(row), []).append(row)
    number = groups(rows)
    plots = []
    for name, (label, measure) in _MEASURES.items():
        points = [(row, measure(row, trainings[same_training(row)])) for row in table]
        curves = [(row, some) for row, some in points if len(some) >= LEAST]
        if curves:
            every = [point for _, some in curves for point in some]
            plots.append(
                Lines(
                    name=name,
                    x=Scale(label="rounds", lo=0.0, hi=float(max(n for n, _ in every))),
                    y=_axis(name, label, [v for _, v in every]),
                    lines=[(row.setting, some) for row, some in curves],
                    colours=[number[row.defense] for row, _ in curves],
                    missing=tuple(r.setting for r, some in points if len(some) < LEAST),
                )
            )
    return plots


def _task(row: Row) -> tuple[object, ...]:
    """Return what tables that differ only in the checkpoint have in common."""
    data, model = (row.dataset, row.dataset_settings), (row.model, row.model_settings)
    return (row.suite, *data, *model, row.protocol_settings)


def _accuracy(row: Row, checkpoints: Sequence[Row]) -> Points:
    """The common model's accuracy, else that of the clients' own networks."""
    return [(p.rounds, value) for p in row.course if (value := p.accuracy or p.personal_accuracy)]


def _leak(row: Row, checkpoints: Sequence[Row]) -> Points:
    """The leakage at every checkpoint of the same training, by ascending rounds."""
    points = [(_played(r), value) for r in checkpoints if (value := r.leak_interval) is not None]
    return sorted(points, key=lambda point: point[0])


def _epsilon(
    read: Callable[[CourseFigures], float | None],
) -> Callable[[Row, Sequence[Row]], Points]:
    def points(row: Row, checkpoints: Sequence[Row]) -> Points:
        known = [(p.rounds, read(p)) for p in row.course]
        return [(n, exact(e)) for n, e in known if e is not None and 0 < e < math.inf]

    return points


_MEASURES: dict[str, tuple[str, Callable[[Row, Sequence[Row]], Points]]] = {
    "accuracy": ("accuracy", _accuracy),
    "leak": ("leakage (safer ↓)", _leak),
    "eps_record": ("ε proven for a record (safer ↓)", _epsilon(lambda p: p.eps_record)),
    "eps_claimed": ("ε claimed (safer ↓)", _epsilon(lambda p: p.eps_claimed)),
}


def _axis(name: str, label: str, values: Sequence[Interval]) -> Scale:
    if name == "leak":
        return Scale(label=label, lo=0.0, hi=1.0)
    return linear(label, values) if name == "accuracy" else logarithmic(label, values)


def _played(row: Row) -> int:
    return rounds_before(row.checkpoint, row.protocol_settings.rounds)
