"""What a paper prints, beside what was measured here: its tables and figures, cell by cell.

    python docs/printed.py [NAME] [--results DIR] [--table ID]

prints them as Markdown; without a name it lists the papers and their tables. Each paper has a file
in `docs/papers/tables/`: its tables as printed, and for every cell where its counterpart stands, in
a row of the leaderboard or in the ledger.
"""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from formulas import columns
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.errors import UserError
from bench.metrics.intervals import Interval
from bench.names import did_you_mean
from bench.records import FlagCode, Row
from bench.registry import Registry, discover
from bench.report import leaderboard
from bench.report.accounts import accounts_over
from bench.report.plots import exact

_TABLES = Path(__file__).parent / "papers" / "tables"
_STRICT = ConfigDict(extra="forbid", frozen=True)
ACCURACY_SPREAD, LEAKAGE_SPREAD = 0.13, 0.6
"""95 % of two trainings of one setting differ by less: 1.96 sqrt(2) times the standard deviation
over seeds, root mean square over the rows of version 1 of `reference`."""
_CERTAIN = ("eps_claimed", "eps_record", "costs", "workings")
"""Figures that a further training would not change, or hardly."""
_ROOMS = {
    "settings": "settings",
    "protocol": "protocol_settings",
    "data": "dataset_settings",
    "model": "model_settings",
}
"""First words of dotted names, and the fields of a row in which the others are looked up."""


class PrintedRow(BaseModel):
    """A row of a paper's table.

    Attributes:
        title: As the paper has it.
        pick: See `PrintedTable`.
        read: See `PrintedTable`.
        printed: Its figures by column; a text where the paper prints one, "" where it has nothing.
            Empty for a figure whose values the paper does not print.
        why: The reason for differences of this row.
    """

    model_config = _STRICT

    title: str
    pick: dict[str, Any] = Field(default_factory=dict)
    read: str = ""
    printed: list[float | str] = Field(default_factory=list)
    why: str = ""


class PrintedColumn(BaseModel):
    """A column of a paper's table; `pick` and `read` see `PrintedTable`."""

    model_config = _STRICT

    title: str
    pick: dict[str, Any] = Field(default_factory=dict)
    read: str = ""
    factor: float | None = None


class Claim(BaseModel):
    """What a paper says of two rows of its table: `left` exceeds `right` by at least `by`, in the
    table's unit and in every column."""

    model_config = _STRICT

    says: str
    left: str
    right: str
    by: float = 0.0


class PrintedTable(BaseModel):
    """A table or figure of a paper.

    Attributes:
        id: Short name: table-2, fig-3a.
        title: What it shows, with the paper's name of it.
        unit: Of its figures.
        scale: In what the run that is measured is smaller than the paper's.
        run: The command that makes its measured figures; "" where nothing smaller than the paper's
            scale tells anything, as `scale` says.
        paper_run: The command that makes them at the paper's scale; "" for what is not measured.
        pick: What the rows of the leaderboard that belong to it have in common: `defense`,
            `dataset`, `model`, `checkpoint`, or of its settings `settings.NAME`, `protocol.NAME`,
            `data.NAME`, `model.NAME`; `{ any = [...] }` stands for one of several values, as of
            both scales. A row's and a column's are added to it. For the ledger: `defense`,
            `settings.NAME` and `facts.NAME`.
        read: Which figure of a leaderboard's row a cell has: `accuracy`, `personal_accuracy`,
            `leak`, `choice` and `worst` (SSIM of the attacker's choice and of the best answers),
            `eps_claimed`, `eps_record`, `costs.NAME`, `workings.NAME`, `attacks.COLUMN.METRIC`;
            `course.NAME` after the part `course.share` of all rounds; or of the ledger
            `ledger.COLUMN`, by the columns of `python docs/formulas.py`.
        factor: Measured figures are multiplied by it, 100 for percent.
        digits: Shown behind the point.
        columns: Its columns.
        rows: Its rows.
        claims: What the paper concludes from it.
        why: The reason for differences of all rows that have none of their own.
    """

    model_config = _STRICT

    id: str
    title: str
    unit: str
    scale: str = ""
    run: str = ""
    paper_run: str = ""
    pick: dict[str, Any] = Field(default_factory=dict)
    read: str = "accuracy"
    factor: float = 1.0
    digits: int = 2
    columns: list[PrintedColumn] = Field(min_length=1)
    rows: list[PrintedRow] = Field(min_length=1)
    claims: list[Claim] = Field(default_factory=list)
    why: str = ""


