"""The leaderboard in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.records import Row, short
from bench.report import explain
from bench.report import overview as overviews
from bench.report.columns import Column, board_columns, refuted
from bench.report.tables import tables, work
from bench.report.text import legend as whole_legend
from bench.report.verdicts import UNDEFENDED, has_use

_ATTACKS = 5
"""Columns of attacks that fit 80 columns."""
_LEFT_OUT = ("marks", "defense", "recognised", "selected", "upper bound", "eps audited", "flags")
"""Columns of figures that --details leaves to the overview and the files, or places itself."""
_COLOURS = {f"h{i}": colour for i, colour in enumerate(["green"] * 3 + ["yellow"] * 3, start=1)}
_COLOURS |= {f"h{i}": "red" for i in (7, 8, 9)} | {"none": "dim"}
"""Of leaks by their class of the style sheet: a third each."""
_DEFENSE = 14
"""Least width of a row's name, which is folded."""


def overview(summaries: Sequence[overviews.Overview]) -> list[Group]:
    """Return a rich table of 80 columns for each table of the overviews: each defense's leakage and
    costs; below it the settings."""
    return [
        Group(Text(head.title, style="bold"), _column(summary, place), _settings(summary, place))
        for summary in summaries
        for place, head in enumerate(summary.heads)
    ]


def _settings(summary: overviews.Overview, place: int) -> Text:
    """Return the settings with which a table's defenses are shown."""
    rows = [line.verdicts[place].row for line in summary.lines]
    names = [row.setting for row in rows if row is not None and row.settings]
    return Text("; ".join(names), style="dim")


def _column(summary: overviews.Overview, place: int) -> Table:
    """Return one table's column of an overview, as a table."""
    column = [(line.defense, line.verdicts[place]) for line in summary.lines]
    column = [(name, v) for name, v in column if v.leakage != "–"]
    last = column[-1:] if column and column[-1][0] == UNDEFENDED else []
    ranked = column[: len(column) - len(last)]
    body = sorted(ranked, key=lambda line: (line[1].row is None, line[1].leak or 0.0))
    table = _empty(None)
    table.add_column("defense", overflow="fold", min_width=_DEFENSE)
    table.add_column("leakage", no_wrap=True)
    table.add_column("", no_wrap=True)
    known = any(v.recognised != "–" for _, v in column)
    heads = ["recog-\nnised"] if known else []
    for name in (*heads, "accuracy\ndrop", "bytes", "time", "epsilon"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, verdict in [*body, *last]:
        table.add_row(
            name,
            Text(verdict.leakage, style=_COLOURS.get(verdict.style, "")),
            verdict.signs,
            *([verdict.recognised] if known else []),
            verdict.drop_text,
            overviews.times(verdict.bytes),
            overviews.times(verdict.seconds),
            "–" if verdict.row is None else overviews.epsilon_words(verdict.row.eps_record),
        )
    return table


def boards(rows: Sequence[Row]) -> list[Table]:
    """Return rich tables with every row and attack of a leaderboard, without intervals; what else
    the overview or files have is left out."""
    return [table for title, members in tables(rows) for table in _board(title, members)]


def _board(title: str, rows: Sequence[Row]) -> Iterator[Table]:
    columns = [c for c in board_columns(rows) if c.name not in _LEFT_OUT]
    figures = [c for c in columns if not c.attack and c.name != "floor"]
    attacks = [c for c in columns if c not in figures]
    letters = [explain.letters(row.flags) for row in rows]
    yield _table(f"{title}\n{work(rows)}", rows, figures, letters)
    for first in range(0, len(attacks), _ATTACKS):
        yield _table("by attack", rows, attacks[first : first + _ATTACKS], [""] * len(rows))


def _table(
    title: str, rows: Sequence[Row], columns: Sequence[Column], letters: Sequence[str]
) -> Table:
    """Return some columns of a table. letters: the flags of each row, at its end."""
    table = _empty(title)
    table.add_column("", no_wrap=True)
    table.add_column("defense", overflow="fold", min_width=_DEFENSE)
    for column in columns:
        head = column.name.replace(" ", "\n").replace("@", "\n@")
        table.add_column(head, justify="right", no_wrap=True)
    for row, ends in zip(rows, letters, strict=True):
        name = "\n".join([row.defense, *(f" {k}={short(v)}" for k, v in row.settings.items())])
        cells = [(column.name, column.shown(row)) for column in columns]
        units = [c.beside[:3] if name == "eps claimed" else "" for name, c in cells]
        texts = [f"{c.text}{u} {c.mark}".strip() for (_, c), u in zip(cells, units, strict=True)]
        table.add_row(row.marks.text, name, *texts, ends, style="" if has_use(row) else "dim")
    return table


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
    if any(map(refuted, rows)):
        lines.append("! at a claim: an attack on one release certifies more.")
    if units := sorted({r.unit for r in rows if r.unit}):
        lines.append("Claims are per " + ", ".join(f"{u} (/{u[:2]})" for u in units) + ".")
    return "\n".join([*lines, *(f"{letter}: {explain.LETTERS[letter]}." for letter in letters)])
