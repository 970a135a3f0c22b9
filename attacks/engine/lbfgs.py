"""L-BFGS on many independent problems at once.

Each problem has its own curvature history, line search and stopping; they share one evaluation
per iteration. A problem whose trial step is rejected searches on while the others move on. One
that stops is frozen at once and leaves the batch when the host next looks: after every iteration
on a CPU, after every eighth on a GPU, which would wait for the host's question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.engine.curvature import CurvatureMemory
from attacks.engine.line_search import LineSearch

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points [A, N], indices [A] of the problems they belong to) -> (loss [A], gradient [A, N]). The
indices are the same tensor object for as long as the problems are the same ones, and are never
changed in place, so that what depends on them alone may be kept."""

Redraw = Callable[[Tensor], Tensor]
"""Indices [R] of problems whose start has no finite loss -> other starts [R, N]."""

_REDRAWS = 3
_UNSEEN = 8
"""Iterations between two looks at who has stopped, on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One precision.

    Attributes:
        evaluate: The function.
        stop: Loss [P] at which it is left.
        dtype: Of its numbers.
        share: Of all evaluations, after which it is left at the latest.
    """

    evaluate: Evaluate
    stop: Tensor
    dtype: torch.dtype
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Minimum:
    """The best accepted points.

    Attributes:
        x: [P, N].
        loss: [P], infinite where no start that was tried has a finite one.
        evaluations: int64 [P].
        redrawn: Starts replaced because their loss was not finite.
    """

    x: Tensor
    loss: Tensor
    evaluations: Tensor
    redrawn: int


def minimise(
    phases: Sequence[Phase],
    start: Tensor,
    *,
    max_evaluations: int,
    history: int = 30,
    first_move: float = 1.0,
    patience: int = 20,
    least_gain: float = 1e-7,
    redraw: Redraw | None = None,
    look_every: int | None = None,
) -> Minimum:
    """Minimise P independent functions from start [P, N].

    Source: Nocedal and Wright, Numerical Optimization, Alg. 7.4 with strong Wolfe conditions
    (Eq. 3.7); compact form: Byrd, Nocedal, Schnabel 1994.

    Args:
        phases: Usually one; two to begin in float32, which is faster, and end in float64 with
            the curvature learnt so far: a problem enters the next phase when it reaches the
            phase's stop value or can get no further in its precision.
        start: [P, N].
        max_evaluations: Per problem, over all phases.
        history: Curvature pairs.
        first_move: L2 length of the first trial step; with relative tests throughout it makes
            the result independent of the loss's scale.
        patience: Accepted steps in a row that gain next to nothing, after which a problem stops.
        least_gain: Share of the loss that is next to nothing.
        redraw: Gives other starts to problems whose loss is not finite, three times at most.
        look_every: Iterations after which stopped problems leave the batch (None: as the device
            has it); in between they are evaluated in vain, which changes no result (but the
            rounding of products whose batch has another size).
    """
    if look_every is None:
        look_every = look_interval(start.device)
    run = Descent.begin(phases[0], start, history, first_move, redraw)
    for number, phase in enumerate(phases):
        if number:
            run.convert(phase)
        most = math.ceil(phase.share * max_evaluations)
        run.wake(phase, most)
        run.advance(most, patience, least_gain, look_every)
    back = torch.argsort(run.order)
    return Minimum(
        x=run.x[back],
        loss=run.loss[back],
        evaluations=run.evaluations[back],
        redrawn=run.redrawn,
    )


