"""Plots of rows: accuracy against leakage, and figures over the rounds of a training or over the
values of a sweep."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from bench.errors import UserError
from bench.metrics.intervals import Interval
from bench.protocols.settings import rounds_before
from bench.records import Row
from bench.report.explain import MEASURES
from bench.report.paper import COLOURS, GREY, MARKERS, bars, looks, plot, set_log
from bench.report.tables import same_training
from bench.report.verdicts import has_use

Points = Sequence[tuple[float, Interval]]
"""Where each figure was measured, in ascending order, and the figure."""
_LEAST = 3
"""Points from which a line over the rounds tells something."""
_WIDE = 8.0
"""Ratio of largest to smallest value from which their axis is logarithmic."""


def draw_line(
    axes: Axes, points: Points, *, colour: str, marker: str, label: str, **more: Any
) -> None:
    """Draw a line through intervals, with their bars. more: of the line."""
    x, y = zip(*points, strict=True)
    looks = {"markersize": 4, "capsize": 2, "elinewidth": 0.6, **more}
    means = [interval.mean for interval in y]
    axes.errorbar(x, means, yerr=bars(y), color=colour, marker=marker, label=label, **looks)


def courses(table: Sequence[Row], rows: Sequence[Row]) -> dict[str, list[Points]]:
    """Return by key of `MEASURES` what was measured over the rounds of each row's training; nothing
    before the last checkpoint, nor of under three rounds.

    Args:
        table: Its rows.
        rows: All of the report: leakage after fewer rounds stands in other tables.
    """
    trainings: dict[str, list[Row]] = {}
    for row in rows:
        trainings.setdefault(same_training(row), []).append(row)
    checkpoints = [trainings[same_training(row)] for row in table]
    if max(_rounds_played(r) for own in checkpoints for r in own) > _rounds_played(table[0]):
        return {}
    pairs = list(zip(table, checkpoints, strict=True))
    by_measure = {name: [_measure(row, name, own) for row, own in pairs] for name in MEASURES}
    return {n: points for n, points in by_measure.items() if max(map(len, points)) >= _LEAST}


def _measure(row: Row, name: str, checkpoints: Sequence[Row]) -> Points:
    """Return a row's figure over the rounds. checkpoints: rows of the same training."""
    if name == "leak":
        leaks = [(_rounds_played(r), leak) for r in checkpoints if (leak := r.leak_interval)]
        return sorted(leaks, key=lambda point: point[0])
    if name == "accuracy":
        return [(p.rounds, a) for p in row.course if (a := p.accuracy or p.personal_accuracy)]
    known = [(p.rounds, getattr(p, name)) for p in row.course]
    return [(n, exact(e)) for n, e in known if e is not None and 0 < e < math.inf]


def _rounds_played(row: Row) -> int:
    return rounds_before(row.checkpoint, row.protocol_settings.rounds)


def course(
    table: Sequence[Row], rows: Sequence[Row], what: str, *, width: str = "column"
) -> Figure:
    """Draw one table's accuracy, leak, eps_record or eps_claimed over the rounds of training.

    Raises:
        UserError: If that was not measured after three rounds or more.
    """
    measured = courses(table, rows)
    if what not in measured:
        there = ", ".join(measured) or "nothing"
        raise UserError(
            f"this table has {there} over its rounds, not '{what}'; `course` and `checkpoints` "
            "of the suite say what is measured when."
        )
    drawn = {i: points for i, points in enumerate(measured[what]) if len(points) >= _LEAST}
    missing = [r.setting for i, r in enumerate(table) if i not in drawn]
    chosen = looks([table[i] for i in drawn], rows)
    with plot(width, missing) as (figure, axes):
        for (i, points), (colour, marker) in zip(drawn.items(), chosen, strict=True):
            draw_line(axes, points, colour=colour, marker=marker, label=table[i].setting)
        axes.set(xlabel="rounds", ylabel=MEASURES[what])
        if what == "leak":
            axes.set_ylim(-0.03, 1.03)
        elif what != "accuracy":
            set_log(axes, "y")
    return figure


def membership(table: Sequence[Row], rows: Sequence[Row], *, width: str = "column") -> Figure:
    """Draw true over false positives of membership inference in one table, a line per setting, on
    logarithmic axes; dotted: guessing."""
    curves = [r.membership.curve if r.membership else {} for r in table]
    missing = [r.setting for r, curve in zip(table, curves, strict=True) if not curve]
    with plot(width, missing) as (figure, axes):
        for row, curve, (colour, marker) in zip(table, curves, looks(table, rows), strict=True):
            if curve:
                (line,) = axes.plot([*curve], [*curve.values()], color=colour, label=row.setting)
                line.set(marker=marker, markersize=3)
        ends = axes.get_xlim()
        axes.plot(ends, ends, color=GREY, linestyle="dotted", label="guessing")
        set_log(axes, "x")
        set_log(axes, "y")
        axes.set(xlabel="false positives", ylabel="true positives (safer ↓)", ylim=(1e-3, 1.1))
    return figure


