"""The split-federated protocol: where the network is cut, what travels, what is learnt."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bench.contract.defense import Client, Defense, Mixture
from bench.contract.messages import Message, Part, State
from bench.data.dataset import Dataset
from bench.models import Network
from bench.protocols.export import load_seen, save_seen
from bench.protocols.federation import Federation
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import observe
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator
from tests.conftest import federation_of, network_for

STEP = LocalWork(protocol="splitfed", batch=8, lr=0.5, local_steps=1)


def federation(
    digits: Dataset, network: Network, defense: Defense | None = None,
    *, protocol: str = "splitfed", **more: Any,
) -> Federation:  # fmt: skip
    return federation_of(digits, network, defense or Defense(), protocol=protocol, **more)


def play(run: Federation, work: LocalWork = STEP) -> Any:
    return run.play(work, [c.id for c in run.clients], observed=True)


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((one[n] - other[n]).abs().max()) for n in one)


@pytest.mark.parametrize("labels", ["private", "shared"])
@pytest.mark.parametrize(
    ("model", "cut"), [("lenet", "block1"), ("lenet", "block3"), ("cnn_selective_shield", "block1")]
)
def test_one_step_equals_fedsgd(digits: Dataset, model: str, cut: str, labels: str) -> None:
    network = network_for(digits, model)
    whole = federation(digits, network, protocol="fedsgd")
    cut_up = federation(digits, network, cuts=(cut,), labels=labels)
    play(whole, replace(STEP, protocol="fedsgd"))
    play(cut_up)
    assert distance(whole.state, cut_up.state) < 1e-6


def test_several_steps_train_the_bottoms_apart_and_the_top_together(digits: Dataset) -> None:
    """By hand: each client's bottom and head move alone, the top by the mean gradient."""
    network = network_for(digits)
    run = federation(digits, network, clients=2, cuts=("block1",))
    start = dict(run.state)
    result = play(run, replace(STEP, local_steps=3))
    held = set(run.names_held(run.clients[0]))
    assert held == {n for n in start if n.startswith(("block1.", "head."))}
    own = [{n: v.clone() for n, v in start.items() if n in held} for _ in range(2)]
    top = {n: v.clone() for n, v in start.items() if n not in held}
    for step in range(3):
        moves = []
        for k, client in enumerate(run.clients):
            chosen = result.used[client.id][step]
            weights = {n: v.requires_grad_() for n, v in {**own[k], **top}.items()}
            logits = network.apply(weights, client.x[chosen])
            loss = torch.nn.functional.cross_entropy(logits, client.y[chosen])
            grads = torch.autograd.grad(loss, list(weights.values()))
            moves.append(dict(zip(weights, grads, strict=True)))
        own = [{n: v.detach() - 0.5 * moves[k][n] for n, v in own[k].items()} for k in range(2)]
        top = {n: v.detach() - 0.5 * (moves[0][n] + moves[1][n]) / 2 for n, v in top.items()}
    expected = top | {n: (own[0][n] + own[1][n]) / 2 for n in held}
    assert distance(expected, run.state) < 1e-6


def test_what_the_server_sees_in_wire_order(digits: Dataset) -> None:
    network = network_for(digits)
    for labels, kinds in (
        ("private", ["smashed", "features", "features_gradient", "smashed_gradient", "update"]),
        ("shared", ["smashed", "labels", "smashed_gradient", "update"]),
    ):
        run = federation(digits, network, clients=1, cuts=("block1",), labels=labels)
        result = play(run)
        seen = result.wire.messages_for("server")
        assert [m.kind for m in seen] == kinds
        smashed = seen[0].parts["smashed"].values
        client = run.clients[0]
        x = client.x[result.used[client.id][0]]
        assert torch.allclose(smashed, network.run(result.before, x, last="block1"), atol=1e-6)
        assert not smashed.requires_grad
        up = sum(m.n_bytes for m in seen if m.sender == client.id)
        assert result.wire.bytes_up == up
        down = sum(v.numel() * 4 for n, v in result.before.items() if n in run.names_held(client))
        down += smashed.numel() * 4
        down += sum(m.n_bytes for m in seen if m.kind == "features")
        assert result.wire.bytes_down == down


