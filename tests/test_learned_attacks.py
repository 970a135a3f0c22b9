"""Closed-form and learned inverters: where they must be exact, beat the floors, or refuse."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attacks.decoder
import attacks.engine.channel
from attacks.analytic import Analytic, LayerGradient
from attacks.decoder import NOISED, PLAYS, Data, Decoder
from attacks.engine.channel import Channel, count_sketch, layer_input, similarity
from attacks.engine.inverter import Inverter
from attacks.engine.observation import parse_view
from attacks.engine.regression import LAMBDAS, Features, fit
from attacks.ridge import Ridge
from bench.contract.attack import Attack, Context, Seen
from bench.contract.defense import Client, Defense, Local
from bench.contract.messages import SERVER, Message, Part
from bench.data import load_dataset
from bench.data.dataset import Dataset
from bench.metrics.floors import floors
from bench.metrics.score import score
from bench.protocols.observe import Truth
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator
from bench.toolkit.images import ssim
from defenses.noise import GaussianUpdate
from defenses.quantise import Quantise
from defenses.sparsifiers import TopK
from defenses.spm import SPM
from tests.conftest import context_for, network_for, require, seen_under

Case = tuple[Seen, Truth, Context]


def updates(
    data: Dataset, model: str, defense: Defense | None = None, *, clients: int = 8,
    budget: int = 200, **threat: object,
) -> Case:  # fmt: skip
    """One observed round, and a context whose shadow plays it on public data."""
    defense = defense or Defense()
    network = network_for(data, model)
    seen, truth = seen_under(data, network, defense, clients=clients, **threat)
    rng = generator(0, "test shadow")

    shadow = Rehearsals(
        seen=seen, network=network, defense=defense, rng=rng, device=torch.device("cpu")
    )
    ctx = context_for(data, network, defense, budget=budget)
    return seen, truth, replace(ctx, shadow=shadow)


def smashed(
    data: Dataset, model: str, cut: str, *, std: float = 0.0, clients: int = 8, batch: int = 2,
    budget: int = 200, transform: Callable[[Tensor], Tensor] | None = None,
) -> Case:  # fmt: skip
    """Activations after stage `cut` with Gaussian noise, or `transform` of the samples."""
    network = network_for(data, model)
    base, _ = seen_under(data, network, Defense(), clients=2)
    rng = generator(0, "test smashed", cut)

    def make(x: Tensor, y: Tensor, release: Seen | None = None) -> Seen:
        flat = x.flatten(0, 1)
        if transform is not None:
            values = transform(flat)
        else:
            values = network.run(base.before, flat, last=cut, buffers=base.buffers)
        values = values + std * torch.randn(values.shape, generator=rng)
        names = tuple(f"client-{i}" for i in range(len(x)))
        messages = tuple(
            Message(kind="smashed", sender=n, receiver=SERVER, round=0,
                    parts={"smashed": Part(values=v)})
            for n, v in zip(names, values.view(*x.shape[:2], *values.shape[1:]), strict=True)
        )  # fmt: skip
        size = x.shape[1]
        known = base.known | {"cut": cut, "batch": size, "samples": size, "mode": "eval"}
        return replace(base, messages=messages, clients=names, known=known)

    pick = torch.randperm(len(data.train_y), generator=generator(0, "test pick"))
    pick = pick[: clients * batch]
    x = data.train_x[pick].view(clients, batch, *data.shape)
    truth = Truth(x=x, y=data.train_y[pick].view(clients, batch))
    ctx = context_for(data, network, Defense(), budget=budget)
    return make(x, truth.y), truth, replace(ctx, shadow=make)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def run(attack: Attack, data: Dataset, case: Case, metric: str = "ssim") -> float:
    seen, truth, ctx = case
    assert attack.applies(seen) is None
    ctx = replace(ctx, rng=generator(0, "attack"))
    answer = attack.run(seen, ctx)
    scores = score(answer, x=truth.x, y=truth.y, classes=data.classes, aux_x=data.aux_x)
    assert scores.failed == 0
    return mean(scores.values[metric])


def floor_of(data: Dataset, truth: Truth, name: str = "ssim_class_mean") -> float:
    both = {"aux_x": data.aux_x, "aux_y": data.aux_y}
    return mean(floors(x=truth.x, y=truth.y, classes=data.classes, **both)[name])


# --- analytic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp3", "mlp_spm", "logistic"])
def test_analytic_is_exact_where_nothing_is_random(digits: Dataset, model: str) -> None:
    assert run(Analytic(), digits, updates(digits, model)) > 0.99
    table = load_dataset("breast_cancer", seed=0)
    assert run(Analytic(), table, updates(table, model), "mse") < 1e-6


def test_analytic_is_exact_through_a_clip(digits: Dataset) -> None:
    defense = GaussianUpdate(noise_multiplier=0.0, clip_norm=0.01)
    assert run(Analytic(), digits, updates(digits, "mlp3", defense)) > 0.99


def test_analytic_moves_to_the_public_mean_as_noise_grows(digits: Dataset) -> None:
    errors = []
    for noise in (0.0002, 0.002, 0.02, 2.0):
        defense = GaussianUpdate(noise_multiplier=noise, clip_norm=5.0)
        case = updates(digits, "mlp_spm", defense)
        errors.append(run(Analytic(), digits, case, "mse"))
    mean_image = float((digits.aux_x.mean(dim=0) - case[1].x).square().mean())
    assert errors[0] < 1e-3 < errors[1] < errors[2]
    assert errors[2] < 1.1 * mean_image
    assert errors[3] == pytest.approx(mean_image, rel=0.01)


@pytest.mark.parametrize("target", ["weights", "gradient"])
def test_analytic_decides_perturbed_signs(digits: Dataset, target: str) -> None:
    """Plain randomised response keeps every magnitude, and one image explains all signs."""
    defense = SPM(epsilon=1.5, variant="sign_rr", target=target)  # type: ignore[arg-type]
    assert run(Analytic(), digits, updates(digits, "mlp3", defense)) > 0.99


def test_analytic_uses_what_rows_are_visible_per_coordinate() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(3, 7, generator=rng, dtype=torch.float64)
    bias = torch.randn(3, 5, generator=rng, dtype=torch.float64)
    weight = bias[..., None] * x[:, None]
    present = torch.rand(3, 5, 7, generator=rng) < 0.6
    present[0, :, 3] = False  # told by no row: the prior's mean
    spoiled = torch.where(present, weight, torch.nan)
    nothing = torch.zeros_like(weight), torch.zeros_like(bias)
    layer = LayerGradient(
        weight=(spoiled,), bias=(bias,), weight_present=present,
        bias_present=torch.ones_like(bias, dtype=torch.bool), variances=nothing,
        decided_variances=nothing,
    )  # fmt: skip
    found, _ = layer.solve(mean=torch.full((7,), 0.5).double(), variance=torch.ones(7).double())
    told = present.any(dim=1)
    assert torch.allclose(found[told], x[told])
    assert float(found[0, 3]) == 0.5


def test_a_victim_whose_units_are_all_dead_is_failed_not_black(digits: Dataset) -> None:
    seen, _, ctx = updates(digits, "mlp3", clients=2)
    for part in seen.of(seen.clients[0], "update")[0].parts.values():
        part.values.zero_()
    answer = Analytic().run(seen, ctx)
    assert require(answer.failed).tolist() == [True, False]


# --- ridge --------------------------------------------------------------------------------------


def test_ridge_inverts_an_invertible_linear_cut(digits: Dataset) -> None:
    mix = torch.linalg.qr(torch.randn(256, 256, generator=generator(0, "mix"))).Q
    case = smashed(digits, "lenet", "block1", transform=lambda x: x.flatten(1) @ mix)
    assert run(Ridge(), digits, case) > 0.99


@pytest.mark.parametrize(("features", "rows"), [(5, 24), (40, 24)])
def test_left_out_predictions_equal_those_of_refits_without_the_image(
    features: int, rows: int
) -> None:
    """Closed form against the slow loop, in both shapes of the problem."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows, features, generator=rng, dtype=torch.float64)
    y = torch.randn(rows, 3, generator=rng, dtype=torch.float64)
    strata = torch.arange(rows) // 3 % 2
    group = 3
    everything = torch.ones(rows, dtype=torch.bool)
    found = fit(Features(x, group=group, strata=strata), y, judged=everything,
                judge=lambda out: (out - y).square().mean())  # fmt: skip
    member = torch.nn.functional.one_hot(strata).double()
    inner = x - (member @ (member.mT @ x / member.sum(0)[:, None]))
    spectrum = torch.linalg.eigvalsh(inner.mT @ inner if features <= rows else inner @ inner.mT)

    def loop(penalty: float) -> Tensor:
        out = torch.empty_like(y)
        for g in range(0, rows, group):
            keep = torch.ones(rows, dtype=torch.bool)
            keep[g : g + group] = False
            design = torch.cat([x, member], dim=1)
            weights = torch.diag(torch.tensor([penalty] * features + [0.0, 0.0]).double())
            part = design[keep]
            solved = torch.linalg.solve(part.mT @ part + weights, part.mT @ y[keep])
            out[g : g + group] = design[g : g + group] @ solved
        return out

    penalties = [p * float(spectrum.clamp_min(0).mean()) for p in LAMBDAS[3:]]
    refits = [loop(p) for p in penalties]
    assert min(float((r - found.left_out).abs().max()) for r in refits) < 1e-6
    assert found.loss <= min(float((r - y).square().mean()) for r in refits) + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lenet", "cnn_selective_shield", "cnn_spm"])
