"""Paired differences of two rows on the same victims: interval, test, variances, power."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.metrics.intervals import LEVEL, Interval, interval_of
from bench.seeding import numpy_generator

ALPHA = 1 - LEVEL
POWER = 0.8
EXACT_UP_TO = 32
"""Victims in all up to which every one of the 2^N sign patterns is counted."""
FLIPS = 9999
"""Random sign patterns beyond that; the smallest p-value is then 1 / 10000."""
LARGEST = 10**6
"""More victims or seeds than this are not asked for."""
_CERTAIN = 100.0  # a noncentrality beyond which the power is 1 and scipy may overflow


@dataclass(frozen=True, kw_only=True)
class Variances:
    """Where the differences' variance comes from: d = mean + seed effect + victim effect.

    victims: variance of a victim's difference within its seed (0 or more). seeds: variance of the
    seed effect, by the method of moments, clamped at 0; None with one seed.
    """

    victims: float
    seeds: float | None

    @property
    def seed_share(self) -> float | None:
        """Part of one difference's variance that is between seeds, in [0, 1]."""
        if self.seeds is None:
            return None
        total = self.seeds + self.victims
        return self.seeds / total if total > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Paired:
    """What the differences on the same victims say.

    interval: mean difference over all victims with its 95 % interval, over seeds, or with one seed
    over victims. p: of the sign-flip test,
    which speaks of these trainings. p_seeds: of Student's t-test on the seeds' means, which speaks
    of trainings in general; None with one seed or where the means have no spread to judge by.
    seed_means: one mean difference per seed. victims: how many per seed. variances: None where no
    seed has two victims.
    """

    interval: Interval
    p: float
    p_seeds: float | None
    seed_means: tuple[float, ...]
    victims: tuple[int, ...]
    variances: Variances | None

    @property
    def seed_std(self) -> float | None:
        """Standard deviation of the seeds' mean differences (victims' share included)."""
        return float(np.std(self.seed_means, ddof=1)) if len(self.seed_means) > 1 else None


def paired(groups: Sequence[np.ndarray]) -> Paired:
    """Mean paired difference, its interval, tests, and the parts of its variance.

    groups: per seed one float array of differences, one value per victim. The results do not
    depend on the order of victims within a seed, and change sign with the differences.
    Raises ValueError for no values, an empty seed, or a value that is not finite.
    """
    groups = [np.sort(np.asarray(g, dtype=np.float64)) for g in groups]
    if not groups or any(g.ndim != 1 or not len(g) for g in groups):
        raise ValueError("paired differences need one or more values in every seed.")
    if not all(np.isfinite(g).all() for g in groups):
        raise ValueError("paired differences must be finite numbers.")
    means = tuple(float(g.mean()) for g in groups)
    interval = interval_of(groups)
    assert interval is not None  # there are values
    return Paired(
        interval=interval,
        p=sign_flip(np.concatenate(groups)),
        p_seeds=_t_test(means),
        seed_means=means,
        victims=tuple(len(g) for g in groups),
        variances=variances(groups),
    )


