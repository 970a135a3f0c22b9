"""PM-SFL's rivals: clients alone, kept first stages, noised and masked split learning."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.api import Client, Defense, Facts, Part
from bench.data.dataset import Dataset
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.privacy.ledger import account
from bench.protocols.evaluate import Reached, evaluate
from bench.protocols.federation import Federation, names_in
from bench.registry import Registry
from bench.seeding import generator
from defenses.lg_fedavg import LGFedAvg
from defenses.splitfed import SplitFedDP, SplitFedPM
from defenses.standalone import Standalone
from tests.conftest import context_for, federation_of, network_for, require, seen_under
from tests.uploads import (
    assert_moments,
    assert_share,
    distance,
    error_of,
    make_client,
    play,
    upload_of,
)

FACTS = Facts(parameters=100, rounds=10, clients=10, batch=32, records=100, local_steps=5)


# --- standalone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["fedavg", "fedsgd"])
def test_standalone_clients_equal_clients_trained_alone(digits: Dataset, protocol: str) -> None:
    """By a loop per client, on the batches that the protocol drew."""
    network = network_for(digits, "mlp_spm")
    steps = 1 if protocol == "fedsgd" else 3
    run = federation_of(digits, network, Standalone(), clients=3, protocol=protocol)
    alone = {c.id: {n: v.clone() for n, v in run.state.items()} for c in run.clients}
    start = {n: v.clone() for n, v in run.state.items()}
    for _ in range(4):
        result = play(run, protocol=protocol, local_steps=steps)
        assert result.wire.bytes_up == 0
        for client in run.clients:
            for chosen in result.used[client.id]:
                weights = {n: v.requires_grad_() for n, v in alone[client.id].items()}
                logits = network.apply(weights, client.x[chosen])
                loss = torch.nn.functional.cross_entropy(logits, client.y[chosen])
                grads = torch.autograd.grad(loss, list(weights.values()))
                alone[client.id] = {
                    n: v.detach() - 0.2 * g
                    for (n, v), g in zip(weights.items(), grads, strict=True)
                }
    for client in run.clients:
        assert distance(run.weights_of(client), alone[client.id]) < 1e-5
        reached = Reached()
        reached.add(client, run.names_held(client))
        assert not reached.everything()
    assert distance(run.state, start) == 0


@pytest.mark.parametrize("labels", ["private", "shared"])
def test_standalone_under_splitfed_trains_the_servers_part_alone(
    digits: Dataset, labels: str
) -> None:
    network = network_for(digits)
    run = federation_of(
        digits, network, Standalone(), protocol="splitfed", cuts=("block1", "block2"), labels=labels
    )
    start = {n: v.clone() for n, v in run.state.items()}
    result = play(run, protocol="splitfed", rounds=2)
    assert not any(m.kind == "update" for m in result.wire.messages_for("server"))
    bottom = set(run.names_held(run.clients[0]))
    for name, value in run.state.items():
        # block2 is some clients' and, for the others, the server's, whose copy is the state.
        assert torch.equal(value, start[name]) == (name in bottom), name
    one, other = run.weights_of(run.clients[0]), run.weights_of(run.clients[2])
    for name, value in one.items():
        assert torch.equal(value, other[name]) != (name in bottom), name


@pytest.mark.parametrize("attack", ["dlg", "inverting_gradients"])
def test_smashed_data_alone_is_matched(digits: Dataset, registry: Registry, attack: str) -> None:
    network, rebuild = network_for(digits), registry.attack(attack, {})
    seen, truth = seen_under(
        digits, network, Standalone(), protocol="splitfed", split={"cut": "block1"}, clients=3
    )
    assert rebuild.applies(seen) is None
    context = context_for(digits, network, Standalone(), budget=100)
    assert error_of(rebuild, seen, truth, context) < 1e-4


def test_the_ledger_says_that_standalone_sends_nothing_but_smashed_data() -> None:
    entry = account(Standalone(), FACTS)
    assert (entry.eps_record, entry.eps_claimed) == (0.0, None)
    assert entry.reasons == ("What the client trains: never leaves the client.",)
    assert account(Standalone(), replace(FACTS, split=True)).eps_record == math.inf


# --- LG-FedAvg ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "cut", "stages"),
    [
        (1.0, None, ["block1", "block2", "block3"]),
        (0.5, None, ["block1", "block2"]),
        (0.01, None, ["block1"]),
        (1.0, "block2", ["block1", "block2"]),
        (0.5, "block2", ["block1"]),
    ],
)
def test_which_stages_stay_with_a_client(
    digits: Dataset, keep: float, cut: str | None, stages: list[str]
) -> None:
    network = network_for(digits)
    held = network.stages if cut is None else ("block1", "block2", "head")
    names = names_in(held, network.init(generator(0)))
    assert LGFedAvg(keep=keep).stages_kept(names) == stages


@pytest.mark.parametrize("protocol", ["fedavg", "fedsgd", "splitfed"])
def test_kept_stages_never_leave_and_go_on_from_the_clients_own_values(
    digits: Dataset, protocol: str
) -> None:
    network = network_for(digits)
    split = {"cuts": ("block2",)} if protocol == "splitfed" else {}
    run = federation_of(digits, network, LGFedAvg(keep=0.3), clients=3, protocol=protocol, **split)
    start = {n: v.clone() for n, v in run.state.items()}
    kept = {n for n in start if n.startswith("block1.")}
    ends: dict[str, Any] = {}
    for _ in range(3):
        for client in run.clients:
            _, began = run._begin_at(client)
            for name in kept & set(ends.get(client.id, {})):
                assert torch.equal(began[name], ends[client.id][name])
            assert all(torch.equal(began[n], run.state[n]) for n in began if n not in kept)
        result = play(run, protocol=protocol, local_steps=1 if protocol == "fedsgd" else 3)
        ends = {c.id: dict(c.own or {}) for c in run.clients}
    for message in result.wire.log:
        if message.kind not in ("update", "gradient"):
            continue
        sent = [n for n in message.parts if n not in kept]
        assert message.n_bytes == 4 * sum(start[n].numel() for n in sent)
        for name in kept:
            assert not message.parts[name].presence().any()
            assert not message.parts[name].values.any()
    assert all(torch.equal(run.state[n], start[n]) for n in kept)
    assert all(not torch.equal(run.state[n], start[n]) for n in start if n not in kept)
    one, other = (run.weights_of(c) for c in run.clients[:2])
    assert all((not torch.equal(one[n], other[n])) == (n in kept) for n in start)


def test_a_layer_that_its_holders_keep_is_the_servers_copy_to_the_others(digits: Dataset) -> None:
    network = network_for(digits)
    run = federation_of(
        digits, network, LGFedAvg(), protocol="splitfed", cuts=("block1", "block2")
    )  # fmt: skip
    before = run.state["block2.conv.weight"].clone()
    play(run, protocol="splitfed")
    assert torch.equal(run.state["block2.conv.weight"], run.server["block2.conv.weight"])  # type: ignore[attr-defined]
    assert not torch.equal(run.state["block2.conv.weight"], before)
    shallow, deep = run.weights_of(run.clients[0]), run.weights_of(run.clients[1])
    assert torch.equal(shallow["block2.conv.weight"], run.state["block2.conv.weight"])
    assert not torch.equal(deep["block2.conv.weight"], run.state["block2.conv.weight"])


def test_masks_can_be_kept_by_stage_too(digits: Dataset, registry: Registry) -> None:
    """PM-SFL's LG-FedAvg column trains masks."""
    defense = registry.defense("splitfed_pm+lg_fedavg", {"lg_fedavg.keep": 0.3})
    run = federation_of(digits, network_for(digits), defense, clients=2)
    result = play(run, rounds=2)
    update = next(m for m in result.wire.log if m.kind == "weights")
    assert not update.parts["block1.conv.weight"].presence().any()
    sent = update.parts["block2.conv.weight"].values
    assert bool(((sent > 0) & (sent < 1)).all())
    one, other = (run.weights_of(c) for c in run.clients)
    assert distance(one, other) > 0
    assert torch.equal(one["head.weight"], other["head.weight"])