class PrintedPaper(BaseModel):
    """A paper's tables and figures.

    Attributes:
        title: Of the paper.
        source: Where it is published.
        tables: In the paper's order.
    """

    model_config = _STRICT

    title: str
    source: str
    tables: list[PrintedTable]

    def table(self, name: str) -> PrintedTable:
        """The table of an id. Raises UserError if there is none."""
        by_id = {t.id: t for t in self.tables}
        if name not in by_id:
            raise UserError(did_you_mean("table", name, list(by_id)))
        return by_id[name]


@dataclass(frozen=True, kw_only=True)
class MeasuredCell:
    """A cell's counterpart.

    Attributes:
        value: In the table's unit; one number has equal ends.
        spread: By how much two trainings of one setting differ, in the same unit, where only one
            was run; 0 where several were, or none is needed.
        note: What to know of it: that the training diverged.
    """

    value: Interval
    spread: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PrintedCell:
    """One cell: what is printed, and what was measured. None and "": nothing."""

    printed: float | str
    measured: MeasuredCell | None

    @property
    def differs(self) -> bool:
        """Whether the printed number lies outside the measured interval."""
        if self.measured is None or isinstance(self.printed, str):
            return False
        measured = self.measured.value
        return not measured.lo <= self.printed <= measured.hi


@dataclass(frozen=True, kw_only=True)
class ClaimVerdict:
    """What became of a claim: in how many of the measured columns it holds beyond the intervals,
    in how many its contrary does, and in how many neither. once: whether it rests on one training
    of a setting."""

    claim: Claim
    holds: int
    fails: int

    measured: int
    once: bool

    @property
    def text(self) -> str:
        """Holds in 3 of 4 columns, does not in 1."""
        if not self.measured:
            return "not measured"
        open_ = self.measured - self.holds - self.fails
        parts = [
            f"{word} in {count}"
            for word, count in (
                ("holds", self.holds),
                ("does not hold", self.fails),
                ("cannot be told", open_),
            )
            if count
        ]
        once = ", from one training of each" if self.once else ""
        if len(parts) == 1:
            return f"{parts[0].rpartition(' in ')[0]}{_columns(self.measured)}{once}"
        return f"{', '.join(parts)} of {self.measured} columns{once}"


@dataclass(frozen=True, kw_only=True)
class ComparedTable:
    """A paper's table with its measured counterpart.

    Attributes:
        cells: By row and column.
    """

    table: PrintedTable
    cells: tuple[tuple[PrintedCell, ...], ...]

    @property
    def reasons(self) -> dict[str, list[str]]:
        """Why cells differ, or "open": by reason the rows that have such cells, with how many of
        those that can be compared."""
        reasons: dict[str, list[str]] = {}
        for row, cells in zip(self.table.rows, self.cells, strict=True):
            differing = sum(c.differs for c in cells)
            if differing:
                both = sum(c.measured is not None and isinstance(c.printed, float) for c in cells)
                why = row.why or self.table.why or "open"
                reasons.setdefault(why, []).append(f"{row.title} ({differing} of {both})")
        return reasons

    @property
    def verdicts(self) -> list[ClaimVerdict]:
        """One per claim of the paper."""
        places = {row.title: i for i, row in enumerate(self.table.rows)}
        return [
            _verdict(claim, self.cells[places[claim.left]], self.cells[places[claim.right]])
            for claim in self.table.claims
        ]

    def text(self, beside: PrintedCell) -> tuple[str, str]:
        """Printed and measured as texts, "–" for nothing."""
        digits = self.table.digits
        printed = beside.printed
        shown = number(printed, digits) if isinstance(printed, float) else printed or "–"
        if beside.measured is None:
            return shown, "–"
        measured = beside.measured.value
        text = number(measured.mean, digits)
        if measured.hi > measured.lo:
            text += f" [{number(measured.lo, digits)}, {number(measured.hi, digits)}]"
        return shown, text + ("†" if beside.measured.note else "")


def _columns(count: int) -> str:
    return "" if count == 1 else f" in all {count} columns"


