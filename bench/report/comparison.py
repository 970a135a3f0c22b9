"""Two rows of a leaderboard table against each other, by the test that marks the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import UserError
from bench.harness.store import Store
from bench.metrics.intervals import Interval
from bench.metrics.named import METRICS, sign_of
from bench.metrics.paired import Difference, Outcomes, differences
from bench.names import did_you_mean
from bench.records import AttackRecord, PlannedTraining, Row, Run, TrainJob, short
from bench.report.choosing import check_wanted
from bench.report.leaderboard import heading, records_of, row_id, rows_of, settings_of
from bench.report.marks import row_differences
from bench.report.tables import attack_metrics, tables
from bench.report.verdicts import accuracy_drop, undefended
from bench.suite import parse_value

ONLY: Mapping[str, Callable[[TrainJob], Any]] = {
    "protocol": lambda job: job.protocol.name,
    "dataset": lambda job: job.task.dataset,
    "model": lambda job: job.task.model,
    "seed": lambda job: job.seed,
}
"""What a comparison may be restricted by."""


@dataclass(frozen=True, kw_only=True)
class RowComparison:
    """Two rows of a table.

    Attributes:
        title: Of the table.
        first, second: The rows.
        attack: Whose scores are compared, "" for the leakage that the leaderboard shows.
        metric: Of the scores, or "leakage".
        means: Of the first and the second row.
        difference: First minus second, of numbers that grow with the leakage: of an MSE its
            negative. Adjusted over the table, against the undefended row or the one that leaks
            less.
        rows: Number of comparisons that the p-value is adjusted for.
        drop: By how much the first row's accuracy is below the second's.
    """

    title: str
    first: Row
    second: Row
    attack: str
    metric: str
    means: tuple[float, float]
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
            "attack": self.attack,
            "metric": self.metric,
            "first_mean": self.means[0],
            "second_mean": self.means[1],
            **asdict(self.difference),
            "rows": self.rows,
            "accuracy_drop": self.drop,
            "verdict": self.verdict,
        }


def compare_rows(
    folder: Path,
    one: str,
    two: str,
    *,
    attack: str | None = None,
    metric: str | None = None,
    checkpoint: str | None = None,
    only: Mapping[str, Any] | None = None,
) -> list[RowComparison]:
    """Compare the rows of two names in every table that holds both.

    A name is a defense, `spm(epsilon=1.5, variant=printed)` as the leaderboard prints it, or
    `spm:epsilon=1.5`; of the settings only as many are needed as make it unique.

    Args:
        folder: A result folder, or a published one.
        attack: Compare this attack's scores, not the leakage that the leaderboard shows.
        metric: Of that attack: by default ssim, mse of records, lnacc of label counts.
        checkpoint: By default the suite's last.
        only: Keeps trainings by the keys of ONLY.

    Raises:
        UserError: For a filter that nothing fits, names that fit no row, several, or rows of
            different tables only.
    """
    run = Run.read(folder)
    store = Store(folder, run)
    check_wanted("checkpoint", checkpoint, run.suite.checkpoints)
    check_wanted("metric", metric, METRICS)
    if metric and not attack:
        raise UserError(f"--metric {metric} needs --attack: leakage is what rows are marked by.")
    chosen = next(c for c in reversed(run.suite.checkpoints) if checkpoint in (None, c))
    trainings = _filter(run.trainings, only or {})
    members = {row_id(heading(run, m[0], chosen)): m for m in settings_of(trainings)}
    groups = tables(rows_of(run, trainings, store, [chosen]))
    read = cache(store.read)
    out = []
    for title, rows, first, second in list(_pairs(groups, one, two)):
        measure, sign = "leakage", 1.0
        values: list[Outcomes] = [row.leaks.outcomes if row.leaks else {} for row in rows]
        if attack is not None:
            known = attack_metrics(rows)
            check_wanted("attack", attack, known)
            measure = metric or known[attack]
            sign = sign_of(measure)
            records = (records_of(row, members[row_id(row)], read) for row in rows)
            values = [_scores(cells, attack, measure) for cells in records]
        for place in (first, second):
            if not values[place]:
                what = f"{measure} of {attack}" if attack else "leakage"
                raise UserError(f"{rows[place].setting} has no {what} in {title}.")
        means = (_mean(values[first]), _mean(values[second]))
        base, compared = (first, second) if sign * means[0] <= sign * means[1] else (second, first)
        if rows[compared] is undefended(rows):
            base, compared = compared, base
        if attack is None:
            by_row = row_differences(rows, base, also=(compared,))
        else:
            kept = [i for i, outcomes in enumerate(values) if outcomes]
            grown = [{s: sign * v for s, v in values[i].items()} for i in kept]
            some = differences(grown, kept.index(base))
            by_row = [some[kept.index(i)] if i in kept else None for i in range(len(rows))]
        difference, names = by_row[compared], (rows[first].setting, rows[second].setting)
        if difference is None:
            raise UserError(f"{names[0]} and {names[1]} have no seed in common in {title}.")
        out.append(
            RowComparison(
                title=title,
                first=rows[first],
                second=rows[second],
                attack=attack or "",
                metric=measure,
                means=means,
                difference=difference if compared == first else difference.reversed(),
                rows=sum(d is not None for d in by_row),
                drop=accuracy_drop(rows[first], rows[second]),
            )
        )
    return out


def _scores(cells: Mapping[str, Any], attack: str, metric: str) -> Outcomes:
    """Return an attack's score per victim by seed."""
    return {
        seed: np.array(record.values[metric])
        for by_attack in cells.values()
        for seed, record in by_attack.get(attack, {}).items()
        if isinstance(record, AttackRecord) and metric in record.values
    }


def _mean(values: Outcomes) -> float:
    return float(np.concatenate(list(values.values())).mean())


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
    pairs = 0
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
        pairs += 1
        yield title, rows, first, second
    if not pairs:
        raise UserError(
            f"no table holds both '{a}' and '{b}'; rows of different tables have other victims."
        )


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


def _filter(trainings: Sequence[PlannedTraining], only: Mapping[str, Any]) -> list[PlannedTraining]:
    kept = list(trainings)
    for key, value in only.items():
        if key not in ONLY:
            raise UserError(did_you_mean("key", key, list(ONLY), where="--only"))
        read = ONLY[key]
        check_wanted(key, value, (read(t.job) for t in trainings))
        kept = [t for t in kept if str(read(t.job)) == str(value)]
    if not kept:
        text = ", ".join(f"{k}={v}" for k, v in only.items())
        raise UserError(f"no training has {text} at once.")
    return kept
