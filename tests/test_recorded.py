"""Rounds that trained the model, as the server saw them: threats that are `as_trained`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.contract.attack import Seen
from bench.contract.defense import Defense
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.harness.attack import join_views
from bench.harness.environment import Environment
from bench.harness.scoring import together
from bench.outside.exports import export, open_export
from bench.outside.scores import score_files
from bench.protocols.export import load_seen, load_truth, save_tensors
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import Truth, record_round, whole_batches
from bench.protocols.settings import ProtocolSettings, ThreatSettings, rounds_to_record
from bench.records import AttackRecord, DoubledRun
from bench.report.leaderboard import rows
from bench.sandbox.stage import play_round
from defenses.spm import SPM
from tests.conftest import Run, federation_of, network_for

AS_TRAINED = ThreatSettings(work="as_trained")
RECORDED = """
[[threats]]
name = "as_trained"
work = "as_trained"

[[attacks]]
name = "prior_only"
threat = "as_trained"
"""


def recorded_round(
    digits: Dataset, defense: Defense, work: LocalWork, *, each: int = 24, **protocol: Any
) -> tuple[list[tuple[Seen, Truth]], list[str]]:
    """Views of the second round of a federation, and why clients are not among the victims."""
    settings = ProtocolSettings(name=work.protocol, clients=4, lr=work.lr, **protocol)
    cuts = {"cuts": settings.cuts, "labels": settings.labels} if settings.cuts else {}
    federation = federation_of(
        digits, network_for(digits), defense, each=each, protocol=work.protocol, **cuts
    )
    play_round(federation, work)
    result = play_round(federation, work)
    known = {"name": "test", "settings": {}}
    return record_round(federation, result, settings, AS_TRAINED, known)


# --- which rounds and which samples -----------------------------------------------------------
@given(rounds=st.integers(1, 300), seed=st.integers(0, 2**40))
def test_the_first_the_middle_the_last_and_two_more_rounds(rounds: int, seed: int) -> None:
    found = rounds_to_record(rounds, seed)
    assert {0, rounds // 2, rounds - 1} <= set(found) <= set(range(rounds))
    assert len(found) == len(set(found)) == min(5, rounds)
    assert found == rounds_to_record(rounds, seed)


def test_nobody_can_tell_two_of_the_rounds_from_their_number() -> None:
    others = {n for seed in range(200) for n in rounds_to_record(20, seed)}
    assert others == set(range(20))


@given(batch=st.integers(1, 5), each=st.integers(1, 5), steps=st.integers(1, 12), data=st.data())
def test_samples_are_counted_where_every_pass_is_whole(
    batch: int, each: int, steps: int, data: st.DataObject
) -> None:
    each = min(each, steps)
    own = torch.arange(batch * each) + 7
    passes = [torch.tensor(data.draw(st.permutations(own.tolist()))) for _ in range(steps)]
    used = torch.cat(passes)[: steps * batch].view(steps, batch)
    assert whole_batches(used) == batch * each
    if steps > 1:
        used[1, 0] = used[0, 0]  # a sample of the step before, in place of another
        # Two steps of one sample are two whole passes over it.
        expected = 1 if len(used.unique()) == 1 else None
        assert each == 1 or whole_batches(used) == expected


# --- what was seen, and the truth ----------------------------------------------------------------
def test_the_truth_explains_what_was_sent(digits: Dataset) -> None:
    """Plain SGD on the truth's samples, batch by batch, from what was broadcast."""
    work = LocalWork(protocol="fedavg", batch=4, lr=0.5, local_steps=3)
    (view,), left_out = recorded_round(digits, Defense(), work, local_steps=3, batch=4)
    seen, truth = view
    assert not left_out
    assert truth.y.shape == (4, 12)
    assert {n: seen.known[n] for n in ("batch", "local_steps", "samples", "mode")} == {
        "batch": 4, "local_steps": 3, "samples": 12, "mode": "train",
    }  # fmt: skip
    network = network_for(digits)
    for victim, client in enumerate(seen.clients):
        weights = {n: v.clone().requires_grad_() for n, v in seen.before.items()}
        for x, y in zip(truth.x[victim].split(4), truth.y[victim].split(4), strict=True):
            logits = network.apply(weights, x, mode="train")
            loss = torch.nn.functional.cross_entropy(logits, y)
            slopes = torch.autograd.grad(loss, list(weights.values()))
            weights = {
                n: (v - 0.5 * g).detach().requires_grad_()
                for (n, v), g in zip(weights.items(), slopes, strict=True)
            }
        for name, part in seen.of(client, "update")[0].parts.items():
            moved = weights[name] - seen.before[name]
            torch.testing.assert_close(part.values, moved, rtol=1e-4, atol=1e-6)


