"""Networks as pure functions."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from attacks.engine.clients import ObservedTraining, Simulated, layered_gradient
from bench.data.dataset import Dataset
from bench.models import BUILDERS, INITIAL, Network, build
from bench.models.network import StaticBatchNorm
from bench.seeding import generator
from bench.toolkit.batches import soft_cross_entropy
from defenses.none import NoDefense

SHAPE = (3, 16, 16)
SIGNALS = {"har_transformer": (9, 32)}
"""Shapes of the samples of networks that take no images."""
NARROW: dict[str, dict[str, Any]] = {
    "resnet18": {"width": 8},
    "vgg16": {"width": 8},
    "vit_small": {"dim": 16},
    "vit_tiny": {"dim": 24, "depth": 2},
    "har_transformer": {"dim": 16},
}
TRANSFORMERS = ["vit_small", "vit_tiny", "pit_tiny"]


def make(name: str) -> Network:
    return build(name, shape=SIGNALS.get(name, SHAPE), classes=5, settings=NARROW.get(name, {}))


@pytest.mark.parametrize("name", list(BUILDERS))
def test_networks_give_logits_and_split_at_every_cut(name: str) -> None:
    network = make(name)
    params = network.init(generator(0, "init"))
    x = torch.rand(4, *network.shape, generator=generator(0, "x"))
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


def test_the_init_setting_leaves_normalisation_alone() -> None:
    network = build("vit_small", shape=SHAPE, classes=5, settings={"init": 0.25})
    params = network.init(generator(0, "init"))
    assert (params["block1.norm1.weight"] == 1).all()
    for key in ("embed.positions.weight", "block2.attn.qkv.weight", "head.weight"):
        assert 0.24 < params[key].abs().max() <= 0.25


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


@pytest.mark.parametrize("name", [n for n in BUILDERS if n not in INITIAL])
def test_plain_networks_begin_with_pytorchs_uniform_in_the_order_of_the_parameters(
    name: str,
) -> None:
    network = make(name)
    rng, expected = generator(1, "init"), {}
    params = network.init(generator(1, "init"))
    buffers = network.calibrate(params, torch.rand(4, *network.shape, generator=generator(0, "x")))
    for key, value in params.items():
        layer, _, own = key.rpartition(".")
        if f"{layer}.mean" in buffers:
            expected[key] = torch.full_like(value, float(own == "weight"))
        else:
            bound = 1 / params[f"{layer}.weight"][0].numel() ** 0.5
            expected[key] = torch.empty_like(value).uniform_(-bound, bound, generator=rng)
    assert all(torch.equal(params[key], expected[key]) for key in params)


@pytest.mark.parametrize(
    ("name", "side", "expected"),
    [
        ("vit_small", 16, [(16, 64)] * 4 + [(64,)]),
        ("vit_small", 32, [(64, 64)] * 4 + [(64,)]),
        ("vit_tiny", 16, [(16, 192)] * 13 + [(192,)]),
        ("vit_tiny", 32, [(64, 192)] * 13 + [(192,)]),
        ("pit_tiny", 16, [(16, 64), (17, 64), (5, 128), (2, 256), (256,)]),
        ("pit_tiny", 32, [(64, 64), (65, 64), (17, 128), (5, 256), (256,)]),
        ("vgg16", 16, [(64, 8, 8), (128, 4, 4), (256, 2, 2), (512, 1, 1), (512, 1, 1), (512,)]),
        ("vgg16", 32, [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2), (512, 1, 1), (512,)]),
    ],
)
def test_smashed_data_has_the_papers_shapes(
    name: str, side: int, expected: list[tuple[int, ...]]
) -> None:
    network = build(name, shape=(3, side, side), classes=10)
    params = network.init(generator(0, "init"))
    x = torch.rand(2, 3, side, side)
    shapes = [tuple(network.run(params, x, last=c, mode="train").shape[1:]) for c in network.cuts]
    assert shapes == expected


def test_images_need_not_be_square() -> None:
    for name in ("vit_small", "pit_tiny"):
        network = build(name, shape=(1, 16, 24), classes=3, settings={"patch": 4})
        params = network.init(generator(0, "init"))
        assert network.run(params, torch.rand(2, 1, 16, 24), last="embed").shape == (2, 24, 64)
        assert network.apply(params, torch.rand(2, 1, 16, 24)).shape == (2, 3)


def names_in_timm(name: str, key: str) -> str:
    """timm's name of one of our parameters."""
    if key.startswith("embed.positions"):
        return "pos_embed"
    if key == "stage1.token.weight":
        return "cls_token"
    key = key.replace(
        "embed.patches.", "patch_embed.conv." if name == "pit_tiny" else "patch_embed."
    )
    key = key.replace("pool.norm", "norm")
    key = re.sub(r"^block(\d+)", lambda m: f"blocks.{int(m[1]) - 1}", key)
    return re.sub(r"^stage(\d)\.blocks\.inner", lambda m: f"transformers.{int(m[1]) - 1}", key)


