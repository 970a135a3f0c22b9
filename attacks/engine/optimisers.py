"""Optimisers of many independent problems at once: L-BFGS and signed Adam, in pieces that fit the
memory.

Each problem has its own curvature history, line search and stopping; they share one evaluation
per iteration. A problem whose trial step is rejected searches on while the others move on. One
that stops is frozen at once and leaves the batch when the host next looks: after every iteration
on a CPU, after every eighth on a GPU, which would wait for the host's question.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from bench.toolkit.memory import halving, usable_bytes

_CURVATURE = 1e-8
"""Least curvature of a pair that is kept, in units of its lengths."""
_FIRST_MOVE = 1.0
"""L2 length of the first trial step; with relative tests throughout it makes the result independent
of the loss's scale."""


class CurvatureMemory:
    """Curvature pairs of P problems in the compact representation, none to begin with.

    The small systems are float64.
    Source: Byrd, Nocedal, Schnabel 1994, Eq. 3.2.

    Attributes:
        pairs: Steps and gradient changes in a ring [P, 2, M, N].
        full: Which slots hold a pair, bool [P, M]; what lies in the others is finite and counts
            as zero.
        place: The next slot, int64 [P].
        across: s_i . y_j by slot [P, M, M], valid where i is not younger than j; 0 for an empty
            slot.
        gram: y_i . y_j by slot [P, M, M], 0 for an empty slot.
        gamma: Scale of the initial inverse Hessian [P], 0 without curvature.
    """

    def __init__(self, count: int, history: int, like: Tensor) -> None:
        zeros = partial(torch.zeros, device=like.device)
        self.pairs = like.new_zeros(count, 2, history, like.shape[1])
        self.full = zeros(count, history, dtype=torch.bool)
        self.place = zeros(count, dtype=torch.int64)
        self.across = zeros(count, history, history, dtype=torch.float64)
        self.gram, self.gamma = self.across.clone(), zeros(count, dtype=torch.float64)

    def tensors(self) -> list[Tensor]:
        return [self.pairs, self.full, self.place, self.across, self.gram, self.gamma]

    def forget(self, which: Tensor) -> None:
        """Empty the memory of those of the first A problems, bool [A]."""
        active = len(which)
        # The pairs stay where they are: they are large, and nothing reads an empty slot.
        for tensor in self.tensors()[1:]:
            tensor[:active].masked_fill_(column(which, tensor), 0)

    def learn(self, moved: Tensor, change: Tensor, accepted: Tensor, gradient: Tensor) -> Tensor:
        """Store the pairs of accepted steps whose curvature passes a relative test, and give
        the next direction of every problem. All of [A, N], for the first A problems."""
        curvature = (moved * change).sum(dim=1)
        lengths = moved.norm(dim=1) * change.norm(dim=1)
        taken = accepted & (curvature > _CURVATURE * lengths)
        if taken.device.type == "cpu" and not bool(taken.any()):  # a GPU would wait for the answer
            return self.direction(gradient)
        active = len(moved)
        everyone, slot = torch.arange(active, device=moved.device), self.place[:active]
        pairs, full, place, across, gram, gamma = (t[:active] for t in self.tensors())

        def put(target: Tensor, where: tuple[Tensor | slice | int, ...], value: Tensor) -> None:
            target[where] = torch.where(column(taken, value), value, target[where])

        put(pairs, (everyone, 0, slot), moved)
        put(pairs, (everyone, 1, slot), change)
        full[everyone, slot] |= taken
        # One pass over the memory for both products: it is read from far away.
        products = self._products(torch.stack([change, gradient], dim=-1))
        put(across, (everyone, slice(None), slot), products[:, 0, :, 0])
        put(gram, (everyone, slice(None), slot), products[:, 1, :, 0])
        put(gram, (everyone, slot), products[:, 1, :, 0])
        scale = (curvature / change.square().sum(dim=1)).double()
        gamma.copy_(torch.where(taken, scale, gamma))
        place.copy_(torch.where(taken, (slot + 1) % across.shape[1], place))
        return self._toward(gradient, products[..., 1])

    def direction(self, gradient: Tensor) -> Tensor:
        """-H g per problem; steepest descent of length `_FIRST_MOVE` where there is no curvature
        yet or where -H g does not descend."""
        return self._toward(gradient, self._products(gradient[..., None])[..., 0])

    def _products(self, vectors: Tensor) -> Tensor:
        """vectors [A, N, R] -> [A, 2, M, R] in float64, 0 for an empty slot."""
        pairs, full = self.pairs[: len(vectors)], self.full[: len(vectors)]
        # Few rows by a wide transpose: the other way round is a quarter as fast.
        wide = vectors.mT.contiguous() @ pairs.flatten(1, 2).mT
        products = wide.mT.unflatten(1, pairs.shape[1:3]).double()
        return torch.where(full[:, None, :, None], products, 0.0)

    def _toward(self, gradient: Tensor, products: Tensor) -> Tensor:
        active, size = len(gradient), self.across.shape[1]
        lengths = gradient.norm(dim=1)
        steepest = -gradient * (_FIRST_MOVE / lengths.clamp_min(1e-300))[:, None]
        gamma = self.gamma[:active, None]
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


