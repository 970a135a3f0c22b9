"""Rounds, the wire, and the contract that all five published defenses rest on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bench.protocols.federation as federation_module
from bench.contract.compose import Composed
from bench.contract.defense import Client, Defense, Local, Party, Server
from bench.contract.messages import Message, Part, Sealed, Stage, State, as_kind
from bench.data.dataset import Dataset
from bench.protocols.export import load_seen, save_seen
from bench.protocols.federation import Federation
from bench.protocols.local_training import LocalWork
from bench.protocols.wire import Wire
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator
from bench.toolkit.batches import soft_cross_entropy
from defenses.noise import GaussianUpdate
from defenses.spm import SPM
from tests.conftest import federation_of, network_for, seen_under

WORK = LocalWork(protocol="fedavg", batch=8, lr=0.1, local_steps=3)


def everyone(federation: Federation) -> list[str]:
    return [c.id for c in federation.clients]


def equal(a: State, b: State) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


def close(a: State, b: State, tolerance: float = 3e-6) -> bool:
    return all(torch.allclose(a[k], b[k], atol=tolerance) for k in a)


def test_one_round_equals_a_plain_loop_of_sgd(digits: Dataset) -> None:
    network = network_for(digits, "mlp_spm")
    federation = federation_of(digits, network, Defense(), clients=3)
    copy_ = federation.fork("same")
    begin = federation.state
    used = federation.play(replace(WORK), everyone(federation)).used
    ends = []
    for client in copy_.clients:
        params = {k: v.clone().requires_grad_() for k, v in begin.items()}
        for batch in used[client.id]:
            logits = network.apply(params, client.x[batch], mode="train")
            loss = torch.nn.functional.cross_entropy(logits, client.y[batch])
            grads = torch.autograd.grad(loss, list(params.values()))
            params = {
                k: (v - 0.1 * g).detach().requires_grad_()
                for (k, v), g in zip(params.items(), grads, strict=True)
            }
        ends.append(params)
    mean = {k: torch.stack([e[k] for e in ends]).mean(dim=0) for k in begin}
    assert close(federation.state, mean)


def test_clients_as_one_batch_match_clients_one_by_one(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for chunk in (1, None):
        network = network_for(digits, "cnn_selective_shield")
        federation = federation_of(digits, network, Defense(), clients=3)
        monkeypatch.setattr(federation_module.Federation, "_chunk", lambda self, c=chunk: c)
        federation.play(WORK, everyone(federation))
        results.append(federation.state)
    assert close(results[0], results[1], 1e-5)


def test_fedsgd_equals_one_step_of_fedavg(digits: Dataset) -> None:
    states = []
    for protocol in ("fedsgd", "fedavg"):
        federation = federation_of(digits, network_for(digits), Defense())
        work = LocalWork(protocol=protocol, batch=8, lr=0.1, local_steps=1)
        federation.play(work, everyone(federation))
        states.append(federation.state)
    assert close(states[0], states[1], 1e-7)


def test_the_same_seed_gives_the_same_bits_and_leaves_the_global_generator_alone(
    digits: Dataset,
) -> None:
    before = torch.random.get_rng_state()
    states = []
    for _ in range(2):
        federation = federation_of(digits, network_for(digits), SPM(epsilon=1.0))
        federation.play(WORK, everyone(federation))
        states.append(federation.state)
    assert equal(*states)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_batch_uses_every_sample_once_per_epoch(digits: Dataset) -> None:
    federation = federation_of(digits, network_for(digits, "logistic"), Defense(), each=24)
    work = LocalWork(protocol="fedavg", batch=8, lr=0.1, local_epochs=2)
    used = federation.play(work, ["client-0"]).used["client-0"]
    assert used.shape == (6, 8)
    for epoch in (used[:3], used[3:]):
        assert sorted(epoch.flatten().tolist()) == list(range(24))


def test_observing_a_round_does_not_disturb_the_run(digits: Dataset) -> None:
    def trained(look: bool) -> State:
        federation = federation_of(digits, network_for(digits), SPM(epsilon=2.0))
        if look:
            federation.fork("look").play(WORK, everyone(federation))
        federation.play(WORK, everyone(federation))
        return federation.state

    assert equal(trained(True), trained(False))


# --- what the server sees ---------------------------------------------------------------------


def test_seen_holds_no_graph_and_shares_no_storage_with_clients(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=3)
    private = {truth.x.data_ptr(), truth.y.data_ptr()}
    tensors = [*seen.before.values(), *(seen.after or {}).values()]
    tensors += [p.values for m in seen.messages for p in m.parts.values()]
    for tensor in tensors:
        assert tensor.grad_fn is None
        assert not tensor.requires_grad
        assert tensor.untyped_storage().data_ptr() not in private
    assert {m.receiver for m in seen.messages} == {"server"}


def test_the_wire_detaches_and_copies_what_a_careless_plugin_sends() -> None:
    private = torch.ones(3, requires_grad=True)
    shared = torch.zeros(3)
    wire = Wire({}, ["a"])
    parts = {"smashed": Part(values=private * 2), "weights": Part(values=shared)}
    wire.send([Message(kind="x", sender="a", receiver="server", round=0, parts=parts)])
    shared += 1
    for message in (*wire.messages_for("server"), *wire.collect("server")):
        assert message.parts["smashed"].values.grad_fn is None
        assert torch.equal(message.parts["weights"].values, torch.zeros(3))


def test_an_export_reloads_equal_and_never_holds_the_truth(digits: Dataset, tmp_path: Path) -> None:
    seen, truth = seen_under(digits, network_for(digits), SPM(epsilon=1.0), clients=3, batch=4)
    save_seen(seen, tmp_path / "seen")
    again = load_seen(tmp_path / "seen")
    assert equal(seen.before, again.before)
    assert equal(seen.after or {}, again.after or {})
    assert again.known == seen.known
    for a, b in zip(seen.messages, again.messages, strict=True):
        assert (a.kind, a.sender, a.local_steps) == (b.kind, b.sender, b.local_steps)
        assert all(torch.equal(a.parts[n].values, b.parts[n].values) for n in a.parts)
    stored = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    for image in truth.x.flatten(0, 1):
        assert image.numpy().tobytes() not in stored
    (tmp_path / "seen.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="no complete export"):
        load_seen(tmp_path / "seen")


def test_victims_hold_distinct_samples_of_their_own_client(digits: Dataset) -> None:
    seen, truth = seen_under(digits, network_for(digits), Defense(), batch=8)
    assert truth.x.shape == (8, 8, 1, 16, 16)
    flat = [r.numpy().tobytes() for r in truth.x.flatten(0, 1)]
    assert len(set(flat)) == 64
    values, present = seen.stack("update", seen.clients)
    assert values["head.weight"].shape == (8, 10, 192)
    assert all(bool(p.all()) for p in present.values())


def test_the_observed_update_is_the_gradient_of_the_truth(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), lr=0.5)
    sent = seen.of(seen.clients[0], "update")[0]
    observed = as_kind(sent, "gradient", base=seen.before, lr=0.5)

    def loss(params: State) -> Tensor:
        one_hot = torch.nn.functional.one_hot(truth.y[0], 10).float()
        return soft_cross_entropy(network.apply(params, truth.x[0]), one_hot)

    expected = torch.func.grad(loss)(dict(seen.before))
    for name, part in observed.parts.items():
        assert torch.allclose(part.values, expected[name], atol=1e-7), name


def test_upload_kinds_convert_into_each_other() -> None:
    base = {"p": torch.tensor([1.0, 2.0])}
    values = torch.tensor([0.5, -0.25])
    update = Message(
        kind="update", sender="c", receiver="server", round=0, local_steps=4,
        parts={"p": Part(values=values)},
    )  # fmt: skip
    gradient = as_kind(update, "gradient", base=base, lr=0.1)
    assert torch.allclose(gradient.parts["p"].values, -values / 0.4)
    weights = as_kind(gradient, "weights", base=base, lr=0.1)
    assert torch.allclose(weights.parts["p"].values, base["p"] + values)
    with pytest.raises(ValueError, match="an upload is one of"):
        as_kind(replace(update, kind="mask"), "update", base=base, lr=0.1)


def test_a_shadow_round_plays_the_deployed_defense_with_fresh_secrets(digits: Dataset) -> None:
    network, defense = network_for(digits), GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0)
    seen, _ = seen_under(digits, network, defense, clients=3, batch=2)
    x, y = digits.aux_x[:8].view(4, 2, 1, 16, 16), digits.aux_y[:8].view(4, 2)
    shadows = [
        Rehearsals(
            seen=seen, network=network, defense=defense,
            rng=generator(0, "shadow", k), device=torch.device("cpu"),
        )(x, y)
        for k in (1, 2)
    ]  # fmt: skip
    one, two = (s.stack("update", s.clients)[0]["head.bias"] for s in shadows)
    assert one.shape == (4, 10)
    assert equal(shadows[0].before, seen.before)
    assert 0.05 < float((one - two).std()) / (0.1 * 2**0.5) < 2


# --- toy versions of the hooks that the published defenses need --------------------------------


class KeepsHead(Defense):
    """Like MS-PAFL and SelectiveShield's personal zone: the head never leaves the client."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        out = []
        for m in messages:
            parts = {
                n: replace(p, present=torch.zeros_like(p.values, dtype=torch.bool))
                if n.startswith("head") else p
                for n, p in m.parts.items()
            }  # fmt: skip
            out.append(m.with_parts(parts))
        return out