def timms(name: str) -> nn.Module:
    """timm's own network of the same sizes as `make(name)`."""
    if name == "pit_tiny":
        from timm.models.pit import PoolingVisionTransformer

        return PoolingVisionTransformer(
            img_size=16, patch_size=4, stride=4, base_dims=(32, 32, 32), depth=(2, 6, 4),
            heads=(2, 4, 8), num_classes=5,
        )  # fmt: skip
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"vit_small": (16, 3, 2), "vit_tiny": (24, 2, 3)}
    dim, depth, heads = sizes[name]
    return VisionTransformer(
        img_size=16, patch_size=4, embed_dim=dim, depth=depth, num_heads=heads, num_classes=5,
        class_token=False, global_pool="avg", fc_norm=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_equal_timms_with_the_same_weights(name: str) -> None:
    network, reference = make(name), timms(name).eval()
    params = network.init(generator(0, "init"))
    params = {
        k: v + 0.1 * torch.randn(v.shape, generator=generator(0, k)) for k, v in params.items()
    }
    like = reference.state_dict()
    given = {names_in_timm(name, k): v for k, v in params.items()}
    assert set(given) == set(like)
    for key, value in given.items():
        value = value.mT if name == "pit_tiny" and key == "pos_embed" else value
        given[key] = value.reshape(like[key].shape)
    reference.load_state_dict(given)
    x = torch.rand(3, *SHAPE, generator=generator(0, "x"))
    with torch.no_grad():
        assert torch.allclose(network.apply(params, x), reference(x), atol=1e-4, rtol=1e-4)


def test_vit_small_begins_with_strong_positions() -> None:
    """Under plain SGD timm's, of std 0.02, take thousands of steps to matter."""
    params = make("vit_small").init(generator(0, "init"))
    (positions,) = (v for n, v in params.items() if "position" in n)
    assert float(positions.std()) == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("name", ["vit_tiny", "pit_tiny"])
def test_transformers_begin_with_timms_distributions(name: str) -> None:
    torch.manual_seed(0)
    reference = timms(name).state_dict()
    for key, value in make(name).init(generator(0, "init")).items():
        like = reference[names_in_timm(name, key)]
        assert value.numel() == like.numel(), key
        if float(like.std()) == 0:
            assert torch.equal(value.flatten(), like.flatten()), key
        elif value.numel() > 1000:
            assert abs(float(value.std() / like.std()) - 1) < 0.12, key
            assert abs(float(value.abs().max() / like.abs().max()) - 1) < 0.5, key


def test_full_size_networks_have_the_published_numbers_of_parameters() -> None:
    import timm
    from torchvision.models import vgg16_bn

    cases: list[tuple[str, str, dict[str, int], int]] = [
        # timm's class token and its position are not in ours
        ("vit_tiny", "vit_tiny_patch16_224", {"patch": 16}, 2 * 192),
        ("pit_tiny", "pit_ti_224", {"patch": 16, "stride": 8}, 0),
    ]
    with torch.device("meta"):
        references = [timm.create_model(reference) for _, reference, _, _ in cases]
        features = vgg16_bn().features
    for (name, _, settings, missing), reference in zip(cases, references, strict=True):
        network = build(name, shape=(3, 224, 224), classes=1000, settings=settings)
        assert network.n_parameters == sum(p.numel() for p in reference.parameters()) - missing
    vgg = build("vgg16", shape=(3, 32, 32), classes=10)
    convolutions = sum(p.numel() for p in features.parameters())
    assert vgg.n_parameters == convolutions + 512 * 10 + 10


@pytest.mark.parametrize("name", ["vgg16", *TRANSFORMERS])
def test_networks_vmap_over_weights_and_over_samples(name: str) -> None:
    network = make(name)
    x = torch.rand(3, *SHAPE, generator=generator(0, "x")).double()
    y = torch.eye(5)[:3].double()
    inits = [network.init(generator(i, "init")) for i in range(2)]
    clients = [{k: v.double() for k, v in init.items()} for init in inits]
    stacked = {k: torch.stack([c[k] for c in clients]) for k in clients[0]}
    buffers = network.calibrate(clients[0], torch.rand(8, *SHAPE).double())

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor, mode: str) -> Tensor:
        return soft_cross_entropy(network.apply(params, x, mode=mode, buffers=buffers), y)

    for mode in ("eval", "train"):
        together = vmap(grad(loss), in_dims=(0, None, None, None))(stacked, x, y, mode)
        for i, client in enumerate(clients):
            alone = grad(loss)(client, x, y, mode)
            for key in alone:
                assert torch.allclose(together[key][i], alone[key]), (mode, key)

    per_sample = vmap(lambda x, y: grad(loss)(clients[0], x[None], y[None], "eval"))(x, y)
    for i in range(len(x)):
        alone = grad(loss)(clients[0], x[i : i + 1], y[i : i + 1], "eval")
        for key in alone:
            assert torch.allclose(per_sample[key][i], alone[key]), key


