"""Rows of a leaderboard with the records behind them, ranked as it ranks them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.metrics.intervals import bootstrap, bootstrap_shares
from bench.names import did_you_mean
from bench.report.cells import check_wanted
from bench.report.leaderboard import read_run, suite_label
from bench.report.tables import setting, tables
from bench.store import Store

SMALLER_LEAKS = ("mse",)
"""Metrics of which a smaller value is the larger leak."""
ONLY = ("protocol", "dataset", "model", "defense", "seed")
"""What a comparison may be restricted by."""
LOST: dict[str, Any] = {"status": "failed", "reason": "no record"}
"""Stands for a record that is missing."""
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A row with its records. row: what names it and its table. trainings: seed -> record. cells:
    threat -> attack -> seed -> record. rank: as the leaderboard's, None where it has none."""

    row: dict[str, Any]
    trainings: dict[int, Record]
    cells: dict[str, dict[str, dict[int, Record]]]
    rank: int | None = None

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


def sign_of(metric: str) -> float:
    """1 where a larger value is the larger leak, else -1."""
    return -1.0 if metric in SMALLER_LEAKS else 1.0


def read(
    folder: Path, *, checkpoint: str | None = None, only: Mapping[str, Any] | None = None
) -> list[Table]:
    """The tables of a result folder at one checkpoint, each record read once.

    checkpoint: by default the suite's last. only: keeps trainings by the keys of ONLY; ranks
    count rows of all defenses. Raises ValueError for a folder without records, or a filter that
    nothing fits.
    """
    run = read_run(folder)
    if not (folder / "records").is_dir():
        raise ValueError(
            f"comparing needs the records of every victim, which {folder} does not hold "
            "(published results come without them): give a folder that leakbench run wrote."
        )
    checkpoints = run["suite"]["checkpoints"]
    check_wanted("checkpoint", checkpoint, checkpoints)
    chosen = checkpoint or checkpoints[-1]
    groups: dict[str, list[dict[str, Any]]] = {}
    for training in _kept(run["trainings"], only or {}):
        same = {k: training[k] for k in ("task", "protocol", "defense", "settings")}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(training)
    store = Store(folder)
    rows = [_contender(run["suite"], members, chosen, store) for members in groups.values()]
    by_row = {id(c.row): c for c in rows}
    out = []
    for title, members in tables([c.row for c in rows]):
        ranked = _ranked([by_row[id(row)] for row in members])
        wanted = (only or {}).get("defense")
        kept = [c for c in ranked if wanted in (None, c.row["defense"])]
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
            raise ValueError(did_you_mean("key", key, ONLY, where="--only"))
        check_wanted(key, value, (f[key] for f in facts))
    kept = [
        (t, f) for t, f in zip(trainings, facts, strict=True)
        if all(f[k] == str(v) for k, v in only.items() if k != "defense")
    ]  # fmt: skip
    if not any(only.get("defense") in (None, f["defense"]) for _, f in kept):
        asked = ", ".join(f"{k}={v}" for k, v in only.items())
        raise ValueError(f"no training has {asked or 'been planned'} at once.")
    return [t for t, _ in kept]  # other defenses stay until the ranks are given


def _contender(
    suite: Mapping[str, Any], trainings: Sequence[dict[str, Any]], checkpoint: str, store: Store
) -> Contender:
    first = trainings[0]
    cells: dict[str, dict[str, dict[int, Record]]] = {}
    for training in trainings:
        for cell in training["cells"]:
            if cell["checkpoint"] == checkpoint:
                record = store.read("attack", cell["key"]) or LOST
                by_attack = cells.setdefault(cell["threat"], {})
                by_attack.setdefault(cell["label"], {})[training["seed"]] = record
    found = {t["seed"]: store.read("train", t["key"]) for t in trainings}
    return Contender(
        row={
            "suite": suite_label(suite),
            "protocol": first["protocol"]["name"], "protocol_settings": first["protocol"],
            "dataset": first["task"]["dataset"], "model": first["task"]["model"],
            "dataset_settings": first["task"].get("dataset_settings", {}),
            "model_settings": first["task"].get("model_settings", {}),
            "defense": first["defense"], "settings": first["settings"], "checkpoint": checkpoint,
        },
        trainings={s: r for s, r in found.items() if r is not None and r["status"] == "done"},
        cells=cells,
    )  # fmt: skip


def _ranked(rows: Sequence[Contender]) -> list[Contender]:
    """In the leaderboard's order and with its ranks: the less leaks, the better; rows without
    utility or without a figure have none and stand last."""
    leaks = {id(c): None if _useless(c) else _leak(c) for c in rows}
    able = [c for c in rows if leaks[id(c)] is not None]
    able.sort(key=lambda c: leaks[id(c)] or 0.0)
    ranked = [replace(c, rank=rank) for rank, c in enumerate(able, start=1)]
    return ranked + [c for c in rows if leaks[id(c)] is None]


def _leak(row: Contender) -> float | None:
    for metric in ("ssim", "mse"):
        worst = [w for threat in row.cells if (w := row.worst(threat, metric))]
        if worst:
            return max(float(np.concatenate(list(w.values())).mean()) for w in worst)
    return None


def _useless(row: Contender) -> bool:
    """Diverged, or neither the common model nor the clients' own beat a guess (the rule of the
    leaderboard's flags, which a test holds this to)."""
    done = list(row.trainings.values())
    if any(r["diverged"] for r in done):
        return True
    whole = [r for r in done if r["correct"] is not None]
    common = bootstrap_shares([r["correct"] for r in whole], [r["test_samples"] for r in whole])
    judged = [(common, max(r["class_chance"] for r in done))] if common else []
    if any(r.get("keeping_clients") for r in done):
        own = bootstrap([np.array([a for a in r.get("personal_accuracies", ()) if a is not None])
                         for r in done])  # fmt: skip
        judged += [(own, max(r["personal_chance"] for r in done))] if own else []
    return bool(judged) and all(found.lo <= chance for found, chance in judged)
