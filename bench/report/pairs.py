"""Two rows of one leaderboard table against each other, victim by victim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from bench.errors import UserError
from bench.metrics.named import sign_of
from bench.metrics.paired import ALPHA, Paired, paired
from bench.records import AttackOutcome, AttackRecord, Row, TrainRecord
from bench.report.entries import PENDING, beyond, taken, values_of

CHOICE, BOUND = "attacker's choice", "upper bound"
"""What is compared where no single attack is asked for."""
SAME_FLOOR = 1e-6
"""Relative difference up to which two floors are of the same samples."""
PairVerdict = Literal["separated", "separated here", "not separated"]
Found = Mapping[str, Mapping[int, AttackOutcome]]
"""Attack -> seed -> record."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A row of the leaderboard with its records.

    Attributes:
        row: The row.
        trainings: Seed -> record of those that are done.
        cells: Threat -> attack -> seed -> record.
    """

    row: Row
    trainings: dict[int, TrainRecord]
    cells: Mapping[str, Found]

    @property
    def rank(self) -> int | None:
        """As the leaderboard's, None where it has none."""
        return self.row.rank

    @property
    def name(self) -> str:
        """spm(epsilon=1.5, variant=printed)."""
        return self.row.setting

    @property
    def by_truth(self) -> bool:
        """Whether it is ranked by the upper bound, for want of judged losses."""
        return self.row.choice is None

    def leaks(self, threat: str, metric: str) -> dict[int, np.ndarray]:
        """Seed -> leak per victim, as the row is ranked."""
        found = self.cells.get(threat, {})
        seeds = dict.fromkeys(s for by_seed in found.values() for s in by_seed)
        values = {
            s: leaks_of(found, s, metric, frozenset(found), by_truth=self.by_truth) for s in seeds
        }
        return {s: v for s, v in values.items() if v is not None}


def leaks_of(
    found: Found, seed: int, metric: str, names: frozenset[str], *, by_truth: bool
) -> np.ndarray | None:
    """Per victim of a seed the leak over the named attacks, as `taken` takes it: numbers that grow
    with the leak, None if no attack has the metric."""
    records = _done(found, seed, names)
    best = taken(records, metric, by_truth=by_truth)
    return None if best is None else sign_of(metric) * best[0]


def _done(found: Found, seed: int, names: frozenset[str]) -> dict[str, AttackRecord]:
    records = {n: by_seed.get(seed, PENDING) for n, by_seed in found.items() if n in names}
    return {n: r for n, r in records.items() if isinstance(r, AttackRecord)}


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
    notes: tuple[str, ...]

    @property
    def verdict(self) -> PairVerdict:
        """See `verdict_of`."""
        return verdict_of(self.difference.p, self.difference.p_seeds)

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
            "p_seeds": found.p_seeds,
            "seed_std": found.seed_std,
            "variance_victims": None if spread is None else spread.victims,
            "variance_seeds": None if spread is None else spread.seeds,
            "seed_share": None if spread is None else spread.seed_share,
            "verdict": self.verdict,
            "accuracy_difference": None
            if self.accuracy is None
            else {"mean": self.accuracy.mean, **asdict(self.accuracy)},
            "notes": list(self.notes),
        }


def _named(row: Contender) -> dict[str, Any]:
    return {"defense": row.row.defense, "settings": row.row.settings, "rank": row.rank}


# --- two rows ---------------------------------------------------------------------------------


def compare(
    first: Contender, second: Contender, *, attack: str | None = None, metric: str | None = None
) -> RowComparison:
    """Two rows of one table on the same victims.

    attack: one attack instead of what the rows are ranked by: the attacker's choice per victim, or
    the upper bound where one of the two has no judged losses. metric: by default SSIM, else MSE,
    else LnAcc, the first that both rows have. The worst case is taken over the attacks of one
    threat (other threats have other victims): the one under which either row leaks most. An attack
    that failed or has no record for one row in a seed counts for neither there; one that is not
    applicable to a row does not threaten it. Raises UserError if the rows have no seed and threat
    in common, or if their victims are not the same samples.
    """
    shared = _paired_leaks(first, second, attack, metric)
    sign = sign_of(shared.metric)
    seeds = tuple(shared.first)
    return RowComparison(
        first=first,
        second=second,
        attack=attack or (BOUND if _by_truth(first, second) else CHOICE),
        metric=shared.metric,
        threat=shared.threat,
        seeds=seeds,
        means=(sign * _mean(shared.first), sign * _mean(shared.second)),
        difference=shared.difference,
        accuracy=_accuracy(first, second, seeds),
        notes=tuple(_notes(first, second, shared, attack)),
    )


