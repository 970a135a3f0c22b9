"""Rows of one leaderboard table against each other, victim by victim.

It is longer than others: one comparison, a table of them and the names of rows are one thing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from bench.errors import UserError
from bench.metrics.named import METRICS, sign_of
from bench.metrics.paired import (
    ALPHA,
    Paired,
    SampleSize,
    holm,
    least_victims,
    paired,
    victims_needed,
)
from bench.names import did_you_mean
from bench.records import AttackRecord, TrainRecord, short
from bench.report.choosing import check_wanted
from bench.report.contenders import Contender, Contest, Found, worst_leaks
from bench.report.entries import LOST
from bench.suite import parse_value

WORST = "worst case"
SAME_FLOOR = 1e-6
"""Relative difference up to which two floors are of the same samples."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Accuracy of the first row minus that of the second, per seed. personal: of the clients' own
    networks, where there is no common model. test_samples: of the smallest test set."""

    differences: tuple[float, ...]
    personal: bool
    test_samples: int

    @property
    def mean(self) -> float:
        return float(np.mean(self.differences))


@dataclass(frozen=True, kw_only=True)
class RowComparison:
    """Two rows on the same victims.

    means: the metric's mean of the first and the second row. difference: of the leak, first minus
    second, so > 0: the first row leaks more, also where a smaller metric (MSE) is the larger leak.
    p_holm, p_seeds_holm: adjusted for all pairs of the table. plan, cautious_plan: what is needed
    to show the observed difference, or the end of its interval that is nearer to 0 (None where
    the interval holds 0).
    """

    first: Contender
    second: Contender
    attack: str
    metric: str
    threat: str
    seeds: tuple[int, ...]
    means: tuple[float, float]
    difference: Paired
    accuracy: Accuracy | None
    plan: SampleSize | None
    cautious_plan: SampleSize | None
    notes: tuple[str, ...]
    p_holm: float
    p_seeds_holm: float | None

    @property
    def verdict(self) -> str:
        """separated: on the victims of these trainings (sign-flip test and interval) and over
        trainings (t-test on two or more seeds); separated here: only the former."""
        interval = self.difference.interval
        if self.p_holm > ALPHA or interval.lo <= 0 <= interval.hi:
            return "not separated"
        over_trainings = self.p_seeds_holm is not None and self.p_seeds_holm <= ALPHA
        return "separated" if over_trainings else "separated here"

    def to_dict(self) -> dict[str, Any]:
        found = self.difference
        spread = found.variances
        return {
            "first": _named(self.first),
            "second": _named(self.second),
            "attack": self.attack,
            "metric": self.metric,
            "threat": self.threat,
            "seeds": list(self.seeds),
            "victims": list(found.victims),
            "first_mean": self.means[0],
            "second_mean": self.means[1],
            "leak_difference": found.interval.to_dict(),
            "seed_means": list(found.seed_means),
            "p": found.p,
            "p_holm": self.p_holm,
            "p_seeds": found.p_seeds,
            "p_seeds_holm": self.p_seeds_holm,
            "seed_std": found.seed_std,
            "variance_victims": None if spread is None else spread.victims,
            "variance_seeds": None if spread is None else spread.seeds,
            "seed_share": None if spread is None else spread.seed_share,
            "verdict": self.verdict,
            "accuracy_difference": None
            if self.accuracy is None
            else {"mean": self.accuracy.mean, **asdict(self.accuracy)},
            "plan": None if self.plan is None else asdict(self.plan),
            "cautious_plan": None if self.cautious_plan is None else asdict(self.cautious_plan),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """A table's comparisons. skipped: why a pair could not be compared, one sentence each."""

    table: Contest
    comparisons: list[RowComparison]
    skipped: list[str] = field(default_factory=list)

    @property
    def resolution(self) -> str | None:
        """That some pair has fewer victims than Holm's first step needs, whatever the effect."""
        pairs = len(self.comparisons)
        fewest = min((sum(c.difference.victims) for c in self.comparisons), default=0)
        need = least_victims(comparisons=max(1, pairs))
        if not pairs or fewest >= need:
            return None
        smallest = min(1.0, pairs * 2.0 ** (1 - fewest))
        among = f" among {pairs} pairs" if pairs > 1 else ""
        return (
            f"{fewest} victims{among} cannot get p below {smallest:.2g}, however large the "
            f"difference: it takes {need}."
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "table": self.table.title,
            "comparisons": [c.to_dict() for c in self.comparisons],
            "skipped": self.skipped,
            "resolution": self.resolution,
        }


