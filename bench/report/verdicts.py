"""What is to be said of a row: its flags, its place in its table, its accuracy drop."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bench.metrics.intervals import Interval, accuracy_interval, drop_interval, share_interval
from bench.metrics.named import FLOOR_SUFFIX, leak
from bench.protocols.settings import ThreatSettings
from bench.records.flags import Flag, FlagCode
from bench.records.outcomes import AuditFailure, TrainOutcome, TrainRecord
from bench.records.rows import AttackEntry, Convergence, Row

CONTROL = 0.2
"""Least leak of an undefended row from which its table says something about defenses."""
UNDEFENDED = "none"
"""The defense that does nothing."""
_MORE, _MUCH = 0.2, 0.5
"""How much more than a row shows is much; and at least what leak above the floor given the labels
the images of all clients together have where whose they are is not told."""
_WORSE = 0.1
"""How much less than one attack alone, or than the first round alone, a row's chosen answers leak
where they are called worse: more than the best of seven attacks has by chance over a handful of
victims."""
_ROUNDING = 1e-9
_LEARNED_NOTHING = (FlagCode.DIVERGED, FlagCode.AT_CHANCE)


def flags_of(row: Row, trained: Sequence[TrainOutcome]) -> tuple[Flag, ...]:
    """Return the flags, each once, of a row that has none yet, from its trainings of every seed."""
    # Not a set: the order is part of the files.
    return tuple(dict.fromkeys(_flags(row, trained)))


def _flags(row: Row, trained: Sequence[TrainOutcome]) -> Iterator[Flag]:
    done = [record for record in trained if isinstance(record, TrainRecord)]
    for record in trained:
        if not isinstance(record, TrainRecord):
            code = FlagCode(f"training_{record.status}")
            yield Flag(code=code, values={"reason": str(record.reason)})
            continue
        if record.diverged:
            yield Flag(code=FlagCode.DIVERGED, values={"reason": record.diverged})
        for reason in record.undeclared[:1]:
            yield Flag(code=FlagCode.UNDECLARED, values={"reason": reason})
    if at_chance(row, done):
        yield Flag(code=FlagCode.AT_CHANCE)
    if row.eps_claimed is not None and row.eps_record == float("inf"):
        yield Flag(code=FlagCode.CLAIMED_NOT_PROVEN)
    if row.unit is not None and row.unit != "record":
        yield Flag(code=FlagCode.CLAIM_UNIT, subject=row.unit)
    for what in ("claim", "proof"):
        if row.audit and getattr(row.audit, f"verdict_{what}") == "violated":
            code = FlagCode(f"audit_refutes_{what}")
            yield Flag(code=code, values={"epsilon": row.audit.eps_audited})
    for record in done:
        if isinstance(record.audit, AuditFailure):
            yield Flag(code=FlagCode.AUDIT_FAILED, values={"reason": record.audit.reason})
    for name, entry in row.attacks.items():
        if entry.status in ("failed", "timeout", "pending"):
            yield Flag(code=FlagCode(f"attack_{entry.status}"), subject=name)
    if row.ranking and row.leaks and row.leaks.below_baseline:
        yield Flag(code=FlagCode.BELOW_FLOOR, subject=row.ranking.attack)
    yield from _flag_most(FlagCode.WHOSE_UNKNOWN, row, _leakage_to_anyone(row), _MORE)
    if row.choice:  # the likelihood score may have preferred worse reconstructions
        leaks = _leakage_by_attack(row, row.choice.metric)
        yield from _flag_most(FlagCode.UNDERSTATED, row, leaks, _WORSE)
    if row.worst and not row.choice:
        yield Flag(code=FlagCode.BY_BOUND)
    for name, entry in row.attacks.items():
        grown = entry.convergence
        if entry.status == "done" and grown and _may_leak_more(row, entry, grown):
            yield Flag(code=FlagCode.CUT_SHORT, subject=name, values={"gain": grown.gain})


def _may_leak_more(row: Row, entry: AttackEntry, grown: Convergence) -> bool:
    """Return whether an attack had not converged and, by its undefended gain at twice its budget,
    would reconstruct more than the row shows."""
    if grown.converged:
        return False
    similar, floor = entry.scores.get("ssim"), entry.floor.get("ssim")
    if similar is None or floor is None or row.leak is None:
        return True
    return leak(similar.mean + grown.gain, floor, "ssim") > row.leak


def _flag_most(
    code: FlagCode, row: Row, leaks: Iterable[tuple[float, str]], more: float
) -> list[Flag]:
    """Flag the attack that leaks most, where that is more than the row shows by so much at least.
    leaks: of attacks, each with the attack's name."""
    most, name = max(leaks, default=(0.0, ""))
    if row.leak is None or most - row.leak <= more:
        return []
    return [Flag(code=code, subject=name, values={"leak": most})]


def _leakage_to_anyone(row: Row) -> Iterator[tuple[float, str]]:
    """Yield the leakage of attacks, and their names, that reconstruct much more where samples may
    go to any client than of each client's own."""
    if row.ranking is None:
        return
    metric = row.ranking.metric
    for name, entry in row.attacks.items():
        anyone = entry.scores.get(f"{metric}_anyone")
        if anyone is None or entry.is_floor or metric not in entry.floor:
            continue
        floor = entry.floor[metric]
        most, own = (leak(s.mean, floor, metric) for s in (anyone, entry.scores[metric]))
        labels_only = entry.floor.get(metric + FLOOR_SUFFIX, floor)
        if most - own > _MORE and leak(anyone.mean, labels_only, metric) > _MUCH:
            yield most, name


