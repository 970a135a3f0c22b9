"""One attack's entry in a row, and the worst case over attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np

from bench.metrics.intervals import Interval, bootstraps
from bench.metrics.named import METRICS, sign_of
from bench.protocols.settings import ThreatSettings
from bench.records import (
    AttackEntry,
    AttackOutcome,
    AttackRecord,
    Convergence,
    DoubledRun,
    DoubledScore,
    NoResult,
    WorstCase,
)

LeakMetric = Literal["ssim", "mse"]
"""By which a worst case is taken."""
FLOOR_SUFFIX = "_class_mean"
CONVERGED = 0.02
"""Most SSIM that an attack may gain from twice its budget and still count as converged."""
LOST = NoResult(status="failed", reason="no record: the run was stopped before it")
"""Stands for a record that is missing."""
Victims = dict[str, dict[int, np.ndarray]]
"""Attack -> seed -> one figure per victim."""


@dataclass(kw_only=True)
class Awaited:
    """An interval that `Intervals.fill` brings."""

    value: Interval | None = None


class Intervals:
    """Intervals that are asked for one by one and computed many at a time."""

    AT_ONCE = 4096
    """Most that wait, so that memory does not grow with the folder."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Awaited, Sequence[np.ndarray]]] = []

    def ask(self, groups: Sequence[np.ndarray]) -> Awaited:
        """The groups' interval, once `fill` was called; None if they hold no value."""
        awaited = Awaited()
        if groups:
            self._waiting.append((awaited, groups))
            if len(self._waiting) >= self.AT_ONCE:
                self.fill()
        return awaited

    def fill(self) -> None:
        """Compute all that wait."""
        found = bootstraps([groups for _, groups in self._waiting])
        for (awaited, _), interval in zip(self._waiting, found, strict=True):
            awaited.value = interval
        self._waiting.clear()


def values_of(record: AttackRecord | DoubledRun, metric: str) -> np.ndarray:
    """One figure per victim."""
    return np.array(record.values[metric], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class EntryDraft:
    """An attack's entry whose intervals wait."""

    entry: AttackEntry
    scores: Mapping[str, Awaited]
    doubled: tuple[int, Awaited] | None

    def finished(self, convergence: Convergence | None) -> AttackEntry:
        """The entry with its intervals, and the convergence that holds for its table."""
        return replace(
            self.entry,
            scores={m: a.value for m, a in self.scores.items() if a.value is not None},
            doubled=self.doubled
            and DoubledScore(budget=self.doubled[0], ssim=self.doubled[1].value),
            convergence=convergence,
        )


def draft_entry(
    found: Sequence[AttackOutcome | None], threat: ThreatSettings, intervals: Intervals
) -> EntryDraft:
    """One attack's entry: figures over all finished seeds, failures counted beside them; its
    `convergence` is what its own records (None: there is none) say."""
    records = [LOST if r is None else r for r in found]
    done = [r for r in records if isinstance(r, AttackRecord)]
    broken = [r for r in records if r.status in ("failed", "timeout")]
    status = broken[0].status if broken else ("done" if done else "not_applicable")
    scores = {}
    for metric in METRICS:
        groups = [values_of(r, metric) for r in done if metric in r.values]
        if any(map(len, groups)):
            scores[metric] = intervals.ask(groups)
    again = [(r, r.doubled) for r in done if r.doubled and "ssim" in r.doubled.values]
    doubled = None
    if again:
        runs = [values_of(d, "ssim") for _, d in again]
        doubled = (again[0][1].budget, intervals.ask(runs))
    entry = AttackEntry(
        status=status,
        reason=next((r.reason for r in records if r.status == status), None),
        threat=threat.name,
        is_floor=any(r.is_floor for r in done),
        n=sum(r.victims for r in done),
        failed=sum(r.failed for r in done) + threat.victims * len(broken),
        floor=_floor(set(scores), done),
        seconds=sum(r.seconds for r in done) if done else None,
        gradient_evaluations=sum(r.gradient_evaluations for r in done) if done else None,
        notes=tuple(dict.fromkeys(n for r in done for n in r.notes)),
        budget=next((r.budget for r in done if r.budget), None),
        convergence=_convergence(again),
    )
    return EntryDraft(entry=entry, scores=scores, doubled=doubled)


def _convergence(again: Sequence[tuple[AttackRecord, DoubledRun]]) -> Convergence | None:
    """What an attack gains from twice its budget, over victims and seeds; None where that was
    not measured or there is no SSIM."""
    if not again:
        return None
    gains = [values_of(d, "ssim") - values_of(r, "ssim") for r, d in again]
    gain = float(np.concatenate(gains).mean())
    # Records from before budgets were kept have no doubled run either.
    return Convergence(gain=gain, budget=again[0][0].budget or 0, converged=gain <= CONVERGED)


def _floor(measured: set[str], done: Sequence[AttackRecord]) -> dict[str, float]:
    """Means of the floors of every metric that the attack has."""
    names = sorted({n for r in done for n in r.floors})
    return {
        n: _mean(tuple(chain.from_iterable(r.floors[n] for r in done if n in r.floors)))
        for n in names
        if n.removesuffix(FLOOR_SUFFIX) in measured
    }


@lru_cache(maxsize=4096)
def _mean(values: tuple[float, ...]) -> float:
    """Settings of one network are attacked on the same samples, so floors come again and again."""
    return float(np.array(values, dtype=np.float64).mean())


@dataclass(frozen=True, kw_only=True)
class CaseDraft:
    """A worst case whose interval waits."""

    attack: str
    metric: LeakMetric
    awaited: Awaited


def worst_cases(
    by_threat: Mapping[str, Victims], metric: LeakMetric, intervals: Intervals
) -> list[CaseDraft]:
    """For each threat the worst case over attacks, taken per victim and then averaged; only attacks
    on the same observation are compared, so seed by seed, an attack that failed in one counting in
    the others. Named is the attack that is worst for most victims."""
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
            most = max(attacks, key=winners.count)
            cases.append(CaseDraft(attack=most, metric=metric, awaited=intervals.ask(worst)))
    return cases


def worst_of(cases: Sequence[CaseDraft]) -> WorstCase | None:
    """The case that leaks most, the first of equals; None if there is none."""
    found = [
        WorstCase(attack=case.attack, metric=case.metric, interval=interval)
        for case in cases
        if (interval := case.awaited.value)
    ]
    return max(found, key=lambda w: w.leak, default=None)
