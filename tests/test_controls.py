"""Defenses that are known to fail: each is the published one, and falls to who knows it."""

import argparse
import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.func import jacrev

from attacks.engine.clients import Clients
from attacks.engine.observation import SLOPES, SMASHED, lawless, parse_view
from attacks.engine.private import with_private_parts
from attacks.idlg import IDLG
from bench.api import UPLOAD_KINDS, Defense, Facts, Seen, as_kind
from bench.data.dataset import Dataset
from bench.privacy.ledger import account
from bench.seeding import generator
from bench.toolkit.batches import soft_cross_entropy
from bench.toolkit.losses import NetworkLoss
from defenses.censor import NEAR, Censor, Turned
from defenses.none import NoDefense
from defenses.outpost import Outpost, PrunedNoise, _mixture
from defenses.precode import NOISE, Precode
from defenses.soteria import Soteria
from tests.conftest import context_for, network_for, seen_under
from tests.docs_modules import controls
from tests.uploads import error_of, one_hot, upload_of

CONTROLS = (Soteria, Precode, Outpost, Censor)


def gradients(digits: Dataset, defense: Defense, **threat: Any) -> list[dict[str, Tensor]]:
    """What each victim sends of one step from LeNet's initial weights."""
    seen, _ = seen_under(digits, network_for(digits), defense, **threat)
    return [sent_by(seen, client) for client in seen.clients]


def sent_by(seen: Seen, client: str) -> dict[str, Tensor]:
    """The gradient that a client sent, as whatever kind."""
    (upload,) = (m for m in seen.messages if m.sender == client and m.kind in UPLOAD_KINDS)
    parts = as_kind(upload, "gradient", base=seen.before, lr=0.5).parts
    return {n: p.values for n, p in parts.items()}


@pytest.mark.parametrize("control", CONTROLS)
def test_nothing_is_proven_of_them(control: type[Defense]) -> None:
    facts = Facts(parameters=100, rounds=9)
    entry = account(control(), facts)
    assert math.isinf(entry.eps_record)
    assert entry.eps_claimed is None


# --- Soteria ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_soteria_leaves_out_the_features_that_are_least_steep_for_their_size(
    digits: Dataset, batch: int
) -> None:
    network = network_for(digits)
    threat: dict[str, Any] = {"victims": 2, "batch": batch}
    seen, truth = seen_under(digits, network, Soteria(percentile=75.0), **threat)
    plain = gradients(digits, NoDefense(), **threat)
    weights = dict(seen.before)
    for client, x, gradient in zip(seen.clients, truth.x, plain, strict=True):
        score = torch.zeros(network.features(weights, x[:1]).shape[1])
        for one in x:
            slope = jacrev(lambda x: network.features(weights, x[None])[0])(one).flatten(1)
            score += slope.norm(dim=1) / network.features(weights, one[None])[0].abs()
        left_out = score.argsort()[: round(0.75 * len(score))]
        (update,) = seen.of(client, "update")
        part = update.parts["head.weight"]
        expected = torch.ones_like(part.values, dtype=torch.bool)
        expected[:, left_out] = False
        assert part.absent == "zero"
        assert torch.equal(part.presence(), expected)
        sent = sent_by(seen, client)
        gradient["head.weight"] = torch.where(expected, gradient["head.weight"], 0.0)
        for name, value in gradient.items():
            torch.testing.assert_close(sent[name], value, rtol=1e-4, atol=1e-6)


# --- PRECODE ------------------------------------------------------------------------------------


