"""SelectiveShield: Fisher scores, zones and the round."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.contract.defense import Client, Defense, Local, Server
from bench.contract.events import Round
from bench.contract.mechanisms import GaussianNoise
from bench.contract.messages import EVERYONE, SERVER, Message, Part, Stage
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.protocols.export import load_seen, save_seen
from bench.seeding import generator
from defenses import ckks
from defenses.encrypted_zone import CIPHERTEXT, GAIN, KEY_SERVER, MASK, EncryptedZone, KeyHolder
from defenses.fedml_he import FedMLHE
from defenses.mask_crypt import MaskCrypt
from defenses.selective_shield import (
    SelectiveShield,
    consensus,
    fisher_scores,
    normalise_by_layer,
    sensitive,
)
from tests.conftest import federation_of, network_for, seen_under
from tests.oracle import reference_cases
from tests.uploads import assert_moments, distance, make_client, play, tensor

CASES = {c["name"]: c for c in reference_cases("selective_shield")}


def bits(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def shield(tau: float = 0.05, rho: float = 0.5, **more: Any) -> SelectiveShield:
    return SelectiveShield(tau=tau, rho=rho, **more)


# --- Fisher scores and zones ---------------------------------------------------------------------


def scores_of(grads: Any, score: Any) -> dict[str, Tensor]:
    each = tensor(grads)
    total = each.square().sum(dim=0) if score == "eq3" else each.sum(dim=0)
    return fisher_scores({"layer.weight": total}, samples=len(each), score=score)


@pytest.mark.parametrize("score", ["eq3", "eq12"])
@pytest.mark.parametrize("name", ["ss_fisher", "ss_fisher_cancel"])
def test_fisher_scores_and_masks_of_the_oracle(name: str, score: str) -> None:
    case = CASES[name]
    scores = scores_of(case["inputs"]["grads"], score)
    expected = case["expected"]
    assert scores["layer.weight"].tolist() == pytest.approx(expected[score], rel=1e-5)
    if f"{score}_norm" in expected:
        scaled = normalise_by_layer(scores)["layer.weight"]
        assert scaled.tolist() == pytest.approx(expected[f"{score}_norm"], rel=1e-5)
    mask = sensitive(scores, tau=case["inputs"]["tau"])["layer.weight"]
    assert mask.int().tolist() == expected[f"mask_{score}"]


def test_a_constant_layer_is_not_sensitive_and_layers_are_scaled_apart() -> None:
    scores = {
        "a.weight": tensor([5.0, 5.0]), "b.weight": tensor([0.0, 1e-9]), "b.bias": tensor([5e-10])
    }  # fmt: skip
    scaled = normalise_by_layer(scores)
    assert scaled["a.weight"].tolist() == CASES["ss_fisher"]["expected"]["const_layer"]
    assert scaled["b.weight"].tolist() == [0.0, 1.0]
    assert scaled["b.bias"].tolist() == pytest.approx([0.5])


def test_one_replaced_record_flips_the_mask() -> None:
    case = CASES["ss_mask_not_dp"]
    for name in ("D", "D_prime"):
        scores = scores_of(case["inputs"][name], "eq12")
        mask = sensitive(scores, tau=case["inputs"]["tau"])["layer.weight"]
        assert mask.int().tolist() == case["expected"][f"mask_{name}"]


def test_rho_is_met_by_the_exact_share_despite_rounding() -> None:
    masks = [{"w": bits([i < 3])} for i in range(10)]
    assert 3 / 10 < 0.1 + 0.2
    assert consensus(masks, rho=0.1 + 0.2)["w"].tolist() == [True]
    assert consensus(masks, rho=0.31)["w"].tolist() == [False]
    assert consensus(masks, rho=0.0)["w"].tolist() == [True]


@pytest.mark.parametrize("score", ["eq12", "eq3"])
def test_scores_of_all_clients_in_one_batch_equal_a_loop_over_samples(
    digits: Dataset, score: Any
) -> None:
    """Clients of unequal sizes, more samples than a chunk; the padding adds nothing."""
    network = network_for(digits, "mlp_spm")
    run = federation_of(digits, network, SelectiveShield(score=score), clients=3, each=70)
    run.clients[1].x, run.clients[1].y = run.clients[1].x[:13], run.clients[1].y[:13]
    play(run)
    start = run.network.init(generator(0, "init"))
    for client in run.clients:
        total = {n: torch.zeros_like(v) for n, v in start.items()}
        for x, y in zip(client.x, client.y, strict=True):
            leaves = {n: v.clone().requires_grad_() for n, v in start.items()}
            loss = torch.nn.functional.cross_entropy(network.apply(leaves, x[None]), y[None])
            for name, grad in zip(
                leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True
            ):
                total[name] += grad.square() if score == "eq3" else grad
        inspected = client.memory["inspected"]
        for name, value in total.items():
            assert torch.allclose(inspected[name], value, rtol=1e-3, atol=1e-5), name


# --- the round -----------------------------------------------------------------------------------


class Given(SelectiveShield):
    """Proposes given masks, by client."""

    def __init__(self, masks: Sequence[Tensor], **settings: Any) -> None:
        super().__init__(**settings)
        self.masks = masks

    def propose(self, client: Client, local: Local) -> dict[str, Tensor]:
        return {"w": self.masks[int(client.id[-1])]}


def a_round(defense: EncryptedZone, updates: Tensor) -> tuple[Any, list[Message], KeyHolder]:
    """The defense's hooks around updates [K, D] of one tensor, in the order of the protocol."""
    keys = defense.third_parties(0)[KEY_SERVER]
    assert isinstance(keys, KeyHolder)
    ids = [f"client-{i}" for i in range(len(updates))]
    clients = [make_client(n) for n in ids]
    base = {"w": torch.zeros_like(updates[0])}
    locals_ = [
        Local(broadcast=base, start=base, end={"w": u}, const={}, grad_sum={"w": -u}, lr=1.0,
              steps=1)
        for u in updates
    ]  # fmt: skip
    told = keys.begin("round", ids, 0, 0)
    for client in clients:
        defense.hear("round", client, [m for m in told if m.receiver == client.id])
    stage: Stage = "upload"
    said = {c.id: defense.say(stage, c, u, 0) for c, u in zip(clients, locals_, strict=True)}
    for client in clients:
        heard = [m for sender, ms in said.items() for m in ms if sender != client.id]
        defense.hear(stage, client, heard)
    messages = [
        defense.upload(
            [Message(kind="update", sender=c.id, receiver=SERVER, round=0,
                     parts={"w": Part(values=u.end["w"])})], u, c)[0]
        for c, u in zip(clients, locals_, strict=True)
    ]  # fmt: skip
    server = Server(state=base, const={}, lr=1.0, ask=keys.reply)
    return defense.aggregate(server, messages), messages, keys


