"""Does a row of a table differ from another? One test for overview, tables and `compare`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.metrics.intervals import LEVEL, Interval

ALPHA = 1 - LEVEL
Outcomes = Mapping[int, np.ndarray]
"""Seed -> one figure per victim."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A row's figures minus the reference's, on the seeds that both have.

    Attributes:
        interval: Mean difference with its 95 % interval, unadjusted; above 0 the row has more.
        seed_means: One mean difference per seed.
        victims: Number of victims of each seed.
        p: Two-sided p-value of this comparison alone.
        adjusted: The same after Holm's adjustment over the table.
    """

    interval: Interval
    seed_means: tuple[float, ...]
    victims: tuple[int, ...]
    p: float
    adjusted: float

    @property
    def separated(self) -> bool:
        """Whether the adjusted test says that the two differ."""
        return self.adjusted <= ALPHA

    def reverse(self) -> Difference:
        """Exchange the two rows."""
        interval = self.interval
        return replace(
            self,
            interval=Interval(mean=-interval.mean, lo=-interval.hi, hi=-interval.lo),
            seed_means=tuple(-mean for mean in self.seed_means),
        )


def differences(
    rows: Sequence[Outcomes], reference: int, paired: Sequence[bool] | None = None
) -> list[Difference | None]:
    """Compare every row of a table with one of them.

    Student's t on the seeds' mean differences. Three seeds tell little of their own spread, so
    the variance of a seed's mean difference is the larger of the row's own one and of two parts:
    that of victims within seeds, and the interaction of rows and seeds, pooled over the table
    (analysis of variance of rows by seeds). It has the degrees of freedom of the pooled part,
    (rows - 1)(seeds - 1). With one seed it is the variance over victims alone. No p-value is
    below the least of a permutation test on the victims: 2^(1 - n) of n pairs, 2 / C(n + m, n) of n
    and m other victims. p-values are adjusted over the table
    (S. Holm, A simple sequentially rejective multiple test procedure, 1979).

    Args:
        rows: Per row its figures.
        reference: Index of the row with which the others are compared.
        paired: Whether a row's victims are the reference's, in their order; by default all.

    Returns:
        Per row its difference from the reference; None for the reference itself and for rows
        that have no seed in common with it.
    """
    paired = [True] * len(rows) if paired is None else paired
    base = rows[reference]
    pooled, freedom = _interaction(
        [r for r, same in zip(rows, paired, strict=True) if same and _same_victims(r, base)]
    )
    compared: dict[int, Difference] = {}
    for place, (row, same) in enumerate(zip(rows, paired, strict=True)):
        seeds = sorted(set(row) & set(base))
        if place == reference or not seeds:
            continue
        means = np.array([row[s].mean() - base[s].mean() for s in seeds])
        within = float(np.mean([_victim_variance(row[s], base[s], same) for s in seeds]))
        sizes = tuple(len(row[s]) for s in seeds)
        interval, p = _test(means, within, sum(sizes) - len(seeds), pooled, freedom)
        n, others = sum(sizes), sum(len(base[s]) for s in seeds)
        least = 2.0 ** (1 - n) if same and n == others else 2 / math.comb(n + others, n)
        p = min(1.0, max(p, least))
        compared[place] = Difference(
            interval=interval, seed_means=tuple(means.tolist()), victims=sizes, p=p, adjusted=p
        )
    for place, p in zip(compared, holm([d.p for d in compared.values()]), strict=True):
        compared[place] = replace(compared[place], adjusted=p)
    return [compared.get(place) for place in range(len(rows))]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method, in the given order."""
    order = np.argsort(p_values, kind="stable")
    steps = [(len(order) - k) * p_values[i] for k, i in enumerate(order)]
    adjusted: list[float] = np.maximum.accumulate(steps)[np.argsort(order)].clip(max=1.0).tolist()
    return adjusted


def _same_victims(row: Outcomes, base: Outcomes) -> bool:
    """Return whether two rows have as many victims in the same seeds."""
    return {s: len(v) for s, v in row.items()} == {s: len(v) for s, v in base.items()}


def _interaction(rows: Sequence[Outcomes]) -> tuple[float, float]:
    """Variance of the interaction of rows and seeds beyond that of victims, for a difference of
    two rows, with the degrees of freedom of the mean square that it comes from."""
    seeds = sorted(rows[0])
    freedom = (len(rows) - 1) * (len(seeds) - 1)
    if not freedom:
        return 0.0, 0.0
    means = np.array([[row[s].mean() for s in seeds] for row in rows])
    square = _deviations(means) / freedom
    victims = np.mean([_residual(np.stack([row[s] for row in rows])) for s in seeds])
    return 2 * max(0.0, square - float(victims)), float(freedom)


def _residual(figures: np.ndarray) -> float:
    """Variance of a row's mean over the victims of one seed, from figures [rows, victims], without
    what rows have in common on a victim."""
    rows, victims = figures.shape
    if victims == 1:
        return 0.0
    return _deviations(figures) / ((rows - 1) * (victims - 1)) / victims


def _deviations(figures: np.ndarray) -> float:
    """Sum of squares of figures [rows, columns] beyond the means of rows and of columns."""
    left = figures - figures.mean(axis=1, keepdims=True) - figures.mean(axis=0) + figures.mean()
    return float((left**2).sum())


def _victim_variance(row: np.ndarray, base: np.ndarray, paired: bool) -> float:
    """Return the variance of the mean difference over the victims of one seed."""
    if paired and len(row) == len(base):
        return _variance_of_mean(row - base)
    return _variance_of_mean(row) + _variance_of_mean(base)


def _variance_of_mean(values: np.ndarray) -> float:
    return float(values.var(ddof=1)) / len(values) if len(values) > 1 else 0.0


def _test(
    means: np.ndarray, within: float, of_victims: int, pooled: float, freedom: float
) -> tuple[Interval, float]:
    """Student's t on the seeds' mean differences: interval and p-value. of_victims: degrees of
    freedom of `within`."""
    from scipy.special import stdtr, stdtrit

    seeds, mean = len(means), float(means.mean())
    if seeds > 1:
        freedom = freedom or seeds - 1.0
        variance = max(within + pooled, float(means.var(ddof=1)))
    else:
        freedom, variance = float(of_victims), within
    if not freedom:
        return Interval(mean=mean, lo=-math.inf, hi=math.inf), 1.0
    error = math.sqrt(variance / seeds)
    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    interval = Interval(mean=mean, lo=mean - half, hi=mean + half)
    if abs(mean) <= 1e-12 or not error:
        return interval, 0.0 if abs(mean) > 1e-12 else 1.0
    return interval, float(2 * stdtr(freedom, -abs(mean) / error))
