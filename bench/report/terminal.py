"""The leaderboard in a terminal of 80 columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.records import Row, short
from bench.report import explain
from bench.report import overview as overviews
from bench.report.columns import Column, board_columns, floor_column, refuted, two_digits
from bench.report.tables import any_errors, any_personalised, attack_metrics, tables, work
from bench.report.text import ERROR_LEGEND, PERSONAL_LEGEND
from bench.report.text import legend as whole_legend
from bench.report.verdicts import UNDEFENDED

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


def overview(rows: Sequence[Row], loss: float = overviews.LOSS) -> list[Group]:
    """Rich tables of 80 columns, for each protocol: leaks of defenses by tables, and what they
    cost. Tables for which there is no room are in further ones below."""
    return [part for one in overviews.by_protocol(rows, loss) for part in _overview(one)]


def _overview(found: overviews.Overview) -> list[Group]:
    """The parts of one protocol."""
    names = _Strip("defense", [line.defense for line in found.lines])
    strips, styles = [], []
    for place, head in enumerate(found.heads):
        column = [line.verdicts[place] for line in found.lines]
        heading = "\n".join(head.words).replace("_", "_\n")
        strips.append(_Strip(heading, [v.text for v in column]))
        styles.append([v.style for v in column])
    made, first = [], 0
    title = f"{found.protocol}: leak at no more than {100 * found.loss:g} points of accuracy lost"
    while first < len(strips):
        some = max(1, _fitting(strips[first:], WIDTH - names.width + 1))
        table = _empty(None)
        table.add_column(names.heading, no_wrap=True)
        for strip in strips[first : first + some]:
            table.add_column(strip.heading, justify="right", no_wrap=True)
        for place, name in enumerate(names.cells):
            cells = (
                Text(strip.cells[place], style=_COLOURS.get(style[place], ""))
                for strip, style in zip(strips[first:], styles[first:], strict=True)
            )
            table.add_row(name, *itertools.islice(cells, some))
        made.append(_titled(title if first == 0 else "and on", table))
        first += some
    if any(line.rows for line in found.lines if line.defense != UNDEFENDED):
        made.append(_titled("What that costs, and with which settings", _costs(found)))
    return made


def _titled(title: str, table: Table) -> Group:
    """A table of which the title may be wider."""
    return Group(Text(title, style="bold"), table)


def _costs(found: overviews.Overview) -> Table:
    """What defenses cost, the worst over the tables, and with which settings."""
    table = _empty(None)
    table.add_column("defense", no_wrap=True)
    for cost in overviews.COSTS:
        table.add_column(cost.heading, justify="right", no_wrap=True)
    table.add_column("settings", overflow="fold")
    for line in found.lines:
        if line.rows:
            settings = _together([r.settings for r in line.rows])
            table.add_row(line.defense, *(c.of(line) for c in overviews.COSTS), settings)
    return table


def _together(settings: Iterable[Mapping[str, Any]]) -> str:
    """Settings of one defense, those that name the same things as one: bound=1, epsilon=2|4;
    epsilon=8."""
    alike: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for one in settings:
        alike.setdefault(tuple(one), []).append(one)
    found = []
    for names, several in alike.items():
        values = {n: "|".join(dict.fromkeys(short(one[n]) for one in several)) for n in names}
        found.append(", ".join(f"{name}={value}" for name, value in values.items()))
    return "; ".join(found)


def shown(rows: Sequence[Row]) -> list[Table]:
    """Rich tables of 80 columns: intervals and full flags are left to the files, and the upper
    bound where there is an attacker's choice.
    Attacks for which a table has no room are in further ones below it. Of more rows than anybody
    scrolls through, one table that names the safest row of each."""
    if len(rows) > MOST_ROWS:
        return [_safest(rows)]
    return [table for title, members in tables(rows) for table in _board(title, members)]


def _board(title: str, rows: Sequence[Row]) -> list[Table]:
    columns = [c for c in board_columns(rows) if c.heading is not None]
    if any(c.name == "choice" for c in columns):
        columns = [c for c in columns if c.name != "upper bound"]
    by_name = {c.name: _strip(c, rows) for c in columns if c.name != "floor"}
    attacks = [by_name[c.name] for c in columns if c.attack]
    figures = [by_name[c.name] for c in columns[2:] if c.name in by_name and not c.attack]
    ranks, names, flags = by_name["#"], by_name["defense"], figures.pop()
    metrics = attack_metrics(rows)
    first_attack = {c.attack: metrics[c.attack] for c in columns if c.attack}
    floors = _strip(floor_column(dict(itertools.islice(first_attack.items(), 1))), rows)
    known = sorted({f for f in floors.cells if f != "-"})
    shared = len(known) <= 1  # the same victims in every row: once is enough
    ends = [*([] if shared else [floors]), flags]
    taken = sum(c.width for c in (ranks, *figures, *ends)) + _DEFENSE + 1
    first = _fitting(attacks, WIDTH - taken)
    head = f"{title} · floor {known[0]}" if shared and known else title
    parts = work(rows)
    head += "\n" + (parts if len(parts) <= WIDTH else parts.replace("; trained", "\ntrained"))
    made = [_table(head, rows, ranks, names, [*figures, *attacks[:first], *ends])]
    while first < len(attacks):
        some = max(1, _fitting(attacks[first:], WIDTH - ranks.width - 2 * _DEFENSE))
        made.append(_table("and by", rows, ranks, names, attacks[first : first + some]))
        first += some
    return made


def _strip(column: Column, rows: Sequence[Row]) -> _Strip:
    return _Strip(column.heading or "", [column.of(row).brief for row in rows])


def _fitting(columns: Sequence[_Strip], room: int) -> int:
    """How many of the columns, from the first, are not wider than the room."""
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
        name = folded(names.cells[place], room)
        table.add_row(rank, name, *others, style="dim" if row.rank is None else "")
    return table


def folded(text: str, width: int) -> str:
    """Words in lines of this width; a longer one is broken after an underscore or equals sign."""
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
        first = next((r for r in members if r.rank == 1), None)
        leak = None if first is None else first.leak
        table.add_row(
            title,
            first.setting if first else "-",
            str(len(members)),
            "-" if leak is None else two_digits(leak, "ssim"),
        )
    return table


def legend(rows: Sequence[Row]) -> str:
    """What the columns and the letters that occur mean."""
    letters = sorted({letter for row in rows for letter in explain.letters(row.flags)})
    units = sorted({r.unit for r in rows if r.unit})
    parts = [whole_legend(rows)]
    if any_errors(rows):
        parts.append(ERROR_LEGEND)
    if any_personalised(rows):
        parts.append(PERSONAL_LEGEND)
    if any(map(refuted, rows)):
        parts.append("! at a claim: an attack on one release certifies more.")
    if units:
        parts.append("Claims are per " + ", ".join(f"{u} (/{u[:2]})" for u in units) + ".")
    parts += [f"{letter}: {explain.LETTERS[letter]}." for letter in letters]
    return " ".join(parts)