def _leakage_by_attack(row: Row, metric: str) -> list[tuple[float, str]]:
    """Return each attack's leakage, and its name."""
    return [
        (leak(entry.scores[metric].mean, entry.floor[metric], metric), name)
        for name, entry in row.attacks.items()
        if metric in entry.scores and metric in entry.floor
    ]


def with_first_round(row: Row, first: Row | None, threats: Mapping[str, ThreatSettings]) -> Row:
    """Flag the attack that leaks most in the first round, where that is more than a row of several
    observed rounds shows. An attacker who sees more can ignore the other rounds: the attacks on all
    of them were too weak, or their victims harder.

    Args:
        row: At the checkpoint after training.
        first: The same setting at the first one, if it was observed.
        threats: By name. Those of one round tell what another shows in its first round if both
            have the same work and grants.
    """
    if first is None or row.ranking is None:
        return row
    used = [threats[name] for name in {e.threat for e in row.attacks.values()}]
    several = [_work_and_grants(t) for t in used if t.rounds > 1]
    names = {n for n, t in threats.items() if t.rounds == 1 and _work_and_grants(t) in several}
    leaks = _leakage_by_attack(first, row.ranking.metric)
    candidates = [(most, name) for most, name in leaks if first.attacks[name].threat in names]
    more = _flag_most(FlagCode.FIRST_ROUND, row, candidates, _WORSE)
    return replace(row, flags=(*row.flags, *more))


def _work_and_grants(threat: ThreatSettings) -> dict[str, Any]:
    """Return all of a threat except its name and its numbers of victims and rounds."""
    return threat.model_dump(exclude={"name", "victims", "rounds"})


def at_chance(row: Row, done: Sequence[TrainRecord]) -> bool:
    """Return whether neither the common model nor, where clients keep something, their own networks
    beat a guess, on the test samples or clients of all seeds together; a method whose clients keep
    the first stages has no use for the common model."""
    judged: list[tuple[Interval | None, float]] = []
    if row.accuracy:
        known = [t for t in done if t.correct is not None]
        right, of = sum(t.correct or 0 for t in known), sum(t.test_samples for t in known)
        judged.append((share_interval([right], [of]), max(t.class_chance for t in done)))
    if row.personalised and row.personal_accuracy:
        own = [a for t in done for a in t.personal_accuracies if a is not None]
        chance = max(t.personal_chance or 0.0 for t in done)
        judged.append((accuracy_interval([np.array(own)]), chance))
    return bool(judged) and all(a is not None and a.lo <= chance for a, chance in judged)


def sort_rows(table: Sequence[Row]) -> list[Row]:
    """Return the rows of one table, the least leakage first, those without use or figure last;
    flagged where attacks do not work even without a defense.

    Args:
        table: Its rows, with their flags.
    """
    leaks = [leak for r in table if is_reference(r) and (leak := r.leak) is not None]
    if leaks and max(leaks) < CONTROL:
        flag = Flag(code=FlagCode.CONTROL_FAILED, values={"leak": max(leaks)})
        table = [replace(r, flags=(*r.flags, flag)) for r in table]
    return sorted(table, key=lambda r: (r.leak is None or not has_use(r), r.leak or 0.0))


def is_reference(row: Row) -> bool:
    """Return whether it is an undefended row: only there attacks may run at twice their budget."""
    return row.defense == UNDEFENDED or any(e.doubled for e in row.attacks.values())


def understated_leakage(row: Row) -> float | None:
    """Return the largest leakage of flags that say that a row shows less: by one attack, in the
    first round, or of all clients' images in any order. None without such a flag."""
    codes = (FlagCode.UNDERSTATED, FlagCode.FIRST_ROUND, FlagCode.WHOSE_UNKNOWN)
    leaks = [f.values["leak"] for f in row.flags if f.code in codes and "leak" in f.values]
    return max(map(float, leaks), default=None)


def has_use(row: Row) -> bool:
    """Return whether anybody would deploy the row and its leakage is informative: no flag costs its
    rank."""
    return not any(f.code.costs_rank for f in row.flags)


def at_most(drop: float, loss: float) -> bool:
    """Return whether an accuracy drop is within a limit, up to the rounding of a difference."""
    return drop <= loss + _ROUNDING


def find_undefended(rows: Sequence[Row]) -> Row | None:
    """Return the row of a table with which the others are compared; None without one that
    learned."""
    able = [r for r in rows if not any(f.code in _LEARNED_NOTHING for f in r.flags)]
    named = (r for r in able if r.defense == UNDEFENDED)
    return next(named, None) or next(filter(is_reference, able), None)


def accuracy_drop(row: Row, bare: Row) -> Interval | None:
    """Return by how much a row's accuracy is below the undefended one's, over the seeds that both
    have, in [-1, 1]: of the common model, or of the clients' own networks where there is none.
    None if either is not known."""
    for name in ("accuracies", "personal_accuracies"):
        own, reference = getattr(row, name), getattr(bare, name)
        if seeds := sorted(own.keys() & reference.keys()):
            samples = min(row.test_samples, bare.test_samples)
            return drop_interval([reference[s] for s in seeds], [own[s] for s in seeds], samples)
    return None