def test_what_is_withheld_at_upload_is_kept_by_the_client(digits: Dataset) -> None:
    federation = federation_of(digits, network_for(digits, "mlp_spm"), KeepsHead(), clients=3)
    server_head = federation.state["head.weight"].clone()
    federation.play(WORK, everyone(federation))
    assert torch.equal(federation.state["head.weight"], server_head)
    own = [c.own["head.weight"] for c in federation.clients if c.own is not None]
    assert len(own) == 3
    assert not torch.equal(own[0], own[1])
    _, start = federation._begin_at(federation.clients[0])
    assert torch.equal(start["head.weight"], own[0])
    assert torch.equal(start["hidden1.linear.weight"], federation.state["hidden1.linear.weight"])
    sent = 256 * 256 + 256
    assert federation.play(WORK, ["client-0"]).wire.bytes_up == 4 * sent


class KeyServer(Party):
    """Opens sealed sums on request and answers the server; like SelectiveShield's S_Key."""

    def reply(self, message: Message) -> list[Message]:
        if message.kind == "vote":
            return [
                Message(kind="agreed", sender="key", receiver=message.sender, round=message.round)
            ]
        opened = {n: Part(values=s.box["secret"]) for n, s in message.sealed.items()}
        return [replace(message, kind="opened", sender="key", receiver="server", parts=opened,
                        sealed={})]  # fmt: skip


