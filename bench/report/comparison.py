"""Two rows of a leaderboard table against each other, by the test that marks the table."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.harness.store import Store
from bench.metrics.intervals import Interval
from bench.metrics.paired import Difference
from bench.names import did_you_mean
from bench.records import Row, Run, short
from bench.report.choosing import check_wanted
from bench.report.leaderboard import rows_of
from bench.report.marks import row_differences
from bench.report.tables import tables
from bench.report.verdicts import accuracy_drop, find_undefended
from bench.suite import parse_value


@dataclass(frozen=True, kw_only=True)
class RowComparison:
    """The leakage of two rows of a table.

    Attributes:
        title: Of the table.
        first, second: The rows.
        difference: First minus second. Adjusted over the table, against the undefended row or the
            one that leaks less.
        rows: Number of comparisons that the p-value is adjusted for.
        drop: By how much the first row's accuracy is below the second's.
    """

    title: str
    first: Row
    second: Row
    difference: Difference
    rows: int
    drop: Interval | None

    @property
    def verdict(self) -> str:
        return "separated" if self.difference.separated else "not separated"

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "first": self.first.setting,
            "second": self.second.setting,
            "first_mean": self.first.leak,
            "second_mean": self.second.leak,
            **asdict(self.difference),
            "rows": self.rows,
            "accuracy_drop": self.drop,
            "verdict": self.verdict,
        }


def compare_rows(
    folder: Path, one: str, two: str, *, checkpoint: str | None = None
) -> list[RowComparison]:
    """Compare the leakage of two rows in every table that holds both.

    A name is a defense, `spm(epsilon=1.5, variant=printed)` as the leaderboard prints it, or
    `spm:epsilon=1.5`; of the settings only as many are needed as make it unique.

    Args:
        folder: A result folder, or a published one.
        one, two: Names of the rows.
        checkpoint: By default the suite's last.

    Raises:
        UserError: For a checkpoint that the suite lacks, names that fit no row, several, or rows
            of different tables only.
    """
    run = Run.read(folder)
    check_wanted("checkpoint", checkpoint, run.suite.checkpoints)
    chosen = next(c for c in reversed(run.suite.checkpoints) if checkpoint in (None, c))
    groups = tables(rows_of(run, Store(folder, run), [chosen]))
    comparisons, pairs = [], list(_pairs(groups, one, two))
    if not pairs:
        raise UserError(
            f"no table holds both '{one}' and '{two}'; rows of different tables have other victims."
        )
    for title, rows, first, second in pairs:
        one_leak, two_leak = rows[first].leak, rows[second].leak
        if one_leak is None or two_leak is None:
            name = rows[first if one_leak is None else second].setting
            raise UserError(f"{name} has no leakage in {title}.")
        base, compared = (first, second) if one_leak <= two_leak else (second, first)
        if rows[compared] is find_undefended(rows):
            base, compared = compared, base
        by_row = row_differences(rows, base, also=(compared,))
        difference = by_row[compared]
        if difference is None:
            pair = f"{rows[first].setting} and {rows[second].setting}"
            raise UserError(f"{pair} have no seed in common in {title}.")
        found = RowComparison(
            title=title,
            first=rows[first],
            second=rows[second],
            difference=difference if compared == first else difference.reverse(),
            rows=sum(d is not None for d in by_row.values()),
            drop=accuracy_drop(rows[first], rows[second]),
        )
        comparisons.append(found)
    return comparisons


# --- which rows -------------------------------------------------------------------------------


def _pairs(
    groups: Sequence[tuple[str, list[Row]]], a: str, b: str
) -> Iterator[tuple[str, list[Row], int, int]]:
    """Yield the title, the rows and the two places of every table that holds both rows."""
    everything = [row for _, rows in groups for row in rows]
    for text in (a, b):
        if not any(_fits(row, text) for row in everything):
            names = dict.fromkeys(r.defense for r in everything)
            inner = dict.fromkeys(r.setting for r in everything if r.defense == _parts(text)[0])
            raise UserError(did_you_mean("row", text, list(inner or names)))
    for title, rows in groups:
        matches = [[i for i, r in enumerate(rows) if _fits(r, text)] for text in (a, b)]
        if not all(matches):
            continue
        for text, fitting in zip((a, b), matches, strict=True):
            if len(fitting) > 1:
                several = ", ".join(rows[i].setting for i in fitting)
                raise UserError(
                    f"'{text}' fits {len(fitting)} rows of {title}; give the setting: {several}."
                )
        (first,), (second,) = matches
        if first == second:
            raise UserError(f"'{a}' and '{b}' are the same row, {rows[first].setting}.")
        yield title, rows, first, second


def _parts(text: str) -> tuple[str, dict[str, str]]:
    """Defense and settings of `spm(epsilon=1.5)` or `spm:epsilon=1.5`."""
    name, _, inner = text.strip().removesuffix(")").replace("(", ":", 1).partition(":")
    pairs = [p for p in re.split(r",(?![^\[{]*[\]}])", inner) if p.strip()]
    return name.strip(), {k.strip(): v.strip() for k, _, v in (p.partition("=") for p in pairs)}


def _fits(row: Row, text: str) -> bool:
    name, settings = _parts(text)
    return row.defense == name and all(
        k in row.settings and (short(row.settings[k]) == v or parse_value(v) == row.settings[k])
        for k, v in settings.items()
    )
