"""Rows of a leaderboard with the records behind them, ranked as it ranks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import UserError
from bench.metrics.named import sign_of
from bench.names import did_you_mean
from bench.report.cells import check_wanted
from bench.report.dicts import DictStore as Store
from bench.report.leaderboard import Read, identity, read_run, row_id, rows_of, settings_of
from bench.report.tables import setting, tables

ONLY = ("protocol", "dataset", "model", "defense", "seed")
"""What a comparison may be restricted by."""
LOST: dict[str, Any] = {"status": "failed", "reason": "no record"}
"""Stands for a record that is missing."""
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A row of the leaderboard with its records. trainings: seed -> record. cells: threat ->
    attack -> seed -> record."""

    row: dict[str, Any]
    trainings: dict[int, Record]
    cells: dict[str, dict[str, dict[int, Record]]]

    @property
    def rank(self) -> int | None:
        """As the leaderboard's, None where it has none."""
        rank: int | None = self.row["rank"]
        return rank

    @property
    def name(self) -> str:
        """spm(epsilon=1.5, variant=printed)."""
        return setting(self.row)

    def worst(self, threat: str, metric: str) -> dict[int, np.ndarray]:
        """Seed -> leak per victim: the worst over the attacks that have the metric."""
        found = self.cells.get(threat, {})
        seeds = dict.fromkeys(s for by_seed in found.values() for s in by_seed)
        values = {s: worst_leaks(found, s, metric, frozenset(found)) for s in seeds}
        return {s: v for s, v in values.items() if v is not None}


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of the leaderboard: its rows with a rank first, in that order."""

    title: str
    rows: list[Contender]


def worst_leaks(
    found: Mapping[str, Mapping[int, Record]], seed: int, metric: str, names: frozenset[str],
    with_floors: bool = False,
) -> np.ndarray | None:  # fmt: skip
    """Per victim the largest leak over the named attacks, as the leaderboard takes it; None if
    none of them has the metric."""
    leaks = []
    for name, by_seed in found.items():
        record = by_seed.get(seed, LOST)
        done = record["status"] == "done" and (with_floors or not record["is_floor"])
        if done and name in names and metric in record["values"]:
            values = np.array(record["values"][metric], dtype=np.float64)
            leaks.append(sign_of(metric) * values)
    return np.stack(leaks).max(axis=0) if leaks else None


def read(
    folder: Path, *, checkpoint: str | None = None, only: Mapping[str, Any] | None = None
) -> list[Table]:
    """The tables of a result folder at one checkpoint, each record read once.

    checkpoint: by default the suite's last. only: keeps trainings by the keys of ONLY; ranks
    count rows of all defenses. Raises UserError for a folder without records, or a filter that
    nothing fits.
    """
    run = read_run(folder)
    if not (folder / "records").is_dir():
        raise UserError(
            f"comparing needs the records of every victim, which {folder} does not hold "
            "(published results come without them): give a folder that leakbench run wrote."
        )
    checkpoints = run["suite"]["checkpoints"]
    check_wanted("checkpoint", checkpoint, checkpoints)
    chosen = checkpoint or checkpoints[-1]
    suite, trainings = run["suite"], _kept(run["trainings"], only or {})
    once = cache(Store(folder).read)
    rows = rows_of(suite, trainings, once, [chosen])
    members = {row_id(identity(suite, m[0], chosen)): m for m in settings_of(trainings)}
    wanted = (only or {}).get("defense")
    out = []
    for title, ranked in tables(rows):
        kept = [
            _contender(row, members[row_id(row)], once)
            for row in ranked
            if wanted in (None, row["defense"])
        ]
        out += [Table(title=title, rows=kept)] if kept else []
    return out


def _kept(trainings: Sequence[dict[str, Any]], only: Mapping[str, Any]) -> list[dict[str, Any]]:
    facts = [
        {"protocol": t["protocol"]["name"], "dataset": t["task"]["dataset"],
         "model": t["task"]["model"], "defense": t["defense"], "seed": str(t["seed"])}
        for t in trainings
    ]  # fmt: skip
    for key, value in only.items():
        if key not in ONLY:
            raise UserError(did_you_mean("key", key, ONLY, where="--only"))
        check_wanted(key, value, (f[key] for f in facts))
    kept = [
        (t, f) for t, f in zip(trainings, facts, strict=True)
        if all(f[k] == str(v) for k, v in only.items() if k != "defense")
    ]  # fmt: skip
    if not any(only.get("defense") in (None, f["defense"]) for _, f in kept):
        asked = ", ".join(f"{k}={v}" for k, v in only.items())
        raise UserError(f"no training has {asked or 'been planned'} at once.")
    return [t for t, _ in kept]  # other defenses stay until the ranks are given


def _contender(row: dict[str, Any], trainings: Sequence[Record], read: Read) -> Contender:
    cells: dict[str, dict[str, dict[int, Record]]] = {}
    for training in trainings:
        for cell in training["cells"]:
            if cell["checkpoint"] == row["checkpoint"]:
                record = read("attack", cell["key"]) or LOST
                by_attack = cells.setdefault(cell["threat"], {})
                by_attack.setdefault(cell["label"], {})[training["seed"]] = record
    found = {t["seed"]: read("train", t["key"]) for t in trainings}
    done = {s: r for s, r in found.items() if r is not None and r["status"] == "done"}
    return Contender(row=row, trainings=done, cells=cells)
