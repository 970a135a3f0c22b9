"""The leaderboard as the page shows it, and what an opened row shows."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from bench.metrics.intervals import Interval
from bench.metrics.named import METRICS
from bench.records import AttackEntry, LedgerWords, Row, short
from bench.report import explain
from bench.report.columns import LEAKAGE, NOTHING, SPARED, Column, Shown, columns_of, epsilon_text
from bench.report.costs import COSTS, parts
from bench.report.leaderboard import row_id
from bench.report.overview import LOSS, Verdict, epsilon_words, explain_signs, measure, times
from bench.report.verdicts import find_undefended, has_use

if TYPE_CHECKING:
    from bench.report.papers import Publication

DIGITS = 4
"""Significant digits on the page, one less of bounds; leaderboard.json has all of them."""
ID = 12
"""Characters of `row_id` that name a row in an address."""
_TABLET, _LAPTOP, _DESKTOP = 640, 1000, 1400
_MIN_WIDTHS = (
    {"defense": 0, "task": _TABLET, "leakage": 0, "recognised": 0, "accuracy drop": _TABLET}
    | dict.fromkeys(("epsilon", *(c.title for c in COSTS.values()), "status"), _LAPTOP)
    | {"flags": _DESKTOP}
)
"""Columns shown at first, in their order, and the least width of the window for each, in px."""
_PAPER = {"status": "status", "paper": "short", "venue": "venue", "year": "year"}
"""Columns about a defense's paper, and what each shows of its `Publication`."""
_SHORT = {*_MIN_WIDTHS, "suite", "paper", "venue", "year"} - {"flags"}
"""Columns of a leaderboard whose rows lead to reports, where the others are."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row of the leaderboard.

    Attributes:
        row: The row.
        verdict: The same, with what it costs.
        id: Its permanent name on the page.
        table: Number of its table in its report, from 1.
        address: Of the report that opens it; "" for this page.
        cells: By column.
        forest: Its leakage with the interval, drawn between baseline and perfect copy.
        useful: See `has_use`.
    """

    row: Row
    verdict: Verdict
    id: str
    table: int
    address: str
    cells: Sequence[Shown]
    forest: Markup
    useful: bool


@dataclass(frozen=True, kw_only=True)
class Board:
    """The rows of one or more reports in one table. of_attack: whether it is about one attack."""

    columns: Sequence[Column]
    lines: Sequence[Line]
    of_attack: bool

    def min_width(self, column: Column) -> int | None:
        """Return the least width at which a column is shown at first; None: only when chosen."""
        return _TABLET if column in self._fullest else _MIN_WIDTHS.get(column.name)

    @cached_property
    def _fullest(self) -> list[Column]:
        """The two columns of the attack that it is about which most rows have."""
        rows = {
            column: sum(line.cells[place] != NOTHING for line in self.lines)
            for place, column in enumerate(self.columns)
            if column.attack and self.of_attack
        }
        return sorted(rows, key=lambda column: -rows[column])[:2]

    @cached_property
    def reasons(self) -> dict[str, int]:
        """Numbers of the reasons that cells without a figure show when pressed."""
        reasons = (cell.reason for line in self.lines for cell in line.cells if cell.reason)
        return {reason: number for number, reason in enumerate(dict.fromkeys(reasons))}

    @property
    def signs(self) -> list[str]:
        """What the signs in its cells mean, a line each."""
        verdicts = [line.verdict for line in self.lines]
        lines = explain_signs(verdicts, f"{100 * LOSS:g} points", ("recognised", "membership"))
        spared = any(SPARED in cell.mark for line in self.lines for cell in line.cells)
        return [*lines, explain.LEGEND["spared"]] if spared else lines

    @cached_property
    def filters(self) -> dict[str, list[str]]:
        """Return the values of each filter that has a choice, by its key in the address."""
        values: dict[str, dict[str, None]] = {}
        for line in self.lines:
            for key, text in filter_values(line.row).items():
                values.setdefault(key, {}).update(dict.fromkeys(filter(None, text.split("|"))))
        return {key: list(some) for key, some in values.items() if len(some) > 1}


def filter_values(row: Row) -> dict[str, str]:
    """Return what the filters compare; several threats are separated by |, which no value has."""
    names = ("suite", "protocol", "data", "model", "checkpoint", "defense")
    threats = dict.fromkeys(text.partition(":")[0] for text in row.threat.split("; "))
    values = {name: str(getattr(row, name)).replace("|", "/") for name in names}
    return values | {"threat": "|".join(threat.replace("|", "/") for threat in threats)}


def board_of(
    reports: Mapping[str, Sequence[tuple[str, Sequence[Row]]]],
    *,
    keep: Callable[[Sequence[Row]], Sequence[Row]] = list,
    attacks: Callable[[str], bool] | None = None,
) -> Board:
    """Return the leaderboard of some reports.

    Args:
        reports: `tables` by the address of their report, "" for this page.
        keep: Returns the rows of a table that it shows.
        attacks: Of which attacks it has the scores, and shows some at first; None: it has every
            column there is.
    """
    from bench.report.papers import papers_of  # which imports the plugins

    rows = [r for groups in reports.values() for _, table in groups for r in keep(table)]
    shown = [c for c in columns_of(rows) if not (attacks and c.attack) or attacks(c.attack)]
    suites = {row.suite for row in rows}
    papers = papers_of("defense", (part for row in rows for part in row.defense.split("+")))
    heads = _order([*shown, *_page_columns("", {}, papers)], several=len(suites) > 1)
    if attacks:
        heads = [h for h in heads if h.attack or h.name in _SHORT]
    lines = []
    for address, groups in reports.items():
        for number, (title, table) in enumerate(groups, start=1):
            bare = find_undefended(table)
            verdicts = {id(verdict.row): verdict for verdict in measure(table, LOSS)}
            own = [*columns_of(table, whole=True), *_page_columns(title, verdicts, papers)]
            by_key = {column.attack or column.name: column for column in own}
            lines += [
                Line(
                    row=row,
                    verdict=verdicts[id(row)],
                    id=row_id(row)[:ID],
                    table=number,
                    address=address,
                    cells=[_cell(h, by_key.get(h.attack or h.name), row) for h in heads],
                    forest=_draw_forest(row.leak_interval, None if bare is None else bare.leak),
                    useful=has_use(row),
                )
                for row in keep(table)
            ]
    return Board(columns=heads, lines=lines, of_attack=attacks is not None)


