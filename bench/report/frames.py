"""The leaderboard and its records as pandas tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.metrics.named import METRICS
from bench.report.cells import Cell
from bench.report.dicts import DictStore as Store
from bench.report.entries import FLOOR_SUFFIX
from bench.report.tables import Row, setting

if TYPE_CHECKING:
    from pandas import DataFrame

_SAME = ("protocol", "dataset", "model", "checkpoint", "defense", "variant")
_AUDIT = ("eps_audited", "eps_at_least", "verdict_claim", "verdict_proof")


def number(value: Any) -> float | None:
    """A figure of a record as a float: "inf", "-inf" and "nan" are text there."""
    return None if value is None else float(value)


def leaderboard(rows: Sequence[Row]) -> DataFrame:
    """One line per row, flat: utility, both epsilons, the audit, costs, the worst case, and each
    attack's means as ATTACK_METRIC. Intervals end in _lo and _hi."""
    from pandas import DataFrame

    lines = []
    for row in rows:
        line = {"rank": row["rank"], **_identity(row)}
        line |= _three("accuracy", row["accuracy"])
        line |= _three("personal_accuracy", row["personal_accuracy"])
        line |= {"eps_claimed": number(row["eps_claimed"]), "unit": row["unit"]}
        line |= {k: number(row[k]) for k in ("eps_record", "delta")}
        audit = row.get("audit") or {}
        line |= {k: audit.get(k) for k in _AUDIT}
        line["eps_audited"] = number(line["eps_audited"])
        line |= {k: number(row[k]) for k in ("bytes_up", "bytes_down", "client_seconds")}
        worst = row["worst"] or {}
        line["worst_attack"] = worst.get("attack")
        for metric in ("ssim", "mse"):
            line |= _three(f"worst_{metric}", worst.get(metric))
        for name, entry in row["attacks"].items():
            for metric in METRICS:
                if entry[metric] is not None:
                    line[f"{name}_{metric}"] = number(entry[metric]["mean"])
        line |= {"threat": row["threat"], "seeds": _seeds(row), "suite": row["suite"]}
        lines.append(line | {"flags": "; ".join(row["flags"])})
    last = ("threat", "seeds", "suite", "flags")
    names = dict.fromkeys(n for line in lines for n in line if n not in last)
    frame = DataFrame(lines, columns=[*names, *last] if lines else None)
    if "rank" in frame:
        frame["rank"] = frame["rank"].astype("Int64")
    return frame


def attacks(rows: Sequence[Row]) -> DataFrame:
    """One line per row and attack: every metric with interval and floors, status and reason."""
    from pandas import DataFrame

    lines = []
    for row in rows:
        for name, entry in row["attacks"].items():
            line = {**_identity(row), "attack": name}
            line |= {k: entry[k] for k in ("status", "reason", "threat", "is_floor", "n", "failed")}
            for metric in METRICS:
                line |= _three(metric, entry[metric])
                line[f"{metric}_floor"] = number(entry["floor"].get(metric))
                given_label = f"{metric}{FLOOR_SUFFIX}"
                if given_label in entry["floor"]:
                    line[f"{metric}_floor{FLOOR_SUFFIX}"] = number(entry["floor"][given_label])
            line |= {k: number(entry[k]) for k in ("seconds", "gradient_evaluations")}
            convergence = entry.get("convergence") or {}
            line["gain_at_twice_budget"] = number(convergence.get("gain"))
            lines.append(line | {"notes": "; ".join(entry["notes"])})
    return DataFrame(lines)


def victims(folder: Path, cells: Iterable[Cell]) -> DataFrame:
    """One line per finished cell and victim: every metric and, ending in _floor, what needs no
    leak."""
    from pandas import DataFrame

    store = Store(folder)
    lines = []
    for cell in cells:
        record = store.read("attack", cell.key)
        if record is None or record["status"] != "done":
            continue
        same = {
            "protocol": cell.protocol, "dataset": cell.dataset, "model": cell.model,
            "checkpoint": cell.checkpoint, "defense": cell.defense, "setting": cell.setting,
            "seed": cell.seed, "attack": cell.label, "threat": cell.threat,
        }  # fmt: skip
        for victim in range(record["victims"]):
            line = {**same, "victim": victim}
            line |= {k: number(v[victim]) for k, v in record["values"].items()}
            line |= {
                f"{k.removesuffix(FLOOR_SUFFIX)}_floor"
                f"{FLOOR_SUFFIX if k.endswith(FLOOR_SUFFIX) else ''}": number(v[victim])
                for k, v in record["floors"].items()
                if k.removesuffix(FLOOR_SUFFIX) in record["values"]
            }
            lines.append(line | {"key": cell.key})
    return DataFrame(lines)


def _identity(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**{k: row[k] for k in _SAME}, "setting": setting(dict(row))}


def _three(name: str, value: Mapping[str, Any] | None) -> dict[str, float | None]:
    ends = {"": "mean", "_lo": "lo", "_hi": "hi"}
    return {f"{name}{end}": number(value[key]) if value else None for end, key in ends.items()}


def _seeds(row: Mapping[str, Any]) -> str:
    return " ".join(map(str, row["seeds"]))
