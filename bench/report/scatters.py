"""Scatter plots of rows: accuracy against leakage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.errors import UserError
from bench.metrics.intervals import Interval
from bench.records import Row
from bench.report.paper import GREY, bars, looks, plot
from bench.report.verdicts import has_use

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
        axes.errorbar(
            [x.mean],
            [y.mean],
            xerr=bars([x]),
            yerr=bars([y]),
            color=colour,
            marker=marker,
            markersize=5,
            markerfacecolor=colour if has_use(row) else "white",
            linestyle="none",
            elinewidth=0.6,
            label=f"{row.setting}{own}{'' if has_use(row) else ' (no use)'}",
        )


def _draw_front(axes: Axes, spots: Sequence[Spot]) -> None:
    """Draw the front of the useful settings with a common accuracy: that of clients' own networks,
    on their own labels, is no match for it."""
    able = [(x.mean, y.mean) for r, x, y in spots if has_use(r) and r.accuracy is not None]
    leading = [able[i] for i in front([(x, -y) for x, y in able])]
    if leading:
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
