"""SPEAR: exact samples of a batch, and where it says that it has none."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks.engine.samples import first_layer
from attacks.judge import Likelihood
from attacks.spear import Spear, separate
from bench.contract.attack import Reconstruction
from bench.contract.messages import Part
from bench.data import load_dataset
from bench.data.dataset import Dataset
from bench.harness.cascade import EXPLAINED
from bench.models.module import ModuleNetwork
from bench.protocols.observe import Truth
from bench.seeding import generator
from defenses.noise import GaussianUpdate
from defenses.none import NoDefense
from tests.conftest import context_for, network_for, require, seen_under
from tests.spear_figures import measure, rmse


class Wide(nn.Module):
    """A perceptron with two hidden layers of 200, the first with or without a bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(256, 200, bias=bias), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()
        )
        self.head = nn.Linear(200, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def wide(*, bias: bool) -> ModuleNetwork:
    return ModuleNetwork(
        name="wide", settings={}, shape=(1, 16, 16), classes=10, make=lambda: Wide(bias)
    )


def worst(answer: Reconstruction, truth: Truth) -> float:
    """The largest error of a victim, of which none is failed."""
    assert not require(answer.failed).any(), answer.notes
    return max(map(rmse, require(answer.images).flatten(2), truth.x.flatten(2)))


@pytest.mark.parametrize("batch", [2, 10])
@pytest.mark.parametrize("bias", [True, False])
def test_spear_is_exact_and_the_cascade_spares_what_it_solves(
    digits: Dataset, batch: int, bias: bool
) -> None:
    network = wide(bias=bias)
    seen, truth = seen_under(
        digits, network, NoDefense(), clients=2, batch=batch, protocol="fedsgd"
    )
    ctx = context_for(digits, network, NoDefense())
    assert Spear().applies(seen) is None
    answer = Spear().run(seen, ctx)
    assert worst(answer, truth) < 1e-4
    left = require(Likelihood().unexplained(seen, ctx, answer))
    assert bool((left < EXPLAINED).all())


def test_spear_reads_float32_updates_and_clipped_ones(digits: Dataset) -> None:
    """Differences of float32 weights are rounded, and a clip scales all samples."""
    network = network_for(digits, "mlp3")
    for defense in (NoDefense(), GaussianUpdate(noise_multiplier=0.0, clip_norm=0.01)):
        seen, truth = seen_under(digits, network, defense, clients=2, batch=4)
        assert worst(Spear().run(seen, context_for(digits, network, defense)), truth) < 1e-2


def test_spear_says_why_it_cannot_run_and_fails_where_equations_do_not_suffice(
    digits: Dataset,
) -> None:
    network = network_for(digits, "mlp3")
    noise = GaussianUpdate(noise_multiplier=1e-3, clip_norm=1.0)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (network_for(digits, "logistic"), NoDefense(), {"batch": 2}, "hidden linear layer"),
        (network_for(digits), NoDefense(), {"batch": 2}, "hidden linear layer"),
        (network, noise, {"batch": 2}, "noise or rounding hides the rank"),
    ]
    for model, defense, threat, reason in cases:
        seen, _ = seen_under(digits, model, defense, clients=2, **threat)
        assert reason in str(Spear().applies(seen))
    seen, _ = seen_under(digits, network, NoDefense(), clients=2, batch=2)
    for known, reason in (
        ({"local_steps": 2}, "that of 2 local steps together"),
        ({"samples": 26}, "26 samples need more sets of rows"),
    ):
        assert reason in str(Spear().applies(replace(seen, known={**seen.known, **known})))
    seen, _ = seen_under(digits, network, NoDefense(), clients=2, batch=20)
    answer = Spear().run(seen, context_for(digits, network, NoDefense(), budget=1))
    assert require(answer.failed).all()
    assert answer.notes[0].startswith(f"{seen.clients[0]}: rank 20 of 20, 4096 sets")


def test_samples_that_would_have_sent_something_else_are_no_answer(digits: Dataset) -> None:
    network = network_for(digits, "mlp3")
    seen, _ = seen_under(digits, network, NoDefense(), clients=2, batch=2)
    bias, messages = first_layer(seen)[1], []
    for message in seen.messages:
        parts = dict(message.parts)
        if message.sender == seen.clients[0] and bias in parts:
            parts[bias] = Part(values=1.5 * parts[bias].values)
        messages.append(message.with_parts(parts))
    seen = replace(seen, messages=tuple(messages))
    answer = Spear().run(seen, context_for(digits, network, NoDefense(), budget=1))
    assert require(answer.failed).tolist() == [True, False]


def test_noise_of_a_size_below_the_smallest_singular_value_is_told_from_zeros() -> None:
    rng = generator(0, "spear")
    x = torch.rand(6, 100, generator=rng).double()
    weight = torch.randn(120, 100, generator=rng).double() / 10
    bias = torch.randn(120, generator=rng).double() / 10 - weight.mean(dim=1) * 50
    grad = torch.randn(120, 6, generator=rng).double() * ((x @ weight.T + bias).T > 0)
    noise = torch.randn(120, 100, generator=rng).double() * grad.square().mean().sqrt()
    for size, close in ((0.0, 1e-12), (1e-6, 1e-4)):
        unmixed = separate(
            grad @ x + size * noise, grad.sum(dim=1), weight, bias,
            samples=6, chances=torch.full((120,), 0.5), sets=40960, rng=generator(0, "sets"),
        )  # fmt: skip
        assert rmse(require(unmixed.inputs), x) < close
    lost = separate(
        grad @ x + 0.5 * noise, grad.sum(dim=1), weight, bias,
        samples=6, chances=torch.full((120,), 0.5), sets=4096, rng=generator(0, "sets"),
    )  # fmt: skip
    assert lost.inputs is None or rmse(lost.inputs, x) > 0.1


@pytest.mark.slow
def test_published_figures_of_spear_are_found_again(data_dir: Path) -> None:
    """Rates within two batches, since other processors round otherwise."""
    text = (Path(__file__).parents[1] / "results/published/spear.toml").read_text(encoding="utf-8")
    data = load_dataset("mnist", seed=0, data_dir=data_dir)
    for row in tomllib.loads(text)["rows"]:
        words, ours = row["command"].split(), row["measure"]
        epochs, batch = int(words[6]), int(words[7])
        dtype = "float64" if "float64" in words else "float32"
        again = measure(data, epochs, batch, batches=ours["of"], dtype=dtype)
        assert abs(again["exact"] - ours["exact"]) <= 2
