"""The leaderboard's tables as the page shows them: columns, cells, what they are sorted by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import explain, tables
from bench.report.tables import TITLES, Row

AT_ONCE = 100
"""Rows of a table that are shown until the reader asks for all of them."""
_STEPS = 9
"""Shades of leakage between the floor and a perfect copy."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """note: key of its explanation in `explain.COLUMNS`."""

    title: str
    detail: str = ""
    note: str = ""
    numeric: bool = True


@dataclass(frozen=True, kw_only=True)
class Cell:
    """value: what it is sorted by, a number or "inf"; "" where there is no figure, which comes
    last. reason: why there is none. mark: a warning beside the figure."""

    text: str
    small: str = ""
    value: str = ""
    style: str = ""
    mark: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row: the cells before the defense, itself and those after it."""

    rank: Cell
    defense: str
    settings: tuple[str, ...]
    cells: tuple[Cell, ...]
    flags: tuple[explain.Flag, ...]


@dataclass(frozen=True, kw_only=True)
class Board:
    """One table. idle: attacks that apply to no row, with the reason, in place of a column."""

    id: str
    title: str
    rows: tuple[Row, ...]
    threats: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    idle: tuple[tuple[str, str], ...]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def flags(self) -> list[explain.Flag]:
        """Every flag of the table once, in order of appearance."""
        return list({f.text: f for line in self.lines for f in line.flags}.values())


def boards(rows: Sequence[Row]) -> list[Board]:
    """All tables in the order of the rows."""
    return [
        _board(f"t{number}", title, members)
        for number, (title, members) in enumerate(tables.tables(rows), start=1)
    ]


def _board(name: str, title: str, rows: list[Row]) -> Board:
    unused = tables.idle(rows)
    shown = [(n, m) for n, m in tables.attack_columns(rows) if n not in unused]
    own = tables.any_personalised(rows)
    columns = [
        Column(title="#", note="rank"),
        Column(title="defense", numeric=False),
        Column(title="accuracy", note="accuracy"),
        *([Column(title="own accuracy", note="own")] if own else []),
        Column(title="ε claimed", note="claimed"),
        Column(title="ε proven", note="proven"),
        Column(title="ε audited", note="audited"),
        *(Column(title=n, detail=_detail(rows, n, m), note=m) for n, m in shown),
        Column(title="floor", note="floor"),
        Column(title="worst", note="worst"),
        Column(title="flags", note="flags"),
    ]
    return Board(
        id=name,
        title=title,
        rows=tuple(rows),
        threats=tuple(dict.fromkeys(t for r in rows for t in r["threat"].split("; ") if t)),
        columns=tuple(columns),
        lines=tuple(_line(row, shown, own) for row in rows),
        idle=tuple((n, _reason(rows, n)) for n in sorted(unused)),
    )


def _detail(rows: Sequence[Row], attack: str, metric: str) -> str:
    floor = any(r["attacks"][attack]["is_floor"] for r in rows if attack in r["attacks"])
    return f"{TITLES[metric]}, a floor" if floor else TITLES[metric]


def _reason(rows: Sequence[Row], attack: str) -> str:
    return next(str(r["attacks"][attack]["reason"]) for r in rows if attack in r["attacks"])


def _line(row: Row, shown: Sequence[tuple[str, str]], own: bool) -> Line:
    cells = [
        interval_cell(row["accuracy"]),
        *([interval_cell(row.get("personal_accuracy"))] if own else []),
        _claimed(row),
        epsilon_cell(row["eps_record"]),
        _audited(row),
        *(_attack(row["attacks"].get(n), m) for n, m in shown),
        _floors(row, shown),
        _worst(row),
    ]
    rank = Cell(text=str(row["rank"]), value=str(row["rank"])) if row["rank"] else _MISSING
    return Line(
        rank=rank,
        defense=row["defense"],
        settings=tuple(f"{k}={tables.short(v)}" for k, v in row["settings"].items()),
        cells=tuple(cells),
        flags=tuple(explain.flag(f) for f in row["flags"]),
    )


_MISSING = Cell(text="–", style="none")


