"""MS-PAFL: check-in, subsampling, split, clip and noise, aggregation, recombination, ledger."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.contract.defense import Client, Local, Server
from bench.contract.events import Facts
from bench.contract.messages import SERVER, Message, Part
from bench.data import load_dataset
from bench.data.dataset import Dataset
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.privacy.ledger import account
from bench.protocols.evaluate import Reached
from bench.protocols.local_training import LocalWork
from bench.registry import discover
from bench.seeding import generator
from defenses.ms_pafl import MSPAFL, check_in_table, private_coordinates
from tests.conftest import context_for, federation_of, network_for, seen_under
from tests.oracle import reference_cases

ORACLE = reference_cases("ms_pafl")
WORK = LocalWork(protocol="fedavg", batch=4, lr=0.3, local_steps=3)
FACTS = Facts(parameters=100, rounds=20, clients=100, batch=5, records=125, local_steps=5,
              participations=12, delta=1e-4)  # fmt: skip


def a_client(n: int = 20, name: str = "client-0") -> Client:
    streams = ("joins", "batch", "defense")
    return Client(
        id=name, x=torch.zeros(n, 3), y=torch.zeros(n, dtype=torch.int64),
        rng={s: generator(0, name, s) for s in streams},
    )  # fmt: skip


def a_local(end: Tensor, broadcast: Tensor | None = None) -> Local:
    base = {"w": torch.zeros_like(end) if broadcast is None else broadcast}
    return Local(
        broadcast=base, start=base, end={"w": end}, const={}, lr=1.0, steps=1,
        grad_sum={"w": base["w"] - end},
    )  # fmt: skip


def sent(defense: MSPAFL, end: Tensor, client: Client | None = None) -> Part:
    local = a_local(end)
    message = Message(
        kind="update", sender="client-0", receiver=SERVER, round=0,
        parts={"w": Part(values=end - local.broadcast["w"])},
    )  # fmt: skip
    (out,) = defense.upload([message], local, client or a_client())
    assert out.kind == "weights"
    return out.parts["w"]


# --- who takes part ------------------------------------------------------------------------------


def test_check_in_frequencies_are_the_probabilities_within_5_standard_errors() -> None:
    defense = MSPAFL(epsilon=0.5, check_in="0.2,0.7;1")
    rounds = 4000
    for i, p in enumerate((0.2, 0.7)):
        client = a_client(name=f"client-{i}")
        joined = torch.tensor([defense.joins(client, sampled=False) for _ in range(rounds)])
        even, odd = joined[::2].double(), joined[1::2]
        assert abs(float(even.mean()) - p) < 5 * math.sqrt(p * (1 - p) / len(even))
        assert bool(odd.all())


@pytest.mark.parametrize(
    ("text", "table"),
    [(0.5, ((0.5,),)), ("0.1,0.9", ((0.1, 0.9),)), ("0.1,0.9;0.5", ((0.1, 0.9), (0.5,)))],
)
def test_check_in_is_given_by_client_and_round(text: Any, table: Any) -> None:
    assert check_in_table(text) == table


def test_an_empty_round_keeps_the_old_model(digits: Dataset) -> None:
    run = federation_of(digits, network_for(digits), MSPAFL(epsilon=0.5, check_in=0.0))
    before = {n: v.clone() for n, v in run.state.items()}
    result = run.play(WORK, [c.id for c in run.clients])
    assert result.joined == []
    assert all(torch.equal(before[n], v) for n, v in run.state.items())


def test_an_observed_round_has_the_victims_whatever_the_coin_says(digits: Dataset) -> None:
    seen, truth = seen_under(digits, network_for(digits), MSPAFL(epsilon=0.5, check_in=0.01),
                             victims=5)  # fmt: skip
    assert len(seen.clients) == 5
    assert truth.x.shape[:2] == (5, 1)


# --- data subsampling ----------------------------------------------------------------------------


def test_batches_without_replacement_are_distinct_over_a_round() -> None:
    defense, client = MSPAFL(epsilon=0.5, sampling="wor"), a_client(20)
    rounds = []
    for number in range(2):
        defense.say("round", client, None, number)
        rounds.append(torch.cat([defense.batch(client, 5) for _ in range(4)]))
        assert sorted(rounds[-1].tolist()) == list(range(20))
    assert rounds[0].tolist() != rounds[1].tolist()
    defense.say("round", client, None, 2)
    more = torch.cat([defense.batch(client, 8) for _ in range(3)])
    assert len(more) == 24
    assert sorted(set(more.tolist())) == list(range(20))  # q = 1: none is left out


def test_each_round_starts_its_own_subsample() -> None:
    """Without a fresh one a record's chance would depend on the rounds before."""
    defense, client, hits, rounds = MSPAFL(epsilon=0.5), a_client(20), 0, 2000
    for number in range(rounds):
        defense.say("round", client, None, number)
        hits += int((torch.cat([defense.batch(client, 3) for _ in range(2)]) == 0).sum())
    q = 6 / 20
    assert abs(hits / rounds - q) < 5 * math.sqrt(q * (1 - q) / rounds)