def test_precode_trains_and_evaluates_what_its_paper_says(digits: Dataset) -> None:
    """Its gradient is that of the two layers and the divergence written out, and the head that
    evaluation takes is theirs with z = mu."""
    network, defense = network_for(digits), Precode(width=8, weight=0.5)
    rng = torch.Generator().manual_seed(0)
    params = network.init(rng)
    variables = {**params, **defense.extra_parameters(network, params, network.stages, rng)}
    draw = defense.draw(variables, {}, rng)
    x, y = digits.train_x[:3], torch.eye(10)[:3]
    loss = NetworkLoss(
        network=network, realize=lambda v: defense.realize(v, {}, {}), mode="train", buffers=None
    )
    own = {n: v.clone().requires_grad_() for n, v in variables.items()}

    def layer(name: str, given: Tensor) -> Tensor:
        return given @ own[f"{name}.weight"].mT + own[f"{name}.bias"]

    mean, wide = layer("head.encoder", network.features(own, x)).chunk(2, dim=1)
    normal = Normal(mean, torch.nn.functional.softplus(wide))
    code = normal.mean + normal.stddev * draw[NOISE][:3]
    bits = kl_divergence(normal, Normal(0.0, 1.0)).sum(dim=1).mean() / math.log(2)
    logits = layer("head", layer("head.decoder", code))
    (soft_cross_entropy(logits, y) + 0.5 * bits).backward()
    for name, gradient in defense.gradient(loss, variables, x, y, draw).items():
        torch.testing.assert_close(gradient, own[name].grad, rtol=1e-4, atol=1e-6)
    plain = layer("head", layer("head.decoder", mean)).detach()
    evaluated = network.apply(defense.mean_realize(variables, {}), x)
    torch.testing.assert_close(evaluated, plain, rtol=1e-4, atol=1e-5)


def test_the_random_layer_shows_what_it_got_and_the_slope_by_it(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Precode(), victims=3)
    (release,) = parse_view(seen)
    assert lawless(release) is None
    (features, _), (slopes, _) = release.by_sample[SMASHED][0], release.by_sample[SLOPES][0]
    exact = network.features(dict(seen.before), truth.x[:, 0])
    torch.testing.assert_close(features[:, 0].float(), exact, rtol=1e-3, atol=1e-4)
    below = [n for n in network.init(torch.Generator()) if not n.startswith("head.")]
    for victim, client in enumerate(seen.clients):
        x = truth.x[victim]
        own = {n: seen.before[n].clone().requires_grad_() for n in below}
        (network.features({**seen.before, **own}, x) * slopes[victim].float()).sum().backward()
        sent = sent_by(seen, client)
        for name in below:
            torch.testing.assert_close(own[name].grad, sent[name], rtol=2e-3, atol=1e-5)