# --- personal accuracy --------------------------------------------------------------------------


def _by_hand(run: Federation, client: Client, data: Dataset) -> float | None:
    """Mean accuracy over the client's own labels: each training sample stands for its class, if
    that was tested."""
    own, kept = client.own or {}, client.kept or {}
    weights = {n: torch.where(kept[n], own[n], v) if n in kept else v for n, v in run.state.items()}
    right = run.network.apply(weights, data.test_x).argmax(dim=1) == data.test_y
    tested = [y for y in client.y if bool((data.test_y == y).any())]
    shares = [float(right[data.test_y == y].double().mean()) for y in tested]
    return sum(shares) / len(shares) if shares else None


@pytest.mark.parametrize(
    "defense", [Defense(), Standalone(), LGFedAvg(keep=0.3)], ids=lambda d: type(d).__name__
)
def test_personal_accuracy_weighs_classes_as_the_clients_labels_do(
    digits: Dataset, defense: Defense
) -> None:
    run = federation_of(digits, network_for(digits), defense, clients=3)
    play(run, rounds=3)
    if run.clients[2].own is not None:  # as one that never joined
        run.clients[2].own = run.clients[2].kept = None
    reached = evaluate(run, digits, has_global=True)
    expected = [_by_hand(run, c, digits) for c in run.clients]
    assert reached.personal_accuracies == pytest.approx(expected, rel=1e-9)
    assert reached.personal_accuracy == pytest.approx(sum(expected) / 3, rel=1e-9)
    guess = run.network.apply(run.state, digits.test_x).argmax(dim=1)
    assert reached.correct == int((guess == digits.test_y).sum())
    assert reached.keeping_clients == (0 if type(defense) is Defense else 2)
    commonest = [float(c.y.bincount().max() / len(c.y)) for c in run.clients]
    assert reached.personal_chance == pytest.approx(sum(commonest) / 3)
    run.clients[1].y = torch.full((24,), 9)  # a class without test samples does not count
    tested = digits.test_y < 9
    some = replace(digits, test_x=digits.test_x[tested], test_y=digits.test_y[tested])
    reached, expected = (
        evaluate(run, some, has_global=False),
        [_by_hand(run, c, some) for c in run.clients],
    )
    assert reached.personal_accuracies[1] is expected[1] is None
    assert reached.personal_accuracies[::2] == pytest.approx(expected[::2])
    assert reached.personal_accuracy == pytest.approx(sum(expected[::2]) / 2)
    assert reached.correct is None


