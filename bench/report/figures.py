"""Figures for a paper's column or page: maps of leakage, and which figures a report has."""

import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.files import no_link
from bench.names import check_known
from bench.records import Row
from bench.report.explain import FIGURES
from bench.report.overview import OVER, Overview, by_protocol
from bench.report.paper import LINE_HEIGHT, Paper, inches, style_figures, write
from bench.report.plots import course, courses, membership, pareto, spots_of
from bench.report.tables import tables

_LETTER_WIDTH = 0.07
"""Inches of text of 8 points."""
_LEAST = 3
"""Settings from which a plot tells more than the table above it."""


def overview_map(summary: Overview, *, width: str = "page") -> Figure:
    """Draw the overview's leakage, defenses by tables, as a map from 0 (white) to 1, with one
    decimal and the signs in it."""
    lines = [textwrap.fill(line.defense, 34) for line in summary.lines]
    heads = [textwrap.fill(" ".join(head.words), 26) for head in summary.heads]
    deep = max(len(line) for head in heads for line in head.splitlines()) * _LETTER_WIDTH
    edges = [0.0, *itertools.accumulate(max(1.6, len(name.splitlines())) for name in lines)]
    leaks = [[math.nan if v.leak is None else v.leak for v in r.verdicts] for r in summary.lines]
    with style_figures():
        size = (inches(width), edges[-1] * LINE_HEIGHT + deep + 0.5)
        figure = Paper(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.pcolormesh(range(len(heads) + 1), edges, leaks, cmap="Oranges", vmin=0.0, vmax=1.5)
        for (top, bottom), line in zip(itertools.pairwise(edges), summary.lines, strict=True):
            for x, verdict in enumerate(line.verdicts):
                signs = verdict.signs.replace(OVER, "")
                text = verdict.leakage if verdict.leak is None else f"{verdict.leak:.1f}{signs}"
                size_ = None if len(text) < 7 else "small"
                middle = (x + 0.5, (top + bottom) / 2)
                axes.text(*middle, text, ha="center", va="center", fontsize=size_)
        axes.invert_yaxis()
        axes.set_xticks([x + 0.5 for x in range(len(heads))], heads, rotation=90)
        axes.set_yticks([(a + b) / 2 for a, b in itertools.pairwise(edges)], lines)
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        axes.spines[:].set_visible(False)
    return figure


def of_table(
    members: Sequence[Row], rows: Sequence[Row], most: int | None = None
) -> dict[str, Figure]:
    """Return the figures of one table by their names.

    Args:
        members: Its rows.
        rows: All of the report.
        most: Rows up to which accuracy against leakage is drawn; None: any number.
    """
    drawn = {}
    if len(spots_of(members)) >= _LEAST and len(members) <= (most or len(members)):
        drawn["pareto"] = pareto(members, among=rows)
    if any(r.membership and r.membership.curve for r in members):
        drawn["membership"] = membership(members, rows)
    for what in courses(members, rows):
        drawn[f"over_{what}"] = course(members, rows, what)
    return drawn


def write_figures(
    rows: Sequence[Row], out: Path, formats: Sequence[str], more: Sequence[str] = ()
) -> list[Path]:
    """Write each protocol's overview as a map, and every table's accuracy against leakage, to
    OUT/figures as PROTOCOL-DATASET-MODEL-CHECKPOINT-WHAT.

    Args:
        rows: Of a report.
        out: Its folder.
        formats: Of `paper.FORMATS`.
        more: Of `explain.FIGURES`: other figures of each table that has them.

    Raises:
        UserError: For an unknown format or figure.
    """
    for name in more:
        check_known("figure", name, FIGURES)
    place = no_link(out, "figures")
    paths: list[Path] = []
    names: Counter[str] = Counter()
    for summary in by_protocol(rows):
        paths += write(overview_map(summary), place / f"{summary.protocol}-overview", formats)
    for _, members in tables(rows):
        same = ("protocol", "dataset", "model", "checkpoint")
        name = "-".join(re.sub(r"[^\w.]+", "_", str(getattr(members[0], k))) for k in same)
        names[name] += 1
        if names[name] > 1:
            name = f"{name}-{names[name]}"
        for what, figure in of_table(members, rows).items():
            if what in ("pareto", *more):
                paths += write(figure, place / f"{name}-{what}", formats)
    return paths