def figure(value: float, metric: str = "ssim") -> str:
    """0.908; errors of records, which span decades, with three digits: 4.1e-8."""
    if metric == "mse":
        return tables.error_number(value)
    return _fixed(value, 3)


def bounds(value: Mapping[str, float], metric: str = "ssim") -> str:
    """[0.88, 0.94]."""
    if metric == "mse":
        return f"[{tables.error_number(value['lo'], 2)}, {tables.error_number(value['hi'], 2)}]"
    return f"[{_fixed(value['lo'], 2)}, {_fixed(value['hi'], 2)}]"


def _fixed(value: float, digits: int) -> str:
    """So many decimals, without a minus before zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def interval_cell(value: Mapping[str, float] | None, metric: str = "ssim", style: str = "") -> Cell:
    if value is None:
        return _MISSING
    return Cell(
        text=figure(value["mean"], metric),
        small=bounds(value, metric),
        value=f"{value['mean']:.6g}",
        style=style,
    )


def epsilon_cell(value: Any, **more: str) -> Cell:
    if value is None:
        return _MISSING
    infinite = math.isinf(float(value))
    text = "inf" if infinite else tables.brief_number(float(value))
    return Cell(text=text, value="inf" if infinite else f"{float(value):.6g}", **more)


def _claimed(row: Row) -> Cell:
    audit = row.get("audit")
    refuted = audit and audit["verdict_claim"] == "violated"
    unit = f"/{row['unit']}" if row["unit"] else ""
    return epsilon_cell(row["eps_claimed"], small=unit, mark="!" if refuted else "")


def _audited(row: Row) -> Cell:
    audit = row.get("audit")
    if not audit:
        return _MISSING
    text = tables.audited(row)
    return Cell(
        text=text.removesuffix("!"),
        value=f"{float(audit['eps_audited']):.6g}",
        mark="!" if text.endswith("!") else "",
    )


def _attack(entry: Mapping[str, Any] | None, metric: str) -> Cell:
    if entry is None:
        return _MISSING
    if entry[metric] is None:
        if entry["status"] == "done":  # it answers with something else
            return _MISSING
        applies = entry["status"] != "not_applicable"
        return Cell(
            text=entry["status"] if applies else "n/a",
            style="bad" if applies else "none",
            reason=str(entry["reason"]),
        )
    cell = interval_cell(entry[metric], metric, _shade(entry, metric))
    lost = entry["failed"]
    if not lost:
        return cell
    return Cell(
        text=cell.text, small=cell.small, value=cell.value, style=cell.style, mark=f"{lost} failed"
    )


def _shade(entry: Mapping[str, Any], metric: str) -> str:
    """h1 to h9: how far between its floor and a perfect copy the attack came; nothing at or below
    the floor, of floors, and of errors, which have no such scale."""
    if metric == "mse" or entry["is_floor"]:
        return "floor" if entry["is_floor"] else ""
    floor = entry["floor"].get(metric, 0.0)
    if floor >= 1:
        return ""
    share = (entry[metric]["mean"] - floor) / (1 - floor)
    step = min(_STEPS, math.ceil(share * _STEPS))
    return f"h{step}" if step > 0 else ""


def _floors(row: Row, shown: Sequence[tuple[str, str]]) -> Cell:
    texts = tables.floor_texts(row, shown)
    if not texts:
        return _MISSING
    (first, value), *others = texts.items()
    small = ", ".join(f"{TITLES[m]} {t}" for m, t in others)
    label = "" if first == "ssim" else f"{TITLES[first]} "
    return Cell(text=label + value, small=small, value=value.split("/")[0])


def _worst(row: Row) -> Cell:
    worst = row["worst"]
    if not worst:
        return _MISSING
    metric = worst["metric"]
    cell = interval_cell(worst[metric], metric)
    label = "" if metric == "ssim" else f"{TITLES[metric]} "
    style = _shade({**row["attacks"][worst["attack"]], **worst}, metric)
    return Cell(
        text=label + cell.text,
        small=f"{cell.small} {worst['attack']}",
        value=cell.value,
        style=style,
    )
