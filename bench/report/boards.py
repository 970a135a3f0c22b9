"""The leaderboard's tables as the page shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.records import Flag, Row, short
from bench.report import explain
from bench.report.columns import Column, Shown, board_columns
from bench.report.tables import idle, tables

AT_ONCE = 100
"""Rows of a table that are shown until the reader asks for all of them."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A flag on the page: a few words, the sentence, what it means."""

    chip: str
    text: str
    why: str
    level: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row: the cells before the defense, itself and those after it."""

    rank: Shown
    defense: str
    settings: tuple[str, ...]
    cells: tuple[Shown, ...]
    flags: tuple[Chip, ...]


@dataclass(frozen=True, kw_only=True)
class Board:
    """One table of the page.

    Attributes:
        id: Of its section.
        threats: A line on each.
        columns: From the rank to the flags.
        idle: Attacks that apply to no row, with the reason, in place of a column.
    """

    id: str
    title: str
    rows: tuple[Row, ...]
    threats: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    idle: tuple[tuple[str, str], ...]

    @property
    def first(self) -> Row:
        """Which says what all have in common."""
        return self.rows[0]

    @property
    def flags(self) -> list[Chip]:
        """Every flag of the table once, in order of appearance."""
        return list(dict.fromkeys(f for line in self.lines for f in line.flags))


def boards(rows: Sequence[Row]) -> list[Board]:
    """All tables in the order of the rows."""
    found = enumerate(tables(rows), start=1)
    return [_board(f"t{number}", title, members) for number, (title, members) in found]


def _board(name: str, title: str, rows: list[Row]) -> Board:
    columns = board_columns(rows)
    return Board(
        id=name,
        title=title,
        rows=tuple(rows),
        threats=tuple(dict.fromkeys(t for r in rows for t in r.threat.split("; ") if t)),
        columns=tuple(columns),
        lines=tuple(_line(row, columns) for row in rows),
        idle=tuple(idle(rows).items()),
    )


def _line(row: Row, columns: Sequence[Column]) -> Line:
    rank, _, *cells, _ = columns
    return Line(
        rank=rank.of(row),
        defense=row.defense,
        settings=tuple(f"{k}={short(v)}" for k, v in row.settings.items()),
        cells=tuple(c.of(row) for c in cells),
        flags=tuple(map(_chip, row.flags)),
    )


def _chip(flag: Flag) -> Chip:
    return Chip(
        chip=explain.chip(flag),
        text=explain.sentence(flag),
        why=explain.FLAGS[flag.code].why,
        level=flag.level,
    )