@pytest.mark.parametrize("dataset", ["digits", "photos"])
def test_updates_are_inverted_above_the_class_mean_floor(dataset: str, model: str) -> None:
    data = load_dataset(dataset, seed=0)
    case = updates(data, model, clients=4)
    ridge, decoder = run(Ridge(rows=360), data, case), run(Decoder(rows=360), data, case)
    floor = floor_of(data, case[1])
    assert ridge > floor + min(0.1, (1 - floor) / 2)  # four victims may be near their class's mean
    assert decoder > ridge - 0.02


CUTS = [
    ("lenet", "block1"),
    ("lenet", "block2"),
    ("lenet", "flatten"),
    pytest.param("cnn_spm", "block2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "cut"), CUTS)
def test_ridge_inverts_smashed_data_above_the_class_mean_floor(
    digits: Dataset, model: str, cut: str
) -> None:
    case = smashed(digits, model, cut)
    assert run(Ridge(), digits, case) > floor_of(digits, case[1]) + 0.2


def test_of_a_batch_each_sample_is_told_by_its_place() -> None:
    """Known answer: the upload is the samples, mixed, the weightiest of each class at its end."""
    data = load_dataset("breast_cancer", seed=0)
    seen, truth, ctx = updates(data, "mlp3", batch=3, clients=4)
    name = "hidden1.linear.weight"
    rows, width = seen.before[name].shape
    mix = torch.linalg.qr(torch.randn(3 * width, 3 * width, generator=generator(0, "mix"))).Q

    def send(x: Tensor, y: Tensor, release: Seen | None = None) -> Seen:
        chance = ctx.network.apply(seen.before, x.flatten(0, 1)).softmax(dim=1)[:, 1]
        order = (y - chance.view_as(y)).argsort(dim=1)
        values = torch.zeros(len(x), rows * width)
        values[:, : 3 * width] = x.gather(1, order[..., None].expand_as(x)).flatten(1) @ mix
        clients = tuple(f"client-{n}" for n in range(len(x)))
        sent = [replace(seen.of("client-0", "update")[0], sender=c) for c in clients]
        parts = [{name: Part(values=v.view(rows, width))} for v in values]
        messages = tuple(m.with_parts(p) for m, p in zip(sent, parts, strict=True))
        return replace(seen, messages=messages, clients=clients)

    case = send(truth.x, truth.y), truth, replace(ctx, shadow=send)
    assert run(Ridge(rows=300), data, case, "mse") < 0.01  # but for what no public sample reaches
    assert run(Ridge(rows=300), data, case, "label_accuracy") > 0.8


@pytest.mark.parametrize(
    "defense",
    [Quantise(how="sign"), GaussianUpdate(noise_multiplier=0.01, clip_norm=5.0), TopK(keep=0.1)],
)
def test_of_a_batch_ridge_tells_more_than_its_labels(defense: Defense) -> None:
    data = load_dataset("breast_cancer", seed=0)
    case = updates(data, "logistic", defense, batch=4, clients=8)
    floor = floor_of(data, case[1], "mse_class_mean")
    assert run(Ridge(rows=600), data, case, "mse") < 0.9 * floor


# --- decoder ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_decoder_improves_on_ridge_where_the_cut_is_deep(photos: Dataset) -> None:
    case = smashed(photos, "cnn_selective_shield", "block2", clients=16)
    ridge = run(Ridge(rows=200), photos, case)
    decoder = run(Decoder(rows=200), photos, case)
    assert ridge > floor_of(photos, case[1]) + 0.2
    assert decoder > ridge


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(Ridge(rows=400), id="ridge"),
        pytest.param(Decoder(), id="decoder", marks=pytest.mark.slow),
    ],
)
def test_noise_on_smashed_data_is_learnt_through(digits: Dataset, attack: Attack) -> None:
    case = smashed(digits, "lenet", "block1", std=0.05, clients=16)
    assert run(attack, digits, case) > floor_of(digits, case[1]) + 0.1


