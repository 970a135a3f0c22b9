"""Records with one-hot groups behind a linear layer, read off sums over several of them.

The layer's weight gradient summed over K records is G = E^T X, with E the errors [K, U] at its
outputs. In a one-hot group each record counts in one column, so that the group's columns hold the
sums of a partition of the K errors. So errors and categories are searched. Numeric columns are then
linear equations, to which softmax regression adds that an error tells its own logits. What stays
open is the mean of a Gaussian fitted to public records.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import KDTree

from attacks.engine.observation import Release, observe

Array = NDArray[np.float64]
MOST = 8
"""Records of a sum: the subsets of one more are twice as many."""
DEVIATIONS = 6.0
"""Standard deviations of a sum's noise that are its tolerance."""
_TRIED, _BEAM = 8, 32
"""Splits of each error that are tried, and sets of errors that are kept."""
_RIDGE = 0.002
"""Added to the variance of public columns."""
_SMALL = 0.03
"""Noise that sums are looked for under, in units of the upload's root mean square."""
_EXACT = 1e-9
"""Variance of what is exactly known."""


def why_not(release: Release) -> str | None:
    """Return why records cannot be decoded from it, or None."""
    if len(release.seen.network["shape"]) > 1:
        return f"rows of the first layer hold one sample alone, but {release.samples} were used"
    if release.samples > MOST:
        return f"{release.samples} records have more subsets than can be searched"
    if release.steps > 1:
        return f"the update is a sum over {release.steps} local steps, each of other errors"
    least, acting = _SMALL * observe(release, dtype=torch.float64).rms, release.acting
    if all(m.faithful and not m.tells_interval and m.spread <= least**2 for m in acting):
        return None
    return "noise or rounding hides which records a sum is of"


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


def _subsets(count: int) -> NDArray[np.int64]:
    """All subsets of so many errors, as rows of 0 and 1 [2^K, K]."""
    return np.arange(2**count)[:, None] >> np.arange(count) & 1


def nearest_sums(columns: Array, errors: Array) -> tuple[Array, Any]:
    """Return how far columns [n, U] are from sums of errors [K, U], and which errors the nearest
    sums have, 0 or 1 [n, K]."""
    subsets = _subsets(len(errors))
    gaps = np.abs(columns[:, None] - subsets @ errors).max(axis=2)
    return gaps.min(axis=1), subsets[gaps.argmin(axis=1)]


def find_errors(groups: Sequence[Array], samples: int, tolerance: float) -> list[Array]:
    """Return sets of errors [K, U] of which every group's columns [n, U] are sums.

    The search begins with the columns of the group that has most of them, and splits one after the
    other so that as many columns as possible become sums.
    """
    groups = [g[(np.abs(g) > tolerance).any(axis=1)] for g in groups]
    richest = max(groups, key=len)
    if not 0 < len(richest) <= samples:
        return []
    columns = np.concatenate(groups)
    basis = np.linalg.svd(columns, full_matrices=False)[2][:samples]
    few, beam = columns @ basis.T, [richest @ basis.T]
    for _ in range(samples - len(richest)):
        splits = dict[bytes, tuple[int, Array]]()
        for errors in beam:
            left = few[nearest_sums(few, errors)[0] > tolerance]
            for place, error in enumerate(errors if len(left) else ()):
                others = np.delete(errors, place, axis=0)
                parts = left[:, None] - _subsets(len(others)) @ others
                parts = parts.reshape(-1, len(basis))
                tree = KDTree(np.concatenate([parts, error - parts]))
                votes = tree.query_ball_point(parts, tolerance, p=np.inf, return_length=True)
                for part in parts[(-votes).argsort(kind="stable")[:_TRIED]]:
                    split = np.vstack([others, part, error - part])
                    open_ = int((nearest_sums(few, split)[0] > tolerance).sum())
                    key = np.sort(split[:, 0] / tolerance / 4).round().tobytes()
                    splits[key] = open_, split
        beam = [split for _, split in sorted(splits.values(), key=lambda s: s[0])[:_BEAM]]
    fits = [nearest_sums(few, errors) for errors in beam]
    return [
        np.linalg.lstsq(shares.astype(float), columns, rcond=None)[0]
        for gaps, shares in fits
        if gaps.max() <= tolerance
    ]


