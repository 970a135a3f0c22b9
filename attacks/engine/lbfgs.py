"""L-BFGS on many independent problems at once.

Each problem has its own curvature history, step length, acceptance and stopping; they share one
evaluation per iteration. A problem whose trial step is rejected halves its step while the
others move on, and stopped problems leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points [A, N], indices [A] of the problems they belong to) -> (loss [A], gradient [A, N])."""

_ARMIJO = 1e-4
_CURVATURE = 1e-8
_SMALLEST_STEP = 1e-10


@dataclass(frozen=True, kw_only=True)
class Minimum:
    """x [P, N] and loss [P] of the best accepted points; evaluations int [P]; reached bool [P]:
    whether the loss fell to the stop value; diverged bool [P]: no finite loss at the start."""

    x: Tensor
    loss: Tensor
    evaluations: Tensor
    reached: Tensor
    diverged: Tensor


def minimise(
    evaluate: Evaluate,
    start: Tensor,
    *,
    stop: Tensor,
    max_evaluations: int,
    history: int = 30,
    first_move: float = 1.0,
    patience: int = 20,
    least_gain: float = 1e-7,
) -> Minimum:
    """Minimise P independent functions from start [P, N].

    stop: [P], loss at which a problem is solved. max_evaluations: per problem. history: number
    of curvature pairs. first_move: L2 length of the first trial step; with the relative tests
    below it makes the result independent of the loss's scale. A problem also stops when
    `patience` accepted steps in a row gained less than `least_gain` of the loss each.
    Source: Nocedal and Wright, Numerical Optimization, Alg. 7.4, with backtracking.
    """
    count, width = start.shape
    everyone = torch.arange(count, device=start.device)
    best = start.clone()
    loss, grad = evaluate(start, everyone)
    diverged = ~(torch.isfinite(loss) & torch.isfinite(grad).all(dim=1))
    evaluations = torch.ones(count, dtype=torch.int64, device=start.device)
    final_loss = torch.where(diverged, torch.full_like(loss, torch.inf), loss)

    active = everyone[~diverged & (loss > stop)]
    x, f, g = start[active], loss[active], grad[active]
    s_pairs = start.new_zeros(len(active), history, width)
    y_pairs = start.new_zeros(len(active), history, width)
    rho = start.new_zeros(len(active), history)
    gamma = start.new_zeros(len(active))  # 0: no curvature yet, so the first move is scaled
    idle = torch.zeros(len(active), dtype=torch.int64, device=start.device)
    pairs = torch.zeros_like(idle)  # curvature pairs stored so far, per problem
    direction = _direction(g, s_pairs, y_pairs, rho, gamma, pairs, first_move)
    step = torch.ones_like(f)

    for _ in range(max_evaluations - 1):
        if not len(active):
            break
        slope = (direction * g).sum(dim=1)
        trial = x + step[:, None] * direction
        f_trial, g_trial = evaluate(trial, active)
        evaluations[active] += 1
        fine = torch.isfinite(f_trial) & torch.isfinite(g_trial).all(dim=1)
        accepted = fine & (f_trial <= f + _ARMIJO * step * slope)

        moved = torch.where(accepted[:, None], trial - x, 0.0)
        change = torch.where(accepted[:, None], g_trial - g, 0.0)
        curvature = (moved * change).sum(dim=1)
        lengths = moved.norm(dim=1) * change.norm(dim=1)
        useful = accepted & (curvature > _CURVATURE * lengths)
        rows = useful.nonzero().squeeze(1)
        if len(rows):
            slots = pairs[rows] % history
            s_pairs[rows, slots], y_pairs[rows, slots] = moved[rows], change[rows]
            rho[rows, slots] = 1 / curvature[rows]
            gamma[rows] = curvature[rows] / change[rows].square().sum(dim=1)
            pairs[rows] += 1

        gain = f - f_trial
        idle = torch.where(accepted, torch.where(gain > least_gain * f.abs(), 0, idle + 1), idle)
        x = torch.where(accepted[:, None], trial, x)
        f = torch.where(accepted, f_trial, f)
        g = torch.where(accepted[:, None], g_trial, g)

        renewed = _direction(g, s_pairs, y_pairs, rho, gamma, pairs, first_move)
        step = torch.where(accepted, 1.0, step * 0.5)
        stuck = ~accepted & (step < _SMALLEST_STEP)
        restart = stuck & (gamma > 0)  # forget the curvature once before giving up
        rho = torch.where(restart[:, None], 0.0, rho)
        gamma = torch.where(restart, 0.0, gamma)
        plain = _direction(g, s_pairs, y_pairs, rho * 0, gamma * 0, pairs, first_move)
        direction = torch.where(accepted[:, None], renewed, direction)
        direction = torch.where(restart[:, None], plain, direction)
        step = torch.where(restart, 1.0, step)

        done = (f <= stop[active]) | (idle >= patience) | (stuck & ~restart) | (g.abs().amax(dim=1) == 0)
        best[active], final_loss[active] = x, f
        if bool(done.any()):
            keep = ~done
            active, x, f, g = active[keep], x[keep], f[keep], g[keep]
            s_pairs, y_pairs, rho = s_pairs[keep], y_pairs[keep], rho[keep]
            gamma, idle, pairs = gamma[keep], idle[keep], pairs[keep]
            direction, step = direction[keep], step[keep]
    return Minimum(
        x=best,
        loss=final_loss,
        evaluations=evaluations,
        reached=final_loss <= stop,
        diverged=diverged,
    )


def _direction(
    g: Tensor,
    s_pairs: Tensor,
    y_pairs: Tensor,
    rho: Tensor,
    gamma: Tensor,
    pairs: Tensor,
    first_move: float,
) -> Tensor:
    """Two-loop recursion per problem; pairs: int [A], stored so far (the newest lies before it).

    Without curvature it is steepest descent of length `first_move`; a direction that does not
    descend is replaced by it too. Empty slots have rho = 0 and leave the recursion unchanged.
    """
    history = s_pairs.shape[1]
    rows = torch.arange(len(g), device=g.device)
    depth = min(history, int(pairs.max())) if len(g) else 0
    slots = [(pairs - 1 - k) % history for k in range(depth)]  # newest first
    q = g.clone()
    alphas = []
    for slot in slots:
        alpha = rho[rows, slot] * (s_pairs[rows, slot] * q).sum(dim=1)
        q = q - alpha[:, None] * y_pairs[rows, slot]
        alphas.append(alpha)
    r = q * gamma[:, None]
    for slot, alpha in zip(reversed(slots), reversed(alphas), strict=True):
        beta = rho[rows, slot] * (y_pairs[rows, slot] * r).sum(dim=1)
        r = r + (alpha - beta)[:, None] * s_pairs[rows, slot]
    steepest = -g * (first_move / g.norm(dim=1).clamp_min(1e-300))[:, None]
    descends = (-r * g).sum(dim=1) < -1e-12 * r.norm(dim=1) * g.norm(dim=1)
    return torch.where(((gamma > 0) & descends)[:, None], -r, steepest)
