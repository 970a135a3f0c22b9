"""Scatter plots of rows: accuracy against leakage, and the trade-off of all tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.errors import UserError
from bench.metrics.intervals import Interval
from bench.metrics.named import METRICS, sign_of
from bench.records import Row
from bench.report.overview import LOSSES, overview
from bench.report.paper import GREY, bars, draw_floors, looks, plot, set_log
from bench.report.tables import same_training, tables
from bench.report.verdicts import UNDEFENDED, has_use

LEAST = 3
"""Settings from which a plot tells more than the table above it."""
_MOST = 150
"""Of more settings in all tables, those that an overview chooses are drawn."""
Spot = tuple[Row, Interval, Interval]
"""A row with its two figures, along x and y."""


def pareto(
    rows: Sequence[Row], *, among: Sequence[Row] = (), width: str = "column", least: int = 1
) -> Figure:
    """Draw accuracy against worst-case leakage of one table's rows, with 95 % intervals, the
    baselines, and the front: settings that no other one beats in both.

    Hollow: without use (diverged, at chance). Rows without a figure are named below.

    Args:
        rows: Of one table.
        among: Rows of the whole report, by which a defense has its colour.
        width: column or page.
        least: Rows that there must be.

    Raises:
        UserError: If fewer rows have both figures.
    """
    metric = "mse" if all(r.ranking.metric == "mse" for r in rows if r.ranking) else "ssim"
    spots = [
        (row, row.ranking.interval, accuracy)
        for row in rows
        if row.ranking and row.ranking.metric == metric and (accuracy := _accuracy(row))
    ]
    _check_enough(spots, least)
    floors = [r.attacks[r.ranking.attack].floor for r, *_ in spots if r.ranking]
    with plot(width, _missing(rows, spots)) as (figure, axes):
        if metric == "mse":
            set_log(axes, "x")
        _draw_spots(axes, spots, among or rows)
        draw_floors(axes, floors, metric)
        _draw_front(axes, spots, sign_of(metric))
        safer = "←" if metric == "ssim" else "→"
        axes.set(xlabel=f"worst-case {METRICS[metric].title} (safer {safer})", ylabel="accuracy")
    return figure


def trade(rows: Sequence[Row], *, width: str = "page") -> Figure:
    """Draw the leakage in the leakiest observed round against the accuracy drop in points, for the
    defended settings of all tables of a report.

    Raises:
        UserError: If too few settings are of use.
    """
    final = [r for r in rows if r.checkpoint == "final"] or rows
    worst: dict[str, float] = {}
    for row in rows:
        if row.leak is not None and has_use(row):
            worst[same_training(row)] = max(row.leak, worst.get(same_training(row), 0.0))
    spots = [
        (row, exact(worst[same_training(row)]), exact(100 * row.accuracy_drop.mean))
        for _, members in tables(final)
        for row in members
        if row.defense != UNDEFENDED and has_use(row)
        if row.leak is not None and row.accuracy_drop is not None
    ]
    if len(spots) > _MOST:
        chosen = {id(row) for line in overview(final, LOSSES[-1]).lines for row in line.rows}
        spots = [spot for spot in spots if id(spot[0]) in chosen]
    if len(spots) < LEAST:
        raise UserError("too few settings of these tables are of use: nothing to draw.")
    with plot(width) as (figure, axes):
        _draw_spots(axes, spots, rows)
        axes.set(
            xlabel="leakage, worst observed round (safer ←)",
            ylabel="accuracy drop, points (better ↓)",
            xlim=(-0.03, 1.03),
        )
    return figure


def exact(value: float) -> Interval:
    """Return a number as an interval without width."""
    return Interval(mean=value, lo=value, hi=value)


def _accuracy(row: Row) -> Interval | None:
    """Return the accuracy of the common model, or where there is none of the clients' own
    networks."""
    return row.accuracy or row.personal_accuracy


def _check_enough(spots: Sequence[object], least: int) -> None:
    if len(spots) < least:
        raise UserError("no row of this table has both figures: nothing to draw.")


def _missing(rows: Sequence[Row], spots: Sequence[Spot]) -> list[str]:
    drawn = {id(row) for row, *_ in spots}
    return [row.setting for row in rows if id(row) not in drawn]


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


def _draw_front(axes: Axes, spots: Sequence[Spot], sign: float) -> None:
    """Draw the front of the useful settings with a common accuracy: that of clients' own networks,
    on their own labels, is no match for it. sign: 1 where a larger x is less safe, else -1."""
    able = [(x.mean, y.mean) for r, x, y in spots if has_use(r) and r.accuracy is not None]
    leading = [able[i] for i in front([(sign * x, -y) for x, y in able])]
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