@pytest.mark.parametrize("name", ["ss_negotiate_rho0.25", "ss_negotiate_rho1"])
def test_negotiated_zones_of_the_oracle(name: str) -> None:
    """Eq. 16-18 as they leave the clients: sealed, not sent at all, sent in the open."""
    given, expected = CASES[name]["inputs"], CASES[name]["expected"]
    masks = [bits(m) for m in given["masks"]]
    defense = Given(masks, rho=given["rho"], noise_multiplier=0.0)
    _, messages, _ = a_round(defense, torch.ones(len(masks), 6))
    noised = torch.stack([m.parts["w"].presence() for m in messages])
    encrypted = torch.stack([m.sealed["w"].covers for m in messages])
    assert encrypted.int().tolist() == [expected["enc"]] * len(masks)
    assert (~noised & ~encrypted).int().tolist() == expected["pers"]
    assert noised.int().tolist() == expected["noise"]
    assert noised.sum(dim=0).tolist() == expected["n_noise_contributors"]


@pytest.mark.parametrize("average", ["count", "all"])
def test_aggregation_of_the_oracle(average: Any) -> None:
    """Through the real ciphertexts; no noise, a clip that never binds."""
    given, expected = CASES["ss_aggregate"]["inputs"], CASES["ss_aggregate"]["expected"]
    masks = [bits(m) for m in given["masks"]]
    defense = Given(masks, rho=given["rho"], noise_multiplier=0.0, clip_norm=100.0, average=average)
    state, messages, _ = a_round(defense, tensor(given["updates"]))
    key = "corrected" if average == "count" else "printed_eta1"
    assert state["w"].tolist() == pytest.approx(expected[key], abs=2e-6)
    for message, mask in zip(messages, expected["sent"], strict=True):
        covered = message.parts["w"].presence() | message.sealed["w"].covers
        assert covered.int().tolist() == mask