def test_of_several_samples_draws_are_looked_for_beside_the_images(digits: Dataset) -> None:
    """A candidate with draws of its own sends what a client with these draws would."""
    network, defense = network_for(digits), Precode(width=8)
    seen, truth = seen_under(digits, network, defense, victims=2, batch=3)
    ctx = context_for(digits, network, defense)
    (release,) = with_private_parts(parse_view(seen), ctx)
    assert lawless(release) is None
    assert release.own is not None
    assert release.own.sizes == {"head.noise": 24}
    clients, y = Clients(release, ctx, dtype=torch.float64), one_hot(truth)
    drawn = torch.randn(2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moves = release.own.moves(drawn, torch.arange(2))
    sent = clients.compute(truth.x.double(), y, moves)
    start = {n: v.double() for n, v in seen.before.items()}
    for victim in range(2):
        draw = {NOISE: drawn[victim].view(3, 8)}
        x = truth.x[victim].double()
        exact = defense.gradient(clients.simulated.loss, start, x, y[victim], draw)
        for name, value in exact.items():
            torch.testing.assert_close(sent[name][victim], value)


@pytest.mark.parametrize("labels", ["shared", "private"])
def test_under_split_protocols_precode_is_no_defense(digits: Dataset, labels: str) -> None:
    split = {"cut": "block1", "labels": labels}
    given: dict[str, Any] = {"protocol": "splitfed", "split": split, "victims": 2, "local_steps": 2}
    both = []
    for defense in (NoDefense(), Precode()):
        seen, _ = seen_under(digits, network_for(digits), defense, clients=3, **given)
        (release,) = parse_view(seen)
        assert (release.mechanisms, lawless(release)) == ((), None)
        both.append([p.values for m in seen.messages for p in m.parts.values()])
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


def test_a_step_of_more_samples_than_draws_is_refused(digits: Dataset) -> None:
    with pytest.raises(ValueError, match="precode draws for 256 samples of a step, got 257"):
        seen_under(digits, network_for(digits), Precode(), victims=1, clients=1, batch=257)


def test_of_several_steps_a_random_layer_has_no_law(digits: Dataset) -> None:
    seen, _ = seen_under(digits, network_for(digits), Precode(), victims=2, local_steps=2)
    reason = lawless(parse_view(seen)[-1])
    assert reason is not None
    assert "RandomLayer gives no likelihood" in reason


# --- Outpost ------------------------------------------------------------------------------------


def test_outpost_prunes_each_tensor_and_noises_the_largest_values_of_all() -> None:
    rng = torch.Generator().manual_seed(0)
    weights = {"wide": 2 * torch.randn(10_000, generator=rng), "narrow": torch.rand(200, 50)}
    values = torch.cat([torch.randn(10_000, generator=rng), 10 + torch.rand(10_000)])[None]
    law = PrunedNoise(of="gradient", chance=1.0, prune=80.0, noised=40.0, noise=0.5)
    wide, narrow = law.perturb(values, rng, weights)[0].split(10_000)
    assert int((wide == 0).sum()) == 8_000  # all noise goes to the other tensor's larger values
    kept = values[0, :10_000].abs() >= values[0, :10_000].abs().sort().values[8_000]
    assert torch.equal(wide[kept], values[0, :10_000][kept])
    pruned = values[0, 10_000:] < values[0, 10_000:].sort().values[8_000]
    noise = narrow - torch.where(pruned, 0.0, values[0, 10_000:])
    quiet = noise == 0
    assert int(quiet.sum()) == 2_000  # 40 % of 20,000 are 8,000
    std = 0.5 * float(weights["narrow"].var())
    assert float(noise[~quiet].std()) == pytest.approx(std, rel=0.04)  # 5 errors of 8,000 draws
    spared = law.perturb(values.expand(4, -1), rng, {**weights, "wide": torch.zeros(10_000)})
    assert torch.equal(spared[:, :10_000] != 0, kept.expand(4, -1))


def test_the_law_of_outpost_is_a_density_of_what_it_sends() -> None:
    """Of every value that can be sent but 0, up to a constant, and its slope is its derivative."""
    law = PrunedNoise(of="gradient", chance=1.0, prune=60.0, noised=20.0, noise=1.0)
    base = {"w": torch.linspace(-1, 1, 200, dtype=torch.float64)}
    grid = torch.linspace(-6, 6, 6001, dtype=torch.float64)
    seen = torch.zeros(1, 200, dtype=torch.float64)
    seen[0, :100] = 2.0  # half is 0: perturbed
    for sent in (-1.0, 0.0, 2.0):
        _, exact, std, bound = law.prepared(seen, 0.05, base=base).seen
        each = [t[0, :1].expand(6001) for t in (exact, std, bound)]
        loss, _ = _mixture(torch.full_like(grid, sent), grid, *each)
        total = float(torch.trapezoid((-loss).exp()[grid != 0], grid[grid != 0]))
        assert total == pytest.approx(3 * math.sqrt(2 * math.pi), rel=1e-3)
    assert float(std[0, 0]) == pytest.approx(float(base["w"].var()))
    sent = torch.linspace(-3, 3, 200, dtype=torch.float64)[None]
    prepared = law.prepared(seen, 0.1, base=base)
    moved = (prepared.misfit(sent + 1e-6)[0] - prepared.misfit(sent - 1e-6)[0]) / 2e-6
    torch.testing.assert_close(prepared.misfit(sent)[1], moved, rtol=1e-4, atol=1e-4)
    calm = law.prepared(torch.where(seen == 0, 1.0, seen), 0.1, base=base).seen
    assert torch.equal(calm[1], calm[2])
    assert torch.equal(calm[1], calm[3])


def test_outpost_perturbs_as_often_as_its_decay_says() -> None:
    law, rng = Outpost(beta=1.0).law, torch.Generator().manual_seed(0)
    sent = law.perturb(torch.ones(4_000, 5), rng, {"w": torch.zeros(5)})
    perturbed = int((sent == 0).any(dim=1).sum())
    assert stats.binomtest(perturbed, 4_000, 0.5).pvalue > 1e-6


# --- CENSOR -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["orthogonal", "printed"])
def test_censor_keeps_norms_alone(digits: Dataset, variant: Any) -> None:
    plain = gradients(digits, NoDefense(), victims=2)
    turned = gradients(digits, Censor(variant=variant), victims=2)
    for one, other in zip(plain, turned, strict=True):
        for name in one:
            assert float(other[name].norm()) == pytest.approx(float(one[name].norm()), rel=1e-4)
            cosine = float((one[name] * other[name]).sum() / one[name].norm().square())
            assert abs(cosine) < (1e-4 if variant == "orthogonal" else 0.95)


@pytest.mark.parametrize("variant", ["orthogonal", "printed"])
@pytest.mark.parametrize("size", [0.0, 1e-25])
def test_censor_sends_finite_values_where_next_to_nothing_flows_back(
    variant: Any, size: float
) -> None:
    sent = upload_of(Censor(variant=variant), torch.full((50,), size), generator(0, "censor"))
    values = sent.parts["p"].values
    assert bool(values.isfinite().all())
    assert float(values.double().norm()) <= size * math.sqrt(50) * 1.001


def test_censor_takes_the_direction_with_the_least_loss(digits: Dataset) -> None:
    """With a step that shows it: of 30 directions the best is as good as the best of others."""
    network, losses = network_for(digits, "logistic"), {}
    for tries in (1, 30):
        seen, _ = seen_under(digits, network, Censor(tries=tries, step=1.0), victims=8, batch=24)
        after = []
        for client in seen.clients:
            sent = sent_by(seen, client)
            moved = {n: v - sent[n] for n, v in seen.before.items()}
            logits = network.apply(moved, digits.train_x[:300])
            after.append(torch.nn.functional.cross_entropy(logits, digits.train_y[:300]))
        losses[tries] = torch.stack(after)
    assert float(losses[30].mean()) < float(losses[1].mean())


def test_the_law_of_turned_gradients_is_their_norms() -> None:
    law, rng = Turned(of="gradient", orthogonal=True), torch.Generator().manual_seed(0)
    base = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    seen = torch.randn(2, 7, generator=rng, dtype=torch.float64)
    right = torch.stack([seen[:, 1], -seen[:, 0], torch.zeros(2)], dim=1)
    right = right * (seen[:, :3].norm(dim=1) / right.norm(dim=1))[:, None]
    turned = torch.cat(
        [right, torch.stack([seen[:, 4], -seen[:, 3], seen[:, 6], -seen[:, 5]], 1)], 1
    )
    prepared = law.prepared(seen, base=base)
    for sent, expected in ((turned, 0.0), (2 * turned, 1 / NEAR**2), (seen, 1 / NEAR**2)):
        assert prepared.misfit(sent)[0].sum(dim=1).tolist() == pytest.approx(
            [expected] * 2, abs=1e-6
        )
    sent, step = torch.randn(2, 7, generator=rng, dtype=torch.float64), 1e-6
    for place in range(7):
        moved = sent + step * torch.eye(7)[place]
        slope = (prepared.misfit(moved)[0] - prepared.misfit(sent)[0]).sum(dim=1) / step
        torch.testing.assert_close(slope, prepared.misfit(sent)[1][:, place], rtol=1e-3, atol=1e-2)


# --- attacked -----------------------------------------------------------------------------------


@pytest.mark.parametrize("control", [Soteria, Precode])
def test_who_knows_the_defense_sees_through_it(digits: Dataset, control: type[Defense]) -> None:
    network, defense = network_for(digits), control()
    seen, truth = seen_under(digits, network, defense, victims=4)
    error = error_of(IDLG(), seen, truth, context_for(digits, network, defense, budget=150))
    plain, same = seen_under(digits, network, NoDefense(), victims=4)
    undefended = error_of(
        IDLG(), plain, same, context_for(digits, network, NoDefense(), budget=150)
    )
    assert error < undefended + 0.01


def test_who_knows_of_no_defense_takes_zeros_and_noise_for_what_was_computed(
    digits: Dataset,
) -> None:
    network = network_for(digits)
    for control in CONTROLS:
        seen, _ = seen_under(digits, network, controls.ignorant(control()), victims=2)
        assert seen.known["mechanisms"] == []
        assert all(p.present is None for m in seen.messages for p in m.parts.values())
        known, _ = seen_under(digits, network, control(), victims=2)
        for client in seen.clients:  # who sends the same
            one, other = sent_by(seen, client), sent_by(known, client)
            assert all(torch.equal(one[n], other[n]) for n in one)


def test_both_attackers_are_scored_alike() -> None:
    given = argparse.Namespace(
        dataset="digits",
        model="mlp_spm",
        init=None,
        lr=0.1,
        data_dir=None,
        victims=2,
        batch=1,
        budget=20,
        defense="soteria",
    )
    known = controls.attack(Soteria(), given, 0)
    assert len(known["ssim"]) == len(known["mse"]) == 2
    unknown = controls.attack(controls.ignorant(Soteria()), given, 0)
    assert sum(known["ssim"]) > sum(unknown["ssim"])