def _named(row: Contender) -> dict[str, Any]:
    return {"defense": row.row.defense, "settings": row.row.settings, "rank": row.rank}


# --- two rows ---------------------------------------------------------------------------------


def compare(
    first: Contender, second: Contender, *, attack: str | None = None, metric: str | None = None
) -> RowComparison:
    """Two rows of one table on the same victims.

    attack: one attack instead of the worst case per victim. metric: by default SSIM, else MSE,
    else LnAcc, the first that both rows have. The worst case is taken over the attacks of one
    threat (other threats have other victims): the one under which either row leaks most. An attack
    that failed or has no record for one row in a seed counts for neither there; one that is not
    applicable to a row does not threaten it. Raises UserError if the rows have no seed and threat
    in common, or if their victims are not the same samples.
    """
    choices = (metric,) if metric else ("ssim", "mse", *(["lnacc"] if attack else []))
    for name in choices:
        found = [s for threat in first.cells if (s := _shared(first, second, threat, attack, name))]
        if found:
            break
    else:
        raise UserError(
            f"{first.name} and {second.name} have no seed in which both have "
            f"{' or '.join(choices)} of {attack or 'an attack'} under the same threat."
        )
    chosen = max(found, key=lambda s: max(_mean(s.first), _mean(s.second)))
    _check_victims(first, second, chosen)
    sign = sign_of(name)
    seeds = tuple(chosen.first)
    difference = paired([chosen.first[s] - chosen.second[s] for s in seeds])
    plan, cautious = _plans(difference)
    return RowComparison(
        first=first,
        second=second,
        attack=attack or WORST,
        metric=name,
        threat=chosen.threat,
        seeds=seeds,
        means=(sign * _mean(chosen.first), sign * _mean(chosen.second)),
        difference=difference,
        accuracy=_accuracy(first, second, seeds),
        plan=plan,
        cautious_plan=cautious,
        notes=tuple(_notes(first, second, chosen, name, attack)),
        p_holm=difference.p,
        p_seeds_holm=difference.p_seeds,
    )


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """Leaks per victim of two rows under one threat, by the seeds that both have. left_out:
    (attack, seed) that counted for neither."""

    threat: str
    first: dict[int, np.ndarray]
    second: dict[int, np.ndarray]
    left_out: list[tuple[str, int]]


def _shared(
    first: Contender, second: Contender, threat: str, attack: str | None, metric: str
) -> _Shared | None:
    both = (first.cells.get(threat, {}), second.cells.get(threat, {}))
    wanted = {n for found in both for n in found if attack in (None, n)}
    values: tuple[dict[int, np.ndarray], dict[int, np.ndarray]] = ({}, {})
    left_out = []
    for seed in sorted({s for found in both for by_seed in found.values() for s in by_seed}):
        lost = {n for n in wanted for found in both if _is_lost(found, n, seed)}
        names = frozenset(wanted - lost)
        one, two = (worst_leaks(found, seed, metric, names, attack is not None) for found in both)
        if one is None or two is None:
            continue
        values[0][seed], values[1][seed] = one, two
        left_out += [(n, seed) for n in sorted(lost)]
    if not values[0]:
        return None
    return _Shared(threat=threat, first=values[0], second=values[1], left_out=left_out)


def _is_lost(found: Found, attack: str, seed: int) -> bool:
    """Whether an attack that was planned has no answer in a seed, for technical reasons."""
    record = found.get(attack, {}).get(seed, LOST)
    return record.status not in ("done", "not_applicable")


