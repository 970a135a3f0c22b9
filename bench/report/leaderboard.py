"""Rows of the leaderboard, from the records of a result folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.metrics.intervals import Interval, bootstrap, bootstrap_shares
from bench.metrics.score import METRICS
from bench.store import Store, key_of

FLOOR_SUFFIX = "_class_mean"
CONVERGED = 0.02
"""Most SSIM that an attack may gain from twice its budget and still count as converged."""
Record = dict[str, Any]
Victims = dict[str, dict[int, np.ndarray]]
"""Attack -> seed -> one figure per victim."""


def read_run(folder: Path) -> dict[str, Any]:
    """The folder's run.json. Raises ValueError if it is no result folder."""
    try:
        run = json.loads((folder / "run.json").read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{folder} is no result folder of leakbench (no readable run.json)."
        ) from error
    if not (isinstance(run, dict) and {"suite", "trainings"} <= run.keys()):
        raise ValueError(f"{folder / 'run.json'} must hold a suite and its trainings.")
    return run


def load(folder: Path) -> list[dict[str, Any]]:
    """Rows made from the folder's records, or, where it holds none (as published results do), as
    its leaderboard.json has them. Raises ValueError if it has neither."""
    if (folder / "records").is_dir():
        return rows(folder)
    path = folder / "leaderboard.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder} has neither records nor a readable {path.name}.") from error
    if not isinstance(found, list) or not all(isinstance(r, dict) for r in found):
        raise ValueError(f"{path} must be a list of rows (see bench/report/schema.json).")
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


def rows(folder: Path) -> list[dict[str, Any]]:
    """One row per defense setting and checkpoint, seeds together, ranked within each table.

    A table is a protocol x dataset x model x checkpoint. See `schema.json` beside this file.
    """
    run = read_run(folder)
    store = Store(folder)
    groups: dict[str, list[dict[str, Any]]] = {}
    for training in run["trainings"]:
        same = {k: training[k] for k in ("task", "protocol", "defense", "settings")}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(training)
    networks: dict[str, list[dict[str, Any]]] = {}
    for trainings in groups.values():
        for checkpoint in run["suite"]["checkpoints"]:
            row = _row(run["suite"], trainings, checkpoint, store)
            if row is not None:
                same = {k: trainings[0][k] for k in ("task", "protocol")}
                key = json.dumps([same, checkpoint], sort_keys=True)
                networks.setdefault(key, []).append(row)
    for members in networks.values():
        _flag_unconverged(members)
    return _ranked([row for members in networks.values() for row in members])


def _row(
    suite: Mapping[str, Any],
    trainings: Sequence[dict[str, Any]],
    checkpoint: str,
    store: Store,
) -> dict[str, Any] | None:
    records = [r for t in trainings if (r := store.read("train", t["key"])) is not None]
    done = [r for r in records if r["status"] == "done"]
    first = trainings[0]
    labels = list(
        dict.fromkeys(c["label"] for t in trainings for c in t["cells"]
                      if c["checkpoint"] == checkpoint)
    )  # fmt: skip
    if not records or (not labels and any(t["cells"] for t in trainings)):
        return None
    attacks: dict[str, dict[str, Any]] = {}
    worst_by_metric: dict[str, dict[str, Victims]] = {"ssim": {}, "mse": {}}
    threats = []
    for label in labels:
        seeds, cells = zip(*((t["seed"], c) for t in trainings for c in t["cells"]
                             if (c["label"], c["checkpoint"]) == (label, checkpoint)),
                           strict=True)  # fmt: skip
        found = [store.read("attack", c["key"]) for c in cells]
        threat = next(t for t in suite["threats"] if t["name"] == cells[0]["threat"])
        if threat not in threats:
            threats.append(threat)
        attacks[label] = _attack(cells, found, threat)
        done_by_seed = {s: r for s, r in zip(seeds, found, strict=True)
                        if r and r["status"] == "done" and not r["is_floor"]}  # fmt: skip
        for metric, worst_by_threat in worst_by_metric.items():
            values = {s: np.array(r["values"][metric]) for s, r in done_by_seed.items()
                      if metric in r["values"]}  # fmt: skip
            if values:
                worst_by_threat.setdefault(threat["name"], {})[label] = values
    ledger = [r["ledger"] for r in done]
    whole = [r for r in done if r["correct"] is not None]
    accuracy = bootstrap_shares([r["correct"] for r in whole], [r["test_samples"] for r in whole])
    row = {
        "suite": suite_label(suite),
        "protocol": first["protocol"]["name"],
        "protocol_settings": first["protocol"],
        "dataset": first["task"]["dataset"],
        "dataset_settings": first["task"].get("dataset_settings", {}),
        "model": first["task"]["model"],
        "model_settings": first["task"].get("model_settings", {}),
        "defense": first["defense"],
        "variant": done[0]["variant"] if done else first["settings"].get("variant", ""),
        "settings": first["settings"],
        "checkpoint": checkpoint,
        "threat": "; ".join(_describe(t) for t in threats),
        "seeds": [t["seed"] for t in trainings],
        "accuracy": accuracy.to_dict() if accuracy else None,
        "personal_accuracy": _interval(bootstrap([_personal(r) for r in done])),
        "personalised": any(r.get("keeping_clients") for r in done),
        "eps_claimed": _largest([e["eps_claimed"] for e in ledger]),
        "eps_record": _largest([e["eps_record"] for e in ledger]),
        "ledger": _ledger(ledger),
        "audit": _audit(done),
        "delta": suite["delta"],
        "unit": ledger[0]["unit"] if ledger else None,
        "bytes_up": _mean([r["bytes_up"] for r in done]),
        "bytes_down": _mean([r["bytes_down"] for r in done]),
        "client_seconds": _mean([r["client_seconds"] for r in done]),
        "attacks": attacks,
        "worst": _worst(worst_by_metric["ssim"], "ssim") or _worst(worst_by_metric["mse"], "mse"),
    }
    row["flags"] = _flags(row, records)
    return row


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