def test_noise_on_a_whole_map_is_learnt_from_many_plays_of_what_is_not_held_out(
    digits: Dataset,
) -> None:
    seen, _, ctx = smashed(digits, "lenet", "block1", std=0.1, clients=2)
    channel = Channel(parse_view(seen), ctx)
    data = Data(Inverter(channel, ctx, rows=100), channel, ctx)
    assert data.noised
    images, plays = data.x[data.train].unique(dim=0, return_counts=True)
    assert plays.min() == PLAYS
    assert len(data.features[data.train].unique(dim=0)) == plays.sum()
    assert not any(bool((x == images).flatten(1).all(dim=1).any()) for x in data.x[data.held])
    _, loss, before = Decoder().train(data, ctx, 120)
    assert loss < 0.9 * before


@pytest.mark.parametrize("std", [0.0, 0.001])
def test_where_noise_hides_little_the_decoder_corrects_ridge(digits: Dataset, std: float) -> None:
    seen, _, ctx = smashed(digits, "lenet", "block1", std=std, clients=1)
    channel = Channel(parse_view(seen), ctx)
    data = Data(Inverter(channel, ctx, rows=100), channel, ctx)
    assert not data.noised
    assert data.before < NOISED


def test_the_answer_is_ridges_where_nothing_better_is_learnt(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks.decoder, "RATE", 0.0)
    seen, _, ctx = smashed(digits, "lenet", "block1", std=0.3, clients=2)
    channel = Channel(parse_view(seen), ctx)
    data = Data(Inverter(channel, ctx, rows=100), channel, ctx)
    images, loss, before = Decoder().train(data, ctx, 2)
    assert torch.equal(images, data.ridge)
    assert loss == before