class SealsHead(Defense):
    """Votes through a third party, uploads the head as ciphertext, and opens only the sum."""

    owns = frozenset({"aggregate"})

    def third_parties(self, seed: int) -> Mapping[str, Party]:
        return {"key": KeyServer()}

    def say(self, when: Stage, client: Client, local: Local | None, round: int) -> list[Message]:
        if when != "upload":
            return []
        assert local is not None
        return [Message(kind="vote", sender=client.id, receiver="key", round=round)]

    def hear(self, when: Stage, client: Client, heard: Sequence[Message]) -> None:
        if when == "upload":
            client.plan["agreed"] = [m.kind for m in heard] == ["agreed"]

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        assert client.plan["agreed"]
        (message,) = messages
        weights = as_kind(message, "weights", base=local.broadcast, lr=local.lr)
        head = weights.parts["head.weight"].values
        sealed = Sealed(
            n_bytes=1000, covers=torch.ones_like(head, dtype=torch.bool), box={"secret": head}
        )
        open_parts = {n: p for n, p in weights.parts.items() if n != "head.weight"}
        return [replace(weights, parts=open_parts, sealed={"head.weight": sealed})]

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State:
        assert server.ask is not None
        boxes = [m.sealed["head.weight"].box["secret"] for m in messages]
        total = torch.stack(boxes).sum(dim=0)
        question = Message(
            kind="open", sender="server", receiver="key", round=0,
            sealed={"head.weight": Sealed(
                n_bytes=1000, covers=torch.ones_like(total, dtype=torch.bool),
                box={"secret": total})},
        )  # fmt: skip
        (answer,) = server.ask(question)
        state = {
            n: torch.stack([m.parts[n].values for m in messages]).mean(dim=0)
            for n in server.state if n != "head.weight"
        }  # fmt: skip
        opened = answer.parts["head.weight"].values / len(messages)
        return {n: opened if n == "head.weight" else state[n] for n in server.state}


