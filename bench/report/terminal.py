"""The leaderboard in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from bench.records import Row, short
from bench.report import explain, frames
from bench.report import overview as overviews
from bench.report.columns import Shown, is_refuted
from bench.report.tables import tables, work
from bench.report.text import legend as whole_legend
from bench.report.verdicts import UNDEFENDED, has_use

if TYPE_CHECKING:
    from pandas import DataFrame

_ATTACKS = 5
"""Columns of attacks that fit 80 columns."""
_LEFT_OUT = ("marks", "defense", "recognised", "selected", "upper bound", "eps audited", "flags")
"""Columns of figures that --details leaves to the overview and the files, or places itself."""
_COLOURS = {f"h{i}": colour for i, colour in enumerate(["green"] * 3 + ["yellow"] * 3, start=1)}
_COLOURS |= {f"h{i}": "red" for i in (7, 8, 9)} | {"none": "dim"}
"""Of leaks by their class of the style sheet: a third each."""
_DEFENSE = 14
"""Least width of a row's name, which is folded."""
_HEADS = {"recognised": "recog-\nnised", "accuracy drop": "accuracy\ndrop"}
"""Of the overview's columns; of the others the last word."""


def overview(summaries: Sequence[overviews.Overview]) -> list[Group]:
    """Return a rich table of 80 columns for each table of the overviews: each defense's leakage and
    costs, the undefended row last; below it the settings."""
    return [
        _overview_table(head.title, frames.table_texts(summary, place))
        for summary in summaries
        for place, head in enumerate(summary.heads)
    ]


def _overview_table(title: str, frame: DataFrame) -> Group:
    """Return one table of an overview. frame: see `frames.table_texts`."""
    settings = Text("; ".join(filter(None, frame["setting"])), style="dim")
    frame["last"] = frame["defense"] == UNDEFENDED
    frame = frame.sort_values(["last", "leak"])
    shown = frame.drop(columns=["leak", "style", "setting", "last"])
    for optional in ("recognised", "membership"):
        if (shown[optional] == "–").all():
            shown = shown.drop(columns=optional)
    table = _empty(None)
    table.add_column("defense", overflow="fold")
    for name in shown.columns[1:]:
        justify: JustifyMethod = "left" if name in ("leakage", "") else "right"
        head = _HEADS.get(name, name.rpartition(" ")[2])
        table.add_column(head, justify=justify, no_wrap=name != "epsilon")
    for (defense, leakage, *others), style in zip(
        shown.to_numpy().tolist(), frame["style"], strict=True
    ):
        table.add_row(defense, Text(leakage, style=_COLOURS.get(style, "")), *others)
    return Group(Text(title, style="bold"), table, settings)


def boards(rows: Sequence[Row]) -> list[Table]:
    """Return rich tables with every row and attack of a leaderboard, without intervals; what else
    the overview or files have is left out."""
    return [table for title, members in tables(rows) for table in _board(title, members)]


def _board(title: str, rows: Sequence[Row]) -> Iterator[Table]:
    frame = frames.board(rows)
    frame = frame.drop(columns=[c for c in frames.columns_of(frame) if c.name in _LEFT_OUT])
    attacks = [c for c in frames.columns_of(frame) if c.attack or c.name == "floor"]
    letters = [explain.letters(row.flags) for row in rows]
    yield _table(f"{title}\n{work(rows)}", rows, frame.drop(columns=attacks), letters)
    for first in range(0, len(attacks), _ATTACKS):
        some = frame[attacks[first : first + _ATTACKS]]
        yield _table("by attack", rows, some, [""] * len(rows))


def _table(title: str, rows: Sequence[Row], frame: DataFrame, letters: Sequence[str]) -> Table:
    """Return some columns of a table. letters: the flags of each row, at its end."""
    table = _empty(title)
    table.add_column("", no_wrap=True)
    table.add_column("defense", overflow="fold", min_width=_DEFENSE)
    for column in frames.columns_of(frame):
        head = column.name.replace(" ", "\n").replace("@", "\n@")
        table.add_column(head, justify="right", no_wrap=True)
    lines = frame.apply(lambda cells: cells.map(partial(_cell, cells.name.name)))
    for row, line, ends in zip(rows, lines.to_numpy().tolist(), letters, strict=True):
        name = "\n".join([row.defense, *(f" {k}={short(v)}" for k, v in row.settings.items())])
        table.add_row(row.marks.text, name, *line, ends, style="" if has_use(row) else "dim")
    return table


def _cell(name: str, shown: Shown) -> str:
    units = {"eps claimed": shown.beside[:3], "membership": f" {shown.beside}"}
    return f"{shown.text}{units.get(name, '')} {shown.mark}".strip()


def _empty(title: str | None) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold dim",
    )


def legend(rows: Sequence[Row]) -> str:
    """Explain the columns, signs and letters that occur, a line each."""
    letters = sorted({letter for row in rows for letter in explain.letters(row.flags)})
    lines = whole_legend(rows)
    if any(map(is_refuted, rows)):
        lines.append("! at a claim: an attack on one release certifies more.")
    if units := sorted({r.unit for r in rows if r.unit}):
        lines.append("Claims are per " + ", ".join(f"{u} (/{u[:2]})" for u in units) + ".")
    return "\n".join([*lines, *(f"{letter}: {explain.LETTERS[letter]}." for letter in letters)])
