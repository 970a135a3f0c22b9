"""Ridge regression in closed form, its penalty by exact leave-group-out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LAMBDAS = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e4)
"""Penalties tried, in units of the mean eigenvalue of the features' Gram matrix."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """y = (x - centres[s]) @ weight + offsets[s] for a sample of stratum s.

    Attributes:
        centres: Means of the features by stratum [S, F].
        weight: [F, P].
        offsets: Means of the targets by stratum [S, P].
        left_out: Prediction of every training row by the fit without its whole group, [R, P].
        loss: Of the left-out predictions that were judged.
    """

    centres: Tensor
    weight: Tensor
    offsets: Tensor
    left_out: Tensor
    loss: float

    def __call__(self, x: Tensor, stratum: int | Tensor) -> Tensor:
        return (x.double() - self.centres[stratum]) @ self.weight + self.offsets[stratum]


def fit(
    x: Tensor,
    y: Tensor,
    *,
    group: int,
    strata: Tensor,
    judged: Tensor,
    judge: Callable[[Tensor], Tensor],
) -> Fit:
    """Ridge regression with one free intercept per stratum; penalty by exact leave-group-out.

    Solved in float64, in the smaller of F and R dimensions. With the smoother
    H = Z (E + lambda)^-1 Z^T + (intercepts), the residual without group g is (I - H_gg)^-1 r_g:
    the leave-one-out formula for blocks (Hastie, Tibshirani, Friedman, The Elements of
    Statistical Learning, Eq. 7.64, is its case of one row).

    Args:
        x: Features [R, F].
        y: Targets [R, P].
        group: So many consecutive rows belong together and are left out together.
        strata: 0..S-1, int64 [R].
        judged: Rows by whose left-out predictions the penalty is chosen, bool [R].
        judge: Their left-out predictions [J, P] -> loss.
    """
    x, y = x.double(), y.double()
    member = torch.nn.functional.one_hot(strata).double()
    count = member.sum(dim=0).clamp_min(1)
    centres, offsets = member.mT @ x / count[:, None], member.mT @ y / count[:, None]
    inner, target = x - centres[strata], y - offsets[strata]
    narrow = x.shape[1] <= len(x)
    values, vectors = torch.linalg.eigh(inner.mT @ inner if narrow else inner @ inner.mT)
    # The intercepts' directions have eigenvalue 0: of rounding, a tiny penalty would make much.
    values = torch.where(values > 1e-12 * values.max(), values, 0.0)
    z = inner @ vectors if narrow else vectors * values.sqrt()
    ztarget, unit = z.mT @ target, values.mean().clamp_min(1e-300)
    blocks = z.view(-1, group, z.shape[1])
    ones = (member / count.sqrt()).view(-1, group, member.shape[1])
    shared, eye = ones @ ones.mT, torch.eye(group, dtype=x.dtype, device=x.device)
    targets = target.view(-1, group, target.shape[1])
    outcomes = y.view(-1, group, y.shape[1])

    def left_out(factor: float, some: Tensor) -> Tensor:
        inverse = 1 / (values + factor * unit)
        part = blocks[some] * inverse
        rest = targets[some] - part @ ztarget
        # A group that alone holds a stratum or a direction has no equation left: keep it finite.
        alone = eye * (1 + 1e-13) - part @ blocks[some].mT - shared[some]
        return outcomes[some] - torch.linalg.solve(alone, rest)

    some = judged.view(-1, group).any(dim=1).nonzero()[:, 0]
    within = judged.view(-1, group)[some].nonzero(as_tuple=True)
    losses = torch.stack([judge(left_out(factor, some)[within]) for factor in LAMBDAS]).tolist()
    best = min(range(len(losses)), key=losses.__getitem__)
    inverse = 1 / (values + LAMBDAS[best] * unit)
    if narrow:
        weight = vectors @ (inverse[:, None] * ztarget)
    else:
        weight = inner.mT @ (vectors @ (inverse[:, None] * (vectors.mT @ target)))
    everyone = torch.arange(len(blocks), device=x.device)
    return Fit(
        centres=centres,
        weight=weight,
        offsets=offsets,
        left_out=left_out(LAMBDAS[best], everyone).flatten(0, 1),
        loss=losses[best],
    )
