"""The leaderboard's tables as the page shows them, and what an opened row shows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bench.metrics.named import METRICS
from bench.records import AttackEntry, LedgerWords, Row, short
from bench.report import explain
from bench.report.columns import Column, Shown, board_columns, has_spared
from bench.report.costs import parts
from bench.report.tables import tables

AT_ONCE = 100
"""Rows of a table that are shown until the reader asks for all of them."""
DIGITS = 4
"""Significant digits on the page, one less of bounds; leaderboard.json has all of them."""


@dataclass(frozen=True)
class Board:
    """One table of the page.

    Attributes:
        id: Of its section.
        title: As of `tables`.
        rows: Its rows.
    """

    id: str
    title: str
    rows: Sequence[Row]

    @cached_property
    def columns(self) -> list[Column]:
        """From the marks to the flags."""
        return board_columns(self.rows)

    @cached_property
    def lines(self) -> list[list[Shown]]:
        """What the columns between the defense and the flags show, by row."""
        return [[column.shown(row) for column in self.columns[2:-1]] for row in self.rows]

    @property
    def threats(self) -> list[str]:
        """A line on each."""
        return list(dict.fromkeys(t for r in self.rows for t in r.threat.split("; ") if t))

    @property
    def spared(self) -> bool:
        """Whether a figure holds earlier attacks' answers."""
        return any(has_spared(entry) for row in self.rows for entry in row.attacks.values())

    @property
    def flags(self) -> dict[str, str]:
        """Every flag of the table in full, with what it means."""
        flags = (flag for row in self.rows for flag in row.flags)
        return {explain.sentence(flag): explain.FLAGS[flag.code].why for flag in flags}


def boards(rows: Sequence[Row]) -> list[Board]:
    """Return all tables in the order of the rows."""
    numbered = enumerate(tables(rows), start=1)
    return [Board(f"t{number}", title, members) for number, (title, members) in numbered]


# --- what an opened row shows ---------------------------------------------------------------


Place = Callable[[Any], int]
"""Numbers a JSON value."""


def details(board: Board) -> dict[str, Any]:
    """Return what opened rows show, for JSON. Most of it is the same in many rows, so every piece
    is kept once: integers under threat, words, reasons, flags, reason, floor and notes are its
    places."""
    places: dict[str, int] = {}

    def place(value: Any) -> int:
        return places.setdefault(json.dumps(value), len(places))

    rows = [_row(row, place) for row in board.rows]
    return {"pieces": list(map(json.loads, places)), "metrics": list(METRICS), "rows": rows}


def _row(row: Row, place: Place) -> dict[str, Any]:
    ledger = row.ledger or LedgerWords()
    flags = [[explain.sentence(flag), explain.FLAGS[flag.code].why] for flag in row.flags]
    return {
        "settings": [[k, short(v)] for k, v in row.settings.items()],
        "variant": row.variant,
        "threat": [place(t) for t in row.threat.split("; ") if t],
        "seeds": row.seeds,
        "words": list(map(place, ledger.words)),
        "reasons": list(map(place, ledger.reasons)),
        "delta": row.delta,
        "audit": row.audit and _round(vars(row.audit)),
        "costs": [
            [part.label, part.show(figure)]
            for name, part in parts().items()
            if (figure := row.costs.get(name)) is not None
        ],
        "flags": list(map(place, flags)),
        "attacks": {n: _attack(e, place) for n, e in row.attacks.items()},
    }


def _attack(entry: AttackEntry, place: Place) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "status": entry.status,
        "reason": None if entry.reason is None else place(entry.reason),
        "threat": entry.threat,
        "n": entry.n,
        "failed": entry.failed,
        "metrics": {
            m: [_round(s.mean), *(_round(end, DIGITS - 1) for end in (s.lo, s.hi))]
            for m, s in entry.scores.items()
        },
        "floor": place(_round(entry.floor)),
        "seconds": _round(entry.seconds),
        "evaluations": entry.gradient_evaluations,
        "budget": entry.budget,
        "notes": list(map(place, entry.notes)),
        "convergence": entry.convergence and _round(vars(entry.convergence)),
    }
    return {k: v for k, v in fields.items() if v not in (None, [], {})}


def _round(value: Any, digits: int = DIGITS) -> Any:
    """Round floats at any depth to some significant digits; whole ones become integers, those that
    are not finite text."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        short_ = float(f"{value:.{digits}g}")
        return int(short_) if short_.is_integer() else short_
    if isinstance(value, Mapping):
        return {k: _round(v, digits) for k, v in value.items()}
    return value