def _describe(threat: Mapping[str, Any]) -> str:
    from bench.protocols.settings import ThreatSettings

    return ThreatSettings.model_validate(threat).describe()


def _attack(
    cells: Sequence[dict[str, Any]], found: Sequence[Record | None], threat: Mapping[str, Any]
) -> dict[str, Any]:
    """One attack's entry: figures over all finished seeds, failures counted beside them."""
    lost: Record = {"status": "failed", "reason": "no record: the run was stopped before it"}
    records = [r or lost for r in found]
    done = [r for r in records if r["status"] == "done"]
    broken = [r for r in records if r["status"] in ("failed", "timeout")]
    status = broken[0]["status"] if broken else ("done" if done else "not_applicable")
    reason = next((r["reason"] for r in records if r["status"] == status), None)
    entry: dict[str, Any] = {
        "status": status,
        "reason": reason,
        "threat": cells[0]["threat"],
        "is_floor": any(r["is_floor"] for r in done),
        "n": sum(r["victims"] for r in done),
        "failed": sum(r["failed"] for r in done) + threat["victims"] * len(broken),
    }
    for metric in METRICS:
        values = [np.array(r["values"][metric]) for r in done if metric in r["values"]]
        entry[metric] = _interval(bootstrap(values))
    entry["floor"] = _floor(entry, done)
    entry["seconds"] = sum(r["seconds"] for r in done) if done else None
    entry["gradient_evaluations"] = sum(r["gradient_evaluations"] for r in done) if done else None
    entry["notes"] = list(dict.fromkeys(n for r in done for n in r["notes"]))
    entry["budget"] = next((r["budget"] for r in done if r.get("budget")), None)
    entry["convergence"] = _convergence(done)
    entry["doubled"] = _doubled(done)
    return entry


def _convergence(done: Sequence[Record]) -> dict[str, Any] | None:
    """What an attack gains from twice its budget, over victims and seeds; None where that was
    not measured (records of older versions have no `doubled`) or there is no SSIM."""
    measured = [r for r in done if r.get("doubled") and "ssim" in r["doubled"]["values"]]
    if not measured:
        return None
    gains = [
        np.array(r["doubled"]["values"]["ssim"]) - np.array(r["values"]["ssim"]) for r in measured
    ]
    gain = float(np.concatenate(gains).mean())
    return {"gain": gain, "budget": measured[0]["budget"], "converged": gain <= CONVERGED}


def _doubled(done: Sequence[Record]) -> dict[str, Any] | None:
    """SSIM at twice the budget where that was run, which is in the undefended rows alone."""
    again = [r["doubled"] for r in done if r.get("doubled") and "ssim" in r["doubled"]["values"]]
    if not again:
        return None
    found = bootstrap([np.array(d["values"]["ssim"]) for d in again])
    return {"budget": again[0]["budget"], "ssim": _interval(found)}


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


def _floor(entry: Mapping[str, Any], done: Sequence[Record]) -> dict[str, float]:
    """Means of the floors of every metric that the attack has."""
    names = {n for r in done for n in r["floors"]}
    shown = [n for n in sorted(names) if entry.get(n.removesuffix(FLOOR_SUFFIX)) is not None]
    return {
        n: float(
            np.concatenate([np.array(r["floors"][n]) for r in done if n in r["floors"]]).mean()
        )
        for n in shown
    }


def _worst(by_threat: Mapping[str, Victims], metric: str) -> dict[str, Any] | None:
    """Worst case over attacks, taken per victim and then averaged; only attacks on the same
    observation are compared, so seed by seed, an attack that failed in one counting in the others.
    attack: the one that is worst for most victims. metric: ssim, of which the largest is worst,
    or mse, of which the least is."""
    sign = 1.0 if metric == "ssim" else -1.0
    best: tuple[float, dict[str, Any]] | None = None
    for attacks in by_threat.values():
        worst, winners = [], []
        for seed in dict.fromkeys(s for found in attacks.values() for s in found):
            names = [n for n, found in attacks.items() if seed in found]
            stack = np.stack([sign * attacks[n][seed] for n in names])
            worst.append(sign * stack.max(axis=0))
            winners += [names[i] for i in stack.argmax(axis=0)]
        interval = bootstrap(worst)
        if interval is None:
            continue
        name = max(attacks, key=winners.count)
        entry = {"attack": name, "metric": metric, metric: interval.to_dict()}
        if best is None or sign * interval.mean > best[0]:
            best = (sign * interval.mean, entry)
    return best[1] if best else None


def leak(worst: Mapping[str, Any]) -> float:
    """A worst case as one number that grows with the leak: SSIM, or minus the MSE of records."""
    if worst["metric"] == "ssim":
        return float(worst["ssim"]["mean"])
    return -float(worst["mse"]["mean"])


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
    return leak(worst) < (floor[metric] if metric == "ssim" else -floor[metric])


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


def _interval(interval: Interval | None) -> dict[str, float] | None:
    return interval.to_dict() if interval else None


def _largest(values: Sequence[Any]) -> float | str | None:
    """The largest epsilon, "inf" as text (records hold it so), None without a value."""
    numbers = [math.inf if v == "inf" else v for v in values if v is not None]
    if not numbers:
        return None
    return "inf" if math.isinf(max(numbers)) else float(max(numbers))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