def verdict_of(p: float, p_seeds: float | None) -> PairVerdict:
    """What p-values show: separated on the victims of these trainings (sign-flip test) and over
    trainings (t-test on two or more seeds), or here alone, or not."""
    if p > ALPHA:
        return "not separated"
    return "separated" if p_seeds is not None and p_seeds <= ALPHA else "separated here"


def apart(first: Contender, second: Contender) -> bool:
    """Whether a row deserves a better rank than one of the same table that leaks more in the mean:
    the two alone are separated over all that was run, over trainings where several seeds were, and
    the first leaks less on what they have in common. Rows that have no victims in common are apart
    if their intervals are."""
    try:
        difference = _paired_leaks(first, second, None, None).difference
    except UserError:
        one, two = first.row.ranking, second.row.ranking
        if one is None or two is None or one.metric != two.metric:
            return True
        return one.interval.hi < two.interval.lo or two.interval.hi < one.interval.lo
    if difference.interval.mean >= 0:  # their means are over other seeds too
        return False
    verdict = verdict_of(difference.p, difference.p_seeds)
    if difference.p_seeds is None:  # one seed, or several that agree to the last digit
        return verdict != "not separated"
    return verdict == "separated"


def _by_truth(first: Contender, second: Contender) -> bool:
    return first.by_truth or second.by_truth


def _paired_leaks(
    first: Contender, second: Contender, attack: str | None, metric: str | None
) -> _Shared:
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
    chosen = max(
        found,
        key=lambda s: max(_beyond(first, s.threat, s.metric, v) for v in (s.first, s.second)),
    )
    _check_victims(first, second, chosen)
    return chosen


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """Leaks per victim of two rows under one threat, by the seeds that both have. left_out:
    (attack, seed) that counted for neither."""

    threat: str
    metric: str
    first: dict[int, np.ndarray]
    second: dict[int, np.ndarray]
    left_out: list[tuple[str, int]]

    @property
    def difference(self) -> Paired:
        """Of the first minus the second."""
        return paired([self.first[s] - self.second[s] for s in self.first])


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
        one, two = (
            _leaks_by(found, seed, metric, attack)
            if attack
            else leaks_of(found, seed, metric, names, by_truth=_by_truth(first, second))
            for found in both
        )
        if one is None or two is None:
            continue
        values[0][seed], values[1][seed] = one, two
        left_out += [(n, seed) for n in sorted(lost)]
    if not values[0]:
        return None
    return _Shared(
        threat=threat, metric=metric, first=values[0], second=values[1], left_out=left_out
    )


def _leaks_by(found: Found, seed: int, metric: str, attack: str) -> np.ndarray | None:
    """The leaks by one attack alone, also by one that reads no message."""
    record = _done(found, seed, frozenset([attack])).get(attack)
    known = record is not None and metric in record.values
    return sign_of(metric) * values_of(record, metric) if record and known else None


def _is_lost(found: Found, attack: str, seed: int) -> bool:
    """Whether an attack that was planned has no answer in a seed, for technical reasons."""
    record = found.get(attack, {}).get(seed, PENDING)
    return record.status not in ("done", "not_applicable")


def _mean(by_seed: Mapping[int, np.ndarray]) -> float:
    return float(np.concatenate(list(by_seed.values())).mean())


def _beyond(row: Contender, threat: str, metric: str, values: Mapping[int, np.ndarray]) -> float:
    """What values that grow with the leak are in the mean, above the floor of the threat."""
    floors = {s: f[metric] for s in values if metric in (f := _floors(row, threat, s))}
    floor = _mean(floors) if floors else None
    return beyond(sign_of(metric) * _mean(values), floor, metric)


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
        record = by_seed.get(seed, PENDING)
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


def _notes(
    first: Contender, second: Contender, shared: _Shared, attack: str | None
) -> Iterator[str]:
    seeds = {s for c in (first, second) for by in c.cells.values() for f in by.values() for s in f}
    missing = sorted(seeds - set(shared.first))
    if missing:
        yield f"Without seed {', '.join(map(str, missing))}, where one of the two has no figure."
    for name in dict.fromkeys(n for n, _ in shared.left_out):
        where = ", ".join(str(s) for n, s in shared.left_out if n == name)
        yield f"Without {name} in seed {where}, where it gave nothing for one of the two."
    for row in () if attack else (first, second):
        leaks = {t: v for t in row.cells if (v := row.leaks(t, shared.metric))}
        own = max(
            leaks, key=lambda t: _beyond(row, t, shared.metric, leaks[t]), default=shared.threat
        )
        if own != shared.threat:
            value = sign_of(shared.metric) * _mean(leaks[own])
            yield (
                f"{row.name} leaks most under threat {own} ({shared.metric} {value:.3g}), whose "
                "victims are others."
            )