def test_personal_weights_of_masks_are_realised(digits: Dataset, registry: Registry) -> None:
    """What a client keeps are scores; its network has w_b sigmoid(score) there."""
    settings = {"personal": 0.5, "agreement_rounds": 0, "growth_rounds": 1, "lr_scale": 100.0}
    run = federation_of(
        digits, network_for(digits), registry.defense("pm_sfl", settings), clients=2
    )
    play(run, rounds=2)
    client = run.clients[0]
    assert client.own is not None
    assert client.kept is not None
    name = "block1.conv.weight"
    weights = run.weights_of(client)[name]
    theta = run.state[name].clamp(0.01, 0.99)
    expected = torch.where(client.kept[name], torch.sigmoid(client.own[name]), theta)
    assert torch.allclose(weights, run.const[name] * expected, atol=1e-6)
    assert int(client.kept[name].sum()) > 0


# --- SplitFed with noise --------------------------------------------------------------------------

SIZE = 200_000


def test_smashed_data_is_clipped_per_sample_and_gets_laplace_noise() -> None:
    """|Laplace| is exponential."""
    q = torch.stack([torch.full((SIZE,), 1.0), torch.full((SIZE,), 0.1 / SIZE)])
    defense = SplitFedDP(epsilon=2.0, smashed_clip=0.5, update_clip=1.0)
    sent = defense.smashed(q.requires_grad_(), make_client()).values
    sent.sum().backward()  # differentiable
    noise = sent.detach().double() - torch.tensor([[0.5 / SIZE], [0.1 / SIZE]])
    scale = 2 * 0.5 / 2.0
    for row in noise:
        assert_moments(row, mean=0, variance=2 * scale**2)
        assert_moments(row.abs(), mean=scale, variance=scale**2)


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_updates_are_clipped_and_get_the_budgets_noise(noise: Any) -> None:
    update = torch.full((SIZE,), 1.0)
    defense = SplitFedDP(
        epsilon=0.5, delta=1e-3, smashed_clip=1.0, update_clip=3.0, update_noise=noise
    )
    values = upload_of(defense, update, generator(0, "splitfed")).parts["p"].values
    if noise == "gaussian":
        std, clipped = 2 * 3.0 * math.sqrt(2 * math.log(1.25e3)) / 0.5, 3.0 / math.sqrt(SIZE)
    else:
        std, clipped = math.sqrt(2) * 2 * 3.0 / 0.5, 3.0 / SIZE
    assert_moments(values, mean=clipped, variance=std**2)
    assert defense.constants(FACTS)["update_noise_std"] == pytest.approx(std)


