"""Variables that move otherwise than along their gradient: PM-SFL's scores by Adam."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attacks.engine import clients
from attacks.engine.clients import Clients, ObservedTraining, Simulated
from attacks.engine.observation import parse_view
from attacks.idlg import IDLG
from bench.api import Client, Defense, Local, Message, State
from bench.contract.compose import Composed
from bench.contract.hooks import BY_NAME
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.protocols.local_training import LocalWork
from bench.seeding import generator
from defenses.pm_sfl import PMSFL
from defenses.pm_sfl_noised import NoisedPMSFL
from defenses.splitfed import SplitFedPM
from tests.conftest import context_for, federation_of, network_for
from tests.test_releases import at_init, context, similarity

F64 = torch.float64


def adam(lr_scale: float = 1.0, **more: Any) -> PMSFL:
    return PMSFL(lr_scale=lr_scale, optimizer="adam", **more)


# --- the direction --------------------------------------------------------------------------------


@given(steps=st.integers(1, 6), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_scores_move_as_torchs_adam_moves_them(steps: int, seed: int) -> None:
    """Stacked clients too; what is no score keeps its gradient."""
    rng = torch.Generator().manual_seed(seed)
    grads = [torch.randn(3, 4, generator=rng, dtype=F64) * 10.0**-k for k in range(steps)]
    scores = torch.nn.Parameter(torch.zeros(3, 4, dtype=F64))
    optimiser = torch.optim.Adam([scores], lr=0.5 * 7.0)
    defense, mine = adam(7.0), torch.zeros(3, 4, dtype=F64)
    memory = dict[str, Tensor]()
    for step, grad in enumerate(grads):
        scores.grad = grad
        optimiser.step()
        moved, memory = defense.direction({"w": grad, "b": grad}, memory, step, {"w": grad})
        assert moved["b"] is grad
        mine = mine - 0.5 * moved["w"]
    torch.testing.assert_close(mine, scores.detach())


def test_the_first_step_is_nearly_a_sign_whatever_the_scale_of_the_gradient() -> None:
    grad = torch.tensor([3.0, -1e-3, 0.0, 1e-8])
    moved, _ = adam(2.0).direction({"w": grad}, {}, 0, {"w": grad})
    assert moved["w"].tolist() == pytest.approx([2.0, -2.0, 0.0, 1.0], rel=1e-4)


@pytest.mark.parametrize("defense", [Defense(), PMSFL(lr_scale=9.0), Composed({"a": PMSFL()})])
def test_by_default_the_direction_is_the_gradient(defense: Defense) -> None:
    grad = {"w": torch.ones(2)}
    moved, memory = defense.direction(grad, {}, 0, grad, softness=0.5)
    assert moved is grad
    assert memory == {}
    assert "direction" not in defense.owns


def test_a_soft_direction_is_smooth_and_nears_the_true_one() -> None:
    defense, grad = adam(), torch.tensor([0.0, 0.3, -2.0], dtype=F64)

    def soft(g: Tensor, softness: float) -> Tensor:
        return defense.direction({"w": g}, {}, 0, {"w": g}, softness)[0]["w"]

    torch.testing.assert_close(soft(grad, 1e-9), soft(grad, 0.0), atol=1e-6, rtol=1e-6)
    assert bool((soft(grad, 0.5).abs() <= soft(grad, 0.0).abs()).all())
    torch.testing.assert_close(soft(1e3 * grad, 0.5), soft(grad, 0.5))
    slope = torch.func.jacrev(lambda g: soft(g, 0.5))(grad)
    assert bool(slope.isfinite().all())  # at 0 too
    assert bool((slope.diagonal() > 0).all())
    inner = grad.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda g: soft(g, 0.5)[1:], inner)


def test_one_member_owns_the_direction_and_its_answer_is_checked() -> None:
    grad = {"w": torch.ones(2)}
    both = Composed({"plain": Defense(), "masks": adam(3.0)})
    assert both.direction(grad, {}, 0, const=grad)[0]["w"].tolist() == pytest.approx([3.0, 3.0])
    with pytest.raises(UserError, match="both own the role"):
        Composed({"a": adam(), "b": adam()})
    check = BY_NAME["direction"].check
    assert check((grad, {}, 0, {}), (grad, {})) is None
    assert check((grad, {}, 0, {}), grad) == (
        "returned a dict, expected a pair (direction, memory)"
    )
    assert "without 'w'" in str(check((grad, {}, 0, {}), ({}, {})))
    broken = {"w": torch.full((2,), torch.nan)}
    assert "NaN" in str(check((grad, {}, 0, {}), (broken, {})))


@pytest.mark.parametrize("kind", [PMSFL, NoisedPMSFL, SplitFedPM])
def test_an_unknown_optimizer_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"optimizer must be sgd or adam, got 'lion'\."):
        kind(optimizer="lion")
    assert "direction" in kind(optimizer="adam").owns
    assert "direction" not in kind().owns


def test_noise_on_score_gradients_goes_with_sgd_alone() -> None:
    with pytest.raises(ValueError, match=r"noise 'local' is for optimizer sgd, got adam"):
        NoisedPMSFL(noise="local", epsilon=1.0, optimizer="adam")
    for noise in ("mask", "smashed"):
        assert "direction" in NoisedPMSFL(noise=noise, epsilon=1.0, optimizer="adam").owns  # type: ignore[arg-type]


# --- in rounds ------------------------------------------------------------------------------------


class Noted(PMSFL):
    """Notes every client's training and draws no masks."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.locals: list[Local] = []

    def draw(self, variables: State, const: State, rng: torch.Generator) -> State:
        return {}

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        self.locals.append(local)
        return super().upload(messages, local, client)


