"""Records of one-hot groups behind a linear layer, read off sums over several of them.

The layer's weight gradient summed over K records is G = E^T X, with E the errors [K, U] at its
outputs. In a one-hot group each record counts in one column, so that the group's columns hold the
sums of a partition of the K errors, and add up to the bias gradient. So errors and categories are
searched. Numeric columns are then linear equations, to which softmax regression adds that an error
tells its own logits. What stays open is the mean of a Gaussian fitted to public records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MOST = 8
"""Records of a sum: the subsets of one more are twice as many."""
_BEAM = 32
"""Sets of errors that are kept while they are searched."""
_RIDGE = 0.002
"""Added to the variance of public columns."""
DEVIATIONS, ROUNDING = 6.0, 1e-6
"""Of the tolerance of a sum: standard deviations of its noise, and its rounding in float32."""
EXACT = 1e-3
"""Noise that is taken for none, in units of the upload's root mean square."""
_JITTER = 1e-9
"""Variance of what is exactly known."""


def find_groups(public: Array, columns: Array, total: Array, tolerance: float) -> list[range]:
    """Return the one-hot groups among the columns of public records [N, F].

    Columns that are 0 in all public records may end one group or begin the next. A group ends
    where the columns [U, F] of the gradient add up to its total [U], NaN where they were not seen.
    """
    groups, start = [], 0
    is_binary = ((public == 0) | (public == 1)).all(axis=0)
    for end in range(1, public.shape[1] + 1):
        if not is_binary[end - 1]:
            start = end
            continue
        while (public[:, start:end].sum(axis=1) > 1).any():  # a column of two values by itself
            start += 1
        each = public[:, start:end].sum(axis=1)
        more = end < public.shape[1] and is_binary[end]
        gap = np.abs(columns[:, start:end].sum(axis=1) - total)
        if (each == 1).all() and ((gap <= tolerance).all() or not more or public[:, end].any()):
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
    other so that as many columns as possible become sums. Sets of errors are kept side by side.
    """
    groups = [g[(np.abs(g) > tolerance).any(axis=1)] for g in groups]
    richest = max(groups, key=len)
    columns = np.concatenate(groups)
    if not 0 < len(richest) <= samples:
        return None
    axis = np.linalg.svd(columns, full_matrices=False)[2][0]
    beam = [richest]
    for _ in range(samples - len(richest)):
        splits = [s for errors in beam for s in _splits(errors, columns, axis, tolerance)]
        splits.sort(key=lambda errors: -int(_explained(errors, columns, tolerance)[0].sum()))
        beam = splits[:_BEAM]
    for errors in beam:
        explained, subsets = _explained(errors, columns, tolerance)
        if explained.all():
            shares = (subsets[:, None] >> np.arange(samples)) & 1
            return np.linalg.lstsq(shares.astype(float), columns, rcond=None)[0]
    return None


def _explained(errors: Array, columns: Array, tolerance: float) -> tuple[NDArray[np.bool_], Array]:
    """Which columns [n, U] are sums of errors, and of which subsets."""
    gap = np.abs(columns[:, None] - subset_sums(errors)).max(axis=2)
    return gap.min(axis=1) <= tolerance, gap.argmin(axis=1)


def _splits(errors: Array, columns: Array, axis: Array, tolerance: float) -> list[Array]:
    """Return the errors [K, U] with one of them split in two, in the ways that make most of the
    columns [n, U] sums, as their values along an axis [U] show."""
    left = columns[~_explained(errors, columns, tolerance)[0]]
    splits = []
    for place, error in enumerate(errors):
        others = np.delete(errors, place, axis=0)
        part = (left[:, None] - subset_sums(others)).reshape(-1, len(axis))
        whose = np.arange(len(left)).repeat(2 ** len(others))
        key = np.minimum(part @ axis, (error - part) @ axis)
        order = key.argsort()
        label = np.cumsum(np.diff(key[order], prepend=-np.inf) > tolerance)
        votes = np.bincount(np.unique(np.stack([label, whose[order]]), axis=1)[0])
        for group in votes.argsort(kind="stable")[::-1][:_BEAM]:
            if votes[group]:
                one = part[order[label.searchsorted(group)]]
                if min(np.abs(one).max(), np.abs(error - one).max()) > tolerance:
                    splits.append(np.concatenate([others, [one, error - one]]))
    return splits


def assign(
    columns: Array, seen: NDArray[np.bool_], errors: Array, tolerance: float
) -> list[int] | None:
    """Return the column of each record within a group, -1 where several unseen ones could be, from
    its columns [n, U]; None where they are no sums of a partition of the errors [K, U]."""
    sums, samples = subset_sums(errors), len(errors)
    told = seen.any(axis=1)
    gaps = [
        np.abs(np.where(s, c - sums, 0.0)).max(axis=1) for c, s in zip(columns, seen, strict=True)
    ]
    fits = {
        n: [0] if gaps[n][0] <= tolerance else np.flatnonzero(gaps[n] <= tolerance).tolist()
        for n in np.flatnonzero(told)
    }
    unseen = np.flatnonzero(~told)
    whole = 2**samples - 1
    covers = [(0.0, 0, {})]
    for n, subsets in fits.items():
        covers = [
            (gap + gaps[n][s], used | s, {**chosen, n: s} if s else chosen)
            for gap, used, chosen in covers
            for s in subsets
            if not used & s
        ]
    covers = [c for c in covers if len(unseen) or c[1] == whole]
    if not covers:
        return None
    chosen = min(covers, key=lambda c: c[0])[2]
    rest = int(unseen[0]) if len(unseen) == 1 else -1
    return [next((int(n) for n, s in chosen.items() if s >> k & 1), rest) for k in range(samples)]


def decode(
    gradient: Array,
    seen: NDArray[np.bool_],
    public: Array,
    labels: NDArray[np.int64],
    classes: int,
    samples: int,
    tolerance: float,
    head: tuple[Array, ...] | None,
) -> tuple[Array, Array] | None:
    """Return the records [K, F] behind a sum of gradients and their errors [K, U], or None.

    Args:
        gradient: Weight's and, as the last column, bias's [U, F + 1], releases below one another.
        seen: Which of it was seen.
        public: Public records [N, F].
        labels: Theirs [N].
        samples: K.
        tolerance: Largest error of a sum.
        head: Weights [R, C, F] and biases [R, C] of the layer in R releases, where it is the head.
    """
    if head is not None:  # errors of all classes add up to 0
        by_class = np.where(seen, gradient, 0.0).reshape(-1, classes, gradient.shape[1])
        told = seen.reshape(by_class.shape)
        restored = ~told & (told.sum(axis=1, keepdims=True) == classes - 1)
        by_class = np.where(restored, -by_class.sum(axis=1, keepdims=True), by_class)
        gradient, seen = by_class.reshape(gradient.shape), seen | restored.reshape(seen.shape)
    columns, told = gradient[:, :-1].T, seen[:, :-1].T
    total = np.where(seen[:, -1], gradient[:, -1], np.nan)
    groups = find_groups(public, np.where(told, columns, 0.0).T, total, tolerance)
    sums = []
    for group in groups:
        whole = told[group].all(axis=1)
        rest = total - columns[group][whole].sum(axis=0)  # of all others together
        sums.append(np.vstack([columns[group][whole], *([] if np.isnan(rest).any() else [rest])]))
    errors = find_errors(sums, samples, tolerance) if groups else None
    if errors is None:
        return None
    chosen = [assign(columns[g], told[g], errors, tolerance) for g in groups]
    equations = _Equations(public, labels, classes, samples)
    for group, places in zip(groups, chosen, strict=True):
        if places is None:
            return None
        for record, place in enumerate(places):
            for number, column in enumerate(group):
                if place >= 0 or told[column].any():
                    equations.add(record, column, float(number == place))
            if place < 0:
                equations.add(record, list(group), 1.0)
    std = tolerance / DEVIATIONS
    for column in set(range(len(columns))) - {c for g in groups for c in g}:
        left, size, right = np.linalg.svd(errors[:, told[column]], full_matrices=False)
        for mix, scale, value in zip(
            left.T, size, right @ columns[column][told[column]], strict=True
        ):
            if scale > tolerance:
                equations.add(slice(None), column, value / scale, std / scale, mix)
    if head is not None and not equations.add_logits(errors, head, std):
        return None
    return equations.solve()[:, : public.shape[1]], errors


class _Equations:
    """Linear equations of K records' columns, behind which their classes stand as more columns."""

    def __init__(
        self, public: Array, labels: NDArray[np.int64], classes: int, samples: int
    ) -> None:
        table = np.concatenate([public, np.eye(classes)[labels]], axis=1)
        self.mean, self.samples = table.mean(axis=0), samples
        self.spread = np.cov(table.T) + _RIDGE * np.eye(len(self.mean))
        self.rows, self.values, self.variances = list[Array](), list[float](), list[float]()

    def add(
        self, records: Any, columns: Any, value: float, std: float = 0.0, weights: Any = 1.0
    ) -> None:
        """Weights times these columns of these records add up to the value."""
        row = np.zeros((self.samples, len(self.mean)))
        row[records, columns] = weights
        self.rows.append(row)
        self.values.append(value)
        self.variances.append(std**2 + _JITTER)

    def add_logits(self, errors: Array, head: tuple[Array, ...], std: float) -> bool:
        """An error is p - y, and p the softmax of the record's logits; False where it cannot be."""
        classes, features = head[0].shape[1:]
        for record, error in enumerate(errors):
            each = error.reshape(-1, classes)
            label = int(each.sum(axis=0).argmin())
            for c in range(classes):
                self.add(record, features + c, float(c == label))
            p = each + np.eye(classes)[label]
            if p.min() < -DEVIATIONS * std:
                return False
            p = p.clip(min=std)
            for weight, bias, chance in zip(*head, p, strict=True):
                for c in range(1, classes):
                    logit = np.log(chance[c] / chance[0]) - bias[c] + bias[0]
                    far = std * np.hypot(1 / chance[c], 1 / chance[0])
                    self.add(record, slice(features), logit, far, weight[c] - weight[0])
        return True

    def solve(self) -> Array:
        """Return the mean [K, F + C] of the public Gaussian under the equations."""
        rows = np.stack(self.rows)
        moved = rows @ self.spread
        within = np.einsum("akf,bkf->ab", moved, rows) + np.diag(self.variances)
        rest = np.array(self.values) - (rows @ self.mean).sum(axis=1)
        return self.mean + np.einsum("akf,a->kf", moved, np.linalg.solve(within, rest))