def test_the_noised_zone_is_clipped_as_the_oracle_says_and_noised_per_number_of_clients() -> None:
    case = CASES["ss_clip"]
    value = tensor(case["inputs"]["v"])
    nothing = torch.zeros(2, dtype=torch.bool)
    quiet = Given([nothing], clip_norm=case["inputs"]["C"], noise_multiplier=0.0)
    _, (message,), _ = a_round(quiet, value[None])
    assert message.parts["w"].values.tolist() == pytest.approx(case["expected"]["out"])
    assert message.sealed == {}
    size, clients = 4000, 4
    none = [torch.zeros(size, dtype=torch.bool)] * clients
    for scale, factor in (("times_K", 2.0), ("plain", 1.0), ("div_K", 0.5)):
        loud = Given(none, clip_norm=2.0, noise_multiplier=3.0, noise_scale=scale)
        _, messages, _ = a_round(loud, torch.zeros(clients, size))
        std = 2.0 * 3.0 * factor
        assert loud.std(clients, loud.clips[0]) == std
        noise = torch.cat([m.parts["w"].values for m in messages])
        assert_moments(noise, mean=0, variance=std**2)
        assert GaussianNoise(of="update", std=std) in loud.mechanisms_in(Round(clients=clients))


def test_the_encrypted_sum_is_exact_and_the_same_at_every_run() -> None:
    updates = torch.randn(5, 3000, generator=generator(0, "updates"))
    everything = [torch.ones(3000, dtype=torch.bool)] * 5
    mean, again = (a_round(Given(everything), updates)[0]["w"] for _ in range(2))
    assert torch.equal(mean, again)
    error = (mean.double() - updates.double().mean(dim=0)).abs().max()
    assert float(error) < ckks.ADDITIVE.resolution / GAIN


def test_values_beyond_the_ciphertexts_range_are_cut_and_lose_no_round() -> None:
    """A diverging training is a result, not an error."""
    everything = [torch.ones(4, dtype=torch.bool)] * 2
    limit = ckks.ADDITIVE.max_magnitude / GAIN / 2  # two clients
    wild = torch.tensor([[1e9, -1e9, float("nan"), 0.5]] * 2)
    mean = a_round(Given(everything), wild)[0]["w"]
    # Four values alone in a ciphertext have a small root mean square: only the range cuts.
    assert mean.tolist() == pytest.approx([2 * limit, -2 * limit, 2 * limit, 0.5], abs=1e-5)
    many = [torch.ones(3000, dtype=torch.bool)] * 2
    mean = a_round(Given(many), torch.full((2, 3000), 1e9))[0]["w"]
    assert float((mean - limit).abs().max()) < 1e-5


