"""Records with one-hot groups behind a linear layer, read off sums over several of them.

The layer's weight gradient summed over K records is G = E^T X, with E the errors [K, U] at its
outputs. In a one-hot group each record counts in one column, so that the group's columns hold the
sums of a partition of the K errors. So errors and categories are searched. Numeric columns are then
linear equations, to which softmax regression adds that an error tells its own logits. What stays
open is the mean of a Gaussian fitted to public records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

Array = NDArray[np.float64]
MOST = 8
"""Records of a sum: the subsets of one more are twice as many."""
DEVIATIONS = 6.0
"""Standard deviations of a sum's noise that are its tolerance."""
_TRIED = 64
"""Splits of each error that are tried."""
_RIDGE = 0.002
"""Added to the variance of public columns."""
_EXACT = 1e-9
"""Variance of what is exactly known."""


def find_groups(public: Array, columns: Array, total: Array, tolerance: float) -> list[range]:
    """Return the one-hot groups among the columns of public records [N, F].

    A column that is 0 in all of them may end one group or begin the next. A group ends where the
    gradient's columns [F, U] add up to its bias's [U], which is NaN where it was not seen.
    """
    groups, start = [], 0
    binary = ((public == 0) | (public == 1)).all(axis=0)
    for end in range(1, len(binary) + 1):
        if not binary[end - 1]:
            start = end
            continue
        while (public[:, start:end].sum(axis=1) > 1).any():  # a column of two values by itself
            start += 1
        fits = np.abs(columns[start:end].sum(axis=0) - total).max() <= tolerance
        last = end == len(binary) or not binary[end] or public[:, end].any()
        if (public[:, start:end].sum(axis=1) == 1).all() and (fits or last):
            groups.append(range(start, end))
            start = end
    return groups


def subset_sums(errors: Array) -> Array:
    """Return the sums [2^K, U] of all subsets of errors [K, U]: at n that of those in n's bits."""
    sums = np.zeros((1, errors.shape[1]))
    for error in errors:
        sums = np.concatenate([sums, sums + error])
    return sums


def find_errors(groups: Sequence[Array], samples: int, tolerance: float) -> Array | None:
    """Return the errors [K, U] of which every group's columns [n, U] are sums, or None.

    The search begins with the columns of the group that has most of them, and splits one after the
    other so that as many columns as possible become sums.
    """
    groups = [g[(np.abs(g) > tolerance).any(axis=1)] for g in groups]
    errors: Array = max(groups, key=len, default=np.zeros((0, 1)))
    if not 0 < len(errors) <= samples:
        return None
    columns = np.concatenate(groups)

    def gaps(errors: Array) -> Array:
        return np.abs(columns[:, None] - subset_sums(errors)).max(axis=2)

    for _ in range(samples - len(errors)):
        splits = []
        left = columns[gaps(errors).min(axis=1) > tolerance]
        for place, error in enumerate(errors if len(left) else ()):
            others = np.delete(errors, place, axis=0)
            parts = (left[:, None] - subset_sums(others)).reshape(-1, errors.shape[1])
            tree = KDTree(np.concatenate([parts, error - parts]))
            votes = tree.query_ball_point(parts, tolerance, p=np.inf, return_length=True)
            for part in parts[(-votes).argsort(kind="stable")[:_TRIED]]:
                splits.append(np.vstack([others, part, error - part]))
        if not splits:  # records of the same categories
            return None
        errors = max(splits, key=lambda split: (gaps(split).min(axis=1) <= tolerance).sum())
    if gaps(errors).min(axis=1).max() > tolerance:
        return None
    shares = (gaps(errors).argmin(axis=1)[:, None] >> np.arange(samples)) & 1
    return np.linalg.lstsq(shares.astype(float), columns, rcond=None)[0]


