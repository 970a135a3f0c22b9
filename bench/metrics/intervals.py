"""Means with 95 % intervals: over seeds, or with one seed over the victims of that training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bench.errors import UserError

LEVEL = 0.95
_SKEW = 3.0
"""By which the degrees of freedom of victims are divided. A few skewed figures tell their own
spread badly; so few degrees as a third keep 95 % intervals of 8 to 32 exponential figures above
93 %, where Student's own have 90 % (docs/method.md has the table)."""
ANYWHERE = (-math.inf, math.inf)
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and the ends of its interval. Raises UserError where the mean is not between them."""

    mean: float
    lo: float
    hi: float

    def __post_init__(self) -> None:
        rounding = _ROUNDING * max(1.0, abs(self.mean))
        if self.lo > self.mean + rounding or self.hi < self.mean - rounding:
            raise UserError(
                f"an interval from {self.lo:g} to {self.hi:g} cannot be that of the mean "
                f"{self.mean:g}."
            )

    def to_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "lo": self.lo, "hi": self.hi}


def interval_of(
    groups: Sequence[np.ndarray], within: tuple[float, float] = ANYWHERE
) -> Interval | None:
    """Mean over all values with its interval, or None without a value.

    With several seeds it is Student's t interval on the seeds' means, which speaks of other
    trainings and victims; seeds of unequal size weigh by their victims, as in the mean. With one
    seed it speaks of other victims of the same training. One value alone has no spread: its ends
    are those of the range, or itself where there are none.

    Args:
        groups: One float array of per-victim values per seed.
        within: Least and largest value that the metric can take, where the interval is cut.
    """
    kept = [np.asarray(g, dtype=np.float64) for g in groups if len(g)]
    if not kept:
        return None
    mean = float(np.concatenate(kept).mean())
    if len(kept) > 1:
        return _over_seeds([float(g.sum()) for g in kept], [len(g) for g in kept], mean, within)
    (values,) = kept
    if len(values) == 1:
        lo, hi = (end if math.isfinite(end) else mean for end in within)
        return Interval(mean=mean, lo=lo, hi=hi)
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return _around(mean, _quantile(max(1.0, (len(values) - 1) / _SKEW)) * error, within)


def share_interval(correct: Sequence[int], totals: Sequence[int]) -> Interval | None:
    """Pooled share of successes of every seed, or None without a seed: over seeds, or with one seed
    over its test samples (Wilson's interval)."""
    if not totals:
        return None
    total = sum(totals)
    mean = sum(correct) / total
    if len(totals) == 1:
        square = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2 / total
        middle = (mean + square / 2) / (1 + square)
        half = math.sqrt(square * (mean * (1 - mean) + square / 4)) / (1 + square)
        return Interval(mean=mean, lo=min(middle - half, mean), hi=max(middle + half, mean))
    return _over_seeds(correct, totals, mean, (0.0, 1.0))


def _over_seeds(
    sums: Sequence[float], sizes: Sequence[int], mean: float, within: tuple[float, float]
) -> Interval:
    """Around the pooled mean, from each seed's sum and number of values."""
    seeds = len(sums)
    gaps = np.array(sums) - np.array(sizes) * mean
    error = math.sqrt(seeds / (seeds - 1) * float((gaps**2).sum())) / sum(sizes)
    return _around(mean, _quantile(seeds - 1.0) * error, within)


def _around(mean: float, half: float, within: tuple[float, float]) -> Interval:
    if math.isnan(mean):
        return Interval(mean=mean, lo=math.nan, hi=math.nan)
    lo, hi = max(mean - half, within[0]), min(mean + half, within[1])
    return Interval(mean=mean, lo=min(lo, mean), hi=max(hi, mean))


@lru_cache(maxsize=1024)
def _quantile(freedom: float) -> float:
    from scipy.special import stdtrit  # scipy is not needed to import a report

    return float(stdtrit(freedom, (1 + LEVEL) / 2))