@pytest.mark.parametrize(("tau", "rho"), [(1.0, 1.0), (0.0, 0.0)])
def test_empty_zones_do_no_harm(digits: Dataset, tau: float, rho: float) -> None:
    """tau = 1 marks nothing; rho = 0 encrypts everything, so that nothing is noised."""
    defense = SelectiveShield(tau=tau, rho=rho, noise_multiplier=0.0, clip_norm=1e6)
    network = network_for(digits)
    run, plain = (federation_of(digits, network, d) for d in (defense, Defense()))
    result = play(run)
    play(plain)
    update = [m for m in result.wire.log if m.kind == "update"]
    assert bool(update[0].sealed) == (rho == 0.0)
    assert distance(run.state, plain.state) < 1e-5


def test_the_personal_zone_is_merged_back_and_nothing_else(digits: Dataset) -> None:
    """Eq. 27."""
    network = network_for(digits)
    run = federation_of(digits, network, SelectiveShield(tau=0.05, rho=1.0, noise_multiplier=0.0))
    play(run, rounds=2)
    for client in run.clients:
        assert client.kept is not None
        mine = run.weights_of(client)
        for name, value in run.state.items():
            mask = client.memory["encrypted_zone.mask"][name] & ~client.plan["encrypted"][name]
            assert torch.equal(client.kept[name], mask)
            assert torch.equal(mine[name][~mask], value[~mask])
            assert client.own is not None
            assert torch.equal(mine[name][mask], client.own[name][mask])


def test_what_the_server_sees_is_noised_values_masks_and_sizes(
    digits: Dataset, tmp_path: Path
) -> None:
    seen, _ = seen_under(digits, network_for(digits), shield(), victims=4)
    save_seen(seen, tmp_path / "seen")
    seen = load_seen(tmp_path / "seen")
    kinds = [m.kind for m in seen.messages]
    assert set(kinds) == {MASK, "update", "public_key"}
    masks = [m for m in seen.messages if m.kind == MASK]
    assert all(m.receiver == EVERYONE for m in masks)
    zone = consensus([{n: p.values for n, p in m.parts.items()} for m in masks], rho=0.5)
    for mask in masks:
        client = mask.sender
        (update,) = seen.of(client, "update")
        assert update.sealed[CIPHERTEXT].box is None
        assert update.sealed[CIPHERTEXT].n_bytes > 10_000
        for name, part in update.parts.items():
            hidden = zone[name] | mask.parts[name].values
            assert part.present is not None
            assert torch.equal(part.present, ~hidden)
            assert bool((part.values[hidden] == 0).all())


