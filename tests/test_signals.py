"""Signals [channels, length] through networks, protocols, attacks, metrics and reports."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

import bench
from bench.errors import UserError
from bench.models import build
from bench.report import pictures
from bench.seeding import generator
from bench.toolkit.batches import soft_cross_entropy
from tests.made_data import waves

SHAPE = (3, 32)
SMALL = {"har_transformer": {"dim": 16, "heads": 2}}
MODELS = sorted(SMALL)


@pytest.fixture(scope="module")
def signals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An npz file of signals with clients."""
    path = tmp_path_factory.mktemp("signals") / "signals.npz"
    x, y, whose = waves(range(8), each=18, channels=3, length=32)
    tx, ty, _ = waves(range(20, 22), each=18, channels=3, length=32, seed=9)
    np.savez(path, train_x=x, train_y=y, test_x=tx, test_y=ty, train_clients=whose)
    return path


# --- networks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_networks_of_signals_differentiate_twice_and_under_vmap(name: str) -> None:
    network = build(name, shape=SHAPE, classes=6, settings=SMALL[name])
    params = network.init(generator(0, "init"))
    x = torch.randn(2, 3, *SHAPE, generator=generator(0, "x"))
    y = torch.eye(6)[:3]

    def distance(x: torch.Tensor) -> torch.Tensor:
        inner = grad(lambda p: soft_cross_entropy(network.apply(p, x), y))(params)
        return sum(g.square().sum() for g in inner.values())  # type: ignore[return-value]

    slopes = vmap(grad(distance))(x)
    assert torch.isfinite(slopes).all()
    moved = x.double() + 0
    step = 1e-6 * torch.randn(moved.shape, generator=generator(0, "step"), dtype=torch.float64)
    doubled = {k: v.double() for k, v in params.items()}
    params, y = doubled, y.double()
    exact = (vmap(grad(distance))(moved) * step).sum()
    change = sum(distance(a + s) - distance(a - s) for a, s in zip(moved, step, strict=True)) / 2
    assert change == pytest.approx(float(exact), rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_networks_of_signals_refuse_what_they_cannot_take(name: str) -> None:
    with pytest.raises(UserError, match=r"takes signals \[channels, length\]"):
        build(name, shape=(1, 16, 16), classes=3)
    with pytest.raises(UserError, match=r"divisible by its patch"):
        build(name, shape=(3, 21), classes=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_networks_of_signals_learn(name: str) -> None:
    x, y, _ = (torch.from_numpy(v) for v in waves(range(30), each=18, channels=3, length=32))
    x = ((x - x.mean(dim=(0, 2), keepdim=True)) / x.std()).float()
    network = build(name, shape=SHAPE, classes=6, settings=SMALL[name])
    params = {k: v.requires_grad_() for k, v in network.init(generator(0, "init")).items()}
    optimiser = torch.optim.Adam(params.values(), lr=0.01)
    for _ in range(60):
        torch.nn.functional.cross_entropy(network.apply(params, x[:450]), y[:450]).backward()
        optimiser.step()
        optimiser.zero_grad()
    right = network.apply(params, x[450:]).argmax(dim=1) == y[450:]
    assert right.float().mean() > 0.8


# --- a whole run ----------------------------------------------------------------------------------

SUITE = """
name = "signals"
version = 1
checkpoints = ["init"]
budget = {budget}
audit = 0

[protocol]
name = "fedavg"
clients = 3
rounds = 1
local_steps = 1
batch = 6
lr = 0.1
partition = "natural"

[[tasks]]
dataset = "npz:{path}"
model = "mlp_spm"

[[tasks]]
dataset = "npz:{path}"
model = "har_transformer"
model_settings = {{ dim = 16, heads = 2, depth = 1 }}
protocol = {{ name = "splitfed", cut = "embed" }}

[[threats]]
victims = 3

[[defenses]]
name = "none"
"""
ATTACKS = (
    *("analytic", "decoder", "dlg", "idlg", "ilrg", "inverting_gradients", "prior_only", "ridge"),
    "split_label",
)


@pytest.mark.slow
def test_every_attack_runs_on_signals_and_what_leaks_is_seen(signals: Path, tmp_path: Path) -> None:
    text = SUITE.format(path=signals, budget=20)
    text += "".join(f'\n[[attacks]]\nname = "{name}"\n' for name in ATTACKS)
    (tmp_path / "suite.toml").write_text(text)
    found = bench.run(
        tmp_path / "suite.toml", out=tmp_path / "out", device="cpu", jobs=0, progress=False
    )
    assert found.failures == []
    told = found.attacks()
    done = told[told.status == "done"]
    assert set(done.attack) == set(ATTACKS)
    # Whatever is no image leaks by its squared error; of a linear layer's gradient nothing is lost.
    assert "ssim" not in done.columns or done.ssim.isna().all()
    error = {(r.model, r.attack): r.mse for r in done.itertuples()}
    floor = float(done.mse_floor.dropna().iloc[0])
    assert error["mlp_spm", "analytic"] < 1e-9
    assert error["mlp_spm", "idlg"] < 0.01 * floor
    assert error["mlp_spm", "ridge"] < 0.7 * floor
    assert error["har_transformer", "idlg"] < 0.1 * floor
    assert error["har_transformer", "prior_only"] > 0.7 * floor


def test_a_report_shows_signals_as_numbers() -> None:
    x = np.arange(2 * 1 * 3 * 32, dtype=np.float32).reshape(2, 1, 3, 32)
    shown = pictures._record(x + 1, x)
    assert shown["features"] == 96
    assert shown["scores"] == [1.0, 1.0]
    assert shown["truth"][0] == [float(v) for v in range(10)]