def assign(
    columns: Array, told: NDArray[np.bool_], errors: Array, tolerance: float
) -> list[int] | None:
    """Return the column of each record within a group, -1 where several unseen ones could be.

    None where the columns [n, U], as far as they were told, are no sums of a partition of the
    errors [K, U].
    """
    sums, samples = subset_sums(errors), len(errors)
    covers: list[tuple[float, int, dict[int, int]]] = [(0.0, 0, {})]
    for n in np.flatnonzero(told.any(axis=1)):
        gaps = np.abs(np.where(told[n], columns[n] - sums, 0.0)).max(axis=1)
        subsets = [0] if gaps[0] <= tolerance else np.flatnonzero(gaps <= tolerance).tolist()
        covers = [
            (gap + gaps[s], used | s, {**chosen, int(n): s})
            for gap, used, chosen in covers
            for s in subsets
            if not used & s
        ]
    unseen = np.flatnonzero(~told.any(axis=1))
    covers = [c for c in covers if len(unseen) or c[1] == 2**samples - 1]
    if not covers:
        return None
    chosen, rest = min(covers)[2], int(unseen[0]) if len(unseen) == 1 else -1
    return [next((n for n, s in chosen.items() if s >> k & 1), rest) for k in range(samples)]


def decode(
    gradient: Array, told: NDArray[np.bool_], public: Array, samples: int, tolerance: float,
    head: Array | None, listed: NDArray[np.bool_] | None = None,
) -> tuple[Array, Array] | None:  # fmt: skip
    """Return the records [K, F] behind a sum of gradients and their errors [K, U], or None.

    Args:
        gradient: Weight's and, as the last row, bias's [F + 1, U], U units of all releases.
        told: Which of it was seen.
        public: Public records [N, F].
        samples: K.
        tolerance: Largest error of a value.
        head: Of a layer that is the head, weight and, as the last column, bias in R releases
            [R, C, F + 1].
        listed: Of one record, which columns are not 0 [F], where its client said so.
    """
    columns, total = gradient[:-1], np.where(told[-1], gradient[-1], np.nan)
    groups = find_groups(public, np.where(told[:-1], columns, 0.0), total, tolerance)
    sums = []
    for group in groups:
        whole = columns[group][told[group].all(axis=1)]
        rest = total - whole.sum(axis=0)  # of all others
        sums.append(whole if np.isnan(rest).any() else np.vstack([whole, rest]))
    errors = find_errors(sums, samples, tolerance)
    if not groups or (errors is None and samples > 1):
        return None
    errors = np.zeros((1, len(total))) if errors is None else errors
    rows, values, std = list[Array](), list[float](), tolerance / DEVIATIONS
    variances = list[float]()

    def add(
        k: int | slice, column: int | slice, value: float, weights: Any = 1.0, std: float = 0.0
    ) -> None:
        """Weights times these columns of these records add up to the value."""
        row = np.zeros((samples, len(columns)))
        row[k, column] = weights
        rows.append(row)
        values.append(value)
        variances.append(std**2 + _EXACT)

    for group in groups:
        places = assign(columns[group], told[group], errors, tolerance)
        if places is None:
            return None
        if listed is not None and listed[group].sum() == 1:
            places = [int(listed[group].argmax())]
        for k, place in enumerate(places):
            add(k, slice(group.start, group.stop), 1.0)
            for number, column in enumerate(group):
                if place >= 0 or told[column].any():
                    add(k, column, float(number == place))
    for column in set(range(len(columns))).difference(*groups):
        for unit in np.flatnonzero(told[column]):
            add(slice(None), column, columns[column, unit], errors[:, unit], std)
    if head is not None and errors.any():  # p - y, and p the softmax of the record's logits
        each = errors.reshape(samples, *head.shape[:2])
        p = each + np.eye(head.shape[1])[each.sum(axis=1).argmin(axis=1)][:, None]
        p = p.clip(min=max(std, _EXACT))
        logits, far = np.log(p / p[..., :1]), std * np.hypot(1 / p, 1 / p[..., :1])
        relative = head - head[:, :1]
        for k, r, c in np.ndindex(*p.shape):
            weights, bias = relative[r, c, :-1], relative[r, c, -1]
            add(k, slice(None), logits[k, r, c] - bias, weights, far[k, r, c])
    mean = public.mean(axis=0)
    moved = np.stack(rows) @ (np.cov(public.T) + _RIDGE * np.eye(len(mean)))
    within = np.tensordot(moved, np.stack(rows), axes=([1, 2], [1, 2])) + np.diag(variances)
    rest = np.array(values) - (np.stack(rows) @ mean).sum(axis=1)
    return mean + np.tensordot(np.linalg.solve(within, rest), moved, axes=1), errors