def test_sampling_with_replacement_draws_from_all_records_each_time() -> None:
    defense, client, rounds = MSPAFL(epsilon=0.5, sampling="wr"), a_client(20), 4000
    drawn = torch.stack([defense.batch(client, 5) for _ in range(rounds)])
    share = float((drawn == 0).any(dim=1).double().mean())
    q = 1 - (1 - 1 / 20) ** 5
    assert abs(share - q) < 5 * math.sqrt(q * (1 - q) / rounds)
    assert bool((drawn.sort(dim=1).values.diff(dim=1) == 0).any())


# --- what is uploaded ----------------------------------------------------------------------------


def test_the_first_half_or_whole_layers_stay_private(digits: Dataset) -> None:
    sizes = {"a.weight": (2, 3), "a.bias": (3,), "head.weight": (2,)}
    values = {n: torch.zeros(s) for n, s in sizes.items()}
    half = private_coordinates(values, 0.5)
    flat = torch.cat([m.flatten() for m in half.values()])
    assert flat.tolist() == [True] * 5 + [False] * 6
    assert not any(bool(m.any()) for m in private_coordinates(values, 0.0).values())
    assert all(bool(m.all()) for m in private_coordinates(values, 1.0).values())
    layer = private_coordinates(values, "head, a.bias")
    assert {n: bool(m.all()) for n, m in layer.items()} == {
        "a.weight": False, "a.bias": True, "head.weight": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match="private names 'top', but the client trains"):
        private_coordinates(values, "top")


@pytest.mark.parametrize("case", [c for c in ORACLE if c["name"].startswith("mspafl_clip")],
                         ids=lambda c: c["name"])  # fmt: skip
def test_the_public_weights_are_clipped(case: Any) -> None:
    given = case["inputs"]
    defense = MSPAFL(epsilon=1e9, noise="analytic", clip_norm=given["C"], private=0.0)
    part = sent(defense, torch.tensor(given["w"], dtype=torch.float64))
    assert part.values.tolist() == pytest.approx(case["expected"]["out"], rel=1e-3, abs=1e-4)


