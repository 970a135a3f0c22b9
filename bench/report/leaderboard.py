"""Rows of the leaderboard, from the records of a result folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import UserError
from bench.harness.store import key_of
from bench.metrics.intervals import bootstrap_shares
from bench.metrics.named import sign_of
from bench.records import Kind
from bench.report.dicts import DictStore as Store
from bench.report.dicts import read_run
from bench.report.entries import (
    Intervals,
    Record,
    Victims,
    attack_entry,
    leak,
    values_of,
    worst_cases,
    worst_of,
)


def load(folder: Path) -> list[dict[str, Any]]:
    """Rows made from the folder's records, or, where it holds none (as published results do), as
    its leaderboard.json has them. Raises UserError if it has neither."""
    if (folder / "records").is_dir():
        return rows(folder)
    path = folder / "leaderboard.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{folder} has neither records nor a readable {path.name}.") from error
    if not isinstance(found, list) or not all(isinstance(r, dict) for r in found):
        raise UserError(f"{path} must be a list of rows (see bench/report/schema.json).")
    return found


_LATER: Mapping[str, Any] = {
    "personal_accuracy": None, "personalised": False, "audit": None, "ledger": None,
    "dataset_settings": {}, "model_settings": {},
}  # fmt: skip
"""What rows of older files lack."""


def complete(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of an older leaderboard.json with what was added since, as unknown."""
    out = []
    for row in rows:
        whole = {**_LATER, **row}
        if whole["worst"] is not None:
            whole["worst"] = {"metric": "ssim", **whole["worst"]}
        out.append(whole)
    return out


def row_id(row: Mapping[str, Any]) -> str:
    """What names a row among all: hash of suite, task, protocol, defense setting, checkpoint."""
    return key_of(
        {
            "suite": row["suite"],
            "protocol": row["protocol_settings"],
            "dataset": [row["dataset"], row.get("dataset_settings", {})],
            "model": [row["model"], row.get("model_settings", {})],
            "defense": [row["defense"], row["settings"]],
            "checkpoint": row["checkpoint"],
        }
    )


def suite_label(suite: Mapping[str, Any]) -> str:
    """quick v5."""
    return f"{suite['name']} v{suite['version']}"


def seeds_of(run: Mapping[str, Any]) -> list[int]:
    """Seeds of a run.json's trainings: a part of a suite may have fewer than the suite."""
    return sorted({t["seed"] for t in run["trainings"]}) or list(run["suite"]["seeds"])


def rows(folder: Path) -> list[dict[str, Any]]:
    """One row per defense setting and checkpoint, seeds together, ranked within each table.

    A table is a protocol x dataset x model x checkpoint. See `schema.json` beside this file. Every
    record is read once, and no more of it is kept than its row shows.
    """
    run = read_run(folder)
    return rows_of(run["suite"], run["trainings"], Store(folder).read)


Read = Callable[[Kind, str], Record | None]
"""A record by kind and key, None without one, as `Store.read`."""


