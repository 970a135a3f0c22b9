"""One attack's entry in a row, and the worst case over attacks."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np

from bench.errors import UserError
from bench.metrics.intervals import Interval, interval_of
from bench.metrics.named import FLOOR_SUFFIX, METRICS, range_of, sign_of
from bench.protocols.settings import ThreatSettings
from bench.records import AttackOutcome, AttackRecord, DoubledRun, NoResult
from bench.records.outcomes import CONVERGED, Status
from bench.records.rows import AttackEntry, Convergence, DoubledScore, Leaks, Recognised, WorstCase

LeakMetric = Literal["ssim", "mse"]
LEAK_METRICS: tuple[LeakMetric, ...] = ("ssim", "mse")
"""By which a worst case is taken, the first that there is."""
PENDING = NoResult(status="pending", reason="the run has not come to it; run it again to go on")
"""Stands for a record that is missing."""
_CLEARLY = 0.05
"""Leakage that one attack has to be ahead of the judged answers to be taken in their place."""
SURE = ("recognised", "exact")
"""Metrics of which a row shows the number of samples."""
Observed = Mapping[int, Mapping[str, AttackRecord]]
"""Seed -> attack -> its record, under one threat."""
Answers = tuple[np.ndarray, list[str]]
"""Per victim the score of the answer that was selected, and its attack."""
Winners = Mapping[int, Answers]
"""Seed -> the answers that were selected."""


def values_of(record: AttackRecord | DoubledRun, metric: str) -> np.ndarray:
    """Return one figure per victim."""
    return np.array(record.values[metric], dtype=np.float64)


def entry_of(outcomes: Sequence[AttackOutcome], threat: ThreatSettings) -> AttackEntry:
    """Return one attack's entry: figures over all finished seeds, with failures counted;
    `convergence` is None without records of it."""
    done = [r for r in outcomes if isinstance(r, AttackRecord)]
    broken = [r for r in outcomes if r.status in ("failed", "timeout")]
    pending = any(r.status == "pending" for r in outcomes)
    other_status: Status = "pending" if pending else "done" if done else "not_applicable"
    status = broken[0].status if broken else other_status
    victims = max((r.victims for r in done), default=threat.victims)
    scores = {
        metric: interval
        for metric in METRICS
        if (interval := _interval([r for r in done if metric in r.values], metric))
    }
    again = [(r, r.doubled) for r in done if r.doubled and "ssim" in r.doubled.values]
    doubled = None
    if again:
        runs = _interval([d for _, d in again], "ssim")
        doubled = DoubledScore(budget=again[0][1].budget, ssim=runs)
    return AttackEntry(
        status=status,
        reason=next((r.reason for r in outcomes if r.status == status), None),
        threat=threat.name,
        is_floor=any(r.is_floor for r in done),
        n=sum(r.victims for r in done),
        failed=sum(r.failed for r in done) + victims * len(broken),
        scores=scores,
        floor=_floor(set(scores), done),
        seconds=sum(r.seconds for r in done) if done else None,
        gradient_evaluations=sum(r.gradient_evaluations for r in done) if done else None,
        notes=tuple(dict.fromkeys(n for r in done for n in r.notes)),
        budget=next((r.budget for r in done if r.budget), None),
        convergence=_convergence(again) if again else None,
        doubled=doubled,
    )


def _interval(runs: Sequence[AttackRecord | DoubledRun], metric: str) -> Interval | None:
    return interval_of([values_of(r, metric) for r in runs], range_of(metric))


def _convergence(again: Sequence[tuple[AttackRecord, DoubledRun]]) -> Convergence:
    """Return an attack's gain of SSIM from twice its budget, over victims and seeds."""
    gains = [values_of(d, "ssim") - values_of(r, "ssim") for r, d in again]
    gain = float(np.concatenate(gains).mean())
    # Records from before budgets were kept have no doubled run either.
    return Convergence(gain=gain, budget=again[0][0].budget or 0, converged=gain <= CONVERGED)


def _floor(measured: set[str], done: Sequence[AttackRecord]) -> dict[str, float]:
    """Return the mean floors of every metric that the attack has."""
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


# --- over attacks -------------------------------------------------------------------------------


def select_answers(
    records: Mapping[str, AttackRecord], metric: str, *, by_truth: bool
) -> Answers | None:
    """Per victim of one observation the score of one attack's answer, and that attack's name.

    By the truth it is the answer that leaks most: an upper bound, which nobody could choose.
    Otherwise it is the one of least judged loss, as the attacker chooses. Answers that read no
    message count where they were judged beside the others. None without an answer.

    Args:
        records: Attack -> its record.
        metric: Of the scores.
        by_truth: Who takes the answer.
    """
    kept = {
        name: r
        for name, r in records.items()
        if metric in r.values and (r.judged is not None or (by_truth and not r.is_floor))
    }
    if not kept:
        return None
    if len({r.victims for r in kept.values()}) > 1:
        counts = ", ".join(f"{r.victims} by {name}" for name, r in kept.items())
        raise UserError(f"attacks on one observation must have the same victims, got {counts}.")
    names, scores = list(kept), np.stack([values_of(r, metric) for r in kept.values()])
    if by_truth:
        merit = sign_of(metric) * scores
    else:
        merit = -np.array([r.judged for r in kept.values()], dtype=np.float64)
    best = np.where(np.isnan(merit), -np.inf, merit).argmax(axis=0)
    return scores[best, np.arange(scores.shape[1])], [names[i] for i in best]