def test_layers_that_some_clients_hold_are_their_mean(digits: Dataset) -> None:
    network = network_for(digits)
    run = federation(digits, network, cuts=("block1", "block2"))
    assert [c.cut for c in run.clients] == ["block1", "block2", "block1", "block2"]
    result = play(run)
    deep = [c for c in run.clients if c.cut == "block2"]
    ends = []
    for client in deep:
        assert client.own is None  # everything was uploaded
        (message,) = [
            m
            for m in result.wire.messages_for("server")
            if m.sender == client.id and m.kind == "update"
        ]
        assert set(message.parts) == set(run.names_held(client))
        ends.append(message.parts["block2.conv.weight"].values)
    expected = result.before["block2.conv.weight"] + torch.stack(ends).mean(dim=0)
    assert torch.allclose(run.state["block2.conv.weight"], expected, atol=1e-6)
    # The server trained layers that nobody uploaded.
    assert (
        distance({"w": run.state["block3.conv.weight"]}, {"w": result.before["block3.conv.weight"]})
        > 0
    )


def test_a_split_network_learns(digits: Dataset) -> None:
    network = network_for(digits, "mlp_spm")
    run = federation(digits, network, clients=4, each=100, cuts=("hidden1",), labels="shared")
    for _ in range(8):
        play(run, replace(STEP, batch=20, local_steps=5))
    logits = network.apply(run.mean_weights(), digits.test_x)
    assert float((logits.argmax(dim=1) == digits.test_y).double().mean()) > 0.75


class Doubles(Defense):
    """Sends twice the activations."""

    def smashed(self, q: Tensor, client: Client) -> Part:
        return Part(values=2 * q)