def number(value: float, digits: int) -> str:
    """With so many digits behind the point; three significant ones where that would be 0 or far
    too long."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "–"
    if value and not 10.0**-digits <= abs(value) < 1e5:
        return f"{value:.3g}"
    return f"{value:.{digits}f}"


def papers() -> list[str]:
    """Names of the papers."""
    return sorted(p.stem for p in _TABLES.glob("*.toml"))


@cache
def read_paper(name: str) -> PrintedPaper:
    """A paper's tables. Raises UserError if there is no such paper."""
    if name not in papers():
        raise UserError(did_you_mean("paper", name, papers()))
    place = _TABLES / f"{name}.toml"
    try:
        paper = PrintedPaper.model_validate(tomllib.loads(place.read_text(encoding="utf-8")))
    except ValidationError as error:  # a file of our own: a bug, not a user's
        raise ValueError(f"{place}: {error}") from error
    for table in paper.tables:
        titles = [row.title for row in table.rows]
        for row in table.rows:
            if len(row.printed) not in (0, len(table.columns)):
                raise ValueError(f"{place}: {table.id}, {row.title}: as many figures as columns.")
        for claim in table.claims:
            if claim.left not in titles or claim.right not in titles:
                raise ValueError(f"{place}: {table.id} claims something of an unknown row.")
    return paper


def compared(table: PrintedTable, rows: Sequence[Row], registry: Registry) -> ComparedTable:
    """A table beside what was measured.

    Args:
        table: As printed.
        rows: Of the leaderboard; none for what is printed alone.
        registry: Of the defenses, for the ledger.
    """
    cells = []
    for line in table.rows:
        printed = line.printed or [""] * len(table.columns)
        cells.append(
            tuple(
                PrintedCell(printed=value, measured=_measured(table, line, column, rows, registry))
                for value, column in zip(printed, table.columns, strict=True)
            )
        )
    return ComparedTable(table=table, cells=tuple(cells))


def _measured(
    table: PrintedTable,
    line: PrintedRow,
    column: PrintedColumn,
    rows: Sequence[Row],
    registry: Registry,
) -> MeasuredCell | None:
    pick = {**table.pick, **line.pick, **column.pick}
    read = column.read or line.read or table.read
    factor = table.factor if column.factor is None else column.factor
    kind, _, rest = read.partition(".")
    if kind == "ledger":
        value = _accounted(pick, rest, registry)
        return None if value is None else MeasuredCell(value=_scaled(exact(value), factor))
    row = counterpart(table, line, column, rows)
    value = None if row is None else _figure(row, read, pick.get("course.share", 1.0))
    if row is None or value is None:
        return None
    accurate = "accuracy" in read
    spread = ACCURACY_SPREAD if accurate else LEAKAGE_SPREAD
    once = len(row.seeds) == 1 and kind not in _CERTAIN
    diverged = any(f.code is FlagCode.DIVERGED for f in row.flags)
    return MeasuredCell(
        value=_scaled(value, factor),
        spread=factor * spread if once else 0.0,
        note="diverged" if diverged else "",
    )


def counterpart(
    table: PrintedTable, line: PrintedRow, column: PrintedColumn, rows: Sequence[Row]
) -> Row | None:
    """The leaderboard's row that a cell's figure stands in; None if there is none."""
    pick = {**table.pick, **line.pick, **column.pick}
    pick.pop("course.share", None)
    fitting = [row for row in rows if all(_has(row, name, v) for name, v in pick.items())]
    if len(fitting) > 1:
        names = ", ".join(f"{row.setting} ({row.where})" for row in fitting)
        raise ValueError(f"{table.id}, {line.title}, {column.title} fits several rows: {names}.")
    return fitting[0] if fitting else None


def _has(row: Row, name: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has(row, name, one) for one in value["any"])
    room, dot, key = name.partition(".")
    if not dot:
        return bool(getattr(row, name) == value)
    held = getattr(row, _ROOMS[room])
    if isinstance(held, Mapping):
        return key in held and bool(held[key] == value)
    return bool(getattr(held, key) == value)


def _figure(row: Row, read: str, share: float) -> Interval | None:
    kind, _, rest = read.partition(".")
    value: Any
    if kind == "attacks":
        attack, _, metric = rest.rpartition(".")
        entry = row.attacks.get(attack)
        value = entry and entry.scores.get(metric)
    elif kind == "course":
        rounds = round(share * row.protocol_settings.rounds)
        point = next((p for p in row.course if p.rounds == rounds), None)
        value = point and getattr(point, rest)
    elif kind in ("choice", "worst"):
        case = getattr(row, kind)
        value = case and case.interval
    elif kind == "costs":
        value = row.costs.get(rest)
    elif kind == "workings":
        value = row.workings and getattr(row.workings, rest)
    else:
        value = getattr(row, read)
    if value is None or isinstance(value, Interval):
        return value
    return exact(float(value))