def test_splitfed_dp_claims_its_budget_and_proves_none_for_a_record() -> None:
    defense = SplitFedDP(epsilon=0.1, smashed_clip=1.0, update_clip=1.0, update_noise="laplace")
    entry = account(defense, replace(FACTS, split=True))
    assert (entry.eps_claimed, entry.claim_delta, entry.unit) == (0.1, 0.0, "record")
    assert entry.eps_record == math.inf
    assert not any("smashed data of every step" in r for r in entry.reasons)
    # 10 rounds of 1 + 4 * 32 releases of smashed data and one update, 0.1 each: so many small
    # ones compose like a Gaussian whose mu^2 is the sum of their squares.
    like = exact_gaussian_epsilon(mu=0.1 * math.sqrt(10 * (129 + 1)), delta=FACTS.delta)
    assert entry.constants["eps_given_labels"] == pytest.approx(like, rel=0.01)
    one_step = account(defense, replace(FACTS, split=True, local_steps=1))
    # Few enough to compose with delta = 1e-5: less than 10 * 2 * 0.1.
    given = one_step.constants["eps_given_labels"]
    assert isinstance(given, float)
    assert 1.0 < given < 2.0
    # The classical Gaussian keeps one update's budget (Dwork and Roth 2014, Theorem A.1).
    gaussian = SplitFedDP(epsilon=1.0, smashed_clip=1.0, update_clip=1.0)
    once = account(gaussian, replace(FACTS, rounds=1, participations=1, local_steps=1))
    assert 1.0 < float(once.constants["eps_given_labels"]) <= 2.0  # smashed data costs 1 of it


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_an_update_can_have_a_budget_of_its_own(noise: Any) -> None:
    """PM-SFL's Fig. 2: 5 for updates, another one for smashed data."""
    common: dict[str, Any] = {"smashed_clip": 1.0, "update_clip": 1.0, "update_noise": noise}
    both, low, high = (
        SplitFedDP(epsilon=0.1, **common),
        SplitFedDP(epsilon=0.1, update_epsilon=5.0, **common),
        SplitFedDP(epsilon=5.0, **common),
    )
    facts = replace(FACTS, split=True)
    assert low.smashed_scale == both.smashed_scale == 20.0
    assert low.update.mechanisms() == high.update.mechanisms() != both.update.mechanisms()
    assert [d.claim(facts)[0] for d in (both, low, high)] == [0.1, 5.0, 5.0]
    assert low._noise_events(facts) == (both._noise_events(facts)[0], high._noise_events(facts)[-1])
    same = SplitFedDP(epsilon=0.1, update_epsilon=0.1, **common)
    assert same.mechanisms() == both.mechanisms()
    assert same.constants(facts) == both.constants(facts)


# --- SplitFed with masks --------------------------------------------------------------------------


def _masks(defense: SplitFedPM, scores: Tensor) -> Part:
    const = {"p": torch.zeros_like(scores)}
    return upload_of(defense, scores, generator(0, "splitfed"), const=const).parts["p"]


def test_splitfed_pm_sends_probabilities_or_their_bits() -> None:
    scores = torch.full((SIZE,), 0.8)
    exact = _masks(SplitFedPM(), scores)
    assert torch.equal(exact.values, torch.sigmoid(scores))
    assert (exact.present, exact.n_bytes) == (None, 4 * SIZE)
    bits = _masks(SplitFedPM(sends="bits"), scores)
    assert bits.n_bytes == SIZE // 8
    assert_share(bits.values, 1 / (1 + math.exp(-0.8)))


def test_splitfed_pm_with_bits_is_pm_sfl_without_personal_masks(
    digits: Dataset, registry: Registry
) -> None:
    runs = []
    for name, settings in (("pm_sfl", {}), ("splitfed_pm", {"sends": "bits"})):
        defense = registry.defense(name, {"lr_scale": 50.0, **settings})
        run = federation_of(
            digits, network_for(digits), defense, protocol="splitfed", cuts=("block1",)
        )
        play(run, protocol="splitfed", rounds=2)
        runs.append(run.state)
    assert distance(*runs) == 0


def test_layers_of_some_clients_are_their_mean_without_the_servers_copy(digits: Dataset) -> None:
    run = federation_of(
        digits, network_for(digits), SplitFedPM(), protocol="splitfed", cuts=("block1", "block2")
    )
    result = play(run, protocol="splitfed")
    name = "block2.conv.weight"
    sent = [
        m.parts[name].values for m in result.wire.log if m.kind == "weights" and name in m.parts
    ]
    assert len(sent) == 2
    assert torch.allclose(run.state[name], torch.stack(sent).mean(dim=0), atol=1e-6)


# --- attacks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["dlg", "idlg", "ilrg", "inverting_gradients", "analytic"])
def test_attacks_on_uploads_do_not_apply_where_nothing_is_uploaded(
    digits: Dataset, registry: Registry, attack: str
) -> None:
    seen, _ = seen_under(digits, network_for(digits), Standalone(), clients=2)
    reason = require(registry.attack(attack, {}).applies(seen))
    assert "no upload" in reason
