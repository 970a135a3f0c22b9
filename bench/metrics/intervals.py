"""Means with 95 % bootstrap intervals over seeds and, within a seed, over victims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.seeding import numpy_generator

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    mean: float
    lo: float
    hi: float

    def to_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "lo": self.lo, "hi": self.hi}


def bootstrap(groups: Sequence[np.ndarray]) -> Interval | None:
    """Mean over all values and its percentile interval, or None without a value.

    groups: one float array of per-victim values per seed. Seeds are resampled, then victims
    within each drawn seed (with one seed, victims alone). The resampling has its own fixed
    stream, so a report made twice shows the same figures.
    """
    groups = [np.asarray(g, dtype=np.float64) for g in groups if len(g)]
    if not groups:
        return None
    rng = numpy_generator(0, "bootstrap")
    means = np.empty(RESAMPLES)
    if len({len(g) for g in groups}) == 1:
        table = np.stack(groups)
        seeds = rng.integers(len(table), size=(RESAMPLES, len(table)))
        victims = rng.integers(table.shape[1], size=(RESAMPLES, *table.shape))
        means = table[seeds[..., None], victims].mean(axis=(1, 2))
    else:
        for i in range(RESAMPLES):
            drawn = [groups[j] for j in rng.integers(len(groups), size=len(groups))]
            means[i] = np.concatenate([rng.choice(g, size=len(g)) for g in drawn]).mean()
    tail = 100 * (1 - LEVEL) / 2
    lo, hi = np.percentile(means, [tail, 100 - tail])
    mean = float(np.concatenate(groups).mean())
    return Interval(mean=mean, lo=min(float(lo), mean), hi=max(float(hi), mean))


def bootstrap_shares(correct: Sequence[int], totals: Sequence[int]) -> Interval | None:
    """Pooled share of successes with an interval over seeds and test samples."""
    if not totals:
        return None
    rng = numpy_generator(0, "bootstrap", "shares")
    right, total = np.asarray(correct), np.asarray(totals)
    seeds = rng.integers(len(total), size=(RESAMPLES, len(total)))
    drawn = rng.binomial(total[seeds], (right / total)[seeds])
    shares = drawn.sum(axis=1) / total[seeds].sum(axis=1)
    lo, hi = np.percentile(shares, [2.5, 97.5])
    mean = float(right.sum() / total.sum())
    return Interval(mean=mean, lo=min(float(lo), mean), hi=max(float(hi), mean))
