"""Signed Adam with a falling step on many independent problems at once."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from attacks.engine.lbfgs import Minimum, Phase, look_interval

_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_MILESTONES, _DECAY = (3 / 8, 5 / 8, 7 / 8), 0.1
Decay = Literal["steps", "cosine"]


def descend(
    phase: Phase,
    start: Tensor,
    *,
    steps: int,
    lr: float,
    signed: bool,
    low: float,
    high: float,
    decay: Decay = "steps",
    look_every: int | None = None,
) -> Minimum:
    """Minimise P functions from start [P, N] by `steps` steps within [low, high].

    The answer is each problem's point of least loss. A problem whose loss or gradient is not
    finite rests at its last point, one that reaches `phase.stop` there.
    Source: Geiping et al., arXiv:2003.14053, Sec. 5 (signed gradients, step decay, box).

    Args:
        phase: The functions, and the loss at which each is solved.
        start: Points [P, N].
        steps: Evaluations of each problem.
        lr: First step length.
        signed: Whether only the sign of each derivative enters Adam.
        low: Least coordinate.
        high: Largest coordinate.
        decay: `steps`: a tenth of the step length after 3/8, 5/8 and 7/8 of the steps, as in the
            paper; `cosine`: half a cosine's way down to 0.
        look_every: Steps after which problems at rest leave the batch (None: as the device has
            it).
    """
    x = start.to(phase.dtype).clone()
    if look_every is None:
        look_every = look_interval(x.device)
    final = x.clone()
    final_loss = torch.full(x.shape[:1], torch.inf, dtype=x.dtype, device=x.device)
    active = torch.arange(len(x), device=x.device)
    final_spent = torch.zeros_like(active)
    best, least, spent, stop = final, final_loss, final_spent, phase.stop
    first, second, going = torch.zeros_like(x), torch.zeros_like(x), active >= 0
    for step in range(steps):
        if not len(active):
            break
        loss, gradient = phase.evaluate(x, active)
        spent = spent + going
        fine = torch.isfinite(loss) & torch.isfinite(gradient).all(dim=1) & going
        better = fine & (loss < least)
        best = torch.where(better[:, None], x, best)
        least = torch.where(better, loss, least)
        if signed:
            gradient = gradient.sign()
        first = torch.lerp(gradient, first, _BETAS[0])
        second = torch.lerp(gradient.square(), second, _BETAS[1])
        length = lr * _share(decay, step / steps)
        unbiased = 1 - _BETAS[0] ** (step + 1), 1 - _BETAS[1] ** (step + 1)
        move = (first / unbiased[0]) / ((second / unbiased[1]).sqrt() + _EPSILON)
        x = (x - length * move).clamp(low, high)
        going = fine & (loss > stop)
        if (step + 1) % look_every == 0 and not bool(going.all()):
            final[active], final_loss[active], final_spent[active] = best, least, spent
            active, x, first, second, best, least, spent, stop, going = (
                t[going] for t in (active, x, first, second, best, least, spent, stop, going)
            )
    final[active], final_loss[active], final_spent[active] = best, least, spent
    return Minimum(x=final, loss=final_loss, evaluations=final_spent, redrawn=0)


def _share(decay: Decay, done: float) -> float:
    """What is left of the first step length when a share `done` of the steps is."""
    if decay == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return _DECAY ** sum(done >= m for m in _MILESTONES)