def test_the_gradient_passes_through_what_a_defense_does_to_smashed_data(digits: Dataset) -> None:
    network = network_for(digits, "mlp_spm")
    run = federation(digits, network, Doubles(), clients=1, cuts=("hidden1",), labels="shared")
    result = play(run)
    client = run.clients[0]
    chosen = result.used[client.id][0]
    weights = {n: v.clone().requires_grad_() for n, v in result.before.items()}
    hidden = 2 * network.run(weights, client.x[chosen], last="hidden1")
    loss = torch.nn.functional.cross_entropy(
        network.run(weights, hidden, first="head"), client.y[chosen]
    )
    grads = torch.autograd.grad(loss, list(weights.values()))
    expected = {n: w.detach() - 0.5 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
    assert distance(expected, run.state) < 1e-6


class PerSample(Defense):
    """Takes the mean of per-sample gradients, as a defense that clips each does."""

    owns = frozenset({"gradient"})

    def gradient(self, loss: Any, variables: State, x: Any, y: Any, draw: State) -> State:
        def of_one(x: Any, y: Any) -> State:
            one_x, one_y = tree_map(lambda t: t[None], (x, y))
            return torch.func.grad(loss)(variables, one_x, one_y)

        return {n: g.mean(dim=0) for n, g in torch.func.vmap(of_one)(x, y).items()}


@pytest.mark.parametrize("labels", ["private", "shared"])
def test_the_loss_of_a_step_is_a_mean_over_samples(digits: Dataset, labels: str) -> None:
    states = []
    for defense in (Defense(), PerSample()):
        run = federation(digits, network_for(digits), defense, cuts=("block1",), labels=labels)
        play(run)
        states.append(run.state)
    assert distance(*states) < 1e-6


class MixesAll(Defense):
    """Averages everybody's activations; each client's loss weighs 1 / n."""

    requires = frozenset({"smashed"})
    owns = frozenset({"mix"})

    def mix(self, uploads: Mapping[str, Part], heard: Sequence[Message]) -> list[Mixture]:
        share = 1 / len(uploads)
        labels = [m.parts["labels"].values for m in heard if m.kind == "labels"]
        return [
            Mixture(
                smashed=torch.stack([share * u.values for u in uploads.values()]).sum(dim=0),
                cut="", targets=torch.stack(labels).mean(dim=0) if labels else None,
                members=[(c, share) for c in uploads],
            )
        ]  # fmt: skip


@pytest.mark.parametrize("labels", ["private", "shared"])
def test_mixing_moves_the_top_by_the_mixture_and_each_bottom_by_its_share(
    digits: Dataset, labels: str
) -> None:
    network = network_for(digits, "lenet")
    run = federation(digits, network, MixesAll(), clients=2, cuts=("block1",), labels=labels)
    result = play(run)
    weights = {n: v.clone().requires_grad_() for n, v in result.before.items()}
    x, y = zip(
        *[(c.x[result.used[c.id][0]], c.y[result.used[c.id][0]]) for c in run.clients], strict=True
    )
    bottoms = [network.run(weights, one, last="block1") for one in x]
    logits = network.run(weights, (bottoms[0] + bottoms[1]) / 2, first="block2")
    loss = sum(torch.nn.functional.cross_entropy(logits, one) / 2 for one in y)
    assert isinstance(loss, Tensor)
    top = [n for n in weights if not n.startswith(("block1.", "head."))]
    grads = torch.autograd.grad(loss, [weights[n] for n in top], retain_graph=True)
    for name, slope in zip(top, grads, strict=True):
        moved = result.before[name] - 0.5 * slope
        assert torch.allclose(run.state[name], moved, atol=1e-6), name
    # Every client's bottom got the gradient by its own activations; their mean is uploaded.
    by_q = torch.autograd.grad(loss, bottoms, retain_graph=True)
    own = [torch.autograd.grad(q, weights["block1.conv.weight"], g, retain_graph=True)[0]
           for q, g in zip(bottoms, by_q, strict=True)]  # fmt: skip
    moved = result.before["block1.conv.weight"] - 0.5 * (own[0] + own[1]) / 2
    assert torch.allclose(run.state["block1.conv.weight"], moved, atol=1e-6)


def test_batches_of_different_size_cannot_be_mixed(digits: Dataset) -> None:
    network = network_for(digits)
    run = federation(digits, network, MixesAll(), clients=2, cuts=("block1",))
    run.clients[1].x, run.clients[1].y = run.clients[1].x[:5], run.clients[1].y[:5]
    with pytest.raises(ValueError, match=r"client-1 holds 5 samples for batches of 8"):
        play(run)


@pytest.mark.parametrize(
    ("cut", "labels"), [("block9", "private"), ("flatten", "private"), ("head", "shared")]
)
def test_a_cut_that_does_not_work_is_named(digits: Dataset, cut: str, labels: str) -> None:
    with pytest.raises(ValueError, match=f"model lenet cannot be cut after '{cut}'.*block1"):
        federation(digits, network_for(digits), cuts=(cut,), labels=labels)


def test_settings_of_the_protocol() -> None:
    assert ProtocolSettings(name="splitfed", cut="a", local_steps=1).cuts == ("a",)
    assert ProtocolSettings(name="splitfed", cut=["a", "b"], local_steps=1).cuts == ("a", "b")
    with pytest.raises(ValueError, match="splitfed needs a cut"):
        ProtocolSettings(name="splitfed", local_steps=1)
    with pytest.raises(ValueError, match="fedavg has no cut"):
        ProtocolSettings(name="fedavg", local_steps=1, cut="a")
    with pytest.raises(ValueError, match="splitfed needs exactly one of local_steps"):
        ProtocolSettings(name="splitfed", cut="a")


def test_observing_shadowing_and_reloading(digits: Dataset, tmp_path: Any) -> None:
    network = network_for(digits)
    run = federation(digits, network, cuts=("block1",))
    before = dict(run.state)
    seen, truth = observe(
        run,
        protocol=ProtocolSettings(name="splitfed", cut="block1", clients=4, local_steps=1, lr=0.5),
        threat=ThreatSettings(victims=3, batch=4),
        aux_x=digits.aux_x,
        defense_known={"name": "none", "settings": {}},
        names=("init",),
    )
    assert distance(run.state, before) == 0
    assert seen.known["cut"] == "block1"
    assert seen.labels == "private"
    smashed, _ = seen.stack("smashed", seen.clients)
    # Activation k is that of the truth's sample k.
    expected = network.run(seen.before, truth.x.flatten(0, 1), last="block1")
    assert torch.allclose(smashed["smashed"].flatten(0, 1), expected, atol=1e-6)
    assert len(seen.server) == 1
    assert torch.equal(seen.server[0]["block2.conv.weight"], before["block2.conv.weight"])
    save_seen(seen, tmp_path / "seen")
    again = load_seen(tmp_path / "seen")
    assert [m.kind for m in again.messages] == [m.kind for m in seen.messages]
    x, y = digits.aux_x[:12].view(3, 4, *digits.shape), digits.aux_y[:12].view(3, 4)
    shadow = Rehearsals(
        seen=again, network=network, defense=Defense(),
        rng=generator(0, "shadow"), device=torch.device("cpu"),
    )(x, y)  # fmt: skip
    made, _ = shadow.stack("smashed", shadow.clients)
    expected = network.run(seen.before, x.flatten(0, 1), last="block1")
    assert torch.allclose(made["smashed"].flatten(0, 1), expected, atol=1e-6)
