"""DepthFL: local classifiers, their loss, their place in the protocols, and attacks on them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax, softmax

from bench.api import Defense, Facts
from bench.data.dataset import Dataset
from bench.privacy.ledger import account
from bench.registry import Registry
from defenses.depthfl import DepthFL, local_loss, pool
from tests.conftest import context_for, federation_of, network_for, require, seen_under
from tests.matchers import matcher_for
from tests.uploads import distance, error_of, one_hot, play

DEPTHS = ("block1", "block2")


def test_the_local_loss_is_cross_entropies_and_pairwise_divergences() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 4, generator=rng, dtype=torch.float64)
    labels = torch.randint(4, (5,), generator=rng)
    y = torch.nn.functional.one_hot(labels, 4).double()
    expected = 0.0
    for i in range(3):
        expected += float(cross_entropy(logits[i], labels))
        for j in range(3):
            if j != i:
                apart = kl_div(
                    log_softmax(logits[i], -1), softmax(logits[j], -1), reduction="batchmean"
                )
                expected += 0.7 / 2 * float(apart)
    loss = local_loss(logits, y, softmax(logits, -1), exits=3, distillation=0.7)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    head = float(cross_entropy(logits[2], labels))
    without = local_loss(logits, y, softmax(logits, -1), exits=2, distillation=0.7)
    assert float(without) == pytest.approx(expected - head, rel=1e-12)
    alone = local_loss(logits[:1], y, softmax(logits[:1], -1), exits=1, distillation=0.7)
    assert float(alone) == pytest.approx(float(cross_entropy(logits[0], labels)), rel=1e-12)


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 5, 3), (2, 3)])
def test_places_and_tokens_are_averaged(shape: tuple[int, ...]) -> None:
    x = torch.arange(math.prod(shape)).float().view(shape)
    pooled = pool(x)
    assert pooled.shape == (2, 3)
    over = {4: (2, 3), 3: (1,), 2: ()}[len(shape)]
    assert torch.equal(pooled, x.mean(dim=over) if over else x)


def _step(weights: dict[str, Tensor], network: Any, x: Tensor, y: Tensor, cut: str) -> Tensor:
    """Loss of one batch through the whole network, plus that of the classifiers up to the cut."""
    logits, z = [], x
    for stage in network.stages:
        z = network.run(weights, z, first=stage, last=stage)
        if stage in network.stages[: network.stages.index(cut) + 1]:
            if stage != "head":
                features = z.mean(dim=(2, 3)) if z.ndim == 4 else z
                logits.append(
                    linear(features, weights[f"{stage}.exit.weight"], weights[f"{stage}.exit.bias"])
                )
            elif cut == "head":
                logits.append(z)
    total = cross_entropy(z, y) + sum(cross_entropy(o, y) for o in logits if o is not z)
    for i, own in enumerate(logits):
        for j, teacher in enumerate(logits):
            if i != j:
                apart = kl_div(
                    log_softmax(own, -1), softmax(teacher.detach(), -1), reduction="batchmean"
                )
                total = total + apart / (len(logits) - 1)
    return total


@pytest.mark.parametrize(("protocol", "cut"), [("fedavg", "head"), ("splitfed", "block2")])
def test_one_clients_training_equals_a_hand_written_loop(
    digits: Dataset, protocol: str, cut: str
) -> None:
    network = network_for(digits)
    split = {"cuts": (cut,), "labels": "shared"} if protocol == "splitfed" else {}
    run = federation_of(digits, network, DepthFL(), clients=1, protocol=protocol, **split)
    weights = {n: v.clone() for n, v in run.state.items()}
    exits = [n for n in weights if ".exit." in n]
    held = network.stages[:-1] if cut == "head" else ("block1", "block2")
    assert exits == [f"{s}.exit.{p}" for s in held for p in ("weight", "bias")]
    result = play(run, protocol=protocol)
    client = run.clients[0]
    for chosen in result.used["client-0"]:
        leaves = {n: v.detach().requires_grad_() for n, v in weights.items()}
        loss = _step(leaves, network, client.x[chosen], client.y[chosen], cut)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        weights = {n: v - 0.2 * g for (n, v), g in zip(weights.items(), grads, strict=True)}
    assert distance(run.state, weights) < 1e-6
    sent = next(m for m in result.wire.log if m.kind == "update")
    assert set(exits) <= set(sent.parts)


def test_at_weight_zero_it_is_the_undefended_protocol(digits: Dataset) -> None:
    network = network_for(digits)
    plain, depth = (
        federation_of(digits, network, d, protocol="splitfed", cuts=DEPTHS)
        for d in (Defense(), DepthFL(weight=0.0))
    )
    for run in (plain, depth):
        play(run, rounds=2, protocol="splitfed")
    assert distance({n: depth.state[n] for n in plain.state}, plain.state) < 1e-6


@pytest.mark.parametrize("protocol", ["fedsgd", "splitfed"])
def test_the_attackers_model_of_the_update_is_exact(digits: Dataset, protocol: str) -> None:
    """At the true images and labels nothing is left of the distance; elsewhere much is."""
    network = network_for(digits)
    split = {"cut": "block2", "labels": "shared"} if protocol == "splitfed" else None
    seen, truth = seen_under(digits, network, DepthFL(), protocol=protocol, split=split)
    matcher = matcher_for(seen, context_for(digits, network, DepthFL()), dtype=torch.float64)
    observation = require(matcher.evidence.uploads).observation
    assert any(".exit." in n for n in observation.values)
    y = one_hot(truth)
    victims = torch.arange(len(y))
    right = matcher.losses(truth.x.double(), y, victims)
    wrong = matcher.losses(truth.x.double(), y.roll(1, dims=-1), victims)
    assert float((right / observation.square).max()) < 1e-9
    assert float((wrong / observation.square).min()) > 1e-3


def test_dlg_sees_through_it(digits: Dataset, registry: Registry) -> None:
    network = network_for(digits)
    seen, truth = seen_under(
        digits, network, DepthFL(), protocol="splitfed", split={"cut": "block1"}, clients=4
    )
    context = context_for(digits, network, DepthFL(), budget=100)
    assert error_of(registry.attack("dlg", {}), seen, truth, context) < 1e-3


def test_masks_may_be_trained_with_local_classifiers(digits: Dataset, registry: Registry) -> None:
    defense = registry.defense("pm_sfl+depthfl", {"pm_sfl.lr_scale": 100.0})
    run = federation_of(digits, network_for(digits), defense, protocol="splitfed", cuts=DEPTHS)
    result = play(run, protocol="splitfed")
    bits = next(m for m in result.wire.log if m.kind == "weights").parts["block1.exit.weight"]
    assert bits.bits == 1
    assert set(bits.values.unique().tolist()) <= {0.0, 1.0}


def test_no_privacy_is_claimed() -> None:
    facts = Facts(parameters=10, rounds=1, clients=2, batch=1, records=1, local_steps=1)
    entry = account(DepthFL(), facts)
    assert (entry.eps_claimed, entry.eps_record) == (None, math.inf)