def sign_flip(differences: np.ndarray) -> float:
    """Two-sided p-value of the sign-flip (paired permutation) test of the mean difference.

    differences: float [N], of all seeds. Under the null hypothesis the two rows are exchangeable
    on every victim, so each difference has either sign with equal chance, independently of the
    others; nothing is assumed about its distribution. p is the share of the 2^N sign patterns
    whose mean is at least as far from 0: exact up to EXACT_UP_TO victims, beyond that from FLIPS
    random ones with the observed one added (so never 0). It conditions on the trainings, with
    many seeds as with one: it tells whether the rows differ on victims of the trainings that were
    run. Whether new trainings would differ alike, see `Paired.p_seeds`.
    """
    sizes = np.sort(np.abs(np.asarray(differences, dtype=np.float64)))
    observed = abs(math.fsum(differences)) - 1e-9 * float(sizes.sum())  # sums round differently
    if observed <= 0:
        return 1.0
    if len(sizes) <= EXACT_UP_TO:
        return _exact(sizes, observed)
    rng = numpy_generator(0, "paired signs")
    extreme, left = 0, FLIPS
    while left:
        rows = min(left, max(1, 2**22 // len(sizes)))
        signs = rng.integers(2, size=(rows, len(sizes)), dtype=np.int8)
        extreme += int((np.abs(2 * (signs @ sizes) - sizes.sum()) >= observed).sum())
        left -= rows
    return (1 + extreme) / (1 + FLIPS)


def _exact(sizes: np.ndarray, observed: float) -> float:
    """Share of all sign patterns with |sum| >= observed: sums of one half of the victims are
    looked up among the sorted sums of the other."""
    one, two = (_signed_sums(part) for part in (sizes[::2], sizes[1::2]))
    two.sort()
    above = len(two) - np.searchsorted(two, observed - one, side="left")
    return min(1.0, 2 * int(above.sum()) / (len(one) * len(two)))  # below 0 it is the same


def _signed_sums(values: np.ndarray) -> np.ndarray:
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def _t_test(means: Sequence[float]) -> float | None:
    spread = float(np.std(means, ddof=1)) if len(means) > 1 else 0.0
    if spread <= 1e-12 * max(map(abs, means)):
        return None
    from scipy.special import stdtr

    t = float(np.mean(means)) / (spread / math.sqrt(len(means)))
    return float(2 * stdtr(len(means) - 1, -abs(t)))


def variances(groups: Sequence[np.ndarray]) -> Variances | None:
    """Variance components of a one-way random-effects model, by the method of moments.

    groups: per seed one float array. victims: the mean square within seeds. seeds: (mean square
    between - within) / n0 with n0 = (N - sum n^2 / N) / (S - 1), clamped at 0 (Searle, Casella
    and McCulloch, Variance Components, 1992, ch. 3). None where no seed has two victims.
    """
    sizes = np.array([len(g) for g in groups])
    total = int(sizes.sum())
    if total == len(groups):
        return None
    within = sum(float(((g - g.mean()) ** 2).sum()) for g in groups) / (total - len(groups))
    if len(groups) == 1:
        return Variances(victims=within, seeds=None)
    grand = float(np.concatenate(list(groups)).mean())
    square = sum(n * (float(g.mean()) - grand) ** 2 for n, g in zip(sizes, groups, strict=True))
    weight = (total - float((sizes**2).sum()) / total) / (len(groups) - 1)
    between = max(0.0, (float(square) / (len(groups) - 1) - within) / weight)
    return Variances(victims=within, seeds=between)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979): rejecting those <= 5 % errs in any of them
    with at most 5 % chance, however the tests depend on each other."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, steps)
    return [float(a) for a in adjusted]


def least_victims(*, comparisons: int = 1, level: float = ALPHA) -> int:
    """Victims in all below which no sign-flip test can reach the level, whatever the effect: its
    smallest p is 2 / 2^N, which Holm multiplies by the number of comparisons."""
    return math.ceil(math.log2(2 * comparisons / level) - 1e-9)


# --- power ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SampleSize:
    """What would show an effect with 80 % power at level 5 %.

    victims: per seed, at the present number of seeds; seeds: at the present victims per seed,
    None with one seed, whose spread is unknown. None means none is enough (up to LARGEST).
    blocked: the spread between seeds alone prevents it, so that victims cannot help.
    """

    effect: float
    victims: int | None
    seeds: int | None
    blocked: bool


def power(
    effect: float, *, spread: Variances, seeds: int, victims: float, level: float = ALPHA
) -> float:
    """Power of a two-sided paired t-test for a true mean difference.

    With one seed: the t-test on its victims (victims - 1 degrees of freedom), which speaks of that
    training. With more: the t-test on the seeds' means (seeds - 1), whose variance is
    spread.seeds / seeds + spread.victims / (seeds * victims). Exact for normal effects, by the
    noncentral t distribution. victims: per seed, 2 or more with one seed; infinity is allowed.
    Raises ValueError for several seeds without spread.seeds.
    """
    from scipy import stats

    if seeds > 1 and spread.seeds is None:
        raise ValueError("the power over several seeds needs the variance between seeds.")
    if seeds == 1:
        variance, freedom = spread.victims / victims, victims - 1
    else:
        variance = ((spread.seeds or 0.0) + spread.victims / victims) / seeds
        freedom = seeds - 1
    away = abs(effect) / math.sqrt(variance) if variance > 0 else math.inf
    away = min(away, _CERTAIN) if effect else 0.0
    if math.isinf(freedom):
        return 1.0 if effect else level
    # t squared is a noncentral F, whose tail scipy computes where its noncentral t overflows
    return float(stats.ncf.sf(stats.t.isf(level / 2, freedom) ** 2, 1, freedom, away**2))


def victims_needed(
    effect: float,
    *,
    spread: Variances,
    seeds: int,
    victims: int,
    level: float = ALPHA,
    target: float = POWER,
) -> SampleSize | None:
    """How many victims, or seeds, a two-sided paired test needs to show a difference.

    effect: the mean difference that is to be shown; spread, seeds, victims (per seed): as they
    are now. Never fewer than the sign-flip test needs (`least_victims`). None for no effect, which
    no number shows. An effect that was observed is itself noisy, so that the answer is rough: give
    the interval's end nearest to 0 for a cautious one.
    """
    if effect == 0:
        return None

    def with_victims(n: float) -> float:
        return power(effect, spread=spread, seeds=seeds, victims=n, level=level)

    def with_seeds(n: int) -> float:
        return power(effect, spread=spread, seeds=n, victims=victims, level=level)

    least = least_victims(level=level)
    blocked = with_victims(math.inf) < target
    return SampleSize(
        effect=effect,
        victims=None if blocked else _least(with_victims, target, max(2, -(-least // seeds))),
        seeds=None if seeds == 1 else _least(with_seeds, target, max(2, -(-least // victims))),
        blocked=blocked,
    )


def _least(power_of: Callable[[int], float], target: float, start: int) -> int | None:
    """The least number >= start, up to LARGEST, of which the power reaches the target."""
    low, high = start - 1, start
    while power_of(high) < target:
        if high >= LARGEST:
            return None
        low, high = high, min(2 * high, LARGEST)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle) >= target else (middle, high)
    return high