def worst_case(
    by_threat: Mapping[str, Observed], metric: LeakMetric, *, by_truth: bool
) -> tuple[WorstCase, Leaks | None] | None:
    """Return the worst case over attacks, chosen per victim (see `select_answers`) or, where that
    leaks more in the other seeds, one attack for all, and the victims' leakage (None without a
    baseline); None without a figure.

    Only attacks on the same observation are compared, so seed by seed, an attack that failed in one
    counting in the others. Named is the attack that is taken for most victims. Threats have
    different victims, hence different baselines: of several the leakage above its own one tells.
    """
    cases = []
    for threat, by_seed in by_threat.items():
        by_winner = {
            seed: t
            for seed, records in by_seed.items()
            if (t := select_answers(records, metric, by_truth=by_truth))
        }
        if not by_truth:
            by_winner = _choose_as_elsewhere(by_winner, by_seed, metric)
        names = [name for _, winners in by_winner.values() for name in winners]
        interval = interval_of([scores for scores, _ in by_winner.values()], range_of(metric))
        if interval:
            known = dict.fromkeys(n for records in by_seed.values() for n in records)
            most = max(known, key=names.count)
            case = WorstCase(attack=most, metric=metric, interval=interval)
            leaks = _leaks(threat, by_seed, by_winner, metric)
            floor = None if leaks is None else leaks.floor
            cases.append((leak_with_sign(interval.mean, floor, metric), case, leaks))
    return max(cases, key=lambda c: c[0])[1:] if cases else None


def _choose_as_elsewhere(judged: Winners, by_seed: Observed, metric: str) -> dict[int, Answers]:
    """Return of each seed the judged answers, or those of one attack that leaks more in every other
    seed, and clearly more in their mean. Who attacks can play whole federations on public data and
    learn so which attack is best here; other seeds stand for that, and the seed's own truth is not
    used."""

    def leakage(answers: Answers, seed: int) -> float:
        floors = _floors_of(by_seed[seed], metric)
        floor = _mean(tuple(floors)) if floors else None
        return leak_with_sign(float(answers[0].mean()), floor, metric)

    chosen, most = dict(judged), dict.fromkeys(judged, _CLEARLY)
    for name in dict.fromkeys(n for seed in judged for n in by_seed[seed]):
        of = {seed: by_seed[seed].get(name) for seed in judged}
        read = {s: r for s, r in of.items() if r and r.judged is not None and metric in r.values}
        alone = {s: (values_of(r, metric), [name] * r.victims) for s, r in read.items()}
        gains = {s: leakage(a, s) - leakage(judged[s], s) for s, a in alone.items()}
        for seed in alone if len(alone) == len(judged) > 1 else ():
            others = [gain for other, gain in gains.items() if other != seed]
            mean = sum(others) / len(others)
            if min(others) > 0 and mean > most[seed]:
                chosen[seed], most[seed] = alone[seed], mean
    return chosen


def _floors_of(records: Mapping[str, AttackRecord], metric: str) -> Sequence[float]:
    """Return the baseline of every victim of one observation, nothing where no attack has it."""
    return next((r.floors[metric] for r in records.values() if metric in r.floors), [])


def _leaks(threat: str, by_seed: Observed, winners: Winners, metric: str) -> Leaks | None:
    """Return the leakage of every victim, whose mean is `leak_with_sign` of the mean score."""
    floors = {s: np.array(_floors_of(by_seed[s], metric), dtype=np.float64) for s in winners}
    if any(len(floors[seed]) != len(values) for seed, (values, _) in winners.items()):
        return None
    floor = _mean(tuple(chain.from_iterable(f.tolist() for f in floors.values())))
    way = METRICS[metric].perfect - floor
    victims = {
        seed: tuple(((values - floors[seed]) / way).tolist() if way else [0.0] * len(values))
        for seed, (values, _) in winners.items()
    }
    recognised = _count_recognised(by_seed, winners)
    return Leaks(threat=threat, floor=floor, victims=victims, recognised=recognised)


def _count_recognised(by_seed: Observed, winners: Winners) -> Recognised | None:
    """Count the samples that are recognised among the selected reconstructions, or the records that
    match exactly; None where that was not measured."""
    count, of, baseline = 0.0, 0, 0.0
    for seed, (_, names) in winners.items():
        records = by_seed[seed]
        metric = next((m for m in SURE if m in records[names[0]].values), None)
        if metric is None or any(metric not in records[n].values for n in names):
            return None
        samples = max(r.samples for r in records.values())
        count += samples * sum(records[n].values[metric][i] for i, n in enumerate(names))
        baseline += samples * sum(_floors_of(records, metric))
        of += samples * len(names)
    return Recognised(count=round(count), of=of, baseline=round(baseline))


def leak_with_sign(score: float, floor: float | None, metric: str) -> float:
    """Return the part of the way from its floor to a perfect copy that a score has covered, as
    `leak`, but below 0 where it stays below the floor. Without a floor, as in old files, return a
    number that grows with the leakage."""
    if floor is None:
        return sign_of(metric) * score
    way = METRICS[metric].perfect - floor
    return (score - floor) / way if way else 0.0
