"""One attack's entry in a row, and the worst case over attacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from bench.metrics.intervals import bootstraps
from bench.metrics.named import METRICS, sign_of

FLOOR_SUFFIX = "_class_mean"
CONVERGED = 0.02
"""Most SSIM that an attack may gain from twice its budget and still count as converged."""
Record = dict[str, Any]
Victims = dict[str, dict[int, np.ndarray]]
"""Attack -> seed -> one figure per victim."""


class Intervals:
    """Intervals that are asked for one by one and computed many at a time."""

    AT_ONCE = 4096
    """Most that wait, so that memory does not grow with the folder."""

    def __init__(self) -> None:
        self._waiting: list[tuple[dict[str, Any], str, Sequence[np.ndarray]]] = []

    def put(self, entry: dict[str, Any], key: str, groups: Sequence[np.ndarray]) -> None:
        """entry[key]: the groups' interval once `fill` was called, None if they hold no value."""
        entry[key] = None
        if not groups:
            return
        self._waiting.append((entry, key, groups))
        if len(self._waiting) >= self.AT_ONCE:
            self.fill()

    def fill(self) -> None:
        found = bootstraps([groups for *_, groups in self._waiting])
        for (entry, key, _), interval in zip(self._waiting, found, strict=True):
            entry[key] = interval.to_dict() if interval else None
        self._waiting.clear()


def values_of(record: Mapping[str, Any], metric: str) -> np.ndarray:
    """One figure per victim; text of figures that are not finite becomes a number."""
    return np.array(record["values"][metric], dtype=np.float64)


def attack_entry(
    found: Sequence[Record | None], threat: Mapping[str, Any], intervals: Intervals
) -> Record:
    """One attack's entry: figures over all finished seeds, failures counted beside them.

    found: its records, None where there is none. The entry's intervals wait in `intervals`.
    """
    lost: Record = {"status": "failed", "reason": "no record: the run was stopped before it"}
    records = [r or lost for r in found]
    done = [r for r in records if r["status"] == "done"]
    broken = [r for r in records if r["status"] in ("failed", "timeout")]
    status = broken[0]["status"] if broken else ("done" if done else "not_applicable")
    reason = next((r["reason"] for r in records if r["status"] == status), None)
    entry: Record = {
        "status": status,
        "reason": reason,
        "threat": threat["name"],
        "is_floor": any(r["is_floor"] for r in done),
        "n": sum(r["victims"] for r in done),
        "failed": sum(r["failed"] for r in done) + threat["victims"] * len(broken),
    }
    measured = set()
    for metric in METRICS:
        groups = [values_of(r, metric) for r in done if metric in r["values"]]
        intervals.put(entry, metric, groups)
        if any(map(len, groups)):
            measured.add(metric)
    entry["floor"] = _floor(measured, done)
    entry["seconds"] = sum(r["seconds"] for r in done) if done else None
    entry["gradient_evaluations"] = sum(r["gradient_evaluations"] for r in done) if done else None
    entry["notes"] = list(dict.fromkeys(n for r in done for n in r["notes"]))
    entry["budget"] = next((r["budget"] for r in done if r.get("budget")), None)
    entry["convergence"] = _convergence(done)
    entry["doubled"] = _doubled(done, intervals)
    return entry


def _convergence(done: Sequence[Record]) -> dict[str, Any] | None:
    """What an attack gains from twice its budget, over victims and seeds; None where that was
    not measured (records of older versions have no `doubled`) or there is no SSIM."""
    measured = [r for r in done if r.get("doubled") and "ssim" in r["doubled"]["values"]]
    if not measured:
        return None
    gains = [values_of(r["doubled"], "ssim") - values_of(r, "ssim") for r in measured]
    gain = float(np.concatenate(gains).mean())
    return {"gain": gain, "budget": measured[0]["budget"], "converged": gain <= CONVERGED}


def _doubled(done: Sequence[Record], intervals: Intervals) -> dict[str, Any] | None:
    """SSIM at twice the budget where that was run, which is in the undefended rows alone."""
    again = [r["doubled"] for r in done if r.get("doubled") and "ssim" in r["doubled"]["values"]]
    if not again:
        return None
    entry = {"budget": again[0]["budget"]}
    intervals.put(entry, "ssim", [values_of(d, "ssim") for d in again])
    return entry


def _floor(measured: set[str], done: Sequence[Record]) -> dict[str, float]:
    """Means of the floors of every metric that the attack has."""
    names = {n for r in done for n in r["floors"]}
    shown = [n for n in sorted(names) if n.removesuffix(FLOOR_SUFFIX) in measured]
    return {
        n: _mean(tuple(chain.from_iterable(r["floors"][n] for r in done if n in r["floors"])))
        for n in shown
    }


@lru_cache(maxsize=4096)
def _mean(values: tuple[Any, ...]) -> float:
    """Settings of one network are attacked on the same samples, so floors come again and again."""
    return float(np.array(values, dtype=np.float64).mean())


def worst_cases(
    by_threat: Mapping[str, Victims], metric: str, intervals: Intervals
) -> list[Record]:
    """For each threat the worst case over attacks, taken per victim and then averaged; only attacks
    on the same observation are compared, so seed by seed, an attack that failed in one counting in
    the others. attack: the one that is worst for most victims. metric: ssim, of which the largest
    is worst, or mse, of which the least is. Their intervals wait in `intervals`."""
    sign = sign_of(metric)
    cases = []
    for attacks in by_threat.values():
        worst, winners = [], []
        for seed in dict.fromkeys(s for found in attacks.values() for s in found):
            names = [n for n, found in attacks.items() if seed in found]
            stack = np.stack([sign * attacks[n][seed] for n in names])
            worst.append(sign * stack.max(axis=0))
            winners += [names[i] for i in stack.argmax(axis=0)]
        if any(map(len, worst)):
            case: Record = {"attack": max(attacks, key=winners.count), "metric": metric}
            intervals.put(case, metric, worst)
            cases.append(case)
    return cases


def worst_of(cases: Iterable[Record]) -> Record | None:
    """The case that leaks most, the first of equals; None if there is none."""
    return max(cases, key=leak, default=None)


def leak(worst: Mapping[str, Any]) -> float:
    """A worst case as one number that grows with the leak: SSIM, or minus the MSE of records."""
    metric: str = worst["metric"]
    return sign_of(metric) * float(worst[metric]["mean"])