def assign(columns: Array, told: Any, errors: Array, tolerance: float) -> Any:
    """Return the column of each record within a group [K], -1 where several unseen ones could be;
    None where the columns [n, U], as far as they were told, are not sums of disjoint errors [K, U].
    """
    subsets, covers = _subsets(len(errors)), [(0.0, np.full(len(errors), -1))]
    for n in np.flatnonzero(told.any(axis=1)):
        gaps = np.abs(np.where(told[n], columns[n] - subsets @ errors, 0.0)).max(axis=1)
        fits = np.flatnonzero(gaps <= tolerance) if gaps[0] > tolerance else [0]
        covers = [
            (gap + gaps[s], np.where(subsets[s] == 1, n, chosen))
            for gap, chosen in covers
            for s in fits
            if (chosen[subsets[s] == 1] < 0).all()
        ]
    unseen = np.flatnonzero(~told.any(axis=1))
    covers = [c for c in covers if len(unseen) or c[1].min() >= 0]
    if not covers:
        return None
    best = min(covers, key=lambda cover: cover[0])[1]
    return np.where(best < 0, unseen[0], best) if len(unseen) == 1 else best


def decode(
    gradient: Array, told: NDArray[np.bool_], public: Array, samples: int, tolerance: float,
    head: Array | None, listed: NDArray[np.bool_] | None = None,
) -> list[tuple[Array, Array]]:  # fmt: skip
    """Return sets of records [K, F] behind a sum of gradients, each with its errors [K, U]: the
    likeliest first.

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
    if not groups:
        return []
    if samples == 1:  # all that was seen of one-hot columns is 0 or the error
        cells = np.where(told & (np.abs(gradient) > tolerance), gradient, 0.0)
        cells = cells[[*(c for g in groups for c in g), -1]]
        sets = [cells[np.abs(cells).argmax(axis=0), np.arange(len(total))][None]]
    else:
        sums = []
        for group in groups:
            whole = columns[group][told[group].all(axis=1)]
            rest = total - whole.sum(axis=0)  # of all others
            sums.append(whole if np.isnan(rest).any() else np.vstack([whole, rest]))
        sets = find_errors(sums, samples, tolerance)
    solutions = []
    for errors in sets:
        places = [
            np.array([listed[g].argmax()])
            if listed is not None and listed[g].sum() == 1
            else assign(columns[g], told[g], errors, tolerance)
            for g in groups
        ]
        if all(p is not None for p in places):
            by_group = list(zip(groups, places, strict=True))
            solution = solve_records(by_group, columns, told, public, errors, tolerance, head)
            solutions.append((*solution, errors))
    solutions.sort(key=lambda solution: solution[0])
    return [(records, errors) for _, records, errors in solutions]


def solve_records(
    places: Sequence[tuple[range, Any]], columns: Array, told: NDArray[np.bool_], public: Array,
    errors: Array, tolerance: float, head: Array | None,
) -> tuple[float, Array]:  # fmt: skip
    """Return how unlikely the equations of decoded records are under a Gaussian fitted to public
    records, and its mean [K, F] under them."""
    mean, std = public.mean(axis=0), tolerance / DEVIATIONS
    equations = list[tuple[Array, float, float]]()

    def add(k: Any, column: Any, value: float, weights: Any = 1.0, std: float = 0.0) -> None:
        """Weights times these columns of these records add up to the value."""
        row = np.zeros((len(errors), len(mean)))
        row[k, column] = weights
        equations.append((row, value, std**2 + _EXACT))

    for group, chosen in places:
        for k, place in enumerate(chosen):
            add(k, group, 1.0)
            for number, column in enumerate(group):
                if place >= 0 or told[column].any():
                    add(k, column, float(number == place))
    for column in set(range(len(mean))).difference(*(group for group, _ in places)):
        units = np.flatnonzero(told[column] & errors.any(axis=0))
        left, size, right = np.linalg.svd(errors[:, units], full_matrices=False)
        for mix, value in zip(left.T * size[:, None], right @ columns[column, units], strict=True):
            add(slice(None), column, value, mix, std)
    if head is not None and errors.all():  # p - y, and p the softmax of the record's logits
        p = errors.reshape(-1, *head.shape[:2])
        p = p + np.eye(head.shape[1])[p.sum(axis=1).argmin(axis=1)][:, None]
        p = p.clip(min=max(std, _EXACT))
        logits, far = np.log(p / p[..., :1]), std * np.hypot(1 / p, 1 / p[..., :1])
        relative = head - head[:, :1]
        for k, r, c in np.ndindex(*p.shape):
            value = logits[k, r, c] - relative[r, c, -1]
            add(k, slice(None), value, relative[r, c, :-1], far[k, r, c])
    table, values, variances = map(np.array, zip(*equations, strict=True))
    moved = table @ (np.cov(public.T) + _RIDGE * np.eye(len(mean)))
    within = np.tensordot(moved, table, axes=([1, 2], [1, 2])) + np.diag(variances)
    rest = values - (table @ mean).sum(axis=1)
    solved = np.linalg.solve(within, rest)
    surprise = float(rest @ solved + np.linalg.slogdet(within)[1])
    return surprise, mean + np.tensordot(solved, moved, axes=1)
