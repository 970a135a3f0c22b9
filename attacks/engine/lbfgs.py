"""L-BFGS on many independent problems at once.

Each problem has its own curvature history, line search and stopping; they share one evaluation
per iteration. A problem whose trial step is rejected searches on while the others move on. One
that stops is frozen at once and leaves the batch when the host next looks: after every iteration
on a CPU, after every eighth on a GPU, which would wait for the host's question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points [A, N], indices [A] of the problems they belong to) -> (loss [A], gradient [A, N]). The
indices are the same tensor object for as long as the problems are the same ones, and are never
changed in place, so that what depends on them alone may be kept."""

Redraw = Callable[[Tensor], Tensor]
"""Indices [R] of problems whose start has no finite loss -> other starts [R, N]."""

_ARMIJO, _CURVATURE_CONDITION = 1e-4, 0.9
_CURVATURE = 1e-8
_SMALLEST_STEP = 1e-10
_PATIENT_TRIALS = 4
_REDRAWS = 3
_UNSEEN = 8
"""Iterations between two looks at who has stopped, on a GPU."""


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
    look_every: int | None = None,
) -> Minimum:
    """Minimise P independent functions from start [P, N].

    phases: usually one; two to begin in float32, which is faster, and end in float64 with the
    curvature learnt so far: a problem enters the next phase when it reaches the phase's stop
    value or can get no further in its precision. max_evaluations: per problem, over all phases.
    history: curvature pairs. first_move: L2 length of the first trial step; with relative tests
    throughout it makes the result independent of the loss's scale. A problem also stops when
    `patience` accepted steps in a row gained less than `least_gain` of the loss each. redraw:
    gives other starts to problems whose loss is not finite, three times at most. look_every:
    iterations after which stopped problems leave the batch (None: as the device has it); in
    between they are evaluated in vain, which changes no result (but the rounding of products
    whose batch has another size).
    Source: Nocedal and Wright, Numerical Optimization, Alg. 7.4 with strong Wolfe conditions
    (Eq. 3.7); compact form: Byrd, Nocedal, Schnabel 1994.
    """
    if look_every is None:
        look_every = look_interval(start.device)
    run = _Run.begin(phases[0], start, history, first_move, redraw)
    for number, phase in enumerate(phases):
        if number:
            run.convert(phase)
        run.wake(phase, max_evaluations)
        run.advance(max_evaluations, patience, least_gain, look_every)
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

    def advance(
        self, max_evaluations: int, patience: int, least_gain: float, look_every: int
    ) -> None:
        """Iterate until no problem of the phase is left."""
        going = torch.ones(self.active, dtype=torch.bool, device=self.x.device)
        forgot = torch.zeros_like(going)
        direction = self.memory.direction(self.gradient[: self.active], self.first_move)
        search = _Search.begin(self.loss[: self.active], direction, self.gradient[: self.active])
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


def _surely_empty(mask: Tensor) -> bool:
    """Whether no entry is set, where the host can know without waiting."""
    return mask.device.type == "cpu" and not bool(mask.any())


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

    pairs [P, 2, M, N]: steps and gradient changes in a ring, the next in slot `place` [P]. full
    [P, M]: which slots hold a pair; what lies in the others is finite and counts as zero.
    across [P, M, M]: s_i . y_j by slot, valid where i is not younger than j; gram: y_i . y_j;
    both are 0 for an empty slot.
    gamma [P]: scale of the initial inverse Hessian, 0 without curvature. The small systems are
    float64.
    Source: Byrd, Nocedal, Schnabel 1994, Eq. 3.2.
    """

    pairs: Tensor
    full: Tensor
    place: Tensor
    across: Tensor
    gram: Tensor
    gamma: Tensor

    @staticmethod
    def empty(count: int, history: int, like: Tensor) -> _Memory:
        small = torch.zeros(count, history, history, dtype=torch.float64, device=like.device)
        return _Memory(
            pairs=like.new_zeros(count, 2, history, like.shape[1]),
            full=torch.zeros(count, history, dtype=torch.bool, device=like.device),
            place=torch.zeros(count, dtype=torch.int64, device=like.device),
            across=small,
            gram=small.clone(),
            gamma=torch.zeros(count, dtype=torch.float64, device=like.device),
        )

    def tensors(self) -> list[Tensor]:
        return [self.pairs, self.full, self.place, self.across, self.gram, self.gamma]

    def to(self, dtype: torch.dtype) -> _Memory:
        return _Memory(self.pairs.to(dtype), *self.tensors()[1:])

    def forget(self, which: Tensor) -> None:
        """Empty the memory of those of the first A problems, bool [A]."""
        if _surely_empty(which):
            return
        active = len(which)
        # The pairs stay where they are: they are large, and nothing reads an empty slot.
        for tensor in self.tensors()[1:]:
            tensor[:active].masked_fill_(_column(which, tensor), 0)

    def learn(
        self, moved: Tensor, change: Tensor, accepted: Tensor, gradient: Tensor, first_move: float
    ) -> Tensor:
        """Store the pairs of accepted steps whose curvature passes a relative test, and give
        the next direction of every problem. All of [A, N], for the first A problems."""
        curvature = (moved * change).sum(dim=1)
        lengths = moved.norm(dim=1) * change.norm(dim=1)
        taken = accepted & (curvature > _CURVATURE * lengths)
        if _surely_empty(taken):
            return self.direction(gradient, first_move)
        active = len(moved)
        everyone, slot = torch.arange(active, device=moved.device), self.place[:active]
        pairs, full, place, across, gram, gamma = (t[:active] for t in self.tensors())

        all_taken = _surely_empty(~taken)

        def put(target: Tensor, where: tuple[Tensor | slice | int, ...], value: Tensor) -> None:
            if not all_taken:
                value = torch.where(_column(taken, value), value, target[where])
            target[where] = value

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
        return self._toward(gradient, products[..., 1], first_move)

    def direction(self, gradient: Tensor, first_move: float) -> Tensor:
        """-H g per problem; steepest descent of length `first_move` where there is no curvature
        yet or where -H g does not descend."""
        if not len(gradient):
            return gradient
        products = self._products(gradient[..., None])[..., 0]
        return self._toward(gradient, products, first_move)

    def _products(self, vectors: Tensor) -> Tensor:
        """vectors [A, N, R] -> [A, 2, M, R] in float64, 0 for an empty slot."""
        pairs, full = self.pairs[: len(vectors)], self.full[: len(vectors)]
        # Few rows by a wide transpose: the other way round is a quarter as fast.
        found = vectors.mT.contiguous() @ pairs.flatten(1, 2).mT
        products = found.mT.unflatten(1, pairs.shape[1:3]).double()
        return torch.where(full[:, None, :, None], products, 0.0)

    def _toward(self, gradient: Tensor, products: Tensor, first_move: float) -> Tensor:
        active, size = len(gradient), self.across.shape[1]
        lengths = gradient.norm(dim=1)
        steepest = -gradient * (first_move / lengths.clamp_min(1e-300))[:, None]
        gamma = self.gamma[:active, None]
        if _surely_empty(gamma > 0):
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


def _column(which: Tensor, like: Tensor) -> Tensor:
    """[A] -> [A, 1, ...] with the dimensions of `like`."""
    return which.view(-1, *[1] * (like.ndim - 1))
