"""How trainings went, round by round: what plots over the rounds show, computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.metrics.intervals import Interval
from bench.protocols.settings import rounds_before
from bench.records import CourseFigures, Row
from bench.report.plots import Scale, exact, groups, linear, logarithmic, same_training

LEAST = 3
"""Points from which a line tells something."""


@dataclass(frozen=True, kw_only=True)
class CourseLine:
    """One setting over the rounds.

    Attributes:
        row: Its row in the table.
        group: Number of its defense, which has a colour.
        points: Rounds played, and the figure then.
    """

    row: Row
    group: int
    points: tuple[tuple[int, Interval], ...]


@dataclass(frozen=True, kw_only=True)
class Course:
    """One figure of a table's settings over the rounds.

    Attributes:
        name: accuracy, leak, eps_record or eps_claimed.
        choice: What is against what.
        missing: Settings without so many such figures.
    """

    name: str
    choice: str
    x: Scale
    y: Scale
    lines: tuple[CourseLine, ...]
    missing: tuple[Row, ...]


def courses(table: Sequence[Row], rows: Sequence[Row]) -> list[Course]:
    """The plots of one table, those of its last checkpoint alone; none where nothing was measured
    at three rounds.

    Args:
        table: Its rows.
        rows: All of the report: leaks after fewer rounds stand in other tables.
    """
    first, task = table[0], _task(table[0])
    alike = [r for r in rows if _task(r) == task]
    if any(_played(r) > _played(first) for r in alike):
        return []
    trainings: dict[str, list[Row]] = {}
    for row in alike:
        trainings.setdefault(same_training(row), []).append(row)
    number = groups(rows)
    found = []
    for name, (label, measure) in _MEASURES.items():
        points = [measure(row, trainings[same_training(row)]) for row in table]
        found.append(_course(name, label, table, points, number))
    return [course for course in found if course.lines]


def _task(row: Row) -> tuple[object, ...]:
    """What tables that differ in the checkpoint alone have in common."""
    data, model = (row.dataset, row.dataset_settings), (row.model, row.model_settings)
    return (row.suite, *data, *model, row.protocol_settings)


Points = list[tuple[int, Interval]]
"""Rounds played, and a figure then."""


def _accuracy(row: Row, checkpoints: Sequence[Row]) -> Points:
    """Of the common model, or where there is none of the clients' own networks."""
    return [(p.rounds, shown) for p in row.course if (shown := p.accuracy or p.personal_accuracy)]


def _leak(row: Row, checkpoints: Sequence[Row]) -> Points:
    """At every checkpoint of the same training, in ascending order of rounds."""
    found = [(_played(r), shown) for r in checkpoints if (shown := r.leak_interval) is not None]
    return sorted(found, key=lambda point: point[0])


def _epsilon(
    read: Callable[[CourseFigures], float | None],
) -> Callable[[Row, Sequence[Row]], Points]:
    def points(row: Row, checkpoints: Sequence[Row]) -> Points:
        known = [(p.rounds, read(p)) for p in row.course]
        return [(n, exact(e)) for n, e in known if e is not None and 0 < e < math.inf]

    return points


_MEASURES: dict[str, tuple[str, Callable[[Row, Sequence[Row]], Points]]] = {
    "accuracy": ("accuracy", _accuracy),
    "leak": ("leak (safer ↓)", _leak),
    "eps_record": ("ε proven for a record (safer ↓)", _epsilon(lambda p: p.eps_record)),
    "eps_claimed": ("ε claimed (safer ↓)", _epsilon(lambda p: p.eps_claimed)),
}


def _course(
    name: str,
    label: str,
    table: Sequence[Row],
    points_of: Sequence[Points],
    number: Mapping[str, int],
) -> Course:
    found = list(zip(table, points_of, strict=True))
    lines = tuple(
        CourseLine(row=row, group=number[row.defense], points=tuple(points))
        for row, points in found
        if len(points) >= LEAST
    )
    values = [v for line in lines for _, v in line.points]
    last = max((n for line in lines for n, _ in line.points), default=1)
    return Course(
        name=name,
        choice=f"{label.partition(' (')[0]} over rounds",
        x=Scale(label="rounds", lo=0.0, hi=float(last)),
        y=_axis(name, label, values),
        lines=lines,
        missing=tuple(row for row, points in found if len(points) < LEAST),
    )


def _axis(name: str, label: str, values: Sequence[Interval]) -> Scale:
    if name == "leak" or not values:
        return Scale(label=label, lo=0.0, hi=1.0)
    return linear(label, values) if name == "accuracy" else logarithmic(label, values)


def _played(row: Row) -> int:
    return rounds_before(row.checkpoint, row.protocol_settings.rounds)
