"""Selective encryption without noise, and the ledger of encrypted zones."""

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.contract.defense import Defense
from bench.contract.events import Facts
from bench.contract.messages import EVERYONE, SERVER, Message, Part
from bench.data.dataset import Dataset
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.privacy.ledger import account
from bench.protocols.wire import Wire
from bench.registry import Registry
from defenses.encrypted_zone import CIPHERTEXT, KEY_SERVER, MASK
from defenses.fedml_he import FedMLHE, largest
from defenses.mask_crypt import MaskCrypt, ranks
from defenses.selective_shield import SelectiveShield
from tests.conftest import federation_of, network_for
from tests.uploads import distance, play, tensor

FACTS = Facts(parameters=100, rounds=10, clients=20, batch=32, records=100, local_steps=5)


# --- selective encryption without noise ----------------------------------------------------------


@pytest.mark.parametrize("name", ["fedml_he", "mask_crypt"])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_a_share_is_encrypted_and_the_model_is_the_plain_mean(
    digits: Dataset, registry: Registry, name: str, share: float
) -> None:
    network = network_for(digits)
    run = federation_of(digits, network, registry.defense(name, {"share": share}))
    plain = federation_of(digits, network, Defense())
    result = play(run, rounds=2)
    play(plain, rounds=2)
    update = next(m for m in result.wire.log if m.kind == "update")
    hidden = sum(int(s.covers.sum()) for n, s in update.sealed.items() if n != CIPHERTEXT)
    assert hidden == round(share * network.n_parameters)
    assert distance(run.state, plain.state) < 1e-5


def test_an_update_that_the_grid_swallows_is_warned_of(digits: Dataset) -> None:
    small = federation_of(digits, network_for(digits), FedMLHE(share=1.0))
    with pytest.warns(UserWarning, match=r"grid of 1e-06 takes more than 1% of an update"):
        play(small, lr=1e-5)
    for sound in (FedMLHE(share=1.0), FedMLHE(share=1.0, parameters="standard")):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            play(federation_of(digits, network_for(digits), sound))


def test_fedml_he_tells_the_server_the_mask_and_no_map(digits: Dataset) -> None:
    run = federation_of(digits, network_for(digits), FedMLHE(share=0.2))
    result = play(run)
    seen = result.wire.messages_for(SERVER)
    assert {m.kind for m in seen} == {MASK, "update", "public_key"}
    (mask,) = (m for m in seen if m.kind == MASK)
    assert mask.sender == KEY_SERVER
    again = play(run)
    assert not any(m.kind == "sensitivity" for m in again.wire.log)
    later = next(m for m in again.wire.messages_for(SERVER) if m.kind == MASK)
    assert all(torch.equal(p.values, later.parts[n].values) for n, p in mask.parts.items())


def test_data_is_inspected_only_where_a_mask_comes_of_it(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs a pass over all samples: once for FedML-HE, never in an attacker's rehearsal."""
    calls = []
    for kind in (FedMLHE, SelectiveShield):
        real = kind.inspect

        def counted(self: Any, *given: Any, real: Any = real) -> Any:
            calls.append(type(self).__name__)
            return real(self, *given)

        monkeypatch.setattr(kind, "inspect", counted)
    run = federation_of(digits, network_for(digits), FedMLHE(share=0.1), clients=2)
    play(run)
    assert calls
    calls.clear()
    play(run, rounds=2)
    assert calls == []
    shield = SelectiveShield(tau=0.05, rho=0.5)
    run = federation_of(digits, network_for(digits), shield, clients=2)
    seen = tuple(play(run).wire.messages_for(SERVER))
    assert calls
    calls.clear()
    plans = shield.public_plans(seen)
    for client, plan in zip(run.clients, plans, strict=True):
        client.plan.update(plan)
    play(run)
    assert calls == []


def test_fedml_hes_mask_has_the_largest_mean_absolute_gradients(digits: Dataset) -> None:
    network = network_for(digits)
    run = federation_of(digits, network, FedMLHE(share=0.1), clients=2)
    result = play(run)
    maps = []
    for client in run.clients:
        sums = torch.cat([v.flatten() for v in client.memory["inspected"].values()]).double()
        maps.append(sums / sums.max())
    order = sum(maps).argsort(descending=True)
    (mask,) = (m for m in result.wire.log if m.kind == MASK)
    flat = torch.cat([p.values.flatten() for p in mask.parts.values()])
    expected = torch.zeros_like(flat)
    expected[order[: int(flat.sum())]] = True
    # The grid of the ciphertexts may swap neighbours at the border.
    assert int((flat != expected).sum()) <= 4


def test_mask_crypt_merges_priority_lists_in_turn() -> None:
    lists = [{"w": tensor([9.0, 8.0, 1.0, 0.0])}, {"w": tensor([0.0, 1.0, 9.0, 8.0])}]
    proposals = [ranks(v, 0.5) for v in lists]
    assert [p["w"].tolist() for p in proposals] == [[1, 2, 0, 0], [0, 0, 1, 2]]
    assert MaskCrypt(share=0.5).agree(proposals)["w"].tolist() == [True, False, True, False]
    assert MaskCrypt(share=0.75).agree(proposals)["w"].tolist() == [True, True, True, False]


def test_largest_takes_the_share_and_the_first_of_equals() -> None:
    values = {"a": tensor([1.0, 3.0]), "b": tensor([[3.0, 2.0]])}
    assert {n: m.flatten().tolist() for n, m in largest(values, 0.25).items()} == {
        "a": [False, True], "b": [False, False],
    }  # fmt: skip


# --- ledger --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hears", [False, True])
@pytest.mark.parametrize("granted", [False, True])
def test_masks_in_plain_sight_prove_nothing_unless_they_are_granted(
    granted: bool, hears: bool
) -> None:
    defense = SelectiveShield(noise_multiplier=5.0, public_masks=granted)
    entry = account(defense, replace(FACTS, broadcast=hears))
    assert entry.eps_claimed == pytest.approx(2.81363, rel=1e-4)
    assert any("masks" in r for r in entry.reasons) == (not granted)
    assert any("new model" in r for r in entry.reasons) == hears
    # times_K: 20 clients of 20; replacing moves by 2C: mu = sqrt(10) * 2 / (5 sqrt(20)).
    exact = exact_gaussian_epsilon(mu=math.sqrt(10) * 2 / (5 * math.sqrt(20)), delta=1e-5)
    assert entry.eps_record == (pytest.approx(exact) if granted and not hears else math.inf)


def test_a_wire_counts_a_mask_to_everyone_once_up(digits: Dataset) -> None:
    wire = Wire({}, ["client-0", "client-1", "client-2"])
    part = Part(values=torch.ones(16, dtype=torch.bool), bits=1)
    wire.send([Message(kind=MASK, sender="client-0", receiver=EVERYONE, round=0,
                       parts={"w": part})])  # fmt: skip
    assert (wire.bytes_up, wire.bytes_down) == (2, 4)
