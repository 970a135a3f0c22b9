"""Absence that means zero, and the sparsifiers that send by it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attacks.engine.observation import observe, parse_view
from attacks.engine.terms import Candidate
from attacks.idlg import IDLG
from bench.api import Client, Defense, Local, Message, Part, Round, Sparsified, Unprotected, as_kind
from bench.contract.compose import Composed
from bench.contract.events import Facts
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.privacy.ledger import account
from bench.protocols.export import load_seen, save_seen
from bench.protocols.federation import Federation
from bench.protocols.settings import ProtocolSettings
from bench.registry import discover
from bench.sandbox.stage import client_alone
from bench.seeding import generator
from bench.toolkit.aggregation import filled
from bench.toolkit.vectors import replace_values, showing, sparse
from defenses.fedml_he import FedMLHE
from defenses.noise import GaussianUpdate
from defenses.sparsifiers import Percentile, TopK
from tests.conftest import context_for, federation_of, network_for, observed_round, seen_under
from tests.matchers import evidence_for
from tests.test_shipped_plugins_conform import FAST, failures
from tests.uploads import distance, error_of, one_hot, play


class DenseZeros(Defense):
    """Zeros in place of all values but the largest, sent as any other value."""

    def __init__(self, *, keep: float, absent: bool) -> None:
        self.keep, self.absent = keep, absent

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        (message,) = TopK(keep=self.keep, feedback=False).upload(messages, local, client)
        parts = {n: Part(values=p.values) for n, p in message.parts.items()}
        return [message if self.absent else message.with_parts(parts)]


def played(digits: Dataset, defense: Defense, rounds: int = 2) -> Federation:
    federation = federation_of(digits, network_for(digits, "mlp_spm"), defense, clients=3)
    play(federation, rounds=rounds)
    return federation


def update_of(*values: Tensor, steps: int = 1) -> Message:
    parts = {str(i): Part(values=v) for i, v in enumerate(values)}
    return Message(
        kind="update", sender="client-0", receiver="server", round=0, local_steps=steps, parts=parts
    )


def alone() -> Client:
    return client_alone(generator(0, "test sparsifiers"))


# --- what absence means -----------------------------------------------------------------------


def test_bytes_of_a_sparse_part_are_values_and_the_cheaper_of_bitmap_and_list() -> None:
    few = torch.zeros(100, dtype=torch.bool)
    few[:10] = True
    values = torch.ones(100)
    # 10 values of 32 bits, and 10 positions of 7 bits: 390 bits.
    assert Part(values=values, present=few, absent="zero").n_bytes == 49
    assert Part(values=values, present=few).n_bytes == 40
    half = torch.arange(100) < 50  # a bitmap of 100 bits: 1700 bits
    assert Part(values=values, present=half, absent="zero").n_bytes == 213
    every = torch.ones(100, dtype=torch.bool)
    assert Part(values=values, present=every, absent="zero").n_bytes == 400


def test_absent_zeros_make_the_same_model_as_zeros_that_are_sent(digits: Dataset) -> None:
    dense, sparse_ = (played(digits, DenseZeros(keep=0.1, absent=a)) for a in (False, True))
    assert distance(dense.state, sparse_.state) < 1e-6
    assert all(c.kept is None for c in sparse_.clients)


def test_absent_weights_are_the_broadcast_ones() -> None:
    base = {"0": torch.tensor([1.0, 2.0, 3.0])}
    update = update_of(torch.tensor([0.5, 0.0, 0.0]))
    chosen = sparse(update.parts["0"], torch.tensor([True, False, False]))
    weights = as_kind(update.with_parts({"0": chosen}), "weights", base=base, lr=0.1)
    assert weights.parts["0"].absent == "zero"
    assert filled(weights, base=base).parts["0"].values.tolist() == [1.5, 2.0, 3.0]


def test_an_export_keeps_what_absence_means_and_older_ones_mean_kept(
    digits: Dataset, tmp_path: Path
) -> None:
    network = network_for(digits, "mlp_spm")
    seen, _ = seen_under(digits, network, TopK(keep=0.1), clients=2)
    save_seen(seen, tmp_path / "seen")

    def meanings() -> set[str]:
        loaded = load_seen(tmp_path / "seen")
        sent = [m for m in loaded.messages if m.kind == "update"]
        return {p.absent for m in sent for p in m.parts.values()}

    assert meanings() == {"zero"}
    text = json.loads((tmp_path / "seen.json").read_text())
    for message in text["messages"]:
        for info in message["parts"].values():
            del info["absent"]
    (tmp_path / "seen.json").write_text(json.dumps(text))
    assert meanings() == {"kept"}


def test_a_tensor_of_which_a_client_keeps_some_cannot_be_sparsified() -> None:
    kept = showing(Part(values=torch.ones(3)), torch.tensor([True, True, False]))
    with pytest.raises(UserError, match="both kept and zero"):
        sparse(kept, torch.tensor([True, False, False]))
    nothing = showing(kept, torch.tensor(False))
    assert sparse(nothing, torch.ones(3, dtype=torch.bool)) is nothing


def test_other_values_of_a_message_are_zero_where_it_sends_none() -> None:
    chosen = sparse(Part(values=torch.ones(3)), torch.tensor([True, False, False]))
    message = update_of(torch.ones(3)).with_parts({"0": chosen})
    assert replace_values(message, {"0": torch.full((3,), 7.0)}).parts["0"].values.tolist() == [
        7.0,
        0.0,
        0.0,
    ]


def test_encrypting_a_part_of_a_sparse_update_changes_no_model(digits: Dataset) -> None:
    alone_ = played(digits, TopK(keep=0.1), rounds=1)
    both = Composed({"top_k": TopK(keep=0.1), "fedml_he": FedMLHE(share=0.1)})
    encrypted = played(digits, both, rounds=1)
    assert distance(alone_.state, encrypted.state) < 1e-5


# --- the defenses -----------------------------------------------------------------------------


def test_top_k_sends_the_largest_values_of_the_whole_update() -> None:
    update = update_of(torch.tensor([[1.0, -5.0], [0.0, 2.0]]), torch.tensor([3.0, -0.5]))
    sent = TopK(keep=0.5).sparsify(update, alone())
    assert sent.parts["0"].values.tolist() == [[0.0, -5.0], [0.0, 2.0]]
    assert sent.parts["1"].values.tolist() == [3.0, 0.0]
    assert sent.parts["1"].presence().tolist() == [True, False]
    sent = TopK(keep=1.0).sparsify(update_of(torch.tensor([0.0, 1.0])), alone())
    assert sent.parts["0"].presence().tolist() == [False, True]  # a zero is never sent


@settings(max_examples=40)
@given(
    keep=st.floats(0.01, 1),
    rounds=st.lists(st.lists(st.integers(-50, 50), min_size=7, max_size=7), min_size=1, max_size=5),
)
def test_error_feedback_loses_nothing(keep: float, rounds: list[list[int]]) -> None:
    defense, client = TopK(keep=keep), alone()
    sent = torch.zeros(7)
    for values in rounds:
        sent += defense.sparsify(update_of(torch.tensor(values).float()), client).parts["0"].values
    expected = torch.tensor(rounds).float().sum(dim=0)
    assert torch.equal(sent + client.memory["residual"]["0"], expected)


def test_percentile_cuts_what_it_sends_per_local_step() -> None:
    update = update_of(torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5]), steps=3)
    sent = Percentile(percentile=50.0, gamma=0.12).sparsify(update, alone()).parts["0"]
    assert sent.presence().tolist() == [False, False, True, True, True]
    torch.testing.assert_close(sent.values, torch.tensor([0.0, 0.0, 0.3, -0.36, 0.36]))
    (mechanism,) = Percentile(gamma=0.12).mechanisms_in(Round(local_steps=3))
    assert isinstance(mechanism, Sparsified)
    assert mechanism.clip == pytest.approx(0.36)


@pytest.mark.parametrize("defense", [TopK(keep=0.1), Percentile()])
def test_nothing_is_proven_of_a_sparsifier(defense: Defense) -> None:
    facts = Facts(parameters=100)
    assert all(isinstance(e, Unprotected) for e in defense.guarantee(facts))
    assert account(defense, facts).eps_record == float("inf")


@FAST
def test_the_sparsifier_of_the_docs_conforms(tmp_path: Path, fast: bool) -> None:
    page = Path(__file__).parents[1] / "docs" / "defenses" / "compression.md"
    (tmp_path / "larger_than.py").write_text(
        page.read_text().split("```python\n")[1].split("```")[0]
    )
    registry = discover((tmp_path / "larger_than.py",))
    assert failures(registry, "defense", "larger_than", {"threshold": 1e-3}, fast=fast) == []


# --- what attackers know ----------------------------------------------------------------------

NUMBERS = st.lists(
    st.floats(-4, 4, width=32).filter(lambda v: v == 0 or abs(v) > 1e-3), min_size=4, max_size=12
)


@settings(max_examples=50)
@given(values=NUMBERS, percentile=st.floats(0, 95), gamma=st.floats(0.05, 3))
def test_the_law_holds_of_what_the_defense_sends(
    values: list[float], percentile: float, gamma: float
) -> None:
    defense = Percentile(percentile=percentile, gamma=gamma)
    true = torch.tensor(values)
    seen = defense.sparsify(update_of(true), alone()).parts["0"].values
    (law,) = defense.mechanisms_in(Round())
    loss, slope = law.misfit(true[None], seen[None])
    assert float(loss.sum()) <= 1e-9
    assert float(slope.abs().sum()) <= 1e-4
    sent = seen != 0
    if bool((seen[sent].abs() < gamma * (1 - 1e-4)).any()):  # one tells the least that is sent
        beyond = torch.where(sent, true, true.sign() * (seen[sent].abs().min() + 1))
        wrong, _ = law.misfit(beyond[None], seen[None])
        assert bool((wrong[0][~sent & (true != 0)] > 0.5).all())
    elif bool(sent.any()):  # all were cut, from which size on is not known
        assert float(law.misfit(10 * true[None], seen[None])[0].sum()) == 0


def test_a_value_that_was_cut_may_be_any_larger_one_of_its_sign() -> None:
    law = Sparsified(of="update", clip=1.0)
    seen = torch.tensor([[1.0, -1.0, 0.5, 0.0]])
    within, _ = law.misfit(torch.tensor([[3.0, -9.0, 0.5, 0.4]]), seen)
    assert within.tolist() == [[0.0, 0.0, 0.0, 0.0]]
    outside, _ = law.misfit(torch.tensor([[-1.0, 0.0, 0.25, 1.5]]), seen)
    assert outside.tolist() == [[4.0, 1.0, 0.0625, 1.0]]


@pytest.mark.parametrize("residual", [False, True])
def test_the_slope_of_the_law_is_its_derivative(residual: bool) -> None:
    law = Sparsified(of="update", clip=2.0, residual=residual)
    seen = torch.tensor([[2.0, -2.0, 0.5, 0.0, -0.7]], dtype=torch.float64)
    sent = torch.tensor([[1.5, -2.5, 0.1, 0.9, 0.3]], dtype=torch.float64)
    up, down = (law.misfit(sent + e, seen)[0] for e in (1e-6, -1e-6))
    torch.testing.assert_close(law.misfit(sent, seen)[1], (up - down) / 2e-6)


def test_attackers_are_told_whether_something_is_left_over(digits: Dataset) -> None:
    network = network_for(digits, "mlp_spm")
    federation = federation_of(digits, network, TopK(keep=0.1), clients=3)
    protocol = ProtocolSettings(name="fedavg", clients=3, local_steps=1)
    fresh, _ = observed_round(federation, digits, protocol)
    play(federation)
    later, _ = observed_round(federation, digits, protocol)
    assert [s.known["mechanisms"][0]["residual"] for s in (fresh, later)] == [False, True]
    (law,), (forgetful,) = (
        TopK(keep=0.1, feedback=f).mechanisms_in(Round(uploads=3)) for f in (True, False)
    )
    assert law.remembers
    assert not forgetful.random


def test_what_was_too_small_is_compared_by_its_bound_and_hidden_from_other_laws(
    digits: Dataset,
) -> None:
    network = network_for(digits)
    defense = TopK(keep=0.1, feedback=False)
    seen, truth = seen_under(digits, network, defense, protocol="fedsgd", clients=2)
    evidence = evidence_for(seen, context_for(digits, network, defense), dtype=torch.float64)
    assert evidence.uploads is not None
    assert bool(evidence.uploads.visible.all())  # every coordinate says something
    x, y = truth.x.double(), one_hot(truth)
    true, other = (
        evidence.terms[0](Candidate(x=one, y=y, vectors=one.flatten(1)), torch.arange(2))
        for one in (x, 1 - x)
    )
    assert bool((true.loss < 0.1 * network.n_parameters).all())
    assert bool((other.loss > 100 * true.loss).all())
    shown = observe(parse_view(seen)[-1], "update", dtype=torch.float64).present
    assert sum(int(p[0].sum()) for p in shown.values()) == round(0.1 * network.n_parameters)

    both = Composed(
        {"top_k": defense, "gaussian": GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0)}
    )
    noised, _ = seen_under(digits, network, both, protocol="fedsgd", clients=2)
    evidence = evidence_for(noised, context_for(digits, network, both))
    assert evidence.uploads is not None
    assert not bool(evidence.uploads.visible.all())


def test_an_attack_that_knows_the_clip_rebuilds_what_a_masked_comparison_cannot(
    digits: Dataset,
) -> None:
    """Three quarters of the values that are sent are cut, and half of all are not sent."""
    network = network_for(digits)
    defense = Percentile(percentile=50.0, gamma=0.01)
    seen, truth = seen_under(digits, network, defense, protocol="fedsgd", clients=2)
    blind = replace(seen, known={**seen.known, "mechanisms": []})
    context = context_for(digits, network, defense, budget=60)
    assert error_of(IDLG(), seen, truth, context) < 1e-3
    assert error_of(IDLG(), blind, truth, context) > 0.02
