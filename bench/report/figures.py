"""Figures for a paper's column or page: what `plots` has computed, placed with matplotlib."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from bench.errors import UserError
from bench.files import no_link
from bench.metrics.intervals import Interval
from bench.records import Row, Run
from bench.report import grids, plots
from bench.report.courses import courses
from bench.report.leaderboard import cells_by_row
from bench.report.overview import by_protocol
from bench.report.paper import Paper, inches, styled, write
from bench.report.plots import SIDES, TOLD, Band, Heat, Lines, Scale, Scatter, Spot
from bench.report.tables import tables

COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"),
    "#777777",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*", "h")
"""Seven colours of Okabe and Ito, told apart by colour-blind readers, the grey of undefended rows
(`plots.GREY`), and twelve shapes."""
_GREY: Mapping[str, Any] = {"color": "#888888", "linewidth": 0.8, "zorder": 0}
_AXES_HEIGHT = 2.1
_LINE_HEIGHT = 0.155
_LETTER_WIDTH = 0.07
"""Inches of text of 8 points."""
_HEADS = 80
"""Letters that the heads of a map have room for beside each other on a page."""
_UPRIGHT = 26
"""Letters of a line of a head that stands upright: two lines are as wide as a column."""
CHOICES = {
    "trade": "Leakage against accuracy drop, all tables",
    "pareto": "Accuracy against leakage",
    "budget": "Leakage against budget",
    "over_accuracy": "Accuracy over the rounds",
    "over_leak": "Leakage over the rounds",
    "over_eps_record": "Proven epsilon over the rounds",
    "over_eps_claimed": "Claimed epsilon over the rounds",
}
"""What the figures on a page show, by their names."""
EPSILONS = {"eps_record": "proven", "eps_claimed": "claimed"}
"""What epsilons there are, and the plots that show them."""


def pareto(
    rows: Sequence[Row], *, among: Sequence[Row] | None = None, width: str = "column"
) -> Figure:
    """Accuracy against worst-case leakage of one table's rows, with 95 % intervals, the floors,
    and the front: settings that no other one beats in both.

    Hollow: without use (diverged, at chance). Rows without a figure are named below. among: rows of
    the whole report, by which a defense has its colour.

    Raises:
        UserError: If no row has both figures.
    """
    return _draw_scatter(plots.scatter(rows, "leak", among), width)


def epsilon(
    rows: Sequence[Row],
    *,
    which: str = "eps_record",
    among: Sequence[Row] | None = None,
    width: str = "column",
) -> Figure:
    """Accuracy against an epsilon on a logarithmic axis; infinite and absent ones in a strip of
    their own at the right. Units of claims stand in the legend.

    Raises:
        UserError: For another `which`, and if no row has an accuracy.
    """
    if which not in EPSILONS:
        raise UserError(f"which must be {' or '.join(EPSILONS)}, got '{which}'.")
    return _draw_scatter(plots.scatter(rows, EPSILONS[which], among), width)


def trade(rows: Sequence[Row], *, width: str = "page") -> Figure:
    """Draw the leakage in the leakiest round against the accuracy drop in points, for all tables of
    a report.

    Raises:
        UserError: If too few settings are of use.
    """
    scatter = plots.trade(rows)
    if scatter is None:
        raise UserError("too few settings of these tables are of use: nothing to draw.")
    return _draw_scatter(scatter, width)


def lines(plot: Lines | None, *, width: str = "column") -> Figure:
    """Draw figures by budget or over the rounds, with 95 % intervals. SSIM that still rises with
    the budget means that the attack was cut short.

    Raises:
        UserError: If no attack was run at more than one budget.
    """
    if plot is None:
        raise UserError("no attack of this table was run at two budgets: nothing to draw.")
    names = [*(name for name, _ in plot.lines), *map(_floor_name, plot.floors)]
    missing = [f"not shown, without a figure: {name}" for name in plot.missing]
    with styled():
        figure, axes, _ = frame(width, [*names, *missing])
        handles = []
        colours = plot.colours or range(len(plot.lines))
        for number, ((_, points), colour) in enumerate(zip(plot.lines, colours, strict=True)):
            handles.append(draw_line(axes, points, colour=colour, marker=number))
        _scale_axis(axes, plot.x, "x")
        _scale_axis(axes, plot.y, "y")
        if plot.ticks:
            axes.set_xticks([*plot.ticks], [*plot.ticks.values()])
        handles += [_floor(axes, band) for band in plot.floors]
        legend(figure, handles, names, width, missing)
    return figure


def heat(plot: Heat | None, *, width: str = "page") -> Figure:
    """Draw leakage as a map, shaded from 0 (white) to 1, with the figures in it.

    Raises:
        UserError: If there is nothing to draw.
    """
    if plot is None or not plot.lines or not plot.columns:
        raise UserError("no attack of this table has a figure: nothing to draw.")
    lines = [textwrap.fill(name, 34) for name in plot.lines]
    names, deep, turned = _heads(plot.columns)
    tall = [max(1.6, len(name.splitlines())) for name in lines]
    with styled():
        high = sum(tall) * _LINE_HEIGHT + deep + 0.5
        figure = Paper(figsize=(inches(width), high), layout="constrained")
        axes = figure.subplots()
        edges = [0.0, *itertools.accumulate(tall)]
        leaks = [[math.nan if v is None else v for v in line] for line in plot.leaks]
        axes.pcolormesh(
            range(len(plot.columns) + 1), edges, leaks, cmap="Oranges", vmin=0.0, vmax=1.5
        )
        for y, texts in enumerate(plot.texts):
            for x, text in enumerate(texts):
                middle = (edges[y] + edges[y + 1]) / 2
                size = None if len(text) < 7 else "small"
                axes.text(x + 0.5, middle, text, ha="center", va="center", fontsize=size)
        axes.invert_yaxis()
        axes.set_xticks([x + 0.5 for x in range(len(names))], names, rotation=turned)
        axes.set_yticks([(a + b) / 2 for a, b in itertools.pairwise(edges)], lines)
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return figure


def _heads(columns: Sequence[str]) -> tuple[list[str], float, int]:
    """Names of columns as they stand above a map, their height in inches and rotation in degrees: a
    word per line, long words broken at underscores; upright where one is too wide for that."""
    most = _HEADS // len(columns)
    words = [name.split() for name in columns]
    broken = [[w if len(w) <= most else w.replace("_", "_\n") for w in name] for name in words]
    level = ["\n".join(name) for name in broken]
    # Letters are narrower than _HEADS allows for: three more do not reach the next column's.
    if all(len(line) <= most + 3 for name in level for line in name.splitlines()):
        return level, max(len(name.splitlines()) for name in level) * _LINE_HEIGHT, 0
    upright = [textwrap.fill(" ".join(name), _UPRIGHT) for name in words]
    longest = max(len(line) for name in upright for line in name.splitlines())
    return upright, longest * _LETTER_WIDTH, 90


def of_report(rows: Sequence[Row]) -> dict[str, Figure]:
    """Return the figure of all tables of a report by its name; none where it would say nothing."""
    plot = plots.trade(rows)
    return {} if plot is None else {"trade": _draw_scatter(plot, "page")}


def of_table(
    members: Sequence[Row], rows: Sequence[Row], *, width: str = "column"
) -> dict[str, Figure]:
    """Return the figures of one table that stand on its page, by their names.

    Args:
        members: Its rows.
        rows: All of the report.
        width: Of each.
    """
    by_name: dict[str, Figure] = {}
    if (pareto_plot := _draw_if_telling(members, "leak", rows, width)) is not None:
        by_name["pareto"] = pareto_plot
    if spent := plots.budgets(members, members[0]):
        by_name["budget"] = lines(spent, width=width)
    for over in courses(members, rows):
        by_name[f"over_{over.name}"] = lines(over, width=width)
    return by_name


def write_figures(
    rows: Sequence[Row],
    folder: Path,
    out: Path,
    formats: Sequence[str],
    *,
    width: str = "column",
) -> list[Path]:
    """Write each protocol's overview and every table's figures to OUT/figures as
    PROTOCOL-DATASET-MODEL-CHECKPOINT-WHAT: attacks (leakage by setting and attack), pareto,
    epsilon_proven, epsilon_claimed, budget, over_accuracy and others over the rounds, and pictures
    (each setting's strongest attack).

    What a table has no figures for (no budget was doubled, records instead of images, no
    artifacts) has no file.

    Raises:
        UserError: For an unknown format or width.
    """
    cells = list(cells_by_row(Run.read(folder)))
    place = no_link(out, "figures")
    paths: list[Path] = []
    names: Counter[str] = Counter()
    for protocol_overview in by_protocol(rows):
        by_table = heat(plots.overview_map(protocol_overview))
        paths += write(by_table, place / f"{protocol_overview.protocol}-overview", formats)
    for what, figure in of_report(rows).items():
        paths += write(figure, place / what, formats)
    for _, members in tables(rows):
        same = ("protocol", "dataset", "model", "checkpoint")
        name = "-".join(re.sub(r"[^\w.]+", "_", str(getattr(members[0], k))) for k in same)
        names[name] += 1
        if names[name] > 1:
            name = f"{name}-{names[name]}"
        by_name: dict[str, Figure] = {}
        if (by_attack := plots.attacks_map(members)) is not None:
            by_name["attacks"] = heat(by_attack)
        for what in EPSILONS.values():
            if (epsilon_plot := _draw_if_telling(members, what, rows, width)) is not None:
                by_name[f"epsilon_{what}"] = epsilon_plot
        by_name |= of_table(members, rows, width=width)
        if strongest := grids.strongest(folder, cells, members):
            by_name["pictures"] = grids.pictures(folder, strongest, width="page")
        for what, figure in by_name.items():
            paths += write(figure, place / f"{name}-{what}", formats)
    return paths


# --- pieces -----------------------------------------------------------------------------------


def _draw_if_telling(
    members: Sequence[Row], name: str, rows: Sequence[Row], width: str
) -> Figure | None:
    """Draw the plot of a table by its key of `plots.KINDS`; None where it would say nothing."""
    try:
        plot = plots.scatter(members, name, rows)
    except UserError:  # no row has both figures
        return None
    return _draw_scatter(plot, width) if plot.tells else None


def _draw_scatter(plot: Scatter, width: str) -> Figure:
    entries = [_label(s, plot) for s in plot.spots]
    entries += ["front"] * bool(plot.front) + list(map(_floor_name, plot.floors))
    missing = [f"not shown, without a figure: {r.setting}" for r in plot.missing]
    with styled():
        figure, axes, strip = frame(width, [*entries, *missing], strip=bool(plot.x.sides))
        seen = zip(plot.spots, looks(plot.spots), strict=True)
        handles = [_draw_point(axes, strip, plot, spot, *look) for spot, look in seen]
        _scale_axis(axes, plot.x, "x")
        _scale_axis(axes, plot.y, "y")
        if strip is not None:
            strip.set_xticks(range(len(plot.x.sides)), [SIDES[s] for s in plot.x.sides])
            strip.set_xlim(-0.6, len(plot.x.sides) - 0.4)
        if strip is not None and all(s.side for s in plot.spots):
            axes.set_xticks([])
            axes.text(0.5, 0.5, "no finite epsilon", transform=axes.transAxes, ha="center")
        on_axis = [s for i in plot.front if not (s := plot.spots[i]).side]
        if plot.front:
            (line,) = axes.plot(
                [_position(s, plot.x) for s in on_axis],
                [s.y.mean for s in on_axis],
                **_GREY,
                drawstyle="steps-post",
                label="front",
            )
            handles.append(line)
        handles += [_floor(axes, band) for band in plot.floors]
        legend(figure, handles, entries, width, missing)
    return figure


def frame(
    width: str, entries: Sequence[str], *, strip: bool = False
) -> tuple[Paper, Axes, Axes | None]:
    """An empty figure with room for its legend; strip: a second, narrow pair of axes."""
    lines = sum(len(_wrap(e, width).splitlines()) for e in entries)
    size = (inches(width), _AXES_HEIGHT + lines * _LINE_HEIGHT + 0.1)
    figure = Paper(figsize=size, layout="constrained")
    if not strip:
        return figure, figure.subplots(), None
    axes, beside = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1.6])
    beside.set_facecolor("#f0f0f0")
    beside.spines["left"].set_visible(False)
    beside.tick_params(axis="y", length=0)
    return figure, axes, beside


def _draw_point(
    axes: Axes, strip: Axes | None, plot: Scatter, spot: Spot, colour: str, marker: str
) -> Line2D:
    """Draw a setting with its intervals."""
    x, on = _position(spot, plot.x), axes
    if spot.side and strip is not None:
        x, on = plot.x.sides.index(spot.side) + spot.aside, strip
    container = on.errorbar(
        [x],
        [spot.y.mean],
        xerr=None if spot.side else bars([spot.x]),
        yerr=bars([spot.y]),
        color=colour,
        marker=marker,
        markersize=5,
        markerfacecolor="white" if spot.muted else colour,
        linestyle="none",
        elinewidth=0.6,
        capsize=0,
    )
    line = container[0]
    assert isinstance(line, Line2D)
    return line


def _position(spot: Spot, scale: Scale) -> float:
    """Return a setting's place on the x axis; 0 is drawn at the left edge of a logarithmic one."""
    return max(spot.x.mean, scale.lo) if scale.log else spot.x.mean


def looks(spots: Sequence[Spot]) -> list[tuple[str, str]]:
    """Return a colour per defense, and a marker that no other setting of this colour has."""
    uses: Counter[str] = Counter()
    out = []
    for spot in spots:
        colour = COLOURS[spot.group % len(COLOURS)]
        out.append((colour, MARKERS[uses[colour] % len(MARKERS)]))
        uses[colour] += 1
    return out


def bars(values: Sequence[Interval]) -> list[list[float]]:
    """Lengths of intervals below and above their means."""
    return [[v.mean - v.lo for v in values], [v.hi - v.mean for v in values]]


def _scale_axis(axes: Axes, scale: Scale, which: str) -> None:
    """Set the extent, ticks and label of one axis, with room for a mark at either end."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    room = (scale.hi - scale.lo) * 0.03
    limits = (scale.lo - room, scale.hi + room)
    if scale.log:
        axes.set(**{f"{which}scale": "log"})
        limits = (scale.lo / 1.3, scale.hi * 1.3)
    axes.set(**{f"{which}lim": limits, f"{which}label": scale.label})
    values, texts = zip(*scale.ticks(), strict=True)
    axis.set_ticks(values, texts)
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def draw_line(
    axes: Axes, points: Sequence[tuple[float, Interval]], *, colour: int, marker: int
) -> Line2D:
    """A line through intervals, drawn at points of x with their bars."""
    x, y = zip(*points, strict=True)
    line: Line2D = axes.errorbar(
        x,
        [at.mean for at in y],
        yerr=bars(y),
        color=COLOURS[colour % len(COLOURS)],
        marker=MARKERS[marker % len(MARKERS)],
        markersize=4,
        capsize=2,
        elinewidth=0.6,
    )[0]
    return line


def _floor(axes: Axes, band: Band) -> Line2D:
    """A line or band at what needs no leak."""
    style = "dashed" if band.label == TOLD else "dotted"
    line, span = (axes.axhline, axes.axhspan) if band.across else (axes.axvline, axes.axvspan)
    if band.hi > band.lo:
        span(band.lo, band.hi, color="#888888", alpha=0.2, linewidth=0, zorder=0)
    return line(
        (band.lo + band.hi) / 2,
        linestyle=style,
        label=_floor_name(band),
        **_GREY,
    )


def _floor_name(band: Band) -> str:
    return f"baseline: {band.label}"


def legend(
    figure: Figure,
    handles: Sequence[Line2D],
    entries: Sequence[str],
    width: str,
    notes: Sequence[str],
) -> None:
    """Below the axes, where it hides no point."""
    blank = Line2D([], [], linestyle="none")
    figure.legend(
        [*handles, *(blank for _ in notes)],
        [_wrap(e, width) for e in [*entries, *notes]],
        loc="outside lower left",
        frameon=False,
        handlelength=1.6,
        labelspacing=0.25,
        borderpad=0.0,
        borderaxespad=0.2,
    )


def _wrap(text: str, width: str) -> str:
    return "\n".join(textwrap.wrap(text, width=50 if width == "column" else 110)) or text


def _label(spot: Spot, plot: Scatter) -> str:
    row = spot.row
    parts = [row.setting]
    if plot.name == "claimed" and row.unit:
        parts.append(f"per {row.unit}")
    if spot.hollow:
        parts.append("(own networks)")
    if spot.muted:
        parts.append("(no use)")
    if plot.name != "leak" and spot.x.mean == 0:
        parts.append("(epsilon 0, at the left edge)")
    return " ".join(parts)