def _mean(by_seed: Mapping[int, np.ndarray]) -> float:
    return float(np.concatenate(list(by_seed.values())).mean())


def _check_victims(first: Contender, second: Contender, shared: _Shared) -> None:
    """Floors are functions of the private samples alone, so they tell victims apart."""
    for seed in shared.first:
        one, two = (_floors(c, shared.threat, seed) for c in (first, second))
        names = sorted(set(one) & set(two))
        same = bool(names) and all(
            len(one[n]) == len(two[n]) == len(shared.first[seed]) == len(shared.second[seed])
            and np.allclose(one[n], two[n], rtol=SAME_FLOOR, atol=SAME_FLOOR)
            for n in names
        )
        if not same:
            raise UserError(
                f"the victims of {first.name} and {second.name} are not the same samples (seed "
                f"{seed}, threat {shared.threat}: their floors differ, which depend on the private "
                "data alone), so their figures cannot be paired."
            )


def _floors(row: Contender, threat: str, seed: int) -> dict[str, np.ndarray]:
    """The floors of every record of one observation, which all hold the same ones."""
    found: dict[str, np.ndarray] = {}
    for by_seed in row.cells[threat].values():
        record = by_seed.get(seed, LOST)
        if isinstance(record, AttackRecord):
            for name, values in record.floors.items():
                found.setdefault(name, np.array(values, dtype=np.float64))
    return found


def _accuracy(first: Contender, second: Contender, seeds: Sequence[int]) -> Accuracy | None:
    both = [
        (first.trainings[s], second.trainings[s])
        for s in seeds
        if s in first.trainings and s in second.trainings
    ]
    for personal in (False, True):
        found = [(_utility(one, personal), _utility(two, personal)) for one, two in both]
        gaps = tuple(a - b for a, b in found if a is not None and b is not None)
        if gaps:
            tested = min(r.test_samples for pair in both for r in pair)
            return Accuracy(differences=gaps, personal=personal, test_samples=tested)
    return None


def _utility(record: TrainRecord, personal: bool) -> float | None:
    if personal:
        return record.personal_accuracy
    return None if record.correct is None else record.correct / record.test_samples