@pytest.mark.parametrize("name", ["vgg16", *TRANSFORMERS])
def test_gradients_of_gradients_equal_finite_differences(name: str) -> None:
    network = make(name)
    params = {k: v.double() for k, v in network.init(generator(0, "init")).items()}
    x = torch.rand(2, *SHAPE, generator=generator(0, "x")).double()
    y = torch.eye(5)[:2].double()
    buffers = network.calibrate(params, x)

    def distance(x: Tensor) -> Tensor:
        def loss(params: dict[str, Tensor]) -> Tensor:
            return soft_cross_entropy(network.apply(params, x, buffers=buffers), y)

        inner = grad(loss)(params)
        return torch.stack([g.square().sum() for g in inner.values()]).sum()

    way = torch.randn(x.shape, generator=generator(0, "way")).double()
    slope = (grad(distance)(x) * way).sum()
    step = 1e-6
    expected = (distance(x + step * way) - distance(x - step * way)) / (2 * step)
    assert torch.isfinite(slope)
    assert expected.abs() > 1e-6
    assert torch.allclose(slope, expected, rtol=1e-4)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_are_traced_and_matched_by_the_general_way(name: str) -> None:
    network = make(name)
    params = network.init(generator(0, "init"))
    x = torch.rand(4, *SHAPE, generator=generator(0, "x"))
    logits, layers = network.trace(params, x)
    assert torch.allclose(logits, network.apply(params, x), atol=1e-6)
    own = {f"{x.name}.{n}" for x in layers for n, _ in x.module.named_parameters(recurse=False)}
    assert own == set(params)
    for layer in layers:
        if layer.kind == "linear":
            weight, bias = params[f"{layer.name}.weight"], params[f"{layer.name}.bias"]
            assert torch.allclose(layer.output, layer.input @ weight.mT + bias, atol=1e-5)

    training = ObservedTraining(
        start=params, const={}, buffers={}, steps=1, batch=2, lr=0.1, mode="eval"
    )
    defense = NoDefense()
    assert layered_gradient(network, defense, training) is None
    candidates = x.unflatten(0, (2, 2)).requires_grad_()
    labels = torch.eye(5)[:4].unflatten(0, (2, 2))
    found = Simulated(network, defense, training)(candidates, labels)
    for i in range(2):
        alone = grad(
            lambda p, i=i: soft_cross_entropy(network.apply(p, candidates[i].detach()), labels[i])
        )(params)
        assert all(torch.allclose(found[k][i], alone[k], atol=1e-5) for k in params)
    square = torch.stack([g.square().sum() for g in found.values()]).sum()
    (slope,) = torch.autograd.grad(square, candidates)
    assert torch.isfinite(slope).all()
    assert slope.abs().max() > 0


@pytest.mark.slow
def test_vit_small_learns_digits(digits: Dataset) -> None:
    network = build("vit_small", shape=digits.shape, classes=digits.classes)
    params = network.init(generator(0, "init"))
    for value in params.values():
        value.requires_grad_()
    optimizer = torch.optim.AdamW(params.values(), lr=2e-3)
    rng = generator(0, "batches")
    for _ in range(400):
        rows = torch.randint(len(digits.train_x), (32,), generator=rng)
        logits = network.apply(params, digits.train_x[rows])
        loss = nn.functional.cross_entropy(logits, digits.train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = network.apply(params, digits.test_x).argmax(dim=1) == digits.test_y
    assert right.float().mean() > 0.6


def test_models_import_timm_only_when_one_needs_it() -> None:
    code = "import sys, bench.models; assert not {'timm', 'torchvision'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_bad_models_get_one_clear_sentence() -> None:
    cases = [
        ("lenett", SHAPE, {}, r"Did you mean 'lenet'"),
        ("lenet", (1, 15, 15), {}, r"sides divisible by 4"),
        ("resnet18", (30,), {}, r"takes images"),
        ("lenet", SHAPE, {"inti": 1}, r"Did you mean 'init'"),
        ("lenet", SHAPE, {"init": -1}, r"must be a number > 0"),
        ("resnet18", SHAPE, {"width": 0}, r"must be >= 1"),
        ("vgg16", (3, 24, 24), {}, r"sides divisible by 16"),
        ("vgg16", SHAPE, {"width": 0}, r"must be >= 1"),
        ("cnn_selective_shield", SHAPE, {"width": 0}, r"must be >= 1"),
        ("vit_small", (3, 18, 16), {}, r"divisible by its patch 4, got .*\[3, 18, 16\]"),
        ("vit_tiny", SHAPE, {"patch": 5}, r"vit_tiny needs .* divisible by its patch 5"),
        ("vit_small", (30,), {}, r"takes images"),
        ("vit_small", SHAPE, {"heads": 5}, r"dim .* divisible by its heads 5, got 64"),
        ("vit_small", SHAPE, {"depth": 0}, r"depth .* must be >= 1"),
        ("vit_small", SHAPE, {"head": 2}, r"Did you mean 'heads'"),
        ("pit_tiny", (3, 18, 18), {}, r"patch 4 plus a multiple of its stride 4"),
        ("pit_tiny", SHAPE, {"patch": 32}, r"patch 32 plus a multiple"),
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
