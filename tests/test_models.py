"""Networks as pure functions."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

from bench.models import BUILDERS, Network, build
from bench.models.network import StaticBatchNorm
from bench.seeding import generator

SHAPE = (3, 16, 16)


def make(name: str) -> Network:
    settings = {"width": 8} if name == "resnet18" else {}
    return build(name, shape=SHAPE, classes=5, settings=settings)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_networks_give_logits_and_split_at_every_cut(name: str) -> None:
    network = make(name)
    params = network.init(generator(0, "init"))
    x = torch.rand(4, *SHAPE, generator=generator(0, "x"))
    buffers = network.calibrate(params, x)
    logits = network.apply(params, x, buffers=buffers)
    assert logits.shape == (4, 5)
    assert set(network.head) <= set(params)
    stages = [*network.cuts, "head"]
    for cut, after in zip(network.cuts, stages[1:], strict=True):
        smashed = network.run(params, x, last=cut, buffers=buffers)
        resumed = network.run(params, smashed, first=after, buffers=buffers)
        assert torch.allclose(resumed, logits, atol=1e-6)
    features = network.features(params, x, buffers=buffers)
    by_hand = features @ params[network.head[0]].T + params[network.head[1]]
    assert torch.allclose(by_hand, logits, atol=1e-6)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_initial_weights_come_from_the_generator_alone(name: str) -> None:
    network = make(name)
    before = torch.random.get_rng_state()
    one, two = network.init(generator(3, "init")), network.init(generator(3, "init"))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_init_setting_bounds_all_weights() -> None:
    network = build("lenet", shape=(1, 16, 16), classes=10, settings={"init": 0.25})
    params = network.init(generator(0, "init"))
    flat = torch.cat([p.flatten() for p in params.values()])
    assert network.n_parameters == 9466
    assert 0.24 < flat.abs().max() <= 0.25


def test_the_default_init_has_pytorchs_variance() -> None:
    network = build("mlp3", shape=(1, 28, 28), classes=10)
    weight = network.init(generator(0, "init"))["hidden1.linear.weight"]
    reference = torch.nn.Linear(784, 256).weight.detach()
    assert abs(float(weight.std() / reference.std()) - 1) < 0.02
    assert weight.abs().max() <= 784**-0.5


def test_static_batch_norm_equals_torchs_in_both_modes() -> None:
    x = torch.randn(6, 4, 5, 5, generator=generator(0, "x"))
    ours, reference = StaticBatchNorm(4), torch.nn.BatchNorm2d(4)
    with torch.no_grad():
        ours.weight.fill_(1.5)
        ours.bias.fill_(0.2)
        reference.weight.fill_(1.5)
        reference.bias.fill_(0.2)
    assert torch.allclose(ours(x), reference.train()(x), atol=1e-5)
    ours.mode = "eval"
    ours.mean, ours.var = torch.rand(4), torch.rand(4) + 0.5
    reference.running_mean, reference.running_var = ours.mean.clone(), ours.var.clone()
    assert torch.allclose(ours(x), reference.eval()(x), atol=1e-5)


def test_networks_with_static_norm_differentiate_twice_in_train_mode() -> None:
    network = make("resnet18")
    params = network.init(generator(0, "init"))
    x = torch.rand(2, 3, *SHAPE, generator=generator(0, "x"))

    def distance(x: torch.Tensor) -> torch.Tensor:
        inner = grad(lambda p: network.apply(p, x, mode="train").square().mean())(params)
        return sum(g.square().sum() for g in inner.values())  # type: ignore[return-value]

    slopes = vmap(grad(distance))(x)
    assert slopes.shape == x.shape
    assert torch.isfinite(slopes).all()
    assert slopes.abs().max() > 0


def test_bad_models_get_one_clear_sentence() -> None:
    cases = [
        ("lenett", SHAPE, {}, r"Did you mean 'lenet'"),
        ("lenet", (1, 15, 15), {}, r"sides divisible by 4"),
        ("resnet18", (30,), {}, r"takes images"),
        ("lenet", SHAPE, {"inti": 1}, r"Did you mean 'init'"),
        ("lenet", SHAPE, {"init": -1}, r"must be a number > 0"),
        ("resnet18", SHAPE, {"width": 0}, r"integer >= 1"),
    ]
    for name, shape, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            build(name, shape=shape, classes=5, settings=settings)
    network = make("cnn_selective_shield")
    params = network.init(generator(0, "init"))
    with pytest.raises(ValueError, match=r"has no stage 'block9'"):
        network.run(params, torch.rand(2, *SHAPE), last="block9", mode="train")
    with pytest.raises(ValueError, match=r"needs normalisation buffers"):
        network.apply(params, torch.rand(2, *SHAPE))
