"""How well two samples of a mechanism's output can be told apart: a certified lower bound.

A mechanism is (epsilon, delta)-DP only if P(S | a) <= e^epsilon P(S | b) + delta for every event
S and neighbours a, b. An event is chosen on the first half of the draws and its probabilities are
bounded on the second half (Clopper-Pearson), so the bound holds however the event was found.
Source: Jagielski et al., arXiv:2006.07709; Nasr et al., arXiv:2101.04535.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, norm

Array = NDArray[np.float64]
Score = Callable[[Array], Array]
_SINGLES, _TOGETHER, _BINS = 8, 64, 16


@dataclass(frozen=True, kw_only=True)
class Separation:
    """An event that is likely under one input and rare under its neighbour.

    Attributes:
        statistic: What the event is a threshold on.
        likely: Lower bound of its probability under the one input.
        rare: Upper bound of its probability under the other; both hold together at the stated
            confidence.
        never: It did not happen under the other at all, so that more draws might show more.
        cap: The largest epsilon that so many draws can show.
    """

    statistic: str
    likely: float
    rare: float
    never: bool
    cap: float

    def epsilon(self, delta: float = 0.0) -> float:
        """Every (epsilon', delta) guarantee of the mechanism has epsilon' at least this."""
        if self.likely <= delta:
            return 0.0
        return max(0.0, math.log((self.likely - delta) / self.rare))

    def delta(self, epsilon: float) -> float:
        """Every (epsilon, delta') guarantee of the mechanism has delta' at least this."""
        if epsilon > 700:
            return 0.0
        return max(0.0, self.likely - math.exp(epsilon) * self.rare)


def cap(draws: int, *, confidence: float) -> float:
    """Return the largest epsilon that `separate` can certify: all of the second half is
    separated."""
    certified, miss = draws - draws // 2, (1 - confidence) / 2
    return max(0.0, math.log(miss) / certified - math.log(-math.expm1(math.log(miss) / certified)))


def separate(a: Array, b: Array, *, confidence: float, delta: float = 0.0) -> Separation:
    """Return the best event between outputs a, b [n, F] of two neighbouring inputs.

    A quarter of the rows fits statistics, a quarter chooses one with a threshold, half certifies.

    Args:
        a: Independent draws of one output, a row each, finite and at least 100.
        b: As many of the other.
        confidence: That the bounds hold together.
        delta: At which the threshold is to show the largest epsilon.
    """
    miss = (1 - confidence) / 2
    half = len(a) // 2
    fit, choose = slice(half // 2), slice(half // 2, half)
    best, event = -math.inf, None
    for name, score in _statistics(a[fit], b[fit]):
        quality, threshold, above, swap = _choose(
            score(a[choose]), score(b[choose]), miss=miss, delta=delta
        )
        if quality > best:
            best, event = quality, (name, score, threshold, above, swap)
    most = cap(len(a), confidence=confidence)
    if event is None:
        return Separation(statistic="none differs", likely=0.0, rare=1.0, never=False, cap=most)
    name, score, threshold, above, swap = event
    hits = [int(((score(s[half:]) > threshold) == above).sum()) for s in (a, b)]
    likely, rare = reversed(hits) if swap else hits
    n = len(a) - half
    low, _ = clopper_pearson(likely, n, miss=miss)
    _, high = clopper_pearson(rare, n, miss=miss)
    return Separation(statistic=name, likely=low, rare=high, never=rare == 0, cap=most)


def clopper_pearson(hits: int, draws: int, *, miss: float) -> tuple[float, float]:
    """One-sided lower and upper bounds of a probability, each wrong with chance at most `miss`."""
    low = 0.0 if hits == 0 else float(beta.ppf(miss, hits, draws - hits + 1))
    high = 1.0 if hits == draws else float(beta.isf(miss, hits + 1, draws - hits))
    return low, high


# --- choosing an event ----------------------------------------------------------------------


def _choose(a: Array, b: Array, *, miss: float, delta: float) -> tuple[float, float, bool, bool]:
    """Estimated epsilon of the best event {score > threshold} == above, with its threshold, and
    whether it is the likely one under b. Wilson's bounds stand in for Clopper and Pearson's."""
    a, b = np.sort(a), np.sort(b)
    values = np.unique(np.concatenate([a, b]))
    if len(values) < 2:
        return -math.inf, 0.0, True, False
    middles = values[:-1] + (values[1:] - values[:-1]) / 2
    last = len(middles) - 1
    tails = np.geomspace(1, last + 1, 32) - 1
    ranks = np.unique(np.concatenate([np.linspace(0, last, 96), tails, last - tails]).astype(int))
    thresholds = middles[ranks]
    above = [1 - np.searchsorted(s, thresholds, side="right") / len(s) for s in (a, b)]
    z, n = float(norm.isf(miss)), len(a)
    best = (-math.inf, 0.0, True, False)
    for up in (True, False):
        shares = above if up else [1 - s for s in above]
        for swap in (False, True):
            likely, rare = shares[::-1] if swap else shares
            low = np.maximum(_wilson(likely, n, z=-z) - delta, 1e-300)
            quality = np.log(low) - np.log(_wilson(rare, n, z=z))
            i = int(quality.argmax())
            if quality[i] > best[0]:
                best = (float(quality[i]), float(thresholds[i]), up, swap)
    return best


def _wilson(share: Array, n: int, *, z: float) -> Array:
    square = z * z / n
    spread = z * np.sqrt(share * (1 - share) / n + square / (4 * n))
    return np.asarray((share + square / 2 + spread) / (1 + square))


# --- statistics, fitted on the first quarter --------------------------------------------------


def _statistics(a: Array, b: Array) -> Iterator[tuple[str, Score]]:
    """Yield named scores of outputs. Columns that are constant over both samples are left out."""
    both = np.concatenate([a, b])
    varying = np.flatnonzero(both.min(axis=0) < both.max(axis=0))
    if len(varying) == 0:
        return

    def columns(x: Array) -> Array:
        return np.concatenate([x[:, varying], np.abs(x[:, varying])], axis=1)

    mean, std = columns(both).mean(axis=0), columns(both).std(axis=0)
    std = np.where(std > 0, std, np.inf)  # a magnitude may be constant where its value is not

    def standard(x: Array) -> Array:
        return np.asarray((columns(x) - mean) / std)

    za, zb = standard(a), standard(b)
    gap = za.mean(axis=0) - zb.mean(axis=0)
    within = np.sqrt((za.var(axis=0) + zb.var(axis=0)) / 2) + 1e-6
    order = np.argsort(-np.abs(gap) / within, kind="stable")
    for j in order[:_SINGLES].tolist():
        kind, index = ("|value|", j - len(varying)) if j >= len(varying) else ("value", j)
        yield f"{kind} {int(varying[index])}", partial(_column, standard, j)
    chosen = order[:_TOGETHER]
    spread = (np.cov(za[:, chosen].T) + np.cov(zb[:, chosen].T)) / 2
    ridge = np.atleast_2d(spread) + 1e-3 * np.eye(len(chosen))
    direction = np.linalg.solve(ridge, gap[chosen])
    yield "Fisher's direction", lambda x: np.asarray(standard(x)[:, chosen] @ direction)
    yield from _histogram_scores(a[:, varying], b[:, varying], varying)
    yield from _patterns(a[:, varying], b[:, varying], varying)


def _histogram_scores(a: Array, b: Array, varying: NDArray[np.intp]) -> Iterator[tuple[str, Score]]:
    """Yield log likelihood ratios of histograms: of single values, and their sum."""
    tables = []
    for j in range(a.shape[1]):
        pooled = np.concatenate([a[:, j], b[:, j]])
        values = np.unique(pooled)
        if len(values) <= _BINS:
            edges = values[:-1] + (values[1:] - values[:-1]) / 2
        else:
            edges = np.unique(np.quantile(pooled, np.linspace(0, 1, _BINS + 1)[1:-1]))
        counts = [
            np.bincount(np.searchsorted(edges, s[:, j]), minlength=len(edges) + 1) + 0.5
            for s in (a, b)
        ]
        ratio = np.log(counts[0]) - np.log(counts[1])
        divergence = float(((counts[0] - counts[1]) * ratio).sum())
        tables.append((divergence, int(varying[j]), edges, ratio))
    tables.sort(key=lambda t: -t[0])

    for t in tables[: _SINGLES // 2]:
        yield f"histogram of value {t[1]}", partial(_likelihood_ratio, [t])
    if len(tables) > 1:
        yield "histograms together", partial(_likelihood_ratio, tables[:_TOGETHER])


def _column(standard: Score, j: int, x: Array) -> Array:
    return np.asarray(standard(x)[:, j])


def _likelihood_ratio(tables: list[tuple[float, int, Array, Array]], x: Array) -> Array:
    total = np.zeros(len(x))
    for _, column, edges, ratio in tables:
        total += ratio[np.searchsorted(edges, x[:, column])]
    return total


def _patterns(a: Array, b: Array, varying: NDArray[np.intp]) -> Iterator[tuple[str, Score]]:
    """Yield the log likelihood ratio of whole outputs, where they repeat."""
    counts = [Counter(row.tobytes() for row in np.ascontiguousarray(s)) for s in (a, b)]
    if len(counts[0] | counts[1]) > len(a):
        return

    def score(x: Array) -> Array:
        rows = (row.tobytes() for row in np.ascontiguousarray(x[:, varying]))
        return np.array([math.log((counts[0][r] + 0.5) / (counts[1][r] + 0.5)) for r in rows])

    yield "frequency of the whole output", score