def _plans(difference: Paired) -> tuple[SampleSize | None, SampleSize | None]:
    """For the observed difference, and for the interval's end nearer to 0 if it excludes 0."""
    if difference.variances is None:
        return None, None
    interval, seeds = difference.interval, len(difference.victims)
    nearer = min(interval.lo, interval.hi, key=abs) if interval.lo * interval.hi > 0 else 0.0
    per_seed = max(1 if seeds > 1 else 2, sum(difference.victims) // seeds)
    one, two = (
        victims_needed(effect, spread=difference.variances, seeds=seeds, victims=per_seed)
        for effect in (interval.mean, nearer)
    )
    return one, two


def _notes(
    first: Contender, second: Contender, shared: _Shared, metric: str, attack: str | None
) -> Iterator[str]:
    seeds = {s for c in (first, second) for by in c.cells.values() for f in by.values() for s in f}
    missing = sorted(seeds - set(shared.first))
    if missing:
        yield f"Without seed {', '.join(map(str, missing))}, where one of the two has no figure."
    for name in dict.fromkeys(n for n, _ in shared.left_out):
        where = ", ".join(str(s) for n, s in shared.left_out if n == name)
        yield f"Without {name} in seed {where}, where it gave nothing for one of the two."
    for row in () if attack else (first, second):
        means = {t: _mean(w) for t in row.cells if (w := row.worst(t, metric))}
        own = max(means, key=lambda t: means[t])
        if own != shared.threat:
            value = sign_of(metric) * means[own]
            yield (
                f"{row.name} leaks most under threat {own} ({metric} {value:.3g}), whose victims "
                "are others."
            )


# --- tables -----------------------------------------------------------------------------------


def ladders(
    found: Sequence[Contest],
    *,
    attack: str | None = None,
    metric: str | None = None,
    every: bool = False,
) -> list[Ladder]:
    """Each table's ranked rows, each against the next one (every: against all later ones), with
    p-values adjusted within the table. Raises UserError for an unknown attack or metric."""
    _check_names(found, attack, metric)
    out = []
    for table in found:
        rows = [c for c in table.rows if c.rank is not None]
        pairs = itertools.combinations(rows, 2) if every else itertools.pairwise(rows)
        out.append(_ladder(table, list(pairs), attack, metric))
    return out


def _ladder(
    table: Contest,
    pairs: Sequence[tuple[Contender, Contender]],
    attack: str | None,
    metric: str | None,
) -> Ladder:
    made, skipped = [], []
    for one, two in pairs:
        try:
            made.append(compare(one, two, attack=attack, metric=metric))
        except ValueError as error:
            skipped.append(str(error))
    p = holm([c.difference.p for c in made])
    over_seeds = iter(holm([s for c in made if (s := c.difference.p_seeds) is not None]))
    made = [
        replace(
            c, p_holm=a, p_seeds_holm=None if c.difference.p_seeds is None else next(over_seeds)
        )
        for c, a in zip(made, p, strict=True)
    ]
    return Ladder(table=table, comparisons=made, skipped=skipped)


def two_rows(
    found: Sequence[Contest],
    one: str,
    two: str,
    *,
    attack: str | None = None,
    metric: str | None = None,
) -> list[Ladder]:
    """The rows of two names in every table that holds both.

    A name is a defense, `spm(epsilon=1.5, variant=printed)` as the leaderboard prints it, or
    `spm:epsilon=1.5`; of the settings only as many are needed as make it unique. Raises UserError
    for names that fit no row, several, or rows of different tables alone.
    """
    _check_names(found, attack, metric)
    everything = [c for table in found for c in table.rows]
    for text in (one, two):
        if not any(_fits(c, text) for c in everything):
            names = dict.fromkeys(c.row.defense for c in everything)
            inner = dict.fromkeys(c.name for c in everything if c.row.defense == _parts(text)[0])
            raise UserError(did_you_mean("row", text, list(inner or names)))
    out = []
    for table in found:
        matches = [[c for c in table.rows if _fits(c, text)] for text in (one, two)]
        if not all(matches):
            continue
        for text, fitting in zip((one, two), matches, strict=True):
            if len(fitting) > 1:
                raise UserError(
                    f"'{text}' fits {len(fitting)} rows of {table.title}; give the setting: "
                    f"{', '.join(c.name for c in fitting)}."
                )
        first, second = matches[0][0], matches[1][0]
        if first is second:
            raise UserError(f"'{one}' and '{two}' are the same row, {first.name}.")
        made = compare(first, second, attack=attack, metric=metric)
        out.append(Ladder(table=table, comparisons=[made]))
    if not out:
        raise UserError(
            f"no table holds both '{one}' and '{two}'; rows of different tables have other victims."
        )
    return out


def _check_names(found: Sequence[Contest], attack: str | None, metric: str | None) -> None:
    known = {n for t in found for c in t.rows for by in c.cells.values() for n in by}
    check_wanted("attack", attack, known)
    check_wanted("metric", metric, METRICS)


def _parts(text: str) -> tuple[str, dict[str, str]]:
    """Defense and settings of `spm(epsilon=1.5)` or `spm:epsilon=1.5`."""
    name, _, inner = text.strip().removesuffix(")").replace("(", ":", 1).partition(":")
    pairs = [p for p in re.split(r",(?![^\[{]*[\]}])", inner) if p.strip()]
    return name.strip(), {k.strip(): v.strip() for k, _, v in (p.partition("=") for p in pairs)}


def _fits(row: Contender, text: str) -> bool:
    name, wanted = _parts(text)
    settings = row.row.settings
    return row.row.defense == name and all(
        k in settings and (short(settings[k]) == v or parse_value(v) == settings[k])
        for k, v in wanted.items()
    )
