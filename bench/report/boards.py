"""The leaderboard's tables as the page shows them, and what an opened row shows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.metrics.named import METRICS
from bench.records import AttackEntry, Flag, LedgerWords, Row, short
from bench.report import explain
from bench.report.columns import Column, Shown, board_columns, spared
from bench.report.tables import idle, tables, work
from bench.report.verdicts import has_use

AT_ONCE = 100
"""Rows of a table that are shown until the reader asks for all of them."""
DIGITS = 4
"""Significant digits on the page, one less of bounds; leaderboard.json has all of them."""


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

    marks: Shown
    useful: bool
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
        work: What the attacked rounds and the training hold.
        columns: From the marks to the flags.
        idle: Attacks that apply to no row, with the reason, in place of a column.
    """

    id: str
    title: str
    rows: tuple[Row, ...]
    threats: tuple[str, ...]
    work: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    idle: tuple[tuple[str, str], ...]

    @property
    def first(self) -> Row:
        """Which says what all have in common."""
        return self.rows[0]

    @property
    def spared(self) -> bool:
        """Whether a figure holds earlier attacks' answers."""
        return any(spared(entry) for row in self.rows for entry in row.attacks.values())

    @property
    def flags(self) -> list[Chip]:
        """Every flag of the table once, in order of appearance."""
        return list(dict.fromkeys(f for line in self.lines for f in line.flags))


def boards(rows: Sequence[Row]) -> list[Board]:
    """Return all tables in the order of the rows."""
    numbered = enumerate(tables(rows), start=1)
    return [_board(f"t{number}", title, members) for number, (title, members) in numbered]


def _board(name: str, title: str, rows: list[Row]) -> Board:
    columns = board_columns(rows)
    return Board(
        id=name,
        title=title,
        rows=tuple(rows),
        threats=tuple(dict.fromkeys(t for r in rows for t in r.threat.split("; ") if t)),
        work=work(rows),
        columns=tuple(columns),
        lines=tuple(_line(row, columns) for row in rows),
        idle=tuple(idle(rows).items()),
    )


def _line(row: Row, columns: Sequence[Column]) -> Line:
    marks, _, *cells, _ = columns
    return Line(
        marks=marks.of(row),
        useful=has_use(row),
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


# --- what an opened row shows ---------------------------------------------------------------


class Pieces:
    """Numbers JSON values in order of appearance; `all` lists them."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._places: dict[str, int] = {}

    def place(self, value: Any) -> int:
        key = json.dumps(value)
        if key not in self._places:
            self._places[key] = len(self.all)
            self.all.append(value)
        return self._places[key]


def details(board: Board) -> dict[str, Any]:
    """Return what opened rows show, for JSON. Most of it is the same in many rows, so every piece
    is kept once: integers under threat, words, reasons, flags, reason, floor and notes are its
    places."""
    pieces = Pieces()
    return {
        "pieces": pieces.all,
        "metrics": list(METRICS),
        "rows": [
            _row(r, line.flags, pieces) for r, line in zip(board.rows, board.lines, strict=True)
        ],
    }


def _row(row: Row, flags: Sequence[Chip], pieces: Pieces) -> dict[str, Any]:
    ledger = row.ledger or LedgerWords()
    return {
        "settings": [[k, short(v)] for k, v in row.settings.items()],
        "variant": row.variant,
        "threat": [pieces.place(t) for t in row.threat.split("; ") if t],
        "seeds": row.seeds,
        "words": [pieces.place(w) for w in ledger.words],
        "reasons": [pieces.place(w) for w in ledger.reasons],
        "delta": row.delta,
        "audit": row.audit and _rounded(vars(row.audit)),
        "up": _rounded(row.bytes_up),
        "down": _rounded(row.bytes_down),
        "client": _rounded(row.client_seconds),
        "flags": [pieces.place([f.text, f.why]) for f in flags],
        "attacks": {n: _attack(e, pieces) for n, e in row.attacks.items()},
    }


def _attack(entry: AttackEntry, pieces: Pieces) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "status": entry.status,
        "reason": None if entry.reason is None else pieces.place(entry.reason),
        "threat": entry.threat,
        "n": entry.n,
        "failed": entry.failed,
        "metrics": {
            m: [_rounded(s.mean), *(_rounded(end, DIGITS - 1) for end in (s.lo, s.hi))]
            for m, s in entry.scores.items()
        },
        "floor": pieces.place(_rounded(entry.floor)),
        "seconds": _rounded(entry.seconds),
        "evaluations": entry.gradient_evaluations,
        "budget": entry.budget,
        "notes": [pieces.place(n) for n in entry.notes],
        "convergence": entry.convergence and _rounded(vars(entry.convergence)),
    }
    return {k: v for k, v in fields.items() if v not in (None, [], {})}


def _rounded(value: Any, digits: int = DIGITS) -> Any:
    """Round floats at any depth to some significant digits; whole ones become integers, those that
    are not finite text."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        short_ = float(f"{value:.{digits}g}")
        return int(short_) if short_.is_integer() else short_
    if isinstance(value, Mapping):
        return {k: _rounded(v, digits) for k, v in value.items()}
    return value