@pytest.mark.slow
def test_an_update_under_noise_is_never_below_the_mean_floor(digits: Dataset) -> None:
    """The label is still read, so that even strong noise leaves the class's mean image."""
    case = updates(digits, "lenet", GaussianUpdate(noise_multiplier=0.02, clip_norm=5.0))
    assert run(Ridge(rows=400), digits, case) > floor_of(digits, case[1]) - 0.05


@pytest.mark.parametrize("attack", [Ridge(rows=100), Decoder(rows=100)], ids=["ridge", "decoder"])
def test_the_same_seed_gives_the_same_answer_whatever_the_global_generator(
    digits: Dataset, attack: Attack
) -> None:
    answers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        seen, _, ctx = smashed(digits, "lenet", "block2", std=0.05, budget=2)
        answers.append(attack.run(seen, replace(ctx, rng=generator(0, "attack"))).images)
    assert answers[0] is not None
    assert torch.equal(answers[0], answers[1])  # type: ignore[arg-type]


def test_a_doubled_budget_trains_twice_as_long(digits: Dataset) -> None:
    for budget in (2, 4):
        seen, _, ctx = smashed(digits, "lenet", "block2", budget=budget, clients=1)
        assert Decoder().run(seen, ctx).evaluations == 2 * budget


def test_where_every_sample_sends_the_same_the_decoder_answers_as_ridge(digits: Dataset) -> None:
    case = smashed(digits, "lenet", "block2", transform=lambda x: torch.zeros(len(x), 40))
    seen, _, ctx = case
    answers = []
    for attack in (Ridge(), Decoder()):
        answers.append(attack.run(seen, replace(ctx, rng=generator(0, "attack"))))
    ridge, decoder = answers
    assert decoder.evaluations == 0
    assert torch.equal(require(decoder.images), require(ridge.images))


