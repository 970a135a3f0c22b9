"""The leaderboard in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
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


def shown(rows: Sequence[Row]) -> list[Table]:
    """Rich tables of 80 columns: intervals, worst cases and full flags are left to the files. Of
    more rows than anybody scrolls through, one table that names the safest row of each."""
    if len(rows) > MOST_ROWS:
        return [_overview(rows)]
    out = []
    for title, members in tables(rows):
        unshown = {n for r in members for n, e in r["attacks"].items() if e["is_floor"]}
        unshown |= idle(members)
        columns = [(n, m) for n, m in attack_columns(members) if n not in unshown]
        lines = [next(iter(floor_texts(row, columns[:1]).values()), "-") for row in members]
        known = sorted({line for line in lines if line != "-"})
        shared = len(known) <= 1  # the same victims in every row: once is enough
        table = Table(
            title=f"{title} · floor {known[0]}" if shared and known else title,
            title_justify="left", title_style="bold", box=None, pad_edge=False,
            padding=(0, 1, 0, 0), header_style="bold dim",
        )  # fmt: skip
        table.add_column("#", justify="right", no_wrap=True)
        table.add_column("defense", overflow="fold", min_width=10)
        personal = any_personalised(members)
        for name in ("acc", *(["own\nacc"] if personal else []), "eps\nclaim", "eps\nproven"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, metric in columns:
            heading = f"{_brief_name(name)}\n{TITLES[metric]}"
            table.add_column(heading, justify="right", no_wrap=True)
        if not shared:
            table.add_column("floor", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for row, floor in zip(members, lines, strict=True):
            claim = brief_number(row["eps_claimed"])
            refuted = "!" if audited(row).endswith("!") else ""
            line = [
                str(row["rank"] or "-"),
                _brief_setting(row),
                _brief(row["accuracy"]),
                *([_brief(row["personal_accuracy"])] if personal else []),
                f"{claim}/{row['unit'][:2]}{refuted}" if row["unit"] else "-",
                brief_number(row["eps_record"]),
            ]
            line += [_brief_entry(row["attacks"].get(n), m) for n, m in columns]
            line += [_codes(row)] if shared else [floor, _codes(row)]
            table.add_row(*line, style="dim" if row["rank"] is None else "")
        out.append(table)
    return out


def _overview(rows: Sequence[Row]) -> Table:
    """A line per table: its rows, and the one that leaks least."""
    overview = Table(
        title=f"{len(rows)} rows, which are in the files; of each table the safest", box=None,
        title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0),
        header_style="bold dim",
    )  # fmt: skip
    for name in ("table", "safest row that learns"):
        overview.add_column(name, overflow="fold")
    for name in ("rows", "worst"):
        overview.add_column(name, justify="right", no_wrap=True)
    for title, members in tables(rows):
        first = next((r for r in members if r["rank"] == 1), None)
        worst = first["worst"] if first else None
        overview.add_row(
            title, setting(first) if first else "-", str(len(members)),
            _brief(worst[worst["metric"]]) if worst else "-",
        )  # fmt: skip
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