def test_only_the_public_half_is_clipped_noised_and_sent() -> None:
    """The norm is the public half's alone; the noise has Lemma 1's std within 5 standard errors."""
    size, draws = 2000, 20
    defense, client = MSPAFL(epsilon=1.0, clip_norm=2.0), a_client()
    end = torch.cat([torch.full((size // 2,), 50.0), torch.full((size // 2,), 3.0)])
    noise = []
    for _ in range(draws):
        part = sent(defense, end, client)
        assert part.present is not None
        assert part.present.tolist() == [False] * (size // 2) + [True] * (size // 2)
        assert bool((part.values[: size // 2] == 0).all())
        noise.append(part.values[size // 2 :] - 2.0 / math.sqrt(size // 2))
    flat = torch.cat(noise)
    std = 2 * 2.0 * math.sqrt(2 * math.log(1.25 / 1e-4)) / 1.0
    assert defense.std == pytest.approx(std)
    assert abs(float(flat.std()) / std - 1) < 5 / math.sqrt(2 * len(flat))
    assert abs(float(flat.mean())) < 5 * std / math.sqrt(len(flat))


def test_clients_keep_their_private_half_and_take_the_new_public_one(digits: Dataset) -> None:
    network = network_for(digits)
    run = federation_of(digits, network, MSPAFL(epsilon=1.0, check_in=1.0, private="block1,block2"))
    start = {n: v.clone() for n, v in run.state.items()}
    run.play(WORK, [])
    for name, value in run.state.items():
        private = name.startswith(("block1", "block2"))
        assert torch.equal(value, start[name]) == private, name
    ones, others = (run.weights_of(run.clients[i]) for i in (0, 1))
    for name, value in ones.items():
        assert torch.equal(value, others[name]) == (not name.startswith(("block1", "block2")))


def test_a_run_has_no_model_of_all_clients(digits: Dataset) -> None:
    run = federation_of(digits, network_for(digits), MSPAFL(epsilon=1.0, check_in=1.0))
    reached = Reached()
    assert reached.everything()
    for client in run.play(WORK, []).joined:
        reached.add(client, run.held(client))
    assert not reached.everything()


# --- aggregation ---------------------------------------------------------------------------------


def test_nu_is_the_chance_that_somebody_checks_in_and_off_by_default() -> None:
    messages = [
        Message(kind="weights", sender=f"client-{i}", receiver=SERVER, round=0,
                parts={"w": Part(values=torch.tensor([float(i + 1), 0.0]),
                                 present=torch.tensor([True, False]))})
        for i in range(2)
    ]  # fmt: skip
    server = Server(state={"w": torch.tensor([9.0, 7.0])}, const={}, lr=1.0)
    plain = MSPAFL(epsilon=0.5, check_in="0.1,0.9")
    assert plain.aggregate(server, messages) is None
    assert "aggregate" not in plain.owns
    corrected = MSPAFL(epsilon=0.5, check_in="0.1,0.9", nu_clients=2)
    found = corrected.aggregate(server, messages)
    assert found is not None
    assert found["w"].tolist() == pytest.approx([1.5 / 0.91, 7.0])


def test_nu_under_splitfed_leaves_the_servers_own_layers_alone(digits: Dataset) -> None:
    network = network_for(digits)
    split = {"protocol": "splitfed", "cuts": ("block1",)}
    runs = [
        federation_of(digits, network, MSPAFL(epsilon=1.0, check_in=1.0, nu_clients=n), **split)
        for n in (0, 4)  # nu = 1: every client checks in
    ]
    work = LocalWork(protocol="splitfed", batch=4, lr=0.3, local_steps=3)
    for run in runs:
        run.play(work, [])
    plain, corrected = (run.state for run in runs)
    assert all(torch.allclose(plain[n], corrected[n]) for n in plain)


# --- attacks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["breast_cancer"])
def test_records_are_rebuilt_from_the_public_weights_where_noise_is_small(name: str) -> None:
    """Logistic regression, batch 1, the clip binding: the attacker models it."""
    data = load_dataset(name, seed=0)
    network = network_for(data, "logistic")
    quiet = MSPAFL(epsilon=1e7, noise="analytic", clip_norm=0.5, private=0.5)
    seen, truth = seen_under(data, network, quiet, victims=4, lr=0.1)
    attack = discover().attack("idlg", {})
    answer = attack.run(seen, context_for(data, network, quiet, budget=300))
    error = float((answer.images - truth.x).square().mean())
    assert error < 0.05 * float(truth.x.square().mean())
    loud = MSPAFL(epsilon=1.0, clip_norm=0.5, private=0.5)
    seen, truth = seen_under(data, network, loud, victims=4, lr=0.1)
    answer = attack.run(seen, context_for(data, network, loud, budget=50))
    assert float((answer.images - truth.x).square().mean()) > 10 * error


# --- ledger --------------------------------------------------------------------------------------


def test_the_proof_counts_uploads_exactly_and_no_amplification() -> None:
    defense = MSPAFL(epsilon=1.0, check_in=0.5)
    entry = account(defense, FACTS)
    assert entry.eps_record == pytest.approx(
        exact_gaussian_epsilon(mu=math.sqrt(12) * 2 / defense.std, delta=1e-4)
    )
    assert entry.unit == "record"
    assert entry.claim_delta is not None
    p, q = 0.5, 0.2
    off = 2 * math.exp(-2 * 0.25**2 * 100)
    one = math.log1p(p / (1 - off) * math.expm1(2 * q))
    theorem4 = math.sqrt(2 * 20 * math.log(1e4)) * one + 20 * one * math.expm1(one)
    assert entry.eps_claimed == pytest.approx(theorem4)
    assert entry.claim_delta == pytest.approx(20 * (off + p * q * 1e-4 / (1 - off)) + 1e-4)


def test_a_budget_beyond_the_lemma_is_warned_of_with_the_right_noise() -> None:
    with pytest.warns(UserWarning, match=r"beyond Lemma 1.* gives epsilon 10\.62.*0\.9105.* 10"):
        loud = MSPAFL(epsilon=10.0)
    assert loud.std == pytest.approx(0.868722, rel=1e-5)
    assert loud.local_epsilon == pytest.approx(10.6209, rel=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MSPAFL(epsilon=1.0)
        MSPAFL(epsilon=10.0, noise="analytic")