def test_tabular_samples_are_decoded() -> None:
    data = load_dataset("breast_cancer", seed=0)
    noise = GaussianUpdate(noise_multiplier=0.002, clip_norm=5.0)
    case = updates(data, "logistic", noise, budget=50)
    for attack in (Ridge(), Decoder()):
        assert run(attack, data, case, "mse") < floor_of(data, case[1], "mse")


# --- the channel --------------------------------------------------------------------------------


def test_draws_differ_under_noise_and_images_are_mirrored_without(digits: Dataset) -> None:
    seen, _, ctx = smashed(digits, "lenet", "block2", std=0.05)
    noisy = Channel(parse_view(seen), ctx)
    assert noisy.random
    pairs = noisy.pairs(group=3)
    rows = pairs.blocks["smashed"].view(-1, 3, 192)
    assert pairs.real.view(-1, 3).all(dim=0).tolist() == [True, False, True]
    assert float((rows[:, 0] - rows[:, 2]).std()) == pytest.approx(0.05 * 2**0.5, rel=0.05)
    seen, _, ctx = smashed(digits, "lenet", "block2")
    clean = Channel(parse_view(seen), ctx)
    assert not clean.random
    pairs = clean.pairs(group=2)
    x = pairs.x.view(-1, 2, 1, 16, 16)
    assert torch.equal(x[:, 0], digits.aux_x)
    assert torch.equal(x[:, 1], digits.aux_x.flip(-1))