def rows_of(
    suite: Mapping[str, Any], trainings: Iterable[Record], read: Read,
    checkpoints: Sequence[str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """`rows` of these trainings of a run.json alone, at all of the suite's checkpoints or these."""
    source = _Source(
        suite=suite, read=read, checkpoints=checkpoints or suite["checkpoints"],
        intervals=Intervals(),
    )  # fmt: skip
    networks: dict[str, list[_Draft]] = {}
    for members in settings_of(trainings):
        same = {k: members[0][k] for k in ("task", "protocol")}
        for draft in _drafts(source, members):
            key = json.dumps([same, draft.row["checkpoint"]], sort_keys=True)
            networks.setdefault(key, []).append(draft)
    source.intervals.fill()
    found = []
    for drafts in networks.values():
        finished = [_finished(d) for d in drafts]
        _flag_unconverged(finished)
        found += finished
    return _ranked(found)


def settings_of(trainings: Iterable[Record]) -> list[list[Record]]:
    """Trainings of a run.json by what makes a row: those of one list differ in their seeds."""
    groups: dict[str, list[Record]] = {}
    for training in trainings:
        same = {k: training[k] for k in ("task", "protocol", "defense", "settings")}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(training)
    return list(groups.values())


def identity(suite: Mapping[str, Any], training: Record, checkpoint: str) -> Record:
    """What a row is called by: all that `row_id` and its table's title are made from."""
    return {
        "suite": suite_label(suite),
        "protocol": training["protocol"]["name"],
        "protocol_settings": training["protocol"],
        "dataset": training["task"]["dataset"],
        "dataset_settings": training["task"].get("dataset_settings", {}),
        "model": training["task"]["model"],
        "model_settings": training["task"].get("model_settings", {}),
        "defense": training["defense"],
        "settings": training["settings"],
        "checkpoint": checkpoint,
    }


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What rows are made from. intervals: those that wait to be computed."""

    suite: Mapping[str, Any]
    read: Read
    checkpoints: Sequence[str]
    intervals: Intervals


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A row whose intervals wait. cases: worst cases, those by SSIM and those by MSE. trained: of
    the trainings' records what flags are made from."""

    row: dict[str, Any]
    cases: Sequence[Sequence[Record]]
    trained: Sequence[Record]


_FLAGGED = ("status", "reason", "diverged", "audit", "class_chance", "personal_chance")
"""What flags are made from."""


def _drafts(source: _Source, trainings: Sequence[dict[str, Any]]) -> Iterator[_Draft]:
    """The rows of one defense setting, one per checkpoint, from its trainings of all seeds."""
    records = [r for t in trainings if (r := source.read("train", t["key"])) is not None]
    if not records:
        return
    trained = [{k: r.get(k) for k in _FLAGGED} for r in records]
    cells: dict[str, dict[str, list[tuple[int, Record]]]] = {}
    for training in trainings:
        for cell in training["cells"]:
            labels = cells.setdefault(cell["checkpoint"], {})
            labels.setdefault(cell["label"], []).append((training["seed"], cell))
    for checkpoint in source.checkpoints:
        if checkpoint in cells or not cells:
            row = _heading(source, trainings, checkpoint, [r for r in records if _is_done(r)])
            cases = _attacks(source, row, cells.get(checkpoint, {}))
            yield _Draft(row=row, cases=cases, trained=trained)


def _is_done(record: Mapping[str, Any]) -> bool:
    return bool(record["status"] == "done")


def _heading(
    source: _Source, trainings: Sequence[Record], checkpoint: str, done: Sequence[Record]
) -> Record:
    """A row with all that its trainings tell; what the attacks add has its place."""
    settings = trainings[0]["settings"]
    ledger = [r["ledger"] for r in done]
    row: Record = {
        **identity(source.suite, trainings[0], checkpoint),
        "variant": done[0]["variant"] if done else settings.get("variant", ""),
        "threat": "",
        "seeds": [t["seed"] for t in trainings],
        "accuracy": _accuracy(done),
    }
    source.intervals.put(row, "personal_accuracy", [_personal(r) for r in done])
    row |= {
        "personalised": any(r.get("keeping_clients") for r in done),
        "eps_claimed": _largest([e["eps_claimed"] for e in ledger]),
        "eps_record": _largest([e["eps_record"] for e in ledger]),
        "ledger": _ledger(ledger),
        "audit": _audit(done),
        "delta": source.suite["delta"],
        "unit": ledger[0]["unit"] if ledger else None,
        "bytes_up": _mean([r["bytes_up"] for r in done]),
        "bytes_down": _mean([r["bytes_down"] for r in done]),
        "client_seconds": _mean([r["client_seconds"] for r in done]),
        "attacks": {},
        "worst": None,
    }
    return row


def _attacks(
    source: _Source, row: Record, cells: Mapping[str, Sequence[tuple[int, Record]]]
) -> list[list[Record]]:
    """Add the attacks' entries to the row; its worst cases, those by SSIM and those by MSE.

    cells: label -> (seed, cell of run.json)."""
    known = {t["name"]: t for t in source.suite.get("threats", ())}
    threats: dict[str, None] = {}
    by_metric: dict[str, dict[str, Victims]] = {"ssim": {}, "mse": {}}
    for label, placed in cells.items():
        threat = known[placed[0][1]["threat"]]
        threats[_described(json.dumps(threat))] = None
        found = [(seed, source.read("attack", cell["key"])) for seed, cell in placed]
        row["attacks"][label] = attack_entry([r for _, r in found], threat, source.intervals)
        for metric, by_threat in by_metric.items():
            values = {
                seed: values_of(r, metric)
                for seed, r in found
                if r and _is_done(r) and not r["is_floor"] and metric in r["values"]
            }
            if values:
                by_threat.setdefault(threat["name"], {})[label] = values
    row["threat"] = "; ".join(threats)
    return [worst_cases(found, m, source.intervals) for m, found in by_metric.items()]


def _finished(draft: _Draft) -> Record:
    """The row with what follows from its intervals, which are known by now."""
    found = (worst_of(cases) for cases in draft.cases)
    draft.row["worst"] = next((worst for worst in found if worst), None)
    draft.row["flags"] = _flags(draft.row, draft.trained)
    return draft.row


def _accuracy(done: Sequence[Record]) -> dict[str, float] | None:
    whole = [r for r in done if r["correct"] is not None]
    totals = tuple(r["test_samples"] for r in whole)
    found = bootstrap_shares(tuple(r["correct"] for r in whole), totals)
    return found.to_dict() if found else None


def _ledger(entries: Sequence[Record]) -> dict[str, Any] | None:
    """Sentences and reasons of the entry that proves least, over seeds. Entries of older records
    have no sentences."""
    if not entries:
        return None
    least = max(entries, key=lambda e: (float(e["eps_record"]), float(e["eps_claimed"] or 0)))
    return {"words": list(least.get("words", ())), "reasons": list(least.get("reasons", ()))}


def _audit(done: Sequence[Record]) -> dict[str, Any] | None:
    """The audit that found most, over seeds; None where none was made (older records)."""
    made = [r["audit"] for r in done if r.get("audit") and r["audit"]["status"] == "done"]
    return max(made, key=lambda a: float(a["eps_audited"])) if made else None


@cache
def _described(threat: str) -> str:
    """A line on a threat, given as JSON."""
    from bench.protocols.settings import ThreatSettings

    return ThreatSettings.model_validate_json(threat).describe()


def _flag_unconverged(members: Sequence[dict[str, Any]]) -> None:
    """Give every row of one network and checkpoint the convergence that was measured on the
    undefended one (the first, if several), and flag the rows that rest on an attack cut short."""
    measured: dict[str, dict[str, Any]] = {}
    for row in members:
        for name, entry in row["attacks"].items():
            if entry["convergence"] is not None:
                measured.setdefault(name, entry["convergence"])
    for row in members:
        for name, entry in row["attacks"].items():
            entry["convergence"] = found = measured.get(name)
            if found and not found["converged"] and entry["status"] == "done":
                row["flags"].append(
                    f"{name} cut short: {found['gain']:+.2f} SSIM on the undefended row at twice "
                    "its budget"
                )


def _flags(row: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    flags = []
    for record in records:
        if record["status"] != "done":
            flags.append(f"training {record['status']}: {record['reason']}")
        elif record["diverged"]:
            flags.append(f"diverged: {record['diverged']}")
    if _at_chance(row, [r for r in records if r["status"] == "done"]):
        flags.append("accuracy at chance")
    if row["eps_claimed"] is not None and row["eps_record"] == "inf":
        flags.append("epsilon claimed, none proven")
    if row["unit"] is not None and row["unit"] != "record":
        flags.append(f"claim is per {row['unit']}")
    audit = row["audit"]
    for what in ("claim", "proof"):
        if audit and audit[f"verdict_{what}"] == "violated":
            flags.append(
                f"audit refutes the {what}: epsilon is at least {audit['eps_audited']:.2f}"
            )
    for record in records:
        if record.get("audit") and record["audit"]["status"] == "failed":
            flags.append(f"audit failed: {record['audit']['reason']}")
    for name, entry in row["attacks"].items():
        if entry["status"] in ("failed", "timeout"):
            flags.append(f"{name} {entry['status']}")
    worst = row["worst"]
    if worst and _below_floor(worst, row["attacks"][worst["attack"]]["floor"]):
        flags.append(f"strongest attack ({worst['attack']}) below the floor")
    return list(dict.fromkeys(flags))


def _below_floor(worst: Mapping[str, Any], floor: Mapping[str, float]) -> bool:
    """Whether the worst case leaks less than the mean public sample."""
    metric = worst["metric"]
    if metric not in floor:
        return False
    return leak(worst) < sign_of(metric) * floor[metric]


def _at_chance(row: Mapping[str, Any], done: Sequence[Record]) -> bool:
    """Whether neither the one model nor, where clients keep something, their own networks beat
    a guess; a method whose clients keep the first stages has no use for the one model."""
    judged = []
    if row["accuracy"]:
        judged.append((row["accuracy"], max(r["class_chance"] for r in done)))
    if row["personalised"] and row["personal_accuracy"]:
        judged.append((row["personal_accuracy"], max(r["personal_chance"] for r in done)))
    return bool(judged) and all(accuracy["lo"] <= chance for accuracy, chance in judged)


def _personal(record: Record) -> np.ndarray:
    """Accuracy of each client's network; none in records of older versions."""
    return np.array([a for a in record.get("personal_accuracies", ()) if a is not None])


def _ranked(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorted by table, then by worst-case SSIM (MSE of records): the less leaks, the better. A
    row without utility (diverged, at chance) or without a figure has no rank and stands last."""
    tables: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in found:
        table = tuple(
            json.dumps(row[k])
            for k in (
                "protocol_settings", "dataset", "dataset_settings", "model", "model_settings",
                "checkpoint",
            )
        )  # fmt: skip
        tables.setdefault(table, []).append(row)
    out = []
    for members in tables.values():
        for row in members:
            useless = any(
                f == "accuracy at chance" or f.startswith("diverged") for f in row["flags"]
            )
            row["rank"] = None if useless or row["worst"] is None else 0
        ranked = [r for r in members if r["rank"] is not None]
        ranked.sort(key=lambda r: leak(r["worst"]))
        for position, row in enumerate(ranked, start=1):
            row["rank"] = position
        out += ranked + [r for r in members if r["rank"] is None]
    return out


def _largest(values: Sequence[Any]) -> float | str | None:
    """The largest epsilon, "inf" as text (records hold it so), None without a value."""
    numbers = [math.inf if v == "inf" else v for v in values if v is not None]
    if not numbers:
        return None
    return "inf" if math.isinf(max(numbers)) else float(max(numbers))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
