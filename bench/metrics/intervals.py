"""Means with 95 % intervals: over seeds and victims, or with one seed over its victims."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bench.errors import UserError

LEVEL = 0.95
_SKEW = 3.0
"""By which the degrees of freedom of one seed's unbounded figures are divided: few skewed ones tell
their own spread badly."""
ANYWHERE = (-math.inf, math.inf)
_ROUNDING = 1e-9
_NODES = 96
"""Of the quadrature in `_mean_cdf`; more change no end of an interval by 1e-6."""


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

    @property
    def half_width(self) -> float:
        return (self.hi - self.lo) / 2


def interval_of(
    groups: Sequence[np.ndarray], within: tuple[float, float] = ANYWHERE
) -> Interval | None:
    """Return the mean over all values with its 95 % interval, or None without a value.

    The interval is the wider of two:

    - Student's t over the seeds' means, which speaks of other trainings and victims (with several
      seeds; seeds of unequal size weigh by their victims);
    - Gaffke's interval of a bounded mean over the victims, as if they were independent. Of
      outcomes that are all or nothing it is Clopper and Pearson's, so it does not collapse where
      every victim has the same outcome. Only where `within` is finite.

    Where neither exists (one seed, no bounds) it is Student's over the victims. docs/method.md has
    the coverage of both together.

    Args:
        groups: One float array of per-victim values per seed.
        within: Least and largest value that the figure can take.

    Source: N. Gaffke, Three test statistics for a nonparametric one-sided hypothesis on the mean
    of a nonnegative variable, Mathematical Methods of Statistics 14 (2005).

    >>> interval_of([np.ones(12)], (0.0, 1.0)).lo.__round__(3)  # as Clopper and Pearson's
    0.735
    """
    kept = [np.asarray(g, dtype=np.float64) for g in groups if len(g)]
    if not kept:
        return None
    values = np.concatenate(kept)
    mean = float(values.mean())
    if math.isnan(mean):
        return Interval(mean=mean, lo=math.nan, hi=math.nan)
    lo, hi = mean, mean
    if len(kept) > 1:
        lo, hi = _t_interval([float(g.sum()) for g in kept], [len(g) for g in kept])
    if all(map(math.isfinite, within)):
        ends = bound_mean(values, within)
        lo, hi = min(lo, ends[0]), max(hi, ends[1])
    elif len(kept) == 1 and len(values) > 1:
        freedom = max(1.0, (len(values) - 1) / _SKEW)
        half = _quantile(freedom) * float(values.std(ddof=1)) / math.sqrt(len(values))
        lo, hi = mean - half, mean + half
    return Interval(mean=mean, lo=min(max(lo, within[0]), mean), hi=max(min(hi, within[1]), mean))


def accuracy_interval(groups: Sequence[np.ndarray]) -> Interval | None:
    """Return the mean of accuracies of several networks with Student's interval, in [0, 1]: each is
    a mean over many test samples already. groups: as of `interval_of`."""
    raw = interval_of(groups)
    return raw and Interval(mean=raw.mean, lo=max(0.0, raw.lo), hi=min(1.0, raw.hi))


def share_interval(correct: Sequence[int], totals: Sequence[int]) -> Interval | None:
    """Return the pooled share of successes of every seed, or None without a seed: Student's t over
    seeds, or with one seed Wilson's interval over its test samples."""
    if not totals:
        return None
    total = sum(totals)
    mean = sum(correct) / total
    lo, hi = wilson(mean, total) if len(totals) == 1 else _t_interval(correct, totals)
    return Interval(mean=mean, lo=max(0.0, min(lo, mean)), hi=min(1.0, max(hi, mean)))


