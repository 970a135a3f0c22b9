"""A table's plots on the page: what `plots` has computed, with its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from bench.errors import UserError
from bench.metrics.named import TITLES
from bench.records import Row
from bench.report import courses, explain, plots, svg
from bench.report.boards import Board
from bench.report.columns import bounds, epsilon_text, figure, interval_text, supported
from bench.report.plots import Scatter, Spot
from bench.report.verdicts import is_reference


@dataclass(frozen=True, kw_only=True)
class View:
    """One plot and what to know to read it.

    Attributes:
        legend: (mark, name).
        table: Header and body of its figures, where they stand in no other table.
        tells: See `Scatter.tells`.
    """

    name: str
    choice: str
    drawing: Markup
    notes: tuple[str, ...]
    legend: tuple[tuple[Markup, str], ...]
    table: tuple[tuple[str, ...], ...] = ()
    tells: bool = True


HOLLOW = "Hollow: no common model; the clients' own accuracy stands in."


# --- utility, leakage, epsilon ----------------------------------------------------------------


def views(board: Board, rows: Sequence[Row]) -> list[View]:
    """The plots of one table; none where no row has both accuracy and leakage. rows: of the whole
    page, for the colours."""
    try:
        shown = plots.scatter(board.rows, "leak", rows)
    except UserError:
        return []
    rest = [plots.scatter(board.rows, name, rows) for name in plots.KINDS if name != "leak"]
    told = {s.place for s in shown.spots}
    return [_view(board, shown, frozenset()), *(_view(board, s, frozenset(told)) for s in rest)]


def telling(board: Board, rows: Sequence[Row]) -> list[View]:
    """Those of `views` that tell more than the table above them."""
    found = views(board, rows)
    return [v for v in found if v.tells] if found and found[0].tells else []


def _view(board: Board, shown: Scatter, told: frozenset[int]) -> View:
    """told: places of rows whose words the page has from an earlier plot."""
    plot = svg.Plot(
        shown.x,
        shown.y,
        name=f"{board.id}-{shown.name}",
        title=f"{shown.choice}: {board.title}",
        description=f"{len(shown.spots)} settings. The table above has the same figures.",
    )
    marks = [_mark(s) for s in shown.spots]
    for band in shown.floors:
        plot.floor(band)
    plot.front([marks[i] for i in shown.front])
    drawn = sorted(sorted(marks, key=lambda m: m.y.mean), key=lambda m: plot.at(m)[0])
    return View(
        name=shown.name,
        choice=shown.choice,
        drawing=plot.draw(drawn, unnamed=told),
        notes=_notes(shown),
        tells=shown.tells,
        legend=_legend(shown),
    )


def _legend(shown: Scatter) -> tuple[tuple[Markup, str], ...]:
    names = {s.group: s.row.defense for s in sorted(shown.spots, key=lambda s: s.group)}
    return tuple((svg.key(g), d) for g, d in names.items())


def _mark(spot: Spot) -> svg.Mark:
    row = spot.row
    tag = str(row.defense)
    states = (("muted", spot.muted), ("hollow", spot.hollow), ("front", spot.front))
    return svg.Mark(
        x=spot.x,
        y=spot.y,
        row=spot.place,
        group=spot.group,
        aside=spot.aside,
        words=_words(row),
        tag=tag if spot.front or is_reference(row) else "",
        states=tuple(name for name, has in states if has),
    )


def _notes(shown: Scatter) -> tuple[str, ...]:
    notes = [f"Bars: {explain.interval_words([s.row for s in shown.spots])}."]
    if len(shown.front) > 1:
        notes.append("Dashed: the Pareto front, settings that no other beats in both.")
    if shown.name in ("leak", "promise"):
        notes.append("Grey lines: floors, what needs no leak.")
    if shown.name in ("claimed", "promise"):
        notes.append(
            "Claims may be for different units (point at a mark), so no front is drawn: "
            "the smaller number need not protect more."
        )
    if shown.name != "leak" and any(s.x.mean == 0 for s in shown.spots):
        notes.append("ε = 0 stands at the left edge.")
    if any(s.hollow for s in shown.spots):
        notes.append(HOLLOW)
    if any(s.muted for s in shown.spots):
        notes.append("Pale: without use; the flags say why.")
    return tuple(notes)


def _words(row: Row) -> str:
    """Setting, figures and epsilons of a point; parts are separated by "; "."""
    parts = [row.setting.replace(";", ",")]
    if row.accuracy:
        parts.append(f"accuracy {interval_text(row.accuracy)}")
    if row.personal_accuracy and row.personalised:
        parts.append(f"own accuracy {interval_text(row.personal_accuracy)}")
    if case := row.ranking:
        figure_ = interval_text(case.interval, case.metric)
        who = "selected" if row.choice else "upper bound"
        parts.append(f"{who} {TITLES[case.metric]} {figure_} by {case.attack}")
    if row.leak_interval is not None:
        parts.append(f"leakage {supported(row.leak_interval, row.seeds)}{row.marks.text}")
    claim = epsilon_text(row.eps_claimed)
    parts.append(f"ε claimed {claim} per {row.unit}" if row.unit else "no ε claimed")
    parts.append(f"ε proven {epsilon_text(row.eps_record)}")
    return "; ".join(parts)


# --- over the rounds ----------------------------------------------------------------------------


def course_views(board: Board, rows: Sequence[Row]) -> list[View]:
    """Accuracy, leak and epsilons of one table's settings over the rounds; rows: of the whole
    page."""
    found = courses.courses(board.rows, rows)
    return [_drawn(board, shown, name=f"over-{shown.name}", width="page") for shown in found]


def _drawn(board: Board, shown: plots.Lines, *, width: str, **more: Any) -> View:
    """A view that matplotlib draws."""
    from bench.report import figures, paper  # which most pages do not need

    drawing = paper.image_of(figures.lines(shown, width=width), f"{shown.choice}: {board.title}")
    return View(
        **{"choice": shown.choice, "notes": (), "legend": (), **more}, drawing=Markup(drawing)
    )


# --- all tables ---------------------------------------------------------------------------------


def trade_view(rows: Sequence[Row]) -> View | None:
    """Leak against accuracy lost over all tables; None where it would tell nothing."""
    shown = plots.trade(rows)
    if shown is None:
        return None
    plot = svg.Plot(
        shown.x,
        shown.y,
        name="trade",
        title="Leak against accuracy lost, all tables",
        description=f"{len(shown.spots)} settings. The tables below have the same figures.",
    )
    marks = [
        replace(
            _mark(s),
            tag=s.row.defense,
            words=f"{_words(s.row)}; {s.y.mean:.1f} points of accuracy lost; in {s.row.where}",
        )
        for s in shown.spots
    ]
    drawn = sorted(marks, key=lambda m: (m.x.mean, m.y.mean))
    return View(
        name=shown.name,
        choice="Leak against accuracy lost, all tables",
        drawing=plot.draw(drawn),
        notes=(
            "Every setting of every table, by the observed round in which it leaks most; the lower "
            "left corner is best. Settings of no use are left out.",
            *([HOLLOW] if any(s.hollow for s in shown.spots) else []),
        ),
        legend=_legend(shown),
    )


# --- budget -----------------------------------------------------------------------------------


def budget_view(board: Board, rows: Sequence[Row]) -> View | None:
    """SSIM against budget where nothing defends, of this table's network in all suites of the page
    (`rows`). None where it was not measured."""
    shown = plots.budgets(rows, board.first)
    if shown is None:
        return None
    body = [
        (attack, str(budget), figure(at.mean), bounds(at))
        for attack, points in shown.lines
        for budget, at in points
    ]
    return _drawn(
        board,
        shown,
        name="budget",
        width="column",
        notes=(
            "Each optimising attack on the undefended row, at its budget and at twice that. "
            "A line that still climbs belongs to an attack that was cut short.",
        ),
        table=(("attack", "budget", "SSIM", explain.interval_words([board.first])), *body),
    )
