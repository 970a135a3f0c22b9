"""The leaderboard in a terminal of 80 columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.report.tables import (
    ERROR_LEGEND,
    LEGEND,
    PERSONAL_LEGEND,
    TITLES,
    Row,
    any_errors,
    any_personalised,
    attack_columns,
    audited,
    brief_number,
    entry_text,
    floor_texts,
    idle,
    setting,
    short,
    tables,
    two_digits,
)

CODES = {
    "D": ("diverged", "training diverged"),
    "C": ("accuracy at chance", "accuracy at chance"),
    "B": (" cut short: ", "an attack was cut short: undefended, twice its budget leaks more"),
    "F": ("strongest attack", "strongest attack below its floor: too weak to judge by"),
    "V": ("audit refutes", "the audit refutes a claim or proof"),
    "X": (" failed", "something failed"),
    "T": (" timeout", "over the time limit"),
}


MOST_ROWS = 500
"""Rows that a terminal shows; of more, one line per table."""


WIDTH = 80
_DEFENSE = 10
"""Least width of a row's name, which is folded."""


@dataclass(frozen=True)
class _Column:
    """Figures of all rows under a heading; never folded."""

    heading: str
    cells: list[str]

    @property
    def width(self) -> int:
        """With the space after it."""
        return 1 + max(map(len, [*self.heading.split("\n"), *self.cells]), default=0)


def shown(rows: Sequence[Row]) -> list[Table]:
    """Rich tables of 80 columns: intervals, worst cases and full flags are left to the files.
    Attacks for which a table has no room are in further ones below it. Of more rows than anybody
    scrolls through, one table that names the safest row of each."""
    if len(rows) > MOST_ROWS:
        return [_overview(rows)]
    return [table for title, members in tables(rows) for table in _board(title, members)]


def _board(title: str, rows: Sequence[Row]) -> list[Table]:
    unshown = {n for r in rows for n, e in r["attacks"].items() if e["is_floor"]} | idle(rows)
    columns = [(n, m) for n, m in attack_columns(rows) if n not in unshown]
    floors = [next(iter(floor_texts(row, columns[:1]).values()), "-") for row in rows]
    known = sorted({f for f in floors if f != "-"})
    shared = len(known) <= 1  # the same victims in every row: once is enough
    attacks = [
        _Column(
            f"{_brief_name(name)}\n{TITLES[metric]}",
            [_brief_entry(row["attacks"].get(name), metric) for row in rows],
        )
        for name, metric in columns
    ]
    ranks = _Column("#", [str(row["rank"] or "-") for row in rows])
    figures = _figures(rows)
    ends = [*([] if shared else [_Column("floor", floors)]), _Column("", list(map(_codes, rows)))]
    taken = sum(c.width for c in (ranks, *figures, *ends)) + _DEFENSE + 1
    first = _fitting(attacks, WIDTH - taken)
    head = f"{title} · floor {known[0]}" if shared and known else title
    made = [_table(head, rows, ranks, [*figures, *attacks[:first], *ends])]
    while first < len(attacks):
        some = max(1, _fitting(attacks[first:], WIDTH - ranks.width - 2 * _DEFENSE))
        made.append(_table("and by", rows, ranks, attacks[first : first + some]))
        first += some
    return made


def _fitting(columns: Sequence[_Column], room: int) -> int:
    """How many of the columns, from the first, are not wider than the room."""
    widths = itertools.accumulate(c.width for c in columns)
    return sum(w <= room for w in widths)


def _figures(rows: Sequence[Row]) -> list[_Column]:
    """What stands before the attacks."""
    claims = []
    for row in rows:
        refuted = "!" if audited(row).endswith("!") else ""
        unit = f"/{row['unit'][:2]}{refuted}" if row["unit"] else ""
        claims.append(brief_number(row["eps_claimed"]) + unit if unit else "-")
    own = [_Column("own\nacc", [_brief(r["personal_accuracy"]) for r in rows])]
    return [
        _Column("acc", [_brief(r["accuracy"]) for r in rows]),
        *(own if any_personalised(rows) else []),
        _Column("eps\nclaim", claims),
        _Column("eps\nproven", [brief_number(r["eps_record"]) for r in rows]),
    ]


def _table(title: str, rows: Sequence[Row], ranks: _Column, columns: Sequence[_Column]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold dim",
    )
    table.add_column(ranks.heading, justify="right", no_wrap=True)
    table.add_column("defense", overflow="fold", min_width=_DEFENSE)
    for column in columns:
        table.add_column(
            column.heading, justify="right" if column.heading else "left", no_wrap=True
        )
    for place, row in enumerate(rows):
        table.add_row(
            ranks.cells[place],
            _brief_setting(row),
            *(c.cells[place] for c in columns),
            style="dim" if row["rank"] is None else "",
        )
    return table


def _overview(rows: Sequence[Row]) -> Table:
    """A line per table: its rows, and the one that leaks least."""
    overview = Table(
        title=f"{len(rows)} rows, which are in the files; of each table the safest",
        box=None,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold dim",
    )
    for name in ("table", "safest row that learns"):
        overview.add_column(name, overflow="fold")
    for name in ("rows", "worst"):
        overview.add_column(name, justify="right", no_wrap=True)
    for title, members in tables(rows):
        first = next((r for r in members if r["rank"] == 1), None)
        worst = first["worst"] if first else None
        overview.add_row(
            title,
            setting(first) if first else "-",
            str(len(members)),
            _brief(worst[worst["metric"]]) if worst else "-",
        )
    return overview


def _brief_name(name: str) -> str:
    """An attack's name for a narrow column: the words of a long one, shortened, one a line."""
    words = name.split("_") if len(name) > 10 else [name]
    return "\n".join(w if len(w) < 7 else f"{w[:4]}." for w in words)


def legend(rows: Sequence[Row]) -> str:
    """What the columns and the letters that occur mean."""
    letters = sorted({c for r in rows for c in _codes(r)})
    units = sorted({r["unit"] for r in rows if r["unit"]})
    parts = [LEGEND]
    if any_errors(rows):
        parts.append(ERROR_LEGEND)
    if any_personalised(rows):
        parts.append(PERSONAL_LEGEND)
    if any(audited(r).endswith("!") for r in rows):
        parts.append("! at a claim: an attack on one release certifies more.")
    if units:
        parts.append("Claims are per " + ", ".join(f"{u} (/{u[:2]})" for u in units) + ".")
    parts += [f"{c}: {CODES[c][1]}." for c in letters]
    return " ".join(parts)


def _codes(row: Row) -> str:
    return "".join(c for c, (text, _) in CODES.items() if any(text in f for f in row["flags"]))


def _brief_setting(row: Row) -> str:
    """spm epsilon=1.5 printed."""
    shown = [v if isinstance(v, str) else f"{k}={short(v)}" for k, v in row["settings"].items()]
    return " ".join([row["defense"], *shown])


def _brief(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['mean']:.2f}"


def _brief_entry(entry: dict[str, Any] | None, metric: str) -> str:
    if entry is None or entry[metric] is None:
        return entry_text(entry, metric)
    lost = f" ({entry['failed']}!)" if entry["failed"] else ""
    return two_digits(entry[metric]["mean"], metric) + lost
