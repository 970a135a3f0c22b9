"""Costs read off the records of result folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.harness.costs.cost import Cost, Point, joined
from bench.harness.costs.features import (
    Stage,
    attack_features,
    round_size,
    threat_size,
    training_features,
)
from bench.harness.store import read_record

Record = Mapping[str, Any]
_SETTLED = ("done", "not_applicable")


def finished(folder: Path) -> dict[Stage, dict[str, Record]]:
    """Per stage and key, what a result folder's finished jobs tell of costs; none if it is none."""
    return {"train": dict(_records(folder, "train")), "attack": dict(_records(folder, "attack"))}


def measure(folder: Path, found: Mapping[Stage, Mapping[str, Record]] | None = None) -> list[Cost]:
    """The costs of a result folder's finished trainings and cells, one per set of features.

    found: its `finished` jobs, if they were read already. Raises UserError for a folder without
    records.
    """
    if not (folder / "records").is_dir():
        raise UserError(f"{folder} holds no records: give --costs a result folder.")
    found = finished(folder) if found is None else found
    trainings = {k: r for k, r in found["train"].items() if "inputs" in r}
    costs = [_of_training(folder, r) for r in trainings.values()]
    for record in found["attack"].values():
        trained = trainings.get(record.get("train", ""))
        if trained is not None and "inputs" in record:
            costs.append(_of_attack(folder, record, trained))
    return joined(costs)


_TOLD = ("key", "status", "seconds", "doubled", "gradient_evaluations", "files", "memory", "device",
         "train", "inputs", "facts", "client_seconds", "parameters")  # fmt: skip
"""Of a record: what is kept while a folder is read, which may hold a hundred thousand."""


def _records(folder: Path, stage: Stage) -> Iterator[tuple[str, Record]]:
    """Key and record of every job that need not be made again."""
    for path in sorted((folder / "records" / stage).glob("*.json")):
        record = read_record(path)
        if record is not None and record["status"] in _SETTLED:
            kept = {k: record[k] for k in _TOLD if k in record}
            if kept.get("doubled"):
                kept["doubled"] = {k: kept["doubled"][k] for k in ("budget", "seconds")}
            yield path.stem, kept


def _of_training(folder: Path, record: Record) -> Cost:
    inputs = record["inputs"]
    done = record["status"] == "done"
    steps = record["facts"]["local_steps"] if done else 1
    return Cost(
        stage="train",
        features=training_features(inputs, record.get("device", "cpu")),
        points=(
            Point(work=inputs["protocol"]["rounds"], seconds=float(record.get("seconds", 0.0))),
        ),
        grows=done,
        size=round_size(inputs, steps),
        n_bytes=_bytes(folder, "train", record),
        skipped=not done,
        step_s=record["client_seconds"] / steps if done else None,
        parameters=record["parameters"] if done else None,
        host=_memory(record, "host"),
        device=_memory(record, "device"),
    )


def _of_attack(folder: Path, record: Record, trained: Record) -> Cost:
    inputs, done = record["inputs"], record["status"] == "done"
    seconds, budget = float(record.get("seconds", 0.0)), inputs["budget"]
    doubled = record.get("doubled")
    if doubled is None:
        points = [Point(work=budget, seconds=seconds)]
    else:  # the second run tells what twice the budget takes
        again = float(doubled["seconds"])
        points = [
            Point(work=budget, seconds=seconds, again=again),
            Point(work=doubled["budget"], seconds=again),
        ]
    return Cost(
        stage="attack",
        features=attack_features(inputs, trained["inputs"], trained.get("device", "cpu")),
        points=tuple(points),
        grows=done and record["gradient_evaluations"] > 0,
        size=threat_size(inputs, trained["inputs"]),
        n_bytes=_bytes(folder, "attack", record),
        skipped=not done,
        host=_memory(record, "host"),
        device=_memory(record, "device"),
    )


def _memory(record: Record, of: str) -> float | None:
    found = (record.get("memory") or {}).get(of)
    return None if found is None else float(found)


def _bytes(folder: Path, stage: Stage, record: Record) -> float:
    """On disk: the record and its files, counted there where the record does not list them."""
    own = (folder / "records" / stage / f"{record['key']}.json").stat().st_size
    if "files" in record:
        return float(own + sum(record["files"].values()))
    place = folder / "artifacts" / record["key"]
    return float(own + sum(p.stat().st_size for p in place.rglob("*") if p.is_file()))
