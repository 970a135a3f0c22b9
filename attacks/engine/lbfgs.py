"""L-BFGS on many independent problems at once.

Each problem has its own curvature history, line search and stopping; they share one evaluation
per iteration. A problem whose trial step is rejected searches on while the others move on, and
stopped problems leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points [A, N], indices [A] of the problems they belong to) -> (loss [A], gradient [A, N])."""

Redraw = Callable[[Tensor], Tensor]
"""Indices [R] of problems whose start has no finite loss -> other starts [R, N]."""

_ARMIJO, _CURVATURE_CONDITION = 1e-4, 0.9
_CURVATURE = 1e-8
_SMALLEST_STEP = 1e-10
_PATIENT_TRIALS = 4
_REDRAWS = 3


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One precision: the function in `dtype`, and the loss [P] at which it is left."""

    evaluate: Evaluate
    stop: Tensor
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Minimum:
    """x [P, N] and loss [P] of the best accepted points; evaluations int64 [P]; reached bool [P]:
    whether the loss fell to the last phase's stop value; redrawn int: starts replaced because
    their loss was not finite; diverged bool [P]: none of the starts tried had a finite loss."""

    x: Tensor
    loss: Tensor
    evaluations: Tensor
    reached: Tensor
    diverged: Tensor
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
) -> Minimum:
    """Minimise P independent functions from start [P, N].

    phases: usually one; two to begin in float32, which is faster, and end in float64 with the
    curvature learnt so far: a problem enters the next phase when it reaches the phase's stop
    value or can get no further in its precision. max_evaluations: per problem, over all phases.
    history: curvature pairs. first_move: L2 length of the first trial step; with relative tests
    throughout it makes the result independent of the loss's scale. A problem also stops when
    `patience` accepted steps in a row gained less than `least_gain` of the loss each. redraw:
    gives other starts to problems whose loss is not finite, three times at most.
    Source: Nocedal and Wright, Numerical Optimization, Alg. 7.4 with strong Wolfe conditions
    (Eq. 3.7); compact form: Byrd, Nocedal, Schnabel 1994.
    """
    run = _Run.begin(phases[0], start, history, first_move, redraw)
    for number, phase in enumerate(phases):
        if number:
            run.convert(phase)
        run.wake(phase, max_evaluations)
        run.advance(max_evaluations, patience, least_gain)
    back = torch.argsort(run.order)
    final = run.loss[back]
    return Minimum(
        x=run.x[back],
        loss=final,
        evaluations=run.evaluations[back],
        reached=final <= phases[-1].stop.to(final),
        diverged=~torch.isfinite(final),
        redrawn=run.redrawn,
    )


@dataclass(kw_only=True)
class _Run:
    """All problems, active ones first: rows [:active] of every tensor move, the others rest.

    order [P]: which problem a row is. A stopped problem swaps places with the last active one,
    so that the active rows stay one contiguous view of the memory. idle [P]: accepted steps in a
    row that gained next to nothing.
    """

    order: Tensor
    x: Tensor
    loss: Tensor
    gradient: Tensor
    memory: _Memory
    first_move: float
    evaluations: Tensor
    idle: Tensor
    redrawn: int
    phase: Phase
    active: int = 0

    @staticmethod
    def begin(
        phase: Phase, start: Tensor, history: int, first_move: float, redraw: Redraw | None
    ) -> _Run:
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
        return _Run(
            order=everyone.clone(), x=x, gradient=gradient, first_move=first_move,
            loss=torch.where(_finite(loss, gradient), loss, torch.inf),
            memory=_Memory.empty(len(x), history, x), evaluations=evaluations,
            idle=torch.zeros_like(everyone), redrawn=redrawn, phase=phase,
        )  # fmt: skip

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

    def advance(self, max_evaluations: int, patience: int, least_gain: float) -> None:
        """Iterate until no problem of the phase is left."""
        forgot = torch.zeros(self.active, dtype=torch.bool, device=self.x.device)
        direction = self.memory.direction(self.gradient[: self.active], self.first_move)
        search = _Search.begin(self.loss[: self.active], direction, self.gradient[: self.active])
        while self.active:
            a = self.active
            x, loss, gradient = self.x[:a], self.loss[:a], self.gradient[:a]
            trial = torch.addcmul(x, search.step[:, None], direction)
            f, g = self.phase.evaluate(trial, self.order[:a])
            self.evaluations[:a] += 1
            accepted = search.judge(f, (g * direction).sum(dim=1), _finite(f, g))

            gained = (loss - f) > least_gain * loss.abs()
            idle = self.idle[:a]
            idle.copy_(torch.where(accepted, torch.where(gained, 0, idle + 1), idle))
            moved, change = trial - x, g - gradient
            x.copy_(torch.where(accepted[:, None], trial, x))
            gradient.copy_(torch.where(accepted[:, None], g, gradient))
            loss.copy_(torch.where(accepted, f, loss))

            stuck = search.stuck & ~accepted
            again = stuck & ~forgot  # forget the curvature once before giving up
            forgot = ~accepted & (forgot | again)
            self.memory.forget(again.nonzero().squeeze(1))
            renewed = self.memory.learn(moved, change, accepted, gradient, self.first_move)
            turning = accepted | again
            direction = torch.where(turning[:, None], renewed, direction)
            search.renew(turning, loss, (direction * gradient).sum(dim=1))

            staying = (
                (loss > self.phase.stop[self.order[:a]].to(loss))
                & (gradient.abs().amax(dim=1) > 0)
                & (idle < patience)
                & ~(stuck & ~again)
                & (self.evaluations[:a] < max_evaluations)
            )
            if not bool(staying.all()):
                rows = self._keep(staying)
                direction, forgot, search = direction[rows], forgot[rows], search.take(rows)


def _finite(loss: Tensor, gradient: Tensor) -> Tensor:
    return torch.isfinite(loss) & torch.isfinite(gradient).all(dim=1)


@dataclass(kw_only=True)
class _Search:
    """Line searches of A problems, [A] each: a strong Wolfe step by bracketing.

    step: the trial. (low, low_loss, low_slope): the best point below the minimum along the
    direction; (high, high_loss): a point beyond it, infinite until one was met.
    """

    base: Tensor
    slope: Tensor
    step: Tensor
    low: Tensor
    low_loss: Tensor
    low_slope: Tensor
    high: Tensor
    high_loss: Tensor
    trials: Tensor

    @staticmethod
    def begin(loss: Tensor, direction: Tensor, gradient: Tensor) -> _Search:
        slope = (direction * gradient).sum(dim=1)
        zero = torch.zeros_like(loss)
        return _Search(
            base=loss.clone(), slope=slope, step=zero + 1, low=zero, low_loss=loss.clone(),
            low_slope=slope, high=zero + torch.inf, high_loss=zero, trials=zero,
        )  # fmt: skip

    def take(self, rows: Tensor) -> _Search:
        return _Search(**{name: value[rows] for name, value in vars(self).items()})

    def renew(self, rows: Tensor, loss: Tensor, slope: Tensor) -> None:
        """Start over from the present point, for the problems `rows` (bool)."""
        zero = torch.zeros_like(loss)
        fresh = {
            "base": loss, "slope": slope, "step": zero + 1, "low": zero, "low_loss": loss,
            "low_slope": slope, "high": zero + torch.inf, "high_loss": zero, "trials": zero,
        }  # fmt: skip
        for name, value in fresh.items():
            setattr(self, name, torch.where(rows, value, getattr(self, name)))

    @property
    def stuck(self) -> Tensor:
        """No step of a length that matters is left."""
        return (self.high - self.low < _SMALLEST_STEP) | (self.step < _SMALLEST_STEP)

    def judge(self, loss: Tensor, slope: Tensor, finite: Tensor) -> Tensor:
        """Which trials to accept; the others get their next step."""
        enough = finite & (loss <= self.base + _ARMIJO * self.step * self.slope)
        enough &= (loss <= self.low_loss) | (self.low == 0)
        limit = _CURVATURE_CONDITION * self.slope.abs()
        self.trials = self.trials + 1
        # Rounding can hide the curvature condition near a minimum: a decrease must do then.
        accepted = enough & ((slope.abs() <= limit) | (self.trials >= _PATIENT_TRIALS))
        short = enough & (slope < -limit)
        self.low = torch.where(short, self.step, self.low)
        self.low_loss = torch.where(short, loss, self.low_loss)
        self.low_slope = torch.where(short, slope, self.low_slope)
        self.high = torch.where(short, self.high, self.step)
        self.high_loss = torch.where(short, self.high_loss, torch.where(finite, loss, torch.inf))
        width = self.high - self.low
        rise = self.high_loss - self.low_loss - self.low_slope * width
        parabola = -self.low_slope * width.square() / (2 * rise)
        usable = torch.isfinite(parabola) & (rise > 0)
        inside = torch.where(usable, parabola.clamp(0.1 * width, 0.9 * width), 0.5 * width)
        self.step = torch.where(torch.isinf(self.high), 2 * self.step, self.low + inside)
        return accepted


@dataclass
class _Memory:
    """Curvature pairs of P problems in the compact representation.

    pairs [P, 2, M, N]: steps and gradient changes in a ring, the next in slot `place` [P].
    across [P, M, M]: s_i . y_j by slot, valid where i is not younger than j; gram: y_i . y_j.
    gamma [P]: scale of the initial inverse Hessian, 0 without curvature. An empty slot is zero.
    The small systems are float64.
    Source: Byrd, Nocedal, Schnabel 1994, Eq. 3.2.
    """

    pairs: Tensor
    place: Tensor
    across: Tensor
    gram: Tensor
    gamma: Tensor

    @staticmethod
    def empty(count: int, history: int, like: Tensor) -> _Memory:
        small = torch.zeros(count, history, history, dtype=torch.float64, device=like.device)
        return _Memory(
            pairs=like.new_zeros(count, 2, history, like.shape[1]),
            place=torch.zeros(count, dtype=torch.int64, device=like.device),
            across=small,
            gram=small.clone(),
            gamma=torch.zeros(count, dtype=torch.float64, device=like.device),
        )

    def tensors(self) -> list[Tensor]:
        return [self.pairs, self.place, self.across, self.gram, self.gamma]

    def to(self, dtype: torch.dtype) -> _Memory:
        return _Memory(self.pairs.to(dtype), self.place, self.across, self.gram, self.gamma)

    def forget(self, rows: Tensor) -> None:
        for tensor in self.tensors() if len(rows) else []:
            tensor[rows] = 0

    def learn(
        self, moved: Tensor, change: Tensor, accepted: Tensor, gradient: Tensor, first_move: float
    ) -> Tensor:
        """Store the pairs of accepted steps whose curvature passes a relative test, and give
        the next direction of every problem. All of [A, N], for the first A problems."""
        curvature = (moved * change).sum(dim=1)
        lengths = moved.norm(dim=1) * change.norm(dim=1)
        rows = (accepted & (curvature > _CURVATURE * lengths)).nonzero().squeeze(1)
        if not len(rows):
            return self.direction(gradient, first_move)
        active = len(moved)
        slot = self.place[rows]
        self.pairs[rows, 0, slot], self.pairs[rows, 1, slot] = moved[rows], change[rows]
        # One pass over the memory for both products: it is read from far away.
        products = self._products(torch.stack([change, gradient], dim=-1))
        moves, changes = products[rows, 0, :, 0], products[rows, 1, :, 0]
        self.across[rows, :, slot] = moves
        self.gram[rows, :, slot] = changes
        self.gram[rows, slot, :] = changes
        self.gamma[rows] = (curvature[rows] / change[rows].square().sum(dim=1)).double()
        self.place[rows] = (slot + 1) % self.across.shape[1]
        return self._toward(gradient, products[:active, :, :, 1], first_move)

    def direction(self, gradient: Tensor, first_move: float) -> Tensor:
        """-H g per problem; steepest descent of length `first_move` where there is no curvature
        yet or where -H g does not descend."""
        if not len(gradient):
            return gradient
        products = self._products(gradient[..., None])[..., 0]
        return self._toward(gradient, products, first_move)

    def _products(self, vectors: Tensor) -> Tensor:
        """vectors [A, N, R] -> [A, 2, M, R] in float64."""
        pairs = self.pairs[: len(vectors)]
        # Few rows by a wide transpose: the other way round is a quarter as fast.
        found = vectors.mT.contiguous() @ pairs.flatten(1, 2).mT
        return found.mT.unflatten(1, pairs.shape[1:3]).double()

    def _toward(self, gradient: Tensor, products: Tensor, first_move: float) -> Tensor:
        active, size = len(gradient), self.across.shape[1]
        lengths = gradient.norm(dim=1)
        steepest = -gradient * (first_move / lengths.clamp_min(1e-300))[:, None]
        gamma = self.gamma[:active, None]
        if not bool((gamma > 0).any()):
            return steepest
        # Age order, oldest first: there the products s_i . y_j, i <= j, are upper triangular.
        slots = torch.arange(size, device=gradient.device)
        age = (self.place[:active, None] + slots) % size
        across = self._by_age(self.across[:active], age).triu()
        gram = self._by_age(self.gram[:active], age)
        diagonal = across.diagonal(dim1=1, dim2=2)
        across = across + torch.diag_embed((diagonal == 0).to(across))  # makes empty slots inert
        moves = products[:, 0].gather(1, age)
        changes = products[:, 1].gather(1, age)
        u = torch.linalg.solve_triangular(across, moves[..., None], upper=True)
        inner = diagonal * u[..., 0] + gamma * ((gram @ u)[..., 0] - changes)
        top = torch.linalg.solve_triangular(across.mT, inner[..., None], upper=False)
        weights = torch.stack([top[..., 0], -gamma * u[..., 0]], dim=1)
        by_slot = torch.empty_like(weights).scatter_(2, age[:, None].expand_as(weights), weights)
        pairs = self.pairs[:active].flatten(1, 2)
        combined = (by_slot.flatten(1)[:, None].to(gradient) @ pairs).squeeze(1)
        newton = gamma.to(gradient) * gradient + combined
        descends = (newton * gradient).sum(dim=1) > 1e-12 * newton.norm(dim=1) * lengths
        return torch.where(((gamma[:, 0] > 0) & descends)[:, None], -newton, steepest)

    @staticmethod
    def _by_age(matrix: Tensor, age: Tensor) -> Tensor:
        rows = matrix.gather(1, age[:, :, None].expand_as(matrix))
        return rows.gather(2, age[:, None, :].expand_as(matrix))
