"""Inputs of a linear layer from a part of its gradient, or from the order of its magnitudes alone.

A linear layer's weight gradient is outer(db, x), and db is its bias gradient, so
log|dW_ji| = log|db_j| + log x_i. Cells in the open that are joined by rows and columns fix their
terms up to one factor (`completed_inputs`). Some defenses have clients list coordinates by falling
magnitude in plain sight, to agree on what to encrypt (MaskCrypt's priority lists). The order of
many such sums fixes their terms too (additive conjoint measurement, Luce and Tukey 1964; see
`inputs_by_rank`). The factor follows from public samples.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.sparse import block_array, csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from bench.api import Context, Seen
from bench.toolkit.batches import soft_cross_entropy

ROUNDS = 60
"""Of fitting the terms and the magnitudes that stand for the ranks in turn."""
_PUBLIC = 64
"""Public samples whose gradients tell how far log magnitudes spread."""
_SWEEPS = 500
"""Of least squares by turns where few cells join the rest."""
_RIDGE = 0.01
"""Added to the variance of public inputs."""
_TIES = 8
"""More coordinates in order at a list's end are no accident (1 in 8! lists)."""
_TINY = 1e-30


def rankings(seen: Seen) -> dict[str, dict[str, Tensor]]:
    """By client, a list of its coordinates that it sent: int64 ranks by name, 1 for the first and 0
    for what is not listed. Only clients that sent the numbers 1 to n, each once, are in it."""
    lists = {}
    for message in seen.messages:
        ranks = {n: p.values for n, p in message.parts.items()}
        if message.sender not in seen.clients or set(ranks) != set(seen.before):
            continue
        if any(r.dtype != torch.int64 for r in ranks.values()):  # a mask, or values
            continue
        flat = torch.cat([r.flatten() for r in ranks.values()])
        listed = flat[flat != 0].sort().values
        if len(listed) > 1 and torch.equal(listed, torch.arange(1, len(listed) + 1).to(listed)):
            lists[message.sender] = ranks
    return lists


