"""Rows of a leaderboard with the records behind them, ranked as it ranks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.harness.store import Store
from bench.names import did_you_mean
from bench.records import PlannedTraining, Run
from bench.report.choosing import check_wanted
from bench.report.leaderboard import contender, heading, row_id, rows_of, settings_of
from bench.report.pairs import Contender
from bench.report.tables import tables

ONLY = ("protocol", "dataset", "model", "defense", "seed")
"""What a comparison may be restricted by."""


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One table of the leaderboard: its rows with a rank first, in that order."""

    title: str
    rows: list[Contender]


def read(
    folder: Path, *, checkpoint: str | None = None, only: Mapping[str, Any] | None = None
) -> list[Contest]:
    """The tables of a result folder at one checkpoint, each record read once.

    Args:
        checkpoint: By default the suite's last.
        only: Keeps trainings by the keys of ONLY; ranks count rows of all defenses.

    Raises:
        UserError: For a folder without records, or a filter that nothing fits.
    """
    run = Run.read(folder)
    if not Store(folder).has_records:
        raise UserError(
            f"comparing needs the records of every victim, which {folder} does not hold: give a "
            "folder that leakbench run or leakbench report --publish wrote."
        )
    checkpoints = run.suite.checkpoints
    check_wanted("checkpoint", checkpoint, checkpoints)
    chosen = next(c for c in reversed(checkpoints) if checkpoint in (None, c))
    trainings = _kept(run.trainings, only or {})
    records = _Once(folder)
    members = {row_id(heading(run, m[0], chosen)): m for m in settings_of(trainings)}
    wanted = (only or {}).get("defense")
    out = []
    for title, ranked in tables(rows_of(run, trainings, records, [chosen])):
        kept = [
            contender(row, members[row_id(row)], records.read)
            for row in ranked
            if wanted in (None, row.defense)
        ]
        out += [Contest(title=title, rows=kept)] if kept else []
    return out


class _Once(Store):
    """Records that are each read once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read = cache(super().read)  # type: ignore[method-assign,assignment]


def _kept(trainings: Sequence[PlannedTraining], only: Mapping[str, Any]) -> list[PlannedTraining]:
    facts = [
        {
            "protocol": t.job.protocol.name,
            "dataset": t.job.task.dataset,
            "model": t.job.task.model,
            "defense": t.job.defense,
            "seed": str(t.job.seed),
        }
        for t in trainings
    ]
    for key, value in only.items():
        if key not in ONLY:
            raise UserError(did_you_mean("key", key, ONLY, where="--only"))
        check_wanted(key, value, (f[key] for f in facts))
    kept = [
        (t, f)
        for t, f in zip(trainings, facts, strict=True)
        if all(f[k] == str(v) for k, v in only.items() if k != "defense")
    ]
    if not any(only.get("defense") in (None, f["defense"]) for _, f in kept):
        asked = ", ".join(f"{k}={v}" for k, v in only.items())
        raise UserError(f"no training has {asked or 'been planned'} at once.")
    return [t for t, _ in kept]  # other defenses stay until the ranks are given