def column(values: Tensor, like: Tensor) -> Tensor:
    """[P] -> [P, 1, ...] with the dimensions of `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))


_ARMIJO, _CURVATURE_CONDITION = 1e-4, 0.9
_SMALLEST_STEP = 1e-10
_PATIENT_TRIALS = 4


class LineSearch:
    """Line searches of A problems, [A] each: a strong Wolfe step by bracketing.

    Args:
        loss: Of the points where they begin.
        slope: Along their directions.

    Attributes:
        base, slope: Loss and slope where the search begins.
        step: The trial.
        low, low_loss, low_slope: The best point below the minimum along the direction.
        high, high_loss: A point beyond it, infinite until one was met.
        trials: So far.
    """

    def __init__(self, loss: Tensor, slope: Tensor) -> None:
        zero = torch.zeros_like(loss)
        self.base, self.slope, self.step = loss.clone(), slope, zero + 1
        self.low, self.low_loss, self.low_slope = zero, loss.clone(), slope
        self.high, self.high_loss, self.trials = zero + torch.inf, zero, zero

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the problems alone."""
        for name, value in vars(self).items():
            setattr(self, name, value[rows])

    def renew(self, rows: Tensor, loss: Tensor, slope: Tensor) -> None:
        """Start over from the present point, for the problems `rows` (bool)."""
        for name, value in vars(LineSearch(loss, slope)).items():
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


Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points [A, N], indices [A] of the problems they belong to) -> (loss [A], gradient [A, N])."""

Redraw = Callable[[Tensor], Tensor]
"""Indices [R] of problems whose start has no finite loss -> other starts [R, N]."""

_REDRAWS, _PATIENCE = 3, 20
"""Other starts for a loss that is not finite; accepted steps in a row that gain next to nothing,
after which a problem stops."""
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
    least_gain: float = 1e-7,
    redraw: Redraw | None = None,
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
        least_gain: Share of the loss that is next to nothing.
        redraw: Gives other starts to problems whose loss is not finite, three times at most.
    """
    run = Descent(phases[0], start, history, redraw)
    for number, phase in enumerate(phases):
        if number:
            run.convert(phase)
        run.advance(math.ceil(phase.share * max_evaluations), least_gain)
    back = torch.argsort(run.order)
    return Minimum(
        x=run.x[back], loss=run.loss[back], evaluations=run.evaluations[back], redrawn=run.redrawn
    )