def test_ciphertexts_and_third_parties_carry_a_round_without_the_log_seeing_inside(
    digits: Dataset,
) -> None:
    network = network_for(digits, "mlp_spm")
    sealed = federation_of(digits, network, SealsHead(), clients=3)
    plain = federation_of(digits, network, Defense(), clients=3)
    result = sealed.play(WORK, everyone(sealed), observed=True)
    plain.play(WORK, everyone(plain))
    assert close(sealed.state, plain.state)
    seen = result.wire.messages_for("server")
    assert {m.kind for m in seen} == {"weights", "opened"}
    assert all(s.box is None for m in seen for s in m.sealed.values())
    assert all(c.kept is None for c in sealed.clients)


class DrawsMasks(Defense):
    """Like PM-SFL: trains scores, realises random masks, uploads one bit per weight."""

    owns = frozenset({"variables", "aggregate"})

    def variables(
        self, params: State, on_clients: Sequence[str], rng: torch.Generator
    ) -> tuple[State, State]:
        return {n: torch.full_like(p, 0.5) for n, p in params.items()}, params

    def receive(self, state: State, const: State) -> State:
        return {n: torch.logit(v.clamp(0.01, 0.99)) for n, v in state.items()}

    def draw(self, variables: State, const: State, rng: torch.Generator) -> State:
        return {n: torch.rand(v.shape, generator=rng) for n, v in variables.items()}

    def realize(self, variables: State, const: State, draw: State) -> State:
        out = {}
        for n, s in variables.items():
            theta = torch.sigmoid(s)
            hard = (draw[n] < theta).to(theta) if draw else theta
            out[n] = const[n] * (hard.detach() + theta - theta.detach())
        return out

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        masks = {
            n: Part(values=(torch.rand(s.shape, generator=client.rng["defense"])
                            < torch.sigmoid(s)).float(), bits=1)
            for n, s in local.end.items()
        }  # fmt: skip
        return [replace(m, kind="mask", parts=masks) for m in messages]

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State:
        return {
            n: torch.stack([m.parts[n].values for m in messages]).mean(dim=0) for n in server.state
        }