def test_the_round_is_the_training_s_own(digits: Dataset) -> None:
    """The state before and after, and the mean of what was sent."""
    work = LocalWork(protocol="fedavg", batch=4, lr=0.5, local_steps=3)
    ((seen, _),), _ = recorded_round(digits, Defense(), work, local_steps=3, batch=4)
    assert seen.after is not None
    assert all(m.round == 1 for m in seen.messages)
    for name, after in seen.after.items():
        sent = [seen.of(c, "update")[0].parts[name].values for c in seen.clients]
        torch.testing.assert_close(after, seen.before[name] + torch.stack(sent).mean(dim=0))


def test_a_log_changes_nothing_of_a_training(digits: Dataset) -> None:
    work = LocalWork(protocol="fedavg", batch=4, lr=0.5, local_steps=3)
    found = []
    for observed in (False, True):
        defense = SPM(epsilon=3.9, variant="unbiased")
        federation = federation_of(digits, network_for(digits), defense)
        for _ in range(3):
            federation.play(work, [c.id for c in federation.clients], observed=observed)
        found.append(federation.state)
    assert all(torch.equal(v, found[1][n]) for n, v in found[0].items())


def test_epochs_that_are_not_whole_are_left_out_with_the_reason(digits: Dataset) -> None:
    work = LocalWork(protocol="fedavg", batch=7, lr=0.1, local_epochs=3)
    views, left_out = recorded_round(digits, Defense(), work, local_epochs=3, batch=7)
    assert not views
    assert left_out == ["clients whose batches of a round share some samples and not others"]
    whole = LocalWork(protocol="fedavg", batch=24, lr=0.1, local_epochs=3)
    (view,), left_out = recorded_round(digits, Defense(), whole, local_epochs=3, batch=24)
    assert not left_out
    assert view[0].known["samples"] == 24
    assert view[0].known["local_steps"] == 3


def test_clients_that_do_unlike_work_are_views_of_their_own(digits: Dataset) -> None:
    work = LocalWork(protocol="fedavg", batch=8, lr=0.1, local_steps=2)
    federation = federation_of(digits, network_for(digits), Defense())
    for client, size in zip(federation.clients, (5, 24, 5, 3), strict=True):
        client.x, client.y = client.x[:size], client.y[:size]
    result = play_round(federation, work)
    settings = ProtocolSettings(name="fedavg", clients=4, local_steps=2, batch=8)
    views, left_out = record_round(federation, result, settings, AS_TRAINED, {})
    assert not left_out
    assert [(v.clients, tuple(t.y.shape)) for v, t in views] == [
        (("client-0", "client-2"), (2, 5)), (("client-1",), (1, 16)), (("client-3",), (1, 3)),
    ]  # fmt: skip


def test_a_round_of_too_many_bytes_says_how_many(digits: Dataset) -> None:
    work = LocalWork(protocol="fedavg", batch=4, lr=0.5, local_steps=3)
    federation = federation_of(digits, network_for(digits), Defense())
    result = federation.play(work, [c.id for c in federation.clients], observed=True, most_bytes=10)
    assert not result.wire.log
    assert result.wire.logged > 10
    result.wire.logged = 3 * 10**9
    settings = ProtocolSettings(name="fedavg", clients=4, local_steps=3, batch=4)
    found = record_round(federation, result, settings, AS_TRAINED, {})
    assert found == ([], ["a round holds 3 GB of messages, of which at most 1 are kept"])