def _accounted(pick: Mapping[str, Any], column: str, registry: Registry) -> float | None:
    rooms: dict[str, dict[str, Any]] = {"settings": {}, "facts": {}}
    for name, value in pick.items():
        room, dot, key = name.partition(".")
        if dot:
            rooms[room][key] = value
    table = accounts_over(registry, pick["defense"], **rooms, over={})
    (by_head,) = columns(table).to_dict("records")
    if column not in by_head:
        raise ValueError(f"the ledger of {pick['defense']} has no '{column}', but {list(by_head)}.")
    return by_head[column]


def _verdict(
    claim: Claim, left: Sequence[PrintedCell], right: Sequence[PrintedCell]
) -> ClaimVerdict:
    """Two measured cells differ beyond their intervals where the gap exceeds the root of their
    squared half widths, and, where one training was run, by how much trainings differ."""
    holds = fails = measured = 0
    once = False
    for one, two in zip(left, right, strict=True):
        if one.measured is None or two.measured is None:
            continue
        measured += 1
        a, b = one.measured.value, two.measured.value
        gap = a.mean - b.mean - claim.by
        spread = max(one.measured.spread, two.measured.spread)
        once = once or spread > 0
        width = math.hypot(a.half_width, b.half_width, spread)
        holds += gap > width or (width == 0 and gap >= 0)
        fails += gap < -width
    return ClaimVerdict(claim=claim, holds=holds, fails=fails, measured=measured, once=once)


def _scaled(value: Interval, factor: float) -> Interval:
    return Interval(mean=factor * value.mean, lo=factor * value.lo, hi=factor * value.hi)


# --- as text ------------------------------------------------------------------------------------


def markdown(shown: ComparedTable) -> Iterator[str]:
    """A comparison as lines of Markdown: the table, then claims, reasons and commands."""
    table = shown.table
    both = any(row.printed for row in table.rows)
    yield f"**{table.title}** ({table.unit}){'; printed, below it measured' if both else ''}."
    yield ""
    yield f"| | {' | '.join(c.title for c in table.columns)} |"
    yield f"|---|{'---|' * len(table.columns)}"
    for row, cells in zip(table.rows, shown.cells, strict=True):
        texts = [_cell(*shown.text(c), differs=c.differs) for c in cells]
        if not row.printed:
            texts = [measured for _, measured in map(shown.text, cells)]
        yield f"| {row.title} | {' | '.join(texts)} |"
    yield ""
    yield from (f"- {line}" for line in findings(shown))
    yield ""


def _cell(printed: str, measured: str, *, differs: bool) -> str:
    return f"{printed}<br>{f'**{measured}**' if differs else measured}"


def findings(shown: ComparedTable) -> Iterator[str]:
    """What follows from a comparison, a sentence each, and how to make it again."""
    table = shown.table
    for verdict in shown.verdicts:
        claim = verdict.claim
        by = f"at least {claim.by:g}" if claim.by else "more than 0"
        meant = f"{claim.left} less {claim.right} {by}"
        yield f"The paper: {claim.says} Here ({meant}): {verdict.text}."
    for why, rows in shown.reasons.items():
        yield f"Printed figures outside the interval, {', '.join(rows)}: {why}"
    if any(c.measured and c.measured.note for cells in shown.cells for c in cells):
        yield "†: the training diverged."
    if table.scale:
        yield f"Scale: {table.scale}"
    if table.run:
        yield f"Made by `{table.run}`."
    if table.paper_run not in ("", table.run):
        yield f"At the paper's scale: `{table.paper_run}`."


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what the command's arguments ask for; exit code 2 with one sentence for bad ones."""
    parser = argparse.ArgumentParser(description="What a paper prints, beside what was measured.")
    parser.add_argument("name", nargs="?", help="a paper; without one, all are listed")
    parser.add_argument("--results", type=Path, help="folder of a run of the paper's suite")
    parser.add_argument("--table", action="append", help="only this table or figure, by its id")
    asked = parser.parse_args(arguments)
    try:
        if asked.name is None:
            for name in papers():
                paper = read_paper(name)
                print(f"{name}: {paper.title} ({paper.source})")
                print(*(f"  {table.id}  {table.title}" for table in paper.tables), sep="\n")
            return
        paper = read_paper(asked.name)
        rows = leaderboard.load(asked.results) if asked.results else []
        for table in map(paper.table, asked.table) if asked.table else paper.tables:
            print(*markdown(compared(table, rows, discover())), sep="\n", end="\n\n")
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