def test_a_rounds_scores_move_by_the_rate_and_its_moments_begin_at_0(digits: Dataset) -> None:
    """A first step moves every score with a gradient by lr * lr_scale, in the second round too."""
    network, defense = network_for(digits), Noted(lr_scale=0.2, optimizer="adam")
    run = federation_of(digits, network, defense, clients=3)
    work = LocalWork(protocol="fedavg", batch=8, lr=0.5, local_steps=1)
    for _ in range(2):
        run.play(work, [c.id for c in run.clients])
    assert len(defense.locals) == 6
    for local in defense.locals:
        for name, end in local.end.items():
            moved = local.start[name] - end
            torch.testing.assert_close(moved, local.lr * local.grad_sum[name], atol=1e-6, rtol=0)
            assert float(moved.abs().max()) <= 0.1 + 1e-6
            assert float((moved.abs() > 0.099).float().mean()) > 0.3, name


@pytest.mark.parametrize("steps", [1, 3])
def test_an_attackers_simulation_is_what_clients_do(
    digits: Dataset, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without masks drawn, in float32; scores whose gradient is near the floor are left out."""
    monkeypatch.setattr(clients, "_SOFTNESS", 0.0)
    network, defense = network_for(digits), Noted(lr_scale=0.2, optimizer="adam")
    run = federation_of(digits, network, defense, clients=2, each=8 * steps)
    run.clients[1] = replace(run.clients[1], x=run.clients[1].x[:4], y=run.clients[1].y[:4])
    work = LocalWork(protocol="fedavg", batch=8, lr=0.5, local_epochs=1)
    played = run.play(work, [c.id for c in run.clients], observed=True)
    for local, client in zip(defense.locals, run.clients, strict=True):
        used = played.used[client.id].flatten()
        x, y = client.x[used], torch.nn.functional.one_hot(client.y[used], 10).float()
        training = ObservedTraining(
            start=local.start, const=local.const, buffers={}, steps=local.steps,
            batch=len(used) // local.steps, lr=0.5, mode="train",
        )  # fmt: skip
        found = Simulated(network, defense, training)(x[None], y[None])
        for name, sent in local.grad_sum.items():
            away = (found[name][0] - sent / local.steps).abs()
            assert float((away > 1e-3 * 0.2).float().mean()) < 0.02, name


def test_the_servers_copies_of_client_layers_move_alike(digits: Dataset) -> None:
    """Under mixed cuts: by lr * lr_scale in a first step, whatever the number of batches; what the
    server alone holds goes on by SGD."""
    cuts = ("block1", "block2", "block2")
    moved = {}
    for scale in (0.1, 0.2):
        run = federation_of(
            digits, network_for(digits), adam(scale), protocol="splitfed", cuts=cuts,
            labels="shared", clients=3,
        )  # fmt: skip
        before = {n: v.clone() for n, v in run.state.items()}
        work = LocalWork(protocol="splitfed", batch=8, lr=0.5, local_steps=1)
        run.play(work, [c.id for c in run.clients])
        length = run.server["block2.conv.weight"].detach().abs()  # type: ignore[attr-defined]
        assert float(length.max()) <= 0.5 * scale + 1e-6  # scores begin at 0
        assert float((length > 0.49 * scale).float().mean()) > 0.3
        moved[scale] = {
            n: v.detach() - before[n]
            for n, v in run.server.items()  # type: ignore[attr-defined]
            if n not in run.const
        }
    assert moved[0.1]
    for name, value in moved[0.1].items():
        torch.testing.assert_close(value, moved[0.2][name])


@pytest.mark.slow
def test_masks_train_by_adam_in_few_rounds(digits: Dataset) -> None:
    """Chance is 10 %."""
    network = network_for(digits, "mlp_spm")
    run = federation_of(digits, network, adam(0.4), clients=2, each=200)
    work = LocalWork(protocol="fedavg", batch=32, lr=0.5, local_epochs=3)
    for _ in range(8):
        run.play(work, [c.id for c in run.clients])
    with torch.no_grad():
        logits = network.apply(run.mean_weights(), digits.test_x)
    assert float((logits.argmax(dim=-1) == digits.test_y).float().mean()) > 0.7


# --- attackers ------------------------------------------------------------------------------------


def test_an_attacker_knows_how_sure_directions_are_under_drawn_masks(digits: Dataset) -> None:
    """Those of the head's scores follow the samples; those of the first layer the masks as well."""
    network = network_for(digits)
    found = {}
    for defense in (adam(10.0), PMSFL(lr_scale=10.0), Noted(optimizer="adam")):
        seen, _ = at_init(digits, network, defense, 1)
        clients = Clients(
            parse_view(seen)[-1], context_for(digits, network, defense), dtype=torch.float32
        )
        found[type(defense).__name__, defense.optimizer] = clients.simulated.sureness
    assert found["PMSFL", "sgd"] == found["Noted", "adam"] == {}
    sure = found["PMSFL", "adam"]
    assert all(0 <= float(s) <= 1 for s in sure.values())
    assert float(sure["head.weight"]) > 0.9
    assert float(sure["block1.conv.weight"]) < 0.6


@pytest.mark.slow
def test_bits_of_scores_that_adam_moved_tell_of_the_samples(digits: Dataset) -> None:
    """Under fedavg, where nothing but bits is sent, in steps of 3: 0.64, and of the prior alone
    0.29. Directions taken for as sure as without draws mislead: 0.24."""
    network = network_for(digits)
    seen, truth = at_init(digits, network, adam(30.0), 8)
    assert similarity(IDLG(), seen, context(digits, network, adam(30.0), seen), truth) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("sends", ["probabilities", "bits"])
def test_what_a_split_shows_of_adams_scores_is_attacked(digits: Dataset, sends: Any) -> None:
    network = network_for(digits)
    defense = SplitFedPM(lr_scale=1.0, optimizer="adam", sends=sends)
    seen, truth = at_init(digits, network, defense, 1, split=True)
    ctx = context(digits, network, defense, seen)
    ctx = replace(ctx, rng=generator(0, "adam", sends))
    assert similarity(IDLG(), seen, ctx, truth) > 0.8
