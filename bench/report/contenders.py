"""Rows of a leaderboard with the records behind them, ranked as it ranks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import UserError
from bench.harness.store import Store
from bench.metrics.named import sign_of
from bench.names import did_you_mean
from bench.records import AttackOutcome, AttackRecord, PlannedTraining, Row, Run, TrainRecord
from bench.report.choosing import check_wanted
from bench.report.entries import LOST
from bench.report.leaderboard import heading, row_id, rows_of, settings_of
from bench.report.tables import tables

ONLY = ("protocol", "dataset", "model", "defense", "seed")
"""What a comparison may be restricted by."""
Found = Mapping[str, Mapping[int, AttackOutcome]]
"""Attack -> seed -> record."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A row of the leaderboard with its records.

    Attributes:
        row: The row.
        trainings: Seed -> record of those that are done.
        cells: Threat -> attack -> seed -> record.
    """

    row: Row
    trainings: dict[int, TrainRecord]
    cells: Mapping[str, Found]

    @property
    def rank(self) -> int | None:
        """As the leaderboard's, None where it has none."""
        return self.row.rank

    @property
    def name(self) -> str:
        """spm(epsilon=1.5, variant=printed)."""
        return self.row.setting

    def worst(self, threat: str, metric: str) -> dict[int, np.ndarray]:
        """Seed -> leak per victim: the worst over the attacks that have the metric."""
        found = self.cells.get(threat, {})
        seeds = dict.fromkeys(s for by_seed in found.values() for s in by_seed)
        values = {s: worst_leaks(found, s, metric, frozenset(found)) for s in seeds}
        return {s: v for s, v in values.items() if v is not None}


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One table of the leaderboard: its rows with a rank first, in that order."""

    title: str
    rows: list[Contender]


def worst_leaks(
    found: Found, seed: int, metric: str, names: frozenset[str], with_floors: bool = False
) -> np.ndarray | None:
    """Per victim the largest leak over the named attacks, as the leaderboard takes it: numbers that
    grow with the leak, None if no attack has the metric. with_floors: those that read no message
    count too."""
    leaks = []
    for name, by_seed in found.items():
        record = by_seed.get(seed, LOST)
        if name not in names or not isinstance(record, AttackRecord) or metric not in record.values:
            continue
        if with_floors or not record.is_floor:
            values = np.array(record.values[metric], dtype=np.float64)
            leaks.append(sign_of(metric) * values)
    return np.stack(leaks).max(axis=0) if leaks else None


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
    if not (folder / "records").is_dir():
        raise UserError(
            f"comparing needs the records of every victim, which {folder} does not hold "
            "(published results come without them): give a folder that leakbench run wrote."
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
            _contender(row, members[row_id(row)], records)
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


def _contender(row: Row, trainings: Sequence[PlannedTraining], records: Store) -> Contender:
    cells: dict[str, dict[str, dict[int, AttackOutcome]]] = {}
    for training in trainings:
        for cell in training.cells:
            if cell.checkpoint == row.checkpoint:
                by_attack = cells.setdefault(cell.threat, {}).setdefault(cell.label, {})
                by_attack[cell.seed] = records.read("attack", cell.key) or LOST
    found = {t.job.seed: records.read("train", t.key) for t in trainings}
    done = {s: r for s, r in found.items() if isinstance(r, TrainRecord)}
    return Contender(row=row, trainings=done, cells=cells)
