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
    count = len(start)
    everyone = torch.arange(count, device=start.device)
    best = start.clone()
    loss, grad = evaluate(start, everyone)
    diverged = ~(torch.isfinite(loss) & torch.isfinite(grad).all(dim=1))
    evaluations = torch.ones(count, dtype=torch.int64, device=start.device)
    final_loss = torch.where(diverged, torch.full_like(loss, torch.inf), loss)

    active = everyone[~diverged & (loss > stop)]
    x, f, g = start[active], loss[active], grad[active]
    memory = _Memory.empty(len(active), history, start)
    idle = torch.zeros(len(active), dtype=torch.int64, device=start.device)
    direction = memory.direction(g, first_move)
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
        memory.learn(trial - x, g_trial - g, accepted)

        gain = f - f_trial
        idle = torch.where(accepted, torch.where(gain > least_gain * f.abs(), 0, idle + 1), idle)
        x = torch.where(accepted[:, None], trial, x)
        f = torch.where(accepted, f_trial, f)
        g = torch.where(accepted[:, None], g_trial, g)

        step = torch.where(accepted, 1.0, step * 0.5)
        stuck = ~accepted & (step < _SMALLEST_STEP)
        again = stuck & (memory.gamma > 0)  # forget the curvature once before giving up
        memory.forget(again)
        step = torch.where(again, 1.0, step)
        renewed = memory.direction(g, first_move)
        direction = torch.where((accepted | again)[:, None], renewed, direction)

        best[active], final_loss[active] = x, f
        still = (g.abs().amax(dim=1) > 0) & (idle < patience) & ~(stuck & ~again)
        keep = still & (f > stop[active])
        if not bool(keep.all()):
            active, x, f, g = active[keep], x[keep], f[keep], g[keep]
            memory = memory.take(keep)
            idle, direction, step = idle[keep], direction[keep], step[keep]
    return Minimum(
        x=best,
        loss=final_loss,
        evaluations=evaluations,
        reached=final_loss <= stop,
        diverged=diverged,
    )


@dataclass
class _Memory:
    """Curvature pairs of A problems, oldest first, in the compact representation.

    moves, changes [A, M, N]: steps and gradient changes; an empty slot is zero. upper [A, M, M]:
    s_i . y_j for i <= j, with 1 on an empty slot's diagonal, which makes the slot inert. gram:
    y_i . y_j. gamma [A]: scale of the initial inverse Hessian, 0 without curvature. The small
    systems are float64.
    Source: Byrd, Nocedal, Schnabel 1994, Eq. 3.2.
    """

    moves: Tensor
    changes: Tensor
    upper: Tensor
    gram: Tensor
    gamma: Tensor

    @staticmethod
    def empty(count: int, history: int, like: Tensor) -> _Memory:
        eye = torch.eye(history, dtype=torch.float64, device=like.device)
        return _Memory(
            moves=like.new_zeros(count, history, like.shape[1]),
            changes=like.new_zeros(count, history, like.shape[1]),
            upper=eye.repeat(count, 1, 1),
            gram=torch.zeros_like(eye).repeat(count, 1, 1),
            gamma=like.new_zeros(count),
        )

    def take(self, keep: Tensor) -> _Memory:
        return _Memory(
            self.moves[keep], self.changes[keep], self.upper[keep], self.gram[keep],
            self.gamma[keep],
        )  # fmt: skip

    def forget(self, rows: Tensor) -> None:
        if bool(rows.any()):
            blank = _Memory.empty(int(rows.sum()), self.moves.shape[1], self.moves[0])
            self.moves[rows], self.changes[rows] = blank.moves, blank.changes
            self.upper[rows], self.gram[rows] = blank.upper, blank.gram
            self.gamma[rows] = 0

    def learn(self, moved: Tensor, change: Tensor, accepted: Tensor) -> None:
        """Store the pairs of accepted steps whose curvature passes a relative test."""
        curvature = (moved * change).sum(dim=1)
        lengths = moved.norm(dim=1) * change.norm(dim=1)
        rows = (accepted & (curvature > _CURVATURE * lengths)).nonzero().squeeze(1)
        if not len(rows):
            return
        everyone = len(rows) == len(accepted)
        mine = self if everyone else self.take(rows)
        s, y = moved[rows], change[rows]
        moves = torch.cat([mine.moves[:, 1:], s[:, None]], dim=1)
        changes = torch.cat([mine.changes[:, 1:], y[:, None]], dim=1)
        upper = torch.zeros_like(mine.upper)
        upper[:, :-1, :-1] = mine.upper[:, 1:, 1:]
        upper[:, :, -1] = (moves @ y[..., None]).squeeze(-1).double()
        gram = torch.zeros_like(mine.gram)
        gram[:, :-1, :-1] = mine.gram[:, 1:, 1:]
        against = (changes @ y[..., None]).squeeze(-1).double()
        gram[:, :, -1] = against
        gram[:, -1, :] = against
        gamma = curvature[rows] / y.square().sum(dim=1)
        if everyone:
            self.moves, self.changes, self.upper = moves, changes, upper
            self.gram, self.gamma = gram, gamma
        else:
            self.moves[rows], self.changes[rows], self.upper[rows] = moves, changes, upper
            self.gram[rows], self.gamma[rows] = gram, gamma

    def direction(self, g: Tensor, first_move: float) -> Tensor:
        """-H g per problem; steepest descent of length `first_move` where there is no curvature
        yet or where -H g does not descend."""
        lengths = g.norm(dim=1)
        steepest = -g * (first_move / lengths.clamp_min(1e-300))[:, None]
        if not bool((self.gamma > 0).any()):
            return steepest
        along = (self.moves @ g[..., None]).double()
        across = (self.changes @ g[..., None]).double()
        gamma = self.gamma.double()[:, None, None]
        u = torch.linalg.solve_triangular(self.upper, along, upper=True)
        diagonal = self.upper.diagonal(dim1=1, dim2=2)[..., None]
        inner = diagonal * u + gamma * (self.gram @ u - across)
        top = torch.linalg.solve_triangular(self.upper.mT, inner, upper=False)
        newton = self.gamma[:, None] * g
        newton = newton + (self.moves.mT @ top.to(g)).squeeze(-1)
        newton = newton - self.gamma[:, None] * (self.changes.mT @ u.to(g)).squeeze(-1)
        descends = (newton * g).sum(dim=1) > 1e-12 * newton.norm(dim=1) * lengths
        return torch.where(((self.gamma > 0) & descends)[:, None], -newton, steepest)
