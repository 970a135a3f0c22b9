"""What an opened row shows, as compact JSON: most of it is the same in many rows, so every piece
is kept once and named by its place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.metrics.named import METRICS
from bench.records import AttackEntry, LedgerWords, Row, short
from bench.report.boards import Chip

DIGITS = 4
"""Significant digits on the page, one less of bounds; leaderboard.json has all of them."""


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


def details(rows: Sequence[Row], flags: Sequence[Sequence[Chip]]) -> dict[str, Any]:
    """{"pieces": [...], "rows": [...]}: integers under threat, ledger, flags, reason, floor and
    notes are places in pieces."""
    pieces = Pieces()
    return {
        "pieces": pieces.all,
        "metrics": list(METRICS),
        "rows": [_row(r, f, pieces) for r, f in zip(rows, flags, strict=True)],
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
    found: dict[str, Any] = {
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
    return {k: v for k, v in found.items() if v not in (None, [], {})}


def _rounded(value: Any, digits: int = DIGITS) -> Any:
    """Floats at any depth with so many significant digits; whole ones as integers, those that are
    not finite as text."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        short_ = float(f"{value:.{digits}g}")
        return int(short_) if short_.is_integer() else short_
    if isinstance(value, Mapping):
        return {k: _rounded(v, digits) for k, v in value.items()}
    return value