class Descent:
    """All problems, active ones first: rows [:active] of every tensor move, the others rest.

    A stopped problem swaps places with the last active one, so that the active rows stay one
    contiguous view of the memory.

    Attributes:
        order: Which problem a row is, int64 [P].
        idle: Accepted steps in a row that gained next to nothing, int64 [P].
    """

    def __init__(self, phase: Phase, start: Tensor, history: int, redraw: Redraw | None) -> None:
        self.phase, self.active, self.redrawn = phase, 0, 0
        self.x = start.to(phase.dtype).clone()
        everyone = torch.arange(len(self.x), device=self.x.device)
        loss, self.gradient = (t.clone() for t in phase.evaluate(self.x, everyone))
        self.order, self.idle = everyone.clone(), torch.zeros_like(everyone)
        self.evaluations = torch.ones_like(everyone)
        for _ in range(_REDRAWS):
            broken = (~_finite(loss, self.gradient)).nonzero().squeeze(1)
            if not len(broken) or redraw is None:
                break
            self.x[broken] = redraw(broken).to(self.x)
            loss[broken], self.gradient[broken] = phase.evaluate(self.x[broken], broken)
            self.evaluations[broken] += 1
            self.redrawn += len(broken)
        self.loss = torch.where(_finite(loss, self.gradient), loss, torch.inf)
        self.memory = CurvatureMemory(len(self.x), history, self.x)

    def convert(self, phase: Phase) -> None:
        """Go on in the phase, with losses and gradients computed anew in its precision."""
        self.phase = phase
        self.x, self.memory.pairs = (t.to(phase.dtype) for t in (self.x, self.memory.pairs))
        self.loss, self.gradient = self.loss.to(phase.dtype), self.gradient.to(phase.dtype)
        self.active = len(self.x)
        self._keep(torch.isfinite(self.loss))
        rows = slice(self.active)
        if self.active:
            self.loss[rows], self.gradient[rows] = phase.evaluate(self.x[rows], self.order[rows])
            self.evaluations[rows] += 1

    def _keep(self, staying: Tensor) -> Tensor:
        """Let only `staying` [active] remain active. Returns the rows, in their new order."""
        rows = torch.cat([staying.nonzero(), (~staying).nonzero()]).squeeze(1)
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
        self.active = int(staying.sum())
        mine = [self.order, self.x, self.loss, self.gradient, self.evaluations, self.idle]
        for tensor in [*mine, *self.memory.tensors()] if len(moved) else []:
            tensor[moved] = tensor[rows[moved]]  # the memory is large: move only what must
        return rows[: self.active]

    def advance(self, max_evaluations: int, least_gain: float) -> None:
        """Iterate until no problem is left that is finite, not solved and has evaluations left."""
        self.active = len(self.x)
        self.idle.zero_()
        waiting = self.loss > self.phase.stop[self.order].to(self.loss)
        self._keep(waiting & torch.isfinite(self.loss) & (self.evaluations < max_evaluations))
        going = torch.ones(self.active, dtype=torch.bool, device=self.x.device)
        forgot = torch.zeros_like(going)
        direction = self.memory.direction(self.gradient[: self.active])
        gradient = self.gradient[: self.active]
        search = LineSearch(self.loss[: self.active], (direction * gradient).sum(dim=1))
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
            renewed = self.memory.learn(moved, change, accepted, gradient)
            turning = accepted | again
            direction = torch.where(turning[:, None], renewed, direction)
            search.renew(turning, loss, (direction * gradient).sum(dim=1))

            going = (
                going
                & (loss > self.phase.stop[problems].to(loss))
                & (gradient.abs().amax(dim=1) > 0)
                & (idle < _PATIENCE)
                & ~(stuck & ~again)
                & (self.evaluations[:a] < max_evaluations)
            )
            iteration += 1
            if iteration % look_interval(x.device) == 0 and not bool(going.all()):
                rows = self._keep(going)
                direction, forgot = direction[rows], forgot[rows]
                search.keep(rows)
                going, problems = going[rows], self.order[: self.active].clone()


def look_interval(device: torch.device) -> int:
    """Return the iterations between two looks at which problems have stopped.

    On a CPU a look costs nothing, and evaluations in vain do; on a GPU it is the other way round.
    It changes no result but the rounding of products whose batch has another size.
    """
    return 1 if device.type == "cpu" else _UNSEEN


