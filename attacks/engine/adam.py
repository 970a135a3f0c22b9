"""Signed Adam with step decay on many independent problems at once."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.engine.lbfgs import Minimum, Phase

_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_MILESTONES, _DECAY = (3 / 8, 5 / 8, 7 / 8), 0.1


def descend(
    phase: Phase,
    start: Tensor,
    *,
    steps: int,
    lr: float,
    signed: bool,
    low: Tensor | float,
    high: Tensor | float,
) -> Minimum:
    """Minimise P functions from start [P, N] by `steps` steps within [low, high].

    signed: only the sign of each derivative enters Adam. lr: first step length, a tenth of it
    after 3/8, 5/8 and 7/8 of the steps. The answer is each problem's point of least loss. A
    problem whose loss or gradient is not finite rests at its last point; one that reaches
    `phase.stop` leaves the batch.
    Source: Geiping et al., arXiv:2003.14053, Sec. 5 (signed gradients, step decay, box).
    """
    x = start.to(phase.dtype).clone()
    low, high = (
        torch.as_tensor(b, dtype=x.dtype, device=x.device).expand_as(x) for b in (low, high)
    )
    best = x.clone()
    least = torch.full(x.shape[:1], torch.inf, dtype=x.dtype, device=x.device)
    active = torch.arange(len(x), device=x.device)
    evaluations = torch.zeros_like(active)
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(steps):
        if not len(active):
            break
        loss, gradient = phase.evaluate(x, active)
        evaluations[active] += 1
        fine = torch.isfinite(loss) & torch.isfinite(gradient).all(dim=1)
        better = fine & (loss < least[active])
        best[active[better]], least[active[better]] = x[better], loss[better]
        if signed:
            gradient = gradient.sign()
        first = torch.lerp(gradient, first, _BETAS[0])
        second = torch.lerp(gradient.square(), second, _BETAS[1])
        length = lr * _DECAY ** sum(step >= m * steps for m in _MILESTONES)
        unbiased = 1 - _BETAS[0] ** (step + 1), 1 - _BETAS[1] ** (step + 1)
        move = (first / unbiased[0]) / ((second / unbiased[1]).sqrt() + _EPSILON)
        x = torch.minimum(torch.maximum(x - length * move, low[active]), high[active])
        staying = fine & (loss > phase.stop[active])
        if not bool(staying.all()):
            active, x, first, second = (t[staying] for t in (active, x, first, second))
    return Minimum(
        x=best,
        loss=least,
        evaluations=evaluations,
        reached=least <= phase.stop.to(least),
        diverged=~torch.isfinite(least),
        redrawn=0,
    )