def test_bytes_count_masks_once_up_and_ciphertexts_whole(digits: Dataset) -> None:
    network = network_for(digits)
    run = federation_of(digits, network, shield(), clients=3)
    result = play(run)
    update = next(m for m in result.wire.log if m.kind == "update")
    mask = next(m for m in result.wire.log if m.kind == MASK)
    parts = sum(-(-p.values.numel() // 8) for p in mask.parts.values())
    assert mask.n_bytes == parts
    shown = sum(int(p.presence().sum()) for p in update.parts.values())
    assert update.n_bytes == 4 * shown + update.sealed[CIPHERTEXT].n_bytes


@pytest.mark.parametrize("defense", [SelectiveShield(), FedMLHE(), MaskCrypt()])
def test_the_server_learns_the_next_model_only_where_it_hears_every_broadcast(
    digits: Dataset, defense: EncryptedZone
) -> None:
    """A key server or the clients form the model, so neither it nor the opened sum is seen."""
    for hears in ("addressed", "every_broadcast"):
        seen, _ = seen_under(digits, network_for(digits), defense, victims=3, hears=hears)
        assert (seen.after is not None) == (hears == "every_broadcast")
        assert "sum" not in {m.kind for m in seen.messages}
    seen, _ = seen_under(digits, network_for(digits), Defense(), victims=3)
    assert seen.after is not None


def test_clients_that_open_the_sum_themselves_download_its_ciphertexts(digits: Dataset) -> None:
    network = network_for(digits)
    plain, opened, own = (
        play(federation_of(digits, network, d, clients=2))
        for d in (Defense(), shield(0.0, 0.0), MaskCrypt(share=1.0))
    )
    model = plain.wire.bytes_down
    sums = [m for m in own.wire.log if m.kind == "sum" and m.sender == SERVER]
    keys = sum(m.n_bytes for m in own.wire.log if m.kind == "public_key" and m.sealed)
    masks = sum(m.n_bytes for m in own.wire.log if m.kind == MASK)
    assert sorted(m.receiver for m in sums) == ["client-0", "client-1"]
    keys_of_clients = keys * 2 / 3  # the third went to the server
    assert own.wire.bytes_down == model + sum(m.n_bytes for m in sums) + keys_of_clients + masks
    assert not any(m.kind == "sum" and m.sender == SERVER for m in opened.wire.log)


def test_settings_given_as_lists_are_dealt_to_clients_in_turn(digits: Dataset) -> None:
    """Client 0 marks everything above 0, client 1 nothing; each is clipped to its own norm."""
    dealt = SelectiveShield(
        tau=[0.0, 1.0], clip_norm=[1e-3, 2e-3, 3e-3], rho=1.0, noise_multiplier=0.0
    )
    run = federation_of(digits, network_for(digits), dealt, clients=6)
    log = play(run).wire.log
    for client in run.clients:
        mask = next(m for m in log if m.kind == MASK and m.sender == client.id)
        marked = sum(int(p.values.sum()) for p in mask.parts.values())
        assert (marked == 0) == (client.number % 2 == 1)
        update = next(m for m in log if m.kind == "update" and m.sender == client.id)
        norm = torch.cat([p.values[p.presence()] for p in update.parts.values()]).norm()
        if marked == 0:
            assert float(norm) == pytest.approx([1e-3, 2e-3, 3e-3][client.number % 3], rel=1e-4)
    assert dealt.cycle == 6
    seen, _ = seen_under(digits, network_for(digits), dealt, clients=8, victims=2)
    assert set(seen.clients) == {"client-0", "client-6"}
    with pytest.raises(UserError, match="first of the settings dealt"):
        seen_under(digits, network_for(digits), dealt, clients=8, victims=3)


def test_an_update_is_measured_from_the_broadcast_or_from_where_training_began() -> None:
    ones = {"w": torch.ones(2)}
    local = Local(
        broadcast=ones, start={"w": torch.tensor([1.0, 5.0])}, end={"w": torch.tensor([2.0, 4.0])},
        const={}, grad_sum={"w": torch.tensor([-1.0, 1.0])}, lr=1.0, steps=1,
    )  # fmt: skip
    sent = {"w": Part(values=torch.tensor([1.0, 3.0]))}
    message = Message(kind="update", sender="c", receiver=SERVER, round=0, parts=sent)
    for update_from, expected in (("broadcast", [1.0, 3.0]), ("start", [1.0, -1.0])):
        shield = SelectiveShield(update_from=update_from)
        assert shield.measure(message, local).parts["w"].values.tolist() == expected


def test_a_rehearsal_keeps_what_was_agreed(digits: Dataset) -> None:
    seen, _ = seen_under(digits, network_for(digits), shield(), victims=3)
    plans = shield().public_plans(seen.messages)
    assert len(plans) == 3
    shared = [p["encrypted"] for p in plans]
    assert all(torch.equal(shared[0][n], s[n]) for s in shared for n in s)
    own = shield(score="update").public_plans(seen.messages)
    assert all("mask" in p for p in plans)
    assert not any("mask" in p for p in own)


def test_forked_federations_share_keys_and_not_who_was_told() -> None:
    keys = KeyHolder(ckks.ADDITIVE)
    twin = copy.deepcopy(keys)
    assert len(keys.begin("round", ["client-0"], 0, 0)) == 1
    assert keys.begin("round", ["client-0"], 1, 0) == []
    assert len(twin.begin("round", ["client-0"], 1, 0)) == 1
    assert keys.keys.public_context == twin.keys.public_context