def without_ties(ranks: dict[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """The ranks without the zeros at the end of a list, which stand in the order of the coordinates
    since all are alike; and whether there were any, so that the list has all values but zeros."""
    flat = torch.cat([r.flatten() for r in ranks.values()])
    order = flat.argsort()[int((flat == 0).sum()) :]  # coordinates by rank
    falls = (order[1:] < order[:-1]).nonzero()
    last = int(falls.max()) + 1 if len(falls) else 0
    ties = len(order) - last > _TIES
    return {n: torch.where(r > last, 0, r) for n, r in ranks.items()} if ties else dict(ranks), ties


def inputs_by_rank(
    weight: Tensor, bias: Tensor, magnitudes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Magnitudes [F] of the layer's input; 0 for inputs of which no weight is listed.

    Args:
        weight: Ranks of the weight's gradient [O, F], 0 for what is not listed.
        bias: Ranks of the bias's gradient [O].
        magnitudes: Logs of magnitudes to begin with, falling, one for each that is listed.
    """
    table = torch.cat([weight, bias[:, None]], dim=1).cpu().numpy()  # the bias's input is 1
    listed = table > 0
    place = np.argsort(np.argsort(table[listed]))
    values = np.zeros(table.shape)
    values[listed] = magnitudes[: len(place)][place]
    spread = magnitudes.std()
    for _ in range(ROUNDS):
        db, x = _terms(values, listed, rounds=4)
        fitted = np.empty(len(place))
        fitted[place] = (db[:, None] + x)[listed]
        steps = isotonic_regression(fitted, increasing=False).x
        steps = (steps - steps.mean()) * spread / max(steps.std(), _TINY) + magnitudes.mean()
        values[listed] = steps[place]
    sizes = np.exp(x - x[-1])
    return np.where(listed.any(axis=0), sizes, 0.0)[:-1]


def completed_inputs(
    gradient: NDArray[np.float64], present: NDArray[np.bool_], public: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Input [F] of the layer from the cells of its gradient that were sent without noise, or None.

    Cells that are not 0 give the inputs of their columns up to a factor, cells that are 0 in a row
    that has others give inputs of 0. The factor, where no bias is among the cells, and the inputs
    that no cell tells are the likeliest under a Gaussian fitted to public inputs.

    Args:
        gradient: Weight's and, as the last column, bias's [O, F + 1].
        present: Which of it was sent.
        public: Inputs of public samples [N, F].
    """
    cells = present & (gradient != 0)
    rows = len(gradient)
    joined = block_array([[None, csr_array(cells)], [csr_array(cells.T), None]])
    _, part = connected_components(joined, directed=False)
    largest = np.bincount(part).argmax()
    cells &= (part[:rows] == largest)[:, None] & (part[rows:] == largest)
    if cells.sum() < 2:
        return None
    logs = np.log(np.where(cells, np.abs(gradient), 1.0))
    x = _terms(logs, cells, rounds=_SWEEPS)[1]
    live = cells.any(axis=1)
    told, zero = cells.any(axis=0), (present[live] & (gradient[live] == 0)).any(axis=0)
    absolute, told, zero = bool(told[-1]), told[:-1], (zero & ~told)[:-1]
    sizes = np.where(told, np.exp(x[:-1] - (x[-1] if absolute else x[:-1][told].max())), 0.0)
    known = told | zero
    mean, spread = public.mean(axis=0), np.cov(public.T) + _RIDGE * np.eye(public.shape[1])
    inverse = np.linalg.inv(spread[np.ix_(known, known)])

    def misfit(factor: float) -> float:
        rest = factor * sizes[known] - mean[known]
        return float(rest @ inverse @ rest) / 2 - int(told.sum()) * math.log(factor)

    factor = 1.0 if absolute else min(np.geomspace(0.02, public.max(), 64), key=misfit)
    answer = factor * sizes
    rest = inverse @ (answer[known] - mean[known])
    answer[~known] = mean[~known] + spread[np.ix_(~known, known)] @ rest
    return answer


def _terms(
    values: NDArray[np.float64], cells: NDArray[np.bool_], rounds: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Terms of rows and columns whose sums are nearest to the values in these cells."""
    rows, columns = (np.maximum(cells.sum(axis=a), 1) for a in (1, 0))
    x = np.zeros(cells.shape[1])
    for _ in range(rounds):  # least squares by turns
        db = ((values - x) * cells).sum(axis=1) / rows
        x = ((values - db[:, None]) * cells).sum(axis=0) / columns
    return db, x


def public_magnitudes(
    seen: Seen, ctx: Context, names: tuple[str, str], count: int, *, whole: bool
) -> NDArray[np.float64]:
    """Logs of magnitudes in a layer's gradient [count], falling: the mean over public samples.

    Args:
        names: Of the layer's weight and bias.
        whole: Whether `count` values are all that are not 0, else the largest of them.
    """
    state = {n: v.to(ctx.device) for n, v in seen.before.items()}
    buffers = {n: v.to(ctx.device) for n, v in seen.buffers.items()}
    x, y = ctx.aux_x[:_PUBLIC].to(ctx.device), ctx.aux_y[:_PUBLIC].to(ctx.device)
    targets = torch.nn.functional.one_hot(y, ctx.network.classes).float()

    def loss(held: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        logits = ctx.network.apply({**state, **held}, sample[None], buffers=buffers)
        return soft_cross_entropy(logits, target[None])

    held = {n: state[n] for n in names}
    grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(held, x, targets)
    each = torch.cat([grads[n].flatten(1).abs() for n in names], dim=1).double().cpu().numpy()
    falling = [-np.sort(-np.log(row[row > 0])) for row in each if (row > 0).any()]
    if not whole:
        falling = [row[:count] for row in falling]
    at = np.linspace(0, 1, count)
    return np.mean([np.interp(at, np.linspace(0, 1, len(r)), r) for r in falling], axis=0)