@dataclass(kw_only=True)
class Descent:
    """All problems, active ones first: rows [:active] of every tensor move, the others rest.

    A stopped problem swaps places with the last active one, so that the active rows stay one
    contiguous view of the memory.

    Attributes:
        order: Which problem a row is, int64 [P].
        idle: Accepted steps in a row that gained next to nothing, int64 [P].
    """

    order: Tensor
    x: Tensor
    loss: Tensor
    gradient: Tensor
    memory: CurvatureMemory
    first_move: float
    evaluations: Tensor
    idle: Tensor
    redrawn: int
    phase: Phase
    active: int = 0

    @staticmethod
    def begin(
        phase: Phase, start: Tensor, history: int, first_move: float, redraw: Redraw | None
    ) -> Descent:
        x = start.to(phase.dtype).clone()
        everyone = torch.arange(len(x), device=x.device)
        loss, gradient = (t.clone() for t in phase.evaluate(x, everyone))
        evaluations, redrawn = torch.ones_like(everyone), 0
        for _ in range(_REDRAWS):
            broken = (~_finite(loss, gradient)).nonzero().squeeze(1)
            if not len(broken) or redraw is None:
                break
            x[broken] = redraw(broken).to(x)
            loss[broken], gradient[broken] = phase.evaluate(x[broken], broken)
            evaluations[broken] += 1
            redrawn += len(broken)
        return Descent(
            order=everyone.clone(),
            x=x,
            gradient=gradient,
            first_move=first_move,
            loss=torch.where(_finite(loss, gradient), loss, torch.inf),
            memory=CurvatureMemory.empty(len(x), history, x),
            evaluations=evaluations,
            idle=torch.zeros_like(everyone),
            redrawn=redrawn,
            phase=phase,
        )

    def convert(self, phase: Phase) -> None:
        """Go on in the phase's precision, with losses and gradients computed anew in it."""
        self.x, self.memory = self.x.to(phase.dtype), self.memory.to(phase.dtype)
        self.loss, self.gradient = self.loss.to(phase.dtype), self.gradient.to(phase.dtype)
        self.active = len(self.x)
        self._keep(torch.isfinite(self.loss))
        rows = slice(self.active)
        if self.active:
            self.loss[rows], self.gradient[rows] = phase.evaluate(self.x[rows], self.order[rows])
            self.evaluations[rows] += 1

    def wake(self, phase: Phase, max_evaluations: int) -> None:
        """Let every problem take part that is finite, not solved and has evaluations left."""
        self.phase, self.active = phase, len(self.x)
        self.idle.zero_()
        waiting = self.loss > phase.stop[self.order].to(self.loss)
        self._keep(waiting & torch.isfinite(self.loss) & (self.evaluations < max_evaluations))

    def _keep(self, staying: Tensor) -> Tensor:
        """Let only `staying` [active] remain active. Returns the rows, in their new order."""
        rows = torch.cat([staying.nonzero(), (~staying).nonzero()]).squeeze(1)
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
        self.active = int(staying.sum())
        mine = [self.order, self.x, self.loss, self.gradient, self.evaluations, self.idle]
        for tensor in [*mine, *self.memory.tensors()] if len(moved) else []:
            tensor[moved] = tensor[rows[moved]]  # the memory is large: move only what must
        return rows[: self.active]

    def advance(
        self, max_evaluations: int, patience: int, least_gain: float, look_every: int
    ) -> None:
        """Iterate until no problem of the phase is left."""
        going = torch.ones(self.active, dtype=torch.bool, device=self.x.device)
        forgot = torch.zeros_like(going)
        direction = self.memory.direction(self.gradient[: self.active], self.first_move)
        gradient = self.gradient[: self.active]
        search = LineSearch.begin(self.loss[: self.active], (direction * gradient).sum(dim=1))
        problems, iteration = self.order[: self.active].clone(), 0
        while a := self.active:
            x, loss, gradient = self.x[:a], self.loss[:a], self.gradient[:a]
            trial = torch.addcmul(x, search.step[:, None], direction)
            f, g = self.phase.evaluate(trial, problems)
            self.evaluations[:a] += going
            accepted = search.judge(f, (g * direction).sum(dim=1), _finite(f, g)) & going

            gained = (loss - f) > least_gain * loss.abs()
            idle = self.idle[:a]
            idle.copy_(torch.where(accepted, torch.where(gained, 0, idle + 1), idle))
            moved, change = trial - x, g - gradient
            x.copy_(torch.where(accepted[:, None], trial, x))
            gradient.copy_(torch.where(accepted[:, None], g, gradient))
            loss.copy_(torch.where(accepted, f, loss))

            stuck = search.stuck & ~accepted & going
            again = stuck & ~forgot  # forget the curvature once before giving up
            forgot = ~accepted & (forgot | again)
            self.memory.forget(again)
            renewed = self.memory.learn(moved, change, accepted, gradient, self.first_move)
            turning = accepted | again
            direction = torch.where(turning[:, None], renewed, direction)
            search.renew(turning, loss, (direction * gradient).sum(dim=1))

            going = (
                going
                & (loss > self.phase.stop[problems].to(loss))
                & (gradient.abs().amax(dim=1) > 0)
                & (idle < patience)
                & ~(stuck & ~again)
                & (self.evaluations[:a] < max_evaluations)
            )
            iteration += 1
            if iteration % look_every == 0 and not bool(going.all()):
                rows = self._keep(going)
                direction, forgot, search = direction[rows], forgot[rows], search.take(rows)
                going, problems = going[rows], self.order[: self.active].clone()


def look_interval(device: torch.device) -> int:
    """Iterations between two looks at which problems have stopped: on a CPU a look costs nothing,
    and evaluations in vain do; on a GPU it is the other way round."""
    return 1 if device.type == "cpu" else _UNSEEN


def _finite(loss: Tensor, gradient: Tensor) -> Tensor:
    return torch.isfinite(loss) & torch.isfinite(gradient).all(dim=1)
