"""How trainings went, round by round: what plots over the rounds show, computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.metrics.intervals import Interval
from bench.metrics.named import leak
from bench.protocols.settings import rounds_before
from bench.records import CourseFigures, Row
from bench.report.plots import Scale, groups, same_training

LEAST = 3
"""Points from which a line tells something."""


@dataclass(frozen=True, kw_only=True)
class CourseLine:
    """One setting over the rounds.

    Attributes:
        row: Its row in the table.
        place: Where that stands in the table.
        group: Number of its defense, which has a colour.
        points: Rounds played, and the figure then.
    """

    row: Row
    place: int
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
    later = {same_training(r) for r in rows if _played(r) > _played(table[0])}
    if any(same_training(r) in later for r in table):
        return []
    found = [_course(name, *what, table, rows) for name, what in _MEASURES.items()]
    return [course for course in found if course.lines]


def _accuracy(row: Row, rows: Sequence[Row]) -> list[tuple[int, Interval]]:
    """Of the common model, or where there is none of the clients' own networks."""
    return [(p.rounds, shown) for p in row.course if (shown := p.accuracy or p.personal_accuracy)]


def _leak(row: Row, rows: Sequence[Row]) -> list[tuple[int, Interval]]:
    """At every checkpoint of the same training, in ascending order of rounds."""
    mine = same_training(row)
    found = []
    for other in rows:
        if same_training(other) == mine and (shown := leak_interval(other)) is not None:
            found.append((_played(other), shown))
    return sorted(found, key=lambda point: point[0])


def _epsilon(
    read: Callable[[CourseFigures], float | None],
) -> Callable[[Row, Sequence[Row]], list[tuple[int, Interval]]]:
    def points(row: Row, rows: Sequence[Row]) -> list[tuple[int, Interval]]:
        known = [(p.rounds, read(p)) for p in row.course]
        return [(n, _exact(e)) for n, e in known if e is not None and 0 < e < math.inf]

    return points


_MEASURES: dict[str, tuple[str, Callable[[Row, Sequence[Row]], list[tuple[int, Interval]]]]] = {
    "accuracy": ("accuracy", _accuracy),
    "leak": ("leak (safer ↓)", _leak),
    "eps_record": ("ε proven for a record (safer ↓)", _epsilon(lambda p: p.eps_record)),
    "eps_claimed": ("ε claimed (safer ↓)", _epsilon(lambda p: p.eps_claimed)),
}


def leak_interval(row: Row) -> Interval | None:
    """A row's leak with the interval of the score that it comes from; None without floor."""
    case = row.ranking
    floor = row.attacks[case.attack].floor.get(case.metric) if case else None
    if case is None or floor is None:
        return None
    mean, *ends = (
        leak(v, floor, case.metric)
        for v in (case.interval.mean, case.interval.lo, case.interval.hi)
    )
    return Interval(mean=mean, lo=min(ends), hi=max(ends))


def _course(
    name: str,
    label: str,
    measure: Callable[[Row, Sequence[Row]], list[tuple[int, Interval]]],
    table: Sequence[Row],
    rows: Sequence[Row],
) -> Course:
    number = groups(rows)
    found = [(place, row, measure(row, rows)) for place, row in enumerate(table)]
    lines = tuple(
        CourseLine(row=row, place=place, group=number[row.defense], points=tuple(points))
        for place, row, points in found
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
        missing=tuple(row for _, row, points in found if len(points) < LEAST),
    )


def _axis(name: str, label: str, values: Sequence[Interval]) -> Scale:
    if name == "leak" or not values:
        return Scale(label=label, lo=0.0, hi=1.0)
    low, high = min(v.lo for v in values), max(v.hi for v in values)
    if name == "accuracy":
        room = max(0.02, 0.06 * (high - low))
        return Scale(label=label, lo=max(0.0, low - room), hi=min(1.0, high + room))
    ends = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return Scale(label=label, lo=10.0 ** ends[0], hi=10.0 ** max(ends[1], ends[0] + 1), log=True)


def _played(row: Row) -> int:
    return rounds_before(row.checkpoint, row.protocol_settings.rounds)


def _exact(value: float) -> Interval:
    return Interval(mean=value, lo=value, hi=value)
