"""The leaderboard in a terminal of 80 columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.records import Row
from bench.report import explain
from bench.report import overview as overviews
from bench.report.columns import Column, board_columns, floor_column, refuted, two_digits
from bench.report.tables import attack_metrics, tables, work
from bench.report.text import legend as whole_legend
from bench.report.verdicts import UNDEFENDED, has_use

MOST_ROWS = 500
"""Rows that a terminal shows; of more, one line per table."""
WIDTH = 80
_COLOURS = {f"h{i}": colour for i, colour in enumerate(["green"] * 3 + ["yellow"] * 3, start=1)}
_COLOURS |= {f"h{i}": "red" for i in (7, 8, 9)} | {"none": "dim"}
"""Of leaks by their class of the style sheet: a third each."""
_DEFENSE = 14
"""Least width of a row's name, which is folded."""


@dataclass(frozen=True)
class _Strip:
    """Figures of all rows under a heading; never folded."""

    heading: str
    cells: list[str]

    @property
    def width(self) -> int:
        """With the space after it."""
        return 1 + max(map(len, [*self.heading.split("\n"), *self.cells]), default=0)


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
    """Return rich tables of 80 columns: intervals and full flags are left to the files, and the
    upper bound where there is an attacker-selected reconstruction. Attacks for which a table has no
    room are in further tables below it. Very many rows become one table that names the safest row
    of each."""
    if len(rows) > MOST_ROWS:
        return [_safest(rows)]
    return [table for title, members in tables(rows) for table in _board(title, members)]


def _board(title: str, rows: Sequence[Row]) -> list[Table]:
    columns = [c for c in board_columns(rows) if c.heading is not None]
    if any(c.name == "selected" for c in columns):
        columns = [c for c in columns if c.name != "upper bound"]
    by_name = {c.name: _strip(c, rows) for c in columns if c.name != "floor"}
    attacks = [by_name[c.name] for c in columns if c.attack]
    figures = [by_name[c.name] for c in columns[2:] if c.name in by_name and not c.attack]
    ranks, names, flags = by_name["marks"], by_name["defense"], figures.pop()
    metrics = attack_metrics(rows)
    first_attack = {c.attack: metrics[c.attack] for c in columns if c.attack}
    floors = _strip(floor_column(dict(itertools.islice(first_attack.items(), 1))), rows)
    known = sorted({f for f in floors.cells if f != "-"})
    shared = len(known) <= 1  # the same victims in every row: once is enough
    ends = [*([] if shared else [floors]), flags]
    used = sum(c.width for c in (ranks, *figures, *ends)) + _DEFENSE + 1
    first = _count_fitting(attacks, WIDTH - used)
    head = f"{title} · floor {known[0]}" if shared and known else title
    parts = work(rows)
    head += "\n" + (parts if len(parts) <= WIDTH else parts.replace("; trained", "\ntrained"))
    pieces = [_table(head, rows, ranks, names, [*figures, *attacks[:first], *ends])]
    while first < len(attacks):
        some = max(1, _count_fitting(attacks[first:], WIDTH - ranks.width - 2 * _DEFENSE))
        pieces.append(_table("and by", rows, ranks, names, attacks[first : first + some]))
        first += some
    return pieces


def _strip(column: Column, rows: Sequence[Row]) -> _Strip:
    return _Strip(column.heading or "", [column.of(row).brief for row in rows])


def _count_fitting(columns: Sequence[_Strip], room: int) -> int:
    """Count the columns, from the first, that fit into the room."""
    widths = itertools.accumulate(c.width for c in columns)
    return sum(w <= room for w in widths)


def _table(
    title: str, rows: Sequence[Row], ranks: _Strip, names: _Strip, columns: Sequence[_Strip]
) -> Table:
    table = _empty(title)
    table.add_column(ranks.heading, justify="right", no_wrap=True)
    table.add_column(names.heading, overflow="fold", min_width=_DEFENSE)
    for column in columns:
        table.add_column(
            column.heading, justify="right" if column.heading else "left", no_wrap=True
        )
    room = max(_DEFENSE, WIDTH - ranks.width - sum(c.width for c in columns) - 1)
    for place, row in enumerate(rows):
        cells = (c.cells[place] for c in (ranks, *columns))
        rank, *others = cells
        name = fold(names.cells[place], room)
        table.add_row(rank, name, *others, style="" if has_use(row) else "dim")
    return table


def fold(text: str, width: int) -> str:
    """Wrap words to lines of this width; a longer word breaks after an underscore or equals
    sign."""
    lines = [""]
    for word in text.split():
        pieces = [word] if len(word) <= width else re.findall(r"[^_=]+[_=]?|[_=]", word)
        for number, piece in enumerate(pieces):
            space = " " if lines[-1] and number == 0 else ""
            if len(lines[-1]) + len(space) + len(word if space else piece) > width:
                lines.append(piece)
            else:
                lines[-1] += space + piece
    return "\n".join(line for line in lines if line)


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


def _safest(rows: Sequence[Row]) -> Table:
    """A line per table: its rows, and the one that leaks least."""
    table = _empty(f"{len(rows)} rows, which are in the files; of each table the safest")
    for name in ("table", "safest row that learns"):
        table.add_column(name, overflow="fold")
    for name in ("rows", "leak"):
        table.add_column(name, justify="right", no_wrap=True)
    for title, members in tables(rows):
        first = next(filter(has_use, members), None)
        leak = None if first is None else first.leak
        table.add_row(
            title,
            first.setting if first else "-",
            str(len(members)),
            "-" if leak is None else two_digits(leak, "ssim"),
        )
    return table


def legend(rows: Sequence[Row]) -> str:
    """Explain the columns, signs and letters that occur, a line each."""
    letters = sorted({letter for row in rows for letter in explain.letters(row.flags)})
    units = sorted({r.unit for r in rows if r.unit})
    lines = whole_legend(rows)
    if any(map(refuted, rows)):
        lines.append("! at a claim: an attack on one release certifies more.")
    if units:
        lines.append("Claims are per " + ", ".join(f"{u} (/{u[:2]})" for u in units) + ".")
    return "\n".join([*lines, *(f"{letter}: {explain.LETTERS[letter]}." for letter in letters)])