def _cell(head: Column, column: Column | None, row: Row) -> Shown:
    """Show a row under a head by its own table's column, which may hold another metric."""
    if column is None:
        return NOTHING
    shown = column.shown(row)
    metric, own = (c.detail.partition(",")[0] for c in (head, column))
    if metric == own or shown.reason or shown == NOTHING:
        return shown
    return replace(shown, text=f"{own} {shown.text}", value="")


def _page_columns(
    title: str, verdicts: Mapping[int, Verdict], papers: Mapping[str, Publication]
) -> list[Column]:
    """Return the columns that only the page has, for the rows of one table.

    Args:
        title: Of the table.
        verdicts: Of its rows, by their `id`.
        papers: By defense.
    """

    def signed(row: Row) -> Shown:
        return replace(LEAKAGE.shown(row), mark=verdicts[id(row)].signs)

    def task(row: Row) -> Shown:
        protocol, _, rest = title.partition(f" · {row.data} · {row.model} · ")
        return Shown(text=f"{row.data} · {row.model}", beside=f"{protocol.split()[0]} · {rest}")

    def multiple(name: str, row: Row) -> Shown:
        value = verdicts[id(row)].costs[name]
        return Shown(text=times(value), value="" if value is None else f"{value:.6g}")

    def worth(row: Row) -> Shown:
        value = "" if row.eps_record is None else f"{row.eps_record:g}"
        claimed = epsilon_text(row.eps_claimed)
        refuted = ", refuted" if row.audit and row.audit.verdict_claim == "violated" else ""
        beside = "" if claimed == "–" else f"claimed {claimed}{refuted}"
        return Shown(text=epsilon_words(row.eps_record), value=value, beside=beside)

    def paper(field: str, row: Row) -> Shown:
        known = (papers[part] for part in row.defense.split("+") if part in papers)
        value = str(getattr(next(known, None), field, None) or "")
        return Shown(text=value or "–", value=value)

    return [
        replace(LEAKAGE, shown=signed),
        Column(name="task", shown=task),
        Column(name="epsilon", note="eps proven", shown=worth),
        *(Column(name=cost.title, shown=partial(multiple, n)) for n, cost in COSTS.items()),
        Column(name="suite", shown=lambda row: Shown(text=row.suite)),
        *(Column(name=name, shown=partial(paper, field)) for name, field in _PAPER.items()),
    ]


def _order(columns: Sequence[Column], *, several: bool) -> list[Column]:
    """Return columns without repeated ones: those shown at first before the others, the flags last.
    several: whether the rows are of several suites."""
    named = {column.name: column for column in columns}
    first = [name for name in _MIN_WIDTHS if name in named and name != "flags"]
    left_out = {*first, "marks", "flags", *(() if several else ("suite",))}
    return [named[n] for n in (*first, *(n for n in named if n not in left_out), "flags")]


def _draw_forest(value: Interval | None, bare: float | None) -> Markup:
    """Draw a mean with its interval on a line from the baseline (0) to a perfect copy (100); a
    second line stands where no defense is."""
    if value is None:
        return Markup("")
    lo, mean, hi = (round(100 * min(max(v, -0.1), 1)) for v in (value.lo, value.mean, value.hi))
    undefended = "" if bare is None else f'<path class="u" d="M{round(100 * bare)} 0v12"/>'
    return Markup(
        f'<svg class="forest" viewBox="-12 0 116 12"><path class="b" d="M0 0v12"/>{undefended}'
        f'<path d="M{lo} 6H{hi}"/><path class="m" d="M{mean} 6h0"/></svg>'
    )


# --- what an opened row shows ---------------------------------------------------------------


Place = Callable[[Any], int]
"""Numbers a JSON value."""


def details(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what opened rows show, for JSON. Most of it is the same in many rows, so every piece
    is kept once: integers under threat, words, reasons, flags, reason, floor and notes are its
    places."""
    places: dict[str, int] = {}

    def place(value: Any) -> int:
        return places.setdefault(json.dumps(value), len(places))

    lines = [_row(row, place) for row in rows]
    return {"pieces": list(map(json.loads, places)), "metrics": list(METRICS), "rows": lines}


def compress(value: Any) -> str:
    """Return JSON as the page holds it, zipped, in base64."""
    text = json.dumps(value, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


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
    same = ("status", "threat", "n", "failed", "budget")
    fields: dict[str, Any] = {name: getattr(entry, name) for name in same} | {
        "reason": None if entry.reason is None else place(entry.reason),
        "metrics": {
            m: [_round(s.mean), *(_round(end, DIGITS - 1) for end in (s.lo, s.hi))]
            for m, s in entry.scores.items()
        },
        "floor": place(_round(entry.floor)),
        "seconds": _round(entry.seconds),
        "evaluations": entry.gradient_evaluations,
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
