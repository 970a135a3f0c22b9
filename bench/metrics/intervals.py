"""Means with 95 % bootstrap intervals over seeds and, within a seed, over victims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bench.seeding import numpy_generator

RESAMPLES = 2000
LEVEL = 0.95
_AT_ONCE = 128
"""Entries that are resampled together: enough to amortise each step, few enough for the cache."""
_GATHERED = 1 << 17
"""Values that one step gathers."""


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
    return bootstraps([groups])[0]


def bootstraps(entries: Sequence[Sequence[np.ndarray]]) -> list[Interval | None]:
    """`bootstrap` of every entry, much faster than one by one and to the last bit the same.

    The stream is fixed, so entries of equally long groups have the same resamples: they are drawn
    once, and equal values are resampled once.
    """
    found: list[Interval | None] = [None] * len(entries)
    alike: dict[tuple[int, ...], dict[bytes, list[int]]] = {}
    for place, groups in enumerate(entries):
        kept = [np.asarray(g, dtype=np.float64) for g in groups if len(g)]
        if kept:
            values = alike.setdefault(tuple(map(len, kept)), {})
            values.setdefault(np.concatenate(kept).tobytes(), []).append(place)
    for sizes, values in alike.items():
        table = np.frombuffer(b"".join(values)).reshape(len(values), -1)
        for places, interval in zip(values.values(), _intervals(table, sizes), strict=True):
            for place in places:
                found[place] = interval
    return found


def _intervals(table: np.ndarray, sizes: tuple[int, ...]) -> Iterator[Interval]:
    """The interval of each row of table [entries, values of all groups]."""
    for start in range(0, len(table), _AT_ONCE):
        some = table[start : start + _AT_ONCE]
        means = np.ascontiguousarray(_means(some, sizes).T)
        mean = some.mean(axis=1)
        lo, hi = _percentiles(means)
        lo, hi = (np.where(np.isnan(mean), np.nan, end) for end in (lo, hi))
        ends = (mean, np.minimum(lo, mean), np.maximum(hi, mean))
        for middle, low, high in zip(*(e.tolist() for e in ends), strict=True):
            yield Interval(mean=middle, lo=low, hi=high)


def _means(table: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """[R, entries]: the mean of every resample of every entry."""
    values = np.ascontiguousarray(table.T)
    means = np.empty((RESAMPLES, len(table)))
    done = 0
    for places in _draws(sizes):
        length, count = places.shape
        step = max(1, _GATHERED // (length * len(table)))
        for start in range(0, count, step):
            some = places[:, start : start + step]
            np.divide(
                _sum(values.take(some, axis=0)), length, out=means[done : done + some.shape[1]]
            )
            done += some.shape[1]
    return means


@lru_cache(maxsize=16)
def _draws(sizes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """The resamples of groups of these sizes, as places in the concatenated groups: for each
    length that occurs an array [length, resamples]. Their order means nothing to percentiles."""
    rng = numpy_generator(0, "bootstrap")
    if len(set(sizes)) == 1:
        seeds = rng.integers(len(sizes), size=(RESAMPLES, len(sizes)))
        victims = rng.integers(sizes[0], size=(RESAMPLES, len(sizes), sizes[0]))
        places = (seeds[..., None] * sizes[0] + victims).reshape(RESAMPLES, -1)
        return (np.ascontiguousarray(places.T),)
    starts = np.cumsum([0, *sizes])
    drawn: dict[int, list[np.ndarray]] = {}
    for _ in range(RESAMPLES):
        groups = rng.integers(len(sizes), size=len(sizes))
        one = [starts[g] + rng.integers(sizes[g], size=sizes[g]) for g in groups]
        drawn.setdefault(sum(map(len, one)), []).append(np.concatenate(one))
    return tuple(np.stack(alike, axis=1) for alike in drawn.values())


def _sum(values: np.ndarray) -> np.ndarray:
    """The sum over the first axis of values, which are used up; added in NumPy's order for values
    that lie side by side, so that it does not depend on how many entries are summed at once."""
    count = len(values)
    if count < 8:
        total = values[0]
        for value in values[1:]:
            total += value
        return total
    if count > 128:
        half = count // 2 - count // 2 % 8
        return _sum(values[:half]) + _sum(values[half:])
    whole = count - count % 8
    parts = values[:8]
    for start in range(8, whole, 8):
        parts += values[start : start + 8]
    total = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + (
        (parts[4] + parts[5]) + (parts[6] + parts[7])
    )
    for value in values[whole:]:
        total += value
    return total


def _percentiles(means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of the interval of each row of means [entries, R], which are reordered: what
    np.percentile gives, by two partitions that need not be complete."""
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.array([tail, 100 - tail]) / 100 * (RESAMPLES - 1)
    above = int(high)
    means.partition(above, axis=1)
    hi = _between(means[:, above], means[:, above + 1 :].min(axis=1), high - above)
    rest, below = means[:, :above], int(low)
    rest.partition(below + 1, axis=1)
    lo = _between(rest[:, : below + 1].max(axis=1), rest[:, below + 1], low - below)
    return lo, hi


def _between(start: np.ndarray, end: np.ndarray, share: float) -> np.ndarray:
    """Linear interpolation, from the nearer end as NumPy does it."""
    step = end - start
    return start + step * share if share < 0.5 else end - step * (1 - share)


def bootstrap_shares(correct: Sequence[int], totals: Sequence[int]) -> Interval | None:
    """Pooled share of successes with an interval over seeds and test samples."""
    return _shares(tuple(correct), tuple(totals)) if totals else None


@lru_cache(maxsize=64)
def _shares(correct: tuple[int, ...], totals: tuple[int, ...]) -> Interval:
    """One training is asked about once per checkpoint."""
    rng = numpy_generator(0, "bootstrap", "shares")
    right, total = np.asarray(correct), np.asarray(totals)
    seeds = rng.integers(len(total), size=(RESAMPLES, len(total)))
    drawn = rng.binomial(total[seeds], (right / total)[seeds])
    shares = drawn.sum(axis=1) / total[seeds].sum(axis=1)
    lo, hi = np.percentile(shares, [2.5, 97.5])
    mean = float(right.sum() / total.sum())
    return Interval(mean=mean, lo=min(float(lo), mean), hi=max(float(hi), mean))