def drop_interval(before: Sequence[float], after: Sequence[float], samples: int) -> Interval | None:
    """Return the mean drop before - after with its interval, or None without a pair.

    Student's t over the seeds' differences; with one seed Newcombe's interval of a difference of
    two shares of `samples` test samples each, as if they were different samples (wider than for
    the same ones). Two trainings that agree have no drop, exactly.

    Source: R. Newcombe, Interval estimation for the difference between independent proportions,
    Statistics in Medicine 17 (1998), method 10.
    """
    if not before:
        return None
    drops = np.array(before) - np.array(after)
    mean = float(drops.mean())
    if len(drops) > 1:
        lo, hi = _t_interval(drops.tolist(), [1] * len(drops))
    elif mean == 0:
        lo, hi = 0.0, 0.0
    else:
        (first,), (second,) = before, after
        (l1, u1), (l2, u2) = wilson(first, samples), wilson(second, samples)
        lo = mean - math.hypot(first - l1, u2 - second)
        hi = mean + math.hypot(u1 - first, second - l2)
    return Interval(mean=mean, lo=max(-1.0, min(lo, mean)), hi=min(1.0, max(hi, mean)))


def wilson(share: float, total: int) -> tuple[float, float]:
    """Return the ends of Wilson's interval of a share of `total` samples."""
    square = _quantile(math.inf) ** 2 / total
    middle = (share + square / 2) / (1 + square)
    half = math.sqrt(square * (share * (1 - share) + square / 4)) / (1 + square)
    return middle - half, middle + half


def bound_mean(values: np.ndarray, within: tuple[float, float]) -> tuple[float, float]:
    """Return the ends of Gaffke's interval for the mean of independent values in a range.

    The upper end is a quantile of the mean of the values and the range's largest, weighed by a
    flat Dirichlet distribution; the lower end likewise. Values outside the range widen it.
    """
    low, high = min(within[0], float(values.min())), max(within[1], float(values.max()))
    scaled = np.sort((values - low) / (high - low))
    upper = _upper_end(tuple(scaled.tolist()))
    lower = 1 - _upper_end(tuple((1 - scaled[::-1]).tolist()))
    return low + (high - low) * lower, low + (high - low) * upper


@lru_cache(maxsize=4096)
def _upper_end(values: tuple[float, ...]) -> float:
    """Return the point below which a flat Dirichlet mean of the values in [0, 1] and 1 is with 97.5
    %."""
    from scipy.optimize import brentq

    points = np.array([*values, 1.0])
    if points.min() == 1.0:
        return 1.0
    least, confidence = float(points.mean()), (1 + LEVEL) / 2
    if _mean_cdf(points, 1 - 1e-9) <= confidence:
        return 1.0
    return float(brentq(lambda t: _mean_cdf(points, t) - confidence, least, 1 - 1e-9, xtol=1e-6))


def _mean_cdf(points: np.ndarray, t: float) -> float:
    """P(sum w_i x_i <= t) for flat Dirichlet weights w: that of sum (x_i - t) G_i <= 0 for
    exponential G_i, by inversion of the characteristic function (Imhof 1961)."""
    gaps = points - t
    angle, weight = _nodes()
    u = np.tan(angle) / np.sqrt((gaps**2).sum())
    turned = u[:, None] * gaps
    phase = np.arctan(turned).sum(axis=1)
    size = np.exp(-0.5 * np.log1p(turned**2).sum(axis=1))
    return (
        0.5 - float((weight * np.sin(phase) * size / np.sin(angle) / np.cos(angle)).sum()) / math.pi
    )


@lru_cache(maxsize=1)
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss's quadrature over (0, pi / 2)."""
    x, weight = np.polynomial.legendre.leggauss(_NODES)
    return (x + 1) * math.pi / 4, weight * math.pi / 4


def _t_interval(sums: Sequence[float], sizes: Sequence[int]) -> tuple[float, float]:
    """Return the ends of Student's interval around the pooled mean, from each seed's sum and
    size."""
    seeds, total = len(sums), sum(sizes)
    mean = sum(sums) / total
    gaps = np.array(sums) - np.array(sizes) * mean
    error = math.sqrt(seeds / (seeds - 1) * float((gaps**2).sum())) / total
    half = _quantile(seeds - 1.0) * error
    return mean - half, mean + half


@lru_cache(maxsize=1024)
def _quantile(freedom: float) -> float:
    from scipy.special import ndtri, stdtrit  # scipy is not needed to import a report

    level = (1 + LEVEL) / 2
    return float(ndtri(level) if math.isinf(freedom) else stdtrit(freedom, level))