class HidesHalf(Defense):
    """Sends a random half of the first layer's weights of every second client."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        name = "block1.conv.weight"
        part = messages[0].parts[name]
        if int(client.id.split("-")[1]) % 2:
            return messages
        kept = torch.rand(part.values.shape, generator=client.rng["defense"]) < 0.5
        hidden = Part(values=torch.where(kept, part.values, torch.nan), present=kept)
        return [messages[0].with_parts({**messages[0].parts, name: hidden})]


@pytest.mark.slow
def test_absent_values_become_zero_with_their_pattern_beside(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = updates(digits, "lenet", HidesHalf(), clients=4)
    with monkeypatch.context() as patched:
        patched.setattr(attacks.engine.channel, "FEATURES", 100_000)
        channel = Channel(parse_view(case[0]), case[2])
    for blocks in (channel.blocks, channel.pairs(group=1).blocks):
        values, shown = (blocks[f"{p}block1.conv.weight"] for p in ("", "presence "))
        assert bool((values[shown == 0] == 0).all())
        assert 0 < int((shown == 0).any(dim=1).sum()) < len(shown)
    assert run(Ridge(rows=360), digits, case) > floor_of(digits, case[1]) + 0.1


def test_the_input_of_a_linear_layer_is_read_whatever_the_label(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth, ctx = updates(digits, "lenet")
    found = Channel(parse_view(seen), ctx).blocks["input head.weight"]
    expected = network.features(seen.before, truth.x[:, 0])
    assert torch.allclose(found, expected, atol=1e-4)
    both = torch.ones(2, 3, 4, dtype=torch.bool)
    weight, bias = torch.ones(2, 3, 4), torch.ones(2, 3)
    assert torch.equal(layer_input(weight, bias, both), layer_input(weight, bias, None))


def test_the_sketch_preserves_inner_products() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 20_000, generator=rng).double()
    b = b + a
    exact, errors = float(a @ b), []
    for seed in range(50):
        rng = torch.Generator().manual_seed(seed)
        bucket = torch.randint(2000, (20_000,), generator=rng)
        sign = torch.randint(2, (20_000,), generator=rng) * 2.0 - 1
        one, other = count_sketch(torch.stack([a, b]), bucket, sign, 2000)
        errors.append(float(one @ other) - exact)
    spread = float((2 / 2000) ** 0.5 * a.norm() * b.norm())
    assert abs(mean(errors)) < 5 * spread / 50**0.5
    assert mean([e * e for e in errors]) < 1.5 * spread**2


@pytest.mark.slow
def test_a_wide_update_is_sketched(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacks.engine.channel, "FEATURES", 1024)
    case = updates(digits, "lenet", clients=4)
    blocks = Channel(parse_view(case[0]), case[2]).blocks
    assert sum(b.shape[1] for b in blocks.values()) < 2000
    assert run(Ridge(rows=360), digits, case) > floor_of(digits, case[1]) + 0.1


def test_the_attackers_similarity_is_the_metric(photos: Dataset) -> None:
    a, b = photos.aux_x[:8], photos.aux_x[8:16]
    assert torch.allclose(similarity(a.double(), b.double()), ssim(a, b), atol=1e-6)


# --- refusals -----------------------------------------------------------------------------------


def test_reasons_why_they_do_not_apply(digits: Dataset) -> None:
    seen, _, _ = updates(digits, "lenet", clients=2)
    reason = "the network does not begin with a linear layer with bias on the sample"
    assert Analytic().applies(seen) == reason
    seen, _, _ = updates(digits, "mlp3", clients=2, batch=2)
    assert "but 2 were used" in str(Analytic().applies(seen))
    assert Decoder().applies(seen) == "it inverts one sample per update, but 2 were used"
    assert Ridge().applies(seen) is None
    seen, _, _ = updates(digits, "mlp3", clients=2, batch=2, local_steps=2)
    assert "were used" in str(Ridge().applies(seen))
    assert Decoder().applies(replace(seen, messages=())) == (
        "no upload of weights, update, gradient was seen"
    )
    assert "no client" in str(Ridge().applies(replace(seen, clients=())))
    seen, _, _ = updates(digits, "mlp3", clients=2)
    hidden = tuple(
        m.with_parts({n: p for n, p in m.parts.items() if n != "hidden1.linear.bias"})
        for m in seen.messages
    )
    assert "were not both sent" in str(Analytic().applies(replace(seen, messages=hidden)))


@pytest.mark.parametrize("attack", [Analytic(), Ridge(), Decoder()])
def test_values_that_are_not_finite_are_refused(digits: Dataset, attack: Attack) -> None:
    seen, _, ctx = updates(digits, "mlp3", clients=2)
    seen.of("client-1", "update")[0].parts["hidden1.linear.weight"].values[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"client-1 holds non-finite"):
        attack.run(seen, ctx)
    if not isinstance(attack, Analytic):
        seen, _, ctx = smashed(digits, "lenet", "block2")
        seen.messages[0].parts["smashed"].values[0, 0] = torch.inf
        with pytest.raises(ValueError, match=r"smashed data of client-0 holds non-finite"):
            attack.run(seen, ctx)


def test_the_decoder_holds_something_out_however_few_rows_are_like_the_victims(
    digits: Dataset,
) -> None:
    """A random fifth of all public images mostly holds none of two."""
    seen, _, ctx = smashed(digits, "lenet", "block2", budget=1, clients=1)
    channel = Channel(parse_view(seen), ctx)
    inverter = Inverter(channel, ctx, rows=40)
    (piece,) = {id(p.pairs): p for p in inverter.pieces}.values()
    few = torch.arange(len(piece.judged)) < 2 * piece.pairs.group
    inverter.pieces = [replace(piece, judged=few)]
    for seed in range(5):
        data = Data(inverter, channel, replace(ctx, rng=generator(seed, "few rows")))
        assert len(data.held) == piece.pairs.group
        assert not set(data.held.tolist()) & set(data.train.tolist())