def test_masks_train_through_the_same_round_and_cost_one_bit_per_weight(digits: Dataset) -> None:
    network = network_for(digits, "logistic")
    federation = federation_of(digits, network, DrawsMasks(), clients=3)
    result = federation.play(WORK, everyone(federation))
    d = network.n_parameters
    weights, biases = network.classes * 256, network.classes
    assert result.wire.bytes_up == 3 * (-(-weights // 8) + -(-biases // 8))
    assert d == weights + biases
    thirds = {round(float(v) * 3, 4) for v in federation.state["head.weight"].unique()}
    assert thirds <= {0.0, 1.0, 2.0, 3.0}


class SkipsRounds(Defense):
    """Like MS-PAFL: a check-in coin and its own batches."""

    owns = frozenset({"joins", "batch"})

    def joins(self, client: Client, sampled: bool) -> bool:
        return bool(torch.rand(1, generator=client.rng["joins"]) < 0.5)

    def batch(self, client: Client, size: int) -> Tensor:
        return torch.randint(len(client.y), (size,), generator=client.rng["batch"])


def test_a_round_that_nobody_joins_keeps_the_model(digits: Dataset) -> None:
    federation = federation_of(digits, network_for(digits, "logistic"), SkipsRounds(), clients=1)
    seen_empty = seen_full = False
    for _ in range(12):
        before = federation.state
        result = federation.play(WORK, everyone(federation))
        if result.joined:
            seen_full = True
        else:
            seen_empty = True
            assert equal(before, federation.state)
    assert seen_empty
    assert seen_full


def test_composed_defenses_chain_uploads_in_order(digits: Dataset) -> None:
    network = network_for(digits, "mlp_spm")
    noise = GaussianUpdate(noise_multiplier=0.0, clip_norm=0.05)
    both = Composed({"gaussian": noise, "keeps": KeepsHead()})
    seen, _ = seen_under(digits, network, both, clients=3)
    _, present = seen.stack("update", seen.clients)
    assert not bool(present["head.weight"].any())
    assert bool(present["hidden1.linear.weight"].all())
    assert [type(m).__name__ for m in both.mechanisms()] == ["Clip", "GaussianNoise"]


def test_a_role_owned_twice_is_refused_with_both_names() -> None:
    with pytest.raises(ValueError, match=r"'a' and 'b' both own the role 'aggregate'"):
        Composed({"a": SealsHead(), "b": DrawsMasks()})


def test_a_message_to_nobody_is_refused_and_endless_talk_ends() -> None:
    class Echo(Party):
        def reply(self, message: Message) -> list[Message]:
            return [replace(message, sender="echo", receiver="echo")]

    wire = Wire({"echo": Echo()}, ["a"])
    with pytest.raises(ValueError, match=r"addressed to 'b', expected one of"):
        wire.send([Message(kind="x", sender="a", receiver="b", round=0)])
    with pytest.raises(RuntimeError, match="still answer each other"):
        wire.send([Message(kind="x", sender="a", receiver="echo", round=0)])


@pytest.mark.parametrize("protocol", ["fedavg", "splitfed"])
def test_a_round_for_one_party_has_its_messages_and_nothing_else(
    digits: Dataset, protocol: str
) -> None:
    work = replace(WORK, protocol=protocol)
    cuts = {"cuts": ("block1",), "labels": "private"} if protocol == "splitfed" else {}
    plays = []
    for party in (None, "server"):
        run = federation_of(
            digits, network_for(digits), SPM(epsilon=1.0), clients=2, protocol=protocol, **cuts
        )
        result = run.play(work, everyone(run), observed=True, party=party)
        plays.append((run.state, result))
    (state, whole), (again, one) = plays
    assert all(torch.equal(v, again[n]) for n, v in state.items())
    assert (whole.wire.bytes_up, whole.wire.bytes_down) == (one.wire.bytes_up, one.wire.bytes_down)
    assert len(whole.wire.log) > len(one.wire.log)
    for old, new in zip(whole.wire.messages_for("server"), one.wire.log, strict=True):
        assert (old.kind, old.sender, old.receiver) == (new.kind, new.sender, new.receiver)
        assert all(torch.equal(p.values, new.parts[n].values) for n, p in old.parts.items())
    assert all([whole.trained, whole.received, whole.sent, whole.aggregation.messages])
    assert not any([one.trained, one.received, one.sent, one.aggregation.messages])


def test_bytes_count_present_coordinates_and_every_receiver() -> None:
    wire = Wire({}, ["a", "b"])
    present = torch.tensor([True, False, True])
    part = Part(values=torch.zeros(3), present=present, bits=16)
    wire.send([Message(kind="x", sender="a", receiver="server", round=0, parts={"p": part})])
    assert (wire.bytes_up, wire.bytes_down) == (4, 0)
    wire.send([Message(kind="x", sender="server", receiver="all", round=0, parts={"p": part})])
    assert wire.bytes_down == 8
