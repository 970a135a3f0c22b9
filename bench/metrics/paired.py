"""Paired differences of two rows on the same victims: interval, test, variances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.metrics.intervals import LEVEL, Interval, interval_of
from bench.seeding import numpy_generator

ALPHA = 1 - LEVEL
EXACT_UP_TO = 32
"""Victims in all up to which every one of the 2^N sign patterns is counted."""
FLIPS = 9999
"""Random sign patterns beyond that; the smallest p-value is then 1 / 10000."""


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
