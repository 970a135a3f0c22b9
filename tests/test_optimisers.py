"""The attacks' optimisers: L-BFGS and signed Adam on many problems at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attacks.engine import optimisers
from attacks.engine.optimisers import (
    CurvatureMemory,
    Decay,
    Evaluate,
    Minimum,
    Phase,
    descend,
    minimise,
)

DOUBLE = torch.float64


def solve(
    evaluate: Evaluate, start: Tensor, *, stop: float, evaluations: int, dtype: torch.dtype = DOUBLE
) -> Minimum:
    phase = Phase(evaluate=evaluate, stop=torch.full((len(start),), stop).double(), dtype=dtype)
    return minimise([phase], start, max_evaluations=evaluations)


def rosenbrock(z: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    z = z.detach().requires_grad_()
    loss = (100 * (z[:, 1:] - z[:, :-1] ** 2) ** 2 + (1 - z[:, :-1]) ** 2).sum(dim=1)
    return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]


def starts(count: int, size: int, seed: int) -> Tensor:
    return torch.randn(count, size, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


# --- L-BFGS -------------------------------------------------------------------------------------


def test_lbfgs_solves_every_problem_of_a_batch() -> None:
    found = solve(rosenbrock, starts(16, 8, 1), stop=1e-12, evaluations=1000)
    solved = found.loss <= 1e-12
    assert int(solved.sum()) >= 12  # Rosenbrock in 8 dimensions has a second, local minimum
    assert torch.allclose(found.x[solved], torch.ones(1, dtype=DOUBLE), atol=1e-4)
    assert int(found.evaluations.max()) < 200


SPREAD = 1 + starts(12, 16, 7) / 10 ** torch.arange(12.0, dtype=DOUBLE)[:, None].div(3)
"""Starts of which some are solved soon and some late; bit for bit alike whatever the batch, since
rows of 16 numbers lie alike in memory."""


def assert_frozen(
    monkeypatch: pytest.MonkeyPatch, find: Callable[[], Minimum], *, every: int
) -> None:
    """What stopped is frozen until the host looks, here always or once in so many steps."""
    found = []
    for interval in (1, every):
        monkeypatch.setattr(optimisers, "look_interval", lambda device, n=interval: n)
        found.append(find())
    always, seldom = found
    assert len(always.evaluations.unique()) > 3
    for name in ("x", "loss", "evaluations"):
        assert torch.equal(getattr(always, name), getattr(seldom, name)), name


@pytest.mark.parametrize("every", [3, 8])
@pytest.mark.parametrize("phases", [1, 2])
def test_a_problem_that_stopped_is_frozen_until_the_host_looks(
    every: int, phases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (torch.float32, DOUBLE)[-phases:]
    stop = torch.full((12,), 1e-12, dtype=DOUBLE)
    each = [Phase(evaluate=rosenbrock, stop=stop, dtype=d) for d in kinds]
    assert_frozen(
        monkeypatch, lambda: minimise(each, SPREAD, max_evaluations=60, history=8), every=every
    )


def test_signed_adam_freezes_what_stopped_until_the_host_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phase = Phase(evaluate=rosenbrock, stop=torch.full((12,), 5.0), dtype=DOUBLE)
    adam = {"steps": 50, "lr": 0.05, "signed": True, "low": -3.0, "high": 3.0}
    assert_frozen(monkeypatch, lambda: descend(phase, SPREAD, **adam), every=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_lbfgs_does_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    def scaled(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        loss, grad = rosenbrock(z, p)
        return scale * loss, scale * grad

    start = starts(4, 6, 2)
    one = solve(rosenbrock, start, stop=1e-10, evaluations=300)
    two = solve(scaled, start, stop=scale * 1e-10, evaluations=300)
    assert torch.equal(one.loss <= 1e-10, two.loss <= scale * 1e-10)
    assert torch.allclose(one.x, two.x, atol=1e-4)


def test_a_problem_has_the_same_answer_whatever_the_batch_it_ran_in() -> None:
    start = starts(6, 5, 3)
    together = solve(rosenbrock, start, stop=1e-12, evaluations=400)
    for k in range(6):
        alone = solve(rosenbrock, start[k : k + 1], stop=1e-12, evaluations=400)
        assert torch.allclose(alone.x[0], together.x[k], atol=1e-6)
        assert int(alone.evaluations) == int(together.evaluations[k])


def test_accepted_steps_meet_the_strong_wolfe_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of f(x) = x^2 from 1 the first step, of length 1000, is far too long; 0.001 far too short."""

    def square(z: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return z.square().sum(dim=1), 2 * z

    start = torch.ones(1, 1, dtype=DOUBLE)
    for length in (1000.0, 0.001):
        visited: list[Tensor] = []

        def watched(z: Tensor, p: Tensor, visited: list[Tensor] = visited) -> tuple[Tensor, Tensor]:
            visited.append(z.clone())
            return square(z, p)

        monkeypatch.setattr(optimisers, "_FIRST_MOVE", length)
        phase = Phase(evaluate=watched, stop=torch.full((1,), 0.5).double(), dtype=DOUBLE)
        found = minimise([phase], start, max_evaluations=40)
        slope, end = -2.0, float(found.x)
        step = 1 - end  # the direction is -1
        assert end**2 <= 1 + 1e-4 * step * slope
        assert abs(2 * end) <= 0.9 * abs(slope)
        assert len(visited) > 2


def test_directions_are_those_of_the_two_loop_recursion() -> None:
    rng = torch.Generator().manual_seed(5)
    memory = CurvatureMemory(1, 4, torch.zeros(1, 6, dtype=DOUBLE))
    hessian = torch.diag(torch.rand(6, dtype=DOUBLE, generator=rng) + 0.5)
    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(7):  # more than fit: the ring forgets the oldest
        s = torch.randn(6, dtype=DOUBLE, generator=rng)
        g = torch.randn(6, dtype=DOUBLE, generator=rng)
        pairs = [*pairs, (s, hessian @ s)][-4:]
        accepted = torch.ones(1, dtype=torch.bool)
        got = memory.learn(s[None], (hessian @ s)[None], accepted, g[None])[0]
        q, alphas = g.clone(), []
        for s_i, y_i in reversed(pairs):
            alphas.append(float(s_i @ q) / float(s_i @ y_i))
            q = q - alphas[-1] * y_i
        s_i, y_i = pairs[-1]
        q = q * float(s_i @ y_i) / float(y_i @ y_i)
        for (s_i, y_i), alpha in zip(pairs, reversed(alphas), strict=True):
            q = q + s_i * (alpha - float(y_i @ q) / float(s_i @ y_i))
        assert torch.allclose(got, -q, rtol=1e-9)


def test_a_problem_that_is_not_finite_stops_as_diverged_and_harms_no_other() -> None:
    def poisoned(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(p == 1, torch.nan, z.square().sum(dim=1)), 2 * z

    found = solve(poisoned, torch.ones(3, 4), stop=1e-10, evaluations=50, dtype=torch.float32)
    assert found.loss.isinf().tolist() == [False, True, False]
    assert (found.loss <= 1e-10).tolist() == [True, False, True]
    assert found.redrawn == 0


def test_a_start_without_a_finite_loss_is_replaced_and_counted() -> None:
    def far_away_is_nan(z: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        loss = z.square().sum(dim=1)
        return torch.where(loss > 100, torch.nan, loss), 2 * z

    start = torch.tensor([[1.0, 1.0], [50.0, 0.0]])
    phase = Phase(evaluate=far_away_is_nan, stop=torch.full((2,), 1e-8), dtype=torch.float32)
    found = minimise(
        [phase], start, max_evaluations=60, redraw=lambda rows: torch.full((len(rows), 2), 2.0)
    )
    assert found.redrawn == 1
    assert bool((found.loss <= 1e-8).all())


def test_a_second_precision_goes_on_where_the_first_ends() -> None:
    start = starts(5, 8, 4)
    both = [
        Phase(evaluate=rosenbrock, stop=torch.full((5,), 1e-5), dtype=torch.float32),
        Phase(evaluate=rosenbrock, stop=torch.full((5,), 1e-20).double(), dtype=DOUBLE),
    ]
    found = minimise(both, start, max_evaluations=500)
    assert found.x.dtype == DOUBLE
    assert bool((found.loss <= 1e-20).all())
    alone = solve(rosenbrock, start, stop=1e-20, evaluations=500)
    assert float(found.evaluations.sum()) < 1.3 * float(alone.evaluations.sum())


def test_evaluations_are_counted_and_bounded() -> None:
    calls = 0

    def counted(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += len(z)
        return rosenbrock(z, p)

    found = solve(counted, starts(4, 8, 6), stop=0.0, evaluations=17)
    assert int(found.evaluations.sum()) == calls
    assert int(found.evaluations.max()) <= 17


# --- signed Adam ----------------------------------------------------------------------------------


def test_signed_adam_stays_in_its_box_and_keeps_the_best_point() -> None:
    def bowl(z: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return (z - 0.3).square().sum(dim=1), 2 * (z - 0.3)

    seen: list[Tensor] = []

    def watched(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(z.clone())
        return bowl(z, p)

    stop = torch.full((3,), -torch.inf)
    start = torch.tensor([[5.0, 0.5], [0.1, 0.9], [0.0, 1.0]]).clamp(0, 1)
    found = descend(
        Phase(evaluate=watched, stop=stop, dtype=torch.float32), start, steps=200, lr=0.1,
        signed=True, low=0.0, high=1.0,
    )  # fmt: skip
    assert all(bool(((z >= 0) & (z <= 1)).all()) for z in seen)
    assert torch.allclose(found.x, torch.full((3, 2), 0.3), atol=1e-3)
    losses = torch.stack([bowl(z, torch.empty(0))[0] for z in seen]).min(dim=0).values
    assert torch.equal(found.loss, losses)
    assert found.evaluations.tolist() == [200] * 3


def test_signed_adam_ends_on_the_box_where_the_minimum_lies_beyond() -> None:
    def away(z: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        middle = torch.tensor([1.5, -0.5])
        return (z - middle).square().sum(dim=1), 2 * (z - middle)

    phase = Phase(evaluate=away, stop=torch.full((1,), -torch.inf), dtype=torch.float32)
    found = descend(
        phase, torch.full((1, 2), 0.5), steps=100, lr=0.1, signed=True, low=0.0, high=1.0
    )
    assert found.x.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("decay", ["steps", "cosine"])
def test_signed_adam_without_signs_is_torchs_adam(decay: Decay) -> None:
    start = starts(2, 4, 7)
    x = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=0.05)
    schedule: torch.optim.lr_scheduler.LRScheduler = (
        torch.optim.lr_scheduler.MultiStepLR(optimiser, [3, 5, 7], gamma=0.1)
        if decay == "steps"
        else torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 8)
    )
    trail: list[Tensor] = []
    for _ in range(8):
        trail.append(x.detach().clone())
        _, gradient = rosenbrock(x, torch.empty(0))
        x.grad = gradient
        optimiser.step()
        schedule.step()
    mine: list[Tensor] = []

    def watched(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        mine.append(z.clone())
        return rosenbrock(z, p)

    descend(
        Phase(evaluate=watched, stop=torch.zeros(2).double(), dtype=DOUBLE), start, steps=8,
        lr=0.05, signed=False, low=-torch.inf, high=torch.inf, decay=decay,
    )  # fmt: skip
    assert torch.allclose(torch.stack(mine), torch.stack(trail), rtol=1e-9)