def record_of(judged: list[float], *, doubled: bool) -> AttackRecord:
    again = DoubledRun(budget=2, values={}, gradient_evaluations=1, seconds=1.0)
    return AttackRecord(
        victims=len(judged), samples=1, failed=0, is_floor=False, values={}, floors={},
        gradient_evaluations=1, notes=(), loss=None, judged=judged, seconds=1.0, device="cpu",
        doubled=again if doubled else None, versions={}, scoring="",
    )  # fmt: skip


def test_views_are_joined_and_taken_apart_again() -> None:
    views = [record_of([0.4, 0.5], doubled=True), record_of([0.99], doubled=False)]
    joined = join_views(views)
    assert (joined.views, joined.victims, joined.seconds) == ((2, 1), 3, 2.0)
    assert joined.doubled == views[0].doubled
    for number, view in enumerate(views):
        assert joined.of_view(number).judged == view.judged
    assert join_views(views[1:]).doubled is None
    assert together([{"ssim": [0.4, 0.5], "mse": [0.1, 0.2]}, {"ssim": [0.9]}]) == {
        "ssim": [0.4, 0.5, 0.9]
    }


# --- in a run ---------------------------------------------------------------------------------
def test_attacks_run_on_all_that_took_part_in_every_recorded_round(
    tiny: Callable[..., Path], run: Run, tmp_path: Path
) -> None:
    suite = tiny(
        append=RECORDED,
        **{
            "rounds = 1": "rounds = 9",
            "batch = 8": "batch = 2",
            "local_steps = 1": "local_steps = 2",
        },
    )
    store, report = run(suite, only={"defense": "none", "attack": "prior_only"})
    assert not report.failures
    table = {r.checkpoint: r for r in rows(store.folder)}
    assert list(table) == ["training", "init", "final"]
    row = table["training"]
    assert list(row.attacks) == ["prior_only@as_trained"]
    assert row.attacks["prior_only@as_trained"].n == 3 * 5
    assert row.observed == "rounds of the training: batch 2, two steps"
    assert "up to 5 rounds of the training" in row.threat
    (key,) = (key for kind, key in store.names if kind == "train")
    look = store.read("train", key).observations["training"]["as_trained"]  # type: ignore[union-attr]
    assert look.views == 5
    numbers = []
    for stem in look.stems:
        seen = load_seen(store.artifacts(key) / f"{stem}-seen")
        truth = load_truth(store.artifacts(key) / f"{stem}-truth.safetensors")
        assert truth.y.shape == (3, 4)
        numbers.append(seen.messages[0].round)
    assert numbers == rounds_to_record(9, 0)


def test_one_view_is_exported_and_scored(
    tiny: Callable[..., Path], run: Run, tmp_path: Path
) -> None:
    suite = tiny(append=RECORDED, **{"rounds = 1": "rounds = 3", "batch = 8": "batch = 2"})
    store, _ = run(suite, only={"defense": "none", "threat": "as_trained"})
    cell = "prior_only@as_trained/training"
    with pytest.raises(UserError, match="has no view 3; expected 0 to 2"):
        export(store.folder, cell, tmp_path / "x", Environment(), 3)
    export(store.folder, cell, tmp_path / "x", Environment(), 2)
    opened = open_export(tmp_path / "x")
    assert opened.seen.messages[0].round == 2
    assert opened.about["view"] == 2
    answer = torch.full((3, 2, *opened.public_x.shape[1:]), 0.5)
    save = tmp_path / "answer.safetensors"
    save_tensors({"images": answer}, save)
    found = score_files(store.folder, str(tmp_path / "x.json"), [save], Environment())
    assert (found.victims, found.samples) == (3, 2)
    again = score_files(store.folder, cell, [save], Environment(), 2)
    assert again.answers[0].figures == found.answers[0].figures
    other = score_files(store.folder, cell, [save], Environment(), 0)
    assert other.answers[0].figures != found.answers[0].figures