def sweep(table: DataFrame, *, width: str = "column") -> Figure:
    """Draw leakage over the values of one key; values that are no numbers stand side by side.

    table: Of `bench.report.sweep.frame_of`.
    """
    values = table["value"].unique().tolist()
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    numeric = len(numbers) == len(values)
    at = {str(v): numbers[i] if numeric else float(i) for i, v in enumerate(values)}
    known = table.dropna(subset="leakage")
    with plot(width) as (figure, axes):
        if numeric and min(numbers) > 0 and max(numbers) >= _WIDE * min(numbers):
            set_log(axes, "x")
        for number, (name, some) in enumerate(known.groupby("curve", sort=False)):
            ends = some[["value", "leakage", "leakage_lo", "leakage_hi"]].to_numpy().tolist()
            points = [(at[str(v)], Interval(mean=y, lo=lo, hi=hi)) for v, y, lo, hi in ends]
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            draw_line(axes, points, colour=colour, marker=marker, label=str(name))
        axes.set(xlabel=table["over"].iloc[0], ylabel="leakage (safer ↓)", ylim=(-0.03, 1.03))
        axes.set_xticks(list(at.values()), list(at))
    return figure


# --- accuracy against leakage -------------------------------------------------------------------

Spot = tuple[Row, Interval, Interval]
"""A row with its leakage and its accuracy: of the common model, or where there is none of
the clients' own networks."""


def spots_of(rows: Sequence[Row]) -> list[Spot]:
    """Return the rows of one table that have both figures."""
    known = ((r, r.leak_interval, r.accuracy or r.personal_accuracy) for r in rows)
    return [(row, leakage, accuracy) for row, leakage, accuracy in known if leakage and accuracy]


def pareto(rows: Sequence[Row], *, among: Sequence[Row] = (), width: str = "column") -> Figure:
    """Draw accuracy against leakage of one table's rows, with 95 % intervals, and the front:
    settings that no other one beats in both.

    Hollow: without use (diverged, at chance). Rows without a figure are named below.

    Args:
        rows: Of one table.
        among: Rows of the whole report, by which a defense has its colour.
        width: column or page.

    Raises:
        UserError: If no row has both figures.
    """
    spots = spots_of(rows)
    if not spots:
        raise UserError("no row of this table has both figures: nothing to draw.")
    drawn = {id(row) for row, *_ in spots}
    with plot(width, [r.setting for r in rows if id(r) not in drawn]) as (figure, axes):
        _draw_spots(axes, spots, among or rows)
        _draw_front(axes, spots)
        axes.set(xlabel="leakage (safer ←)", ylabel="accuracy")
    return figure


def exact(value: float) -> Interval:
    """Return a number as an interval without width."""
    return Interval(mean=value, lo=value, hi=value)


def _draw_spots(axes: Axes, spots: Sequence[Spot], among: Sequence[Row]) -> None:
    """Draw settings with their intervals, labelled for the legend; among: see `looks`."""
    chosen = looks([row for row, *_ in spots], among)
    for (row, x, y), (colour, marker) in zip(spots, chosen, strict=True):
        own = " (own networks)" if row.accuracy is None else ""
        label = f"{row.setting}{own}{'' if has_use(row) else ' (no use)'}"
        filled = colour if has_use(row) else "white"
        draw_line(
            axes, [(x.mean, y)], colour=colour, marker=marker, label=label, xerr=bars([x]),
            markersize=5, markerfacecolor=filled, linestyle="none", capsize=0,
        )  # fmt: skip


def _draw_front(axes: Axes, spots: Sequence[Spot]) -> None:
    """Draw the front of the useful settings with a common accuracy: that of clients' own networks,
    on their own labels, is no match for it."""
    able = [(x.mean, y.mean) for r, x, y in spots if has_use(r) and r.accuracy is not None]
    if leading := [able[i] for i in front([(x, -y) for x, y in able])]:
        x, y = zip(*leading, strict=True)
        axes.plot(x, y, drawstyle="steps-post", label="front", color=GREY, lw=0.8, zorder=0)


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the places of the points (x, y), by x, that no other beats in both; smaller is
    better."""
    leading: list[int] = []
    best = (math.inf, math.inf)
    for x, y, place in sorted((x, y, i) for i, (x, y) in enumerate(points)):
        if y < best[1] or (x, y) == best:
            leading.append(place)
            best = (x, y)
    return leading