def _finite(loss: Tensor, gradient: Tensor) -> Tensor:
    return torch.isfinite(loss) & torch.isfinite(gradient).all(dim=1)


_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_MILESTONES, _DECAY = (3 / 8, 5 / 8, 7 / 8), 0.1
Decay = Literal["steps", "cosine"]


def descend(
    phase: Phase,
    start: Tensor,
    *,
    steps: int,
    lr: float | Tensor,
    signed: bool,
    low: float,
    high: float,
    decay: Decay = "steps",
) -> Minimum:
    """Minimise P functions from start [P, N] by `steps` steps within [low, high].

    The answer is each problem's point of least loss. A problem whose loss or gradient is not
    finite rests at its last point, one that reaches `phase.stop` there.
    Source: Geiping et al., arXiv:2003.14053, Sec. 5 (signed gradients, step decay, box).

    Args:
        phase: The functions, and the loss at which each is solved.
        start: Points [P, N].
        steps: Evaluations of each problem.
        lr: First step length, or one of each number [N].
        signed: Whether only the sign of each derivative enters Adam.
        low: Least coordinate.
        high: Largest coordinate.
        decay: `steps`: a tenth of the step length after 3/8, 5/8 and 7/8 of the steps, as in the
            paper; `cosine`: half a cosine's way down to 0.
    """
    x = start.to(phase.dtype).clone()
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
        if (step + 1) % look_interval(x.device) == 0 and not bool(going.all()):
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


_GPU_SHARE = 0.6
"""Part of the usable memory that is filled on purpose: `bytes_each` is an estimate."""


def in_chunks(
    work: Callable[[slice], None], count: int, *, bytes_each: int, device: torch.device
) -> None:
    """Call work(slice) over range(count) in pieces of at most 2 GiB (CPU) or 60 % of the usable
    memory (GPU), estimated at `bytes_each` per problem. A piece that runs out of memory is
    halved and done again, so `work` must keep nothing of a call that raised. One problem that
    does not fit raises what the allocator raised."""
    limit = usable_bytes(device)
    if device.type == "cuda":
        limit = int(limit * _GPU_SHARE)
    size, at = max(1, min(count, limit // max(1, bytes_each))), 0
    while at < count:

        def piece(size: int, first: int = at) -> None:
            work(slice(first, first + size))

        _, size = halving(piece, at_once=min(size, count - at), device=device)
        at += size


def minimise_in_chunks(
    evaluate: Evaluate,
    start: Tensor,
    *,
    numbers_each: int,
    evaluations: int,
    history: int = 30,
    least_gain: float = 1e-7,
) -> tuple[Tensor, Tensor, int]:
    """Minimise functions of which no minimum is known, in chunks that fit the memory, from [P, N].

    Args:
        evaluate: Of all problems, whichever of them are in a chunk.
        start: In the precision to compute in.
        numbers_each: Held for one evaluation of one problem.
        evaluations: Of one problem.
        history: See `minimise`.
        least_gain: See `minimise`.

    Returns:
        Points [P, N], losses [P], and evaluations of all problems.
    """
    points, losses, spent = torch.empty_like(start), start.new_empty(len(start)), [0]

    def work(part: slice) -> None:
        first = part.start
        phase = Phase(
            evaluate=lambda z, problems: evaluate(z, problems + first),
            stop=start.new_full((len(start[part]),), -torch.inf),
            dtype=start.dtype,
        )
        minimum = minimise(
            [phase],
            start[part],
            max_evaluations=evaluations,
            history=history,
            least_gain=least_gain,
        )
        points[part], losses[part] = minimum.x, minimum.loss
        spent.append(int(minimum.evaluations.sum()))

    width = torch.finfo(start.dtype).bits // 8
    bytes_each = width * ((2 * history + 8) * start.shape[1] + numbers_each)
    in_chunks(work, len(start), bytes_each=bytes_each, device=start.device)
    return points, losses, sum(spent)
