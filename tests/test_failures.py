"""What fails is recorded and the run goes on."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.records import FlagCode
from bench.report import frames, leaderboard, terminal
from bench.report.frames import to_csv
from bench.report.verdicts import at_chance, flags_of
from tests import made_rows as made_up
from tests.board import board
from tests.broken_plugins import DEADLY
from tests.conftest import Run
from tests.made_records import trained

# --- what fails -------------------------------------------------------------------------------

BAD = '''
import torch
from bench.contract.attack import Attack, Reconstruction
from bench.contract.defense import Defense

class Raises(Attack):
    """Raises."""
    def run(self, seen, ctx):
        raise RuntimeError("boom")

class WrongShape(Attack):
    """Returns nonsense."""
    def run(self, seen, ctx):
        return Reconstruction(images=torch.zeros(1))

class NotANumber(Attack):
    """Returns NaN."""
    def run(self, seen, ctx):
        shape = (len(seen.clients), 1, *ctx.network.shape)
        return Reconstruction(images=torch.full(shape, float("nan")))

class MeanImage(Attack):
    """Answers with the mean public image."""
    def run(self, seen, ctx):
        shape = (len(seen.clients), 1, *ctx.network.shape)
        return Reconstruction(images=ctx.aux_x.mean(dim=0).cpu().expand(shape).contiguous())

class Forgetful(Attack):
    """Returns nothing."""
    def run(self, seen, ctx):
        return None

class Refuses(Defense):
    """Raises in a hook."""
    def upload(self, messages, local, client):
        raise RuntimeError("no upload")

class Explodes(Defense):
    """Uploads NaN."""
    def upload(self, messages, local, client):
        return [m.with_parts({n: type(p)(values=p.values * float("nan"))
                              for n, p in m.parts.items()}) for m in messages]
'''


@pytest.fixture
def bad(tmp_path: Path) -> tuple[Path, ...]:
    path = tmp_path / "bad_plugins.py"
    path.write_text(BAD + DEADLY)
    return (path,)


def test_a_failing_cell_is_recorded_and_the_run_goes_on(
    run: Run, tiny: Callable[..., Path], bad: tuple[Path, ...]
) -> None:
    attacks = "".join(
        f'\n[[attacks]]\nname = "{n}"\n'
        for n in ("raises", "wrong_shape", "not_a_number", "forgetful", "mean_image")
    )
    only = {"defense": "none", "checkpoint": "init"}
    store, report = run(tiny(append=attacks), plugins=bad, only=only)
    reasons = {label.split()[-3]: reason for label, reason in report.failures}
    assert reasons["raises"] == "failed: RuntimeError: boom"
    assert "images must be a tensor [2, 1, 1, 16, 16], got [1]" in reasons["wrong_shape"]
    assert "must return a Reconstruction, got NoneType" in reasons["forgetful"]
    assert set(reasons) == {"raises", "wrong_shape", "forgetful"}
    row = board(store.folder)[0]
    assert row["attacks"]["ilrg"]["status"] == "done"
    nan = row["attacks"]["not_a_number"]
    assert (nan["status"], nan["failed"], nan["n"]) == ("done", 2, 2)
    public = row["attacks"]["mean_image"]["ssim"]["mean"]
    assert nan["ssim"]["mean"] == pytest.approx(public, abs=1e-6)
    assert row["attacks"]["raises"]["ssim"] is None
    assert row["attacks"]["raises"]["failed"] == 2
    assert "raises failed" in row["flags"]
    _, again = run(tiny(append=attacks), plugins=bad, only=only)
    assert again.ran == 3  # failures are tried again, the rest is cached


def test_a_diverged_training_is_a_result_with_its_attacks_not_applicable(
    run: Run, tiny: Callable[..., Path], bad: tuple[Path, ...]
) -> None:
    suite = tiny(
        append='\n[[defenses]]\nname = "explodes"\n', **{"victims = 2": "victims = 2\nrounds = 2"}
    )
    store, report = run(suite, plugins=bad, only={"defense": "explodes", "attack": "prior_only"})
    assert not list(store.folder.rglob("final-*"))  # its earlier releases, seen before it diverged
    assert report.failures == []
    rows = {r["checkpoint"]: r for r in board(store.folder)}
    final = rows["final"]["attacks"]["prior_only"]
    assert final["status"] == "not_applicable"
    assert "training diverged (weights not finite after round 1)" in final["reason"]
    assert any(f.startswith("diverged") for f in rows["final"]["flags"])
    assert rows["final"]["marks"] == {"best": False, "undefended": False}
    assert rows["init"]["attacks"]["prior_only"]["status"] == "done"
    assert 0 <= rows["final"]["accuracy"]["mean"] <= 0.2


def test_participation_samples_clients_and_the_ledger_counts_real_uploads(
    run: Run, tiny: Callable[..., Path]
) -> None:
    suite = tiny(**{"rounds = 1": "rounds = 6\nparticipation = 0.34"})
    store, _ = run(suite, only={"defense": "none", "checkpoint": "final", "attack": "ilrg"})
    (path,) = (store.folder / "records" / "train").iterdir()
    record = json.loads(path.read_text())
    assert record["rounds_played"] == 6
    # One of three clients per round: six uploads in all, the busiest client made two to six.
    assert 2 <= record["facts"]["participations"] <= 6
    assert record["bytes_up"] == 4 * record["parameters"]


def test_a_defense_that_raises_fails_its_training_and_nothing_else(
    run: Run, tiny: Callable[..., Path], bad: tuple[Path, ...]
) -> None:
    suite = tiny(append='\n[[defenses]]\nname = "refuses"\n')
    only = {"checkpoint": "init", "defense": "none,refuses"}
    store, report = run(suite, plugins=bad, only=only)
    ((label, reason),) = report.failures
    assert "refuses" in label
    assert reason == "failed: RuntimeError: no upload"
    rows = {r["defense"]: r for r in board(store.folder)}
    assert rows["none"]["attacks"]["ilrg"]["status"] == "done"
    assert rows["refuses"]["attacks"]["ilrg"]["status"] == "not_applicable"
    assert rows["refuses"]["accuracy"] is None
    # No attack that rebuilds images reads anything: what leaks is the baseline's luck.
    nothing = "attacks do not work here without a defense (leak 0.10): no row is marked"
    failed = "training failed: RuntimeError: no upload"
    assert rows["refuses"]["flags"] == [failed, nothing]
    assert nothing in rows["none"]["flags"]
    assert not any(mark for r in rows.values() for mark in r["marks"].values())


@pytest.mark.slow
def test_a_dying_worker_and_a_hanging_cell_end_alone(
    run: Run, tiny: Callable[..., Path], bad: tuple[Path, ...]
) -> None:
    suite = tiny(
        append='\n[[attacks]]\nname = "dies"\n\n[[attacks]]\nname = "sleeps"\n',
        **{"budget = 5": "budget = 5\ntimeout_s = 40"},
    )
    only = {"defense": "none", "checkpoint": "init"}
    store, report = run(suite, plugins=bad, only=only, workers=2)
    reasons = {label.split()[-3]: reason for label, reason in report.failures}
    assert reasons == {
        "dies": "failed: the worker process was killed by signal 9",
        "sleeps": "timeout: over the limit of 40 s",
    }
    row = board(store.folder)[0]
    assert row["attacks"]["ilrg"]["status"] == "done"
    assert row["attacks"]["sleeps"]["status"] == "timeout"


@pytest.mark.slow
def test_personal_accuracy_is_recorded_and_shown_where_clients_keep_something(
    run: Run, tiny: Callable[..., Path]
) -> None:
    more = '[[defenses]]\nname = "standalone"\n\n[[defenses]]\nname = "lg_fedavg"\n\n[[attacks]]'
    suite = tiny(**{'[[attacks]]\nname = "ilrg"': f'{more}\nname = "ilrg"'})
    only = {"checkpoint": "final"}
    store, report = run(suite, only=only)
    assert report.failures == []
    records = [json.loads(p.read_text()) for p in (store.folder / "records/train").iterdir()]
    by_defense = {r["inputs"]["defense"]: r for r in records}
    alone, plain = by_defense["standalone"], by_defense["none"]
    assert (alone["correct"], alone["keeping_clients"], alone["bytes_up"]) == (None, 3, 0)
    assert (by_defense["lg_fedavg"]["keeping_clients"], plain["keeping_clients"]) == (3, 0)
    assert len(plain["personal_accuracies"]) == 3
    rows = board(store.folder)
    row = {r["defense"]: r for r in rows}
    assert row["standalone"]["accuracy"] is None
    assert row["standalone"]["attacks"]["ilrg"]["status"] == "not_applicable"
    mean = sum(alone["personal_accuracies"]) / 3
    assert row["standalone"]["personal_accuracy"]["mean"] == pytest.approx(mean)
    assert [row[d]["personalised"] for d in ("none", "standalone", "lg_fedavg")] == [0, 1, 1]
    typed = leaderboard.rows(store.folder)
    shown = frames.texts(frames.board(typed, whole=True))
    assert list(shown)[6:9] == ["accuracy drop", "accuracy", "personal accuracy"]
    line = shown.set_index("defense").loc["standalone"]
    assert line["accuracy"] == "–"
    assert line["personal accuracy"].startswith(f"{mean:.3f} [")
    assert "personal\naccuracy" in [c.header for c in terminal.boards(typed)[0].columns]
    read = list(csv.DictReader(to_csv(leaderboard.rows(store.folder)).splitlines()))
    assert {r["accuracy"] for r in read if r["defense"] == "standalone"} == {""}
    own = [float(r["personal_accuracy"]) for r in read if r["defense"] == "standalone"]
    assert own == pytest.approx([mean] * 2)
    plain_rows = [r for r in typed if not r.personalised]
    assert "personal accuracy" not in [c.name for c in frames.board(plain_rows, whole=True)]
    assert "personal\naccuracy" not in [c.header for c in terminal.boards(plain_rows)[0].columns]


@pytest.mark.parametrize(
    ("common", "own", "personalised", "flagged"),
    [
        (0.08, 0.9, True, False),  # first stages that nobody shares: judged by clients' networks
        (0.08, 0.3, True, True),
        (None, 0.3, True, True),
        (None, 0.9, True, False),
        (0.08, 0.9, False, True),
        (0.5, 0.3, True, False),
    ],
)
def test_a_personalised_row_is_at_chance_if_its_clients_networks_are_too(
    common: float | None, own: float, personalised: bool, flagged: bool
) -> None:
    made = made_up.row(
        accuracy=None if common is None else made_up.interval(common, 0.0),
        personal_accuracy=made_up.interval(own, 0.0),
        personalised=personalised,
    )
    record = trained(
        correct=None if common is None else round(100 * common),
        test_samples=100,
        class_chance=0.1,
        personal_accuracies=(own, own),
        personal_chance=0.4,
    )
    assert at_chance(made, [record]) == flagged


def test_seeds_together_beat_a_guess_that_one_alone_may_not() -> None:
    """Of 100 samples 15 are right: the 95 % interval of one seed holds 1/10, that of four does
    not, though seeds as far apart as 8 and 22 say little by themselves."""
    made = made_up.row(accuracy=made_up.interval(0.15))
    of = [trained(correct=n, test_samples=100, class_chance=0.1) for n in (8, 22)]
    assert at_chance(made, [trained(correct=15, test_samples=100, class_chance=0.1)])
    assert at_chance(made, of[:1])
    assert not at_chance(made, [*of, *of])


# --- flags of rows -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "anyone", "flagged"),
    [(0.3, 0.95, True), (0.3, 0.6, False), (0.3, 0.8, False), (0.9, 0.95, False)],
)
def test_images_of_which_nobody_knows_whose_they_are_flag_their_row(
    own: float, anyone: float, flagged: bool
) -> None:
    """Much more than the attack's own score and than the row shows, and more than half of the way
    from the floor given labels."""
    attacks = {"dlg": made_up.attack(own, ssim_anyone=made_up.interval(anyone))}
    made = made_up.row(attacks=attacks, ssim=0.3, accuracy=None)
    flags = [f for f in flags_of(made, []) if f.code == FlagCode.WHOSE_UNKNOWN]
    leaks = pytest.approx((anyone - 0.2) / 0.8)
    assert [(f.subject, f.values["leak"]) for f in flags] == [("dlg", leaks)] * flagged


@pytest.mark.parametrize(("alone", "flagged"), [(0.9, True), (0.5, True), (0.46, False)])
def test_a_row_of_badly_chosen_answers_is_flagged(alone: float, flagged: bool) -> None:
    """Where one attack alone leaks more than .1 more than what the judge preferred."""
    attacks = {"dlg": made_up.attack(0.4), "ridge": made_up.attack(alone)}
    made = made_up.row(attacks=attacks, ssim=0.4, accuracy=None)
    assert made.worst is not None
    made = replace(made, choice=replace(made.worst, attack="dlg"))
    flags = [f for f in flags_of(made, []) if f.code == FlagCode.UNDERSTATED]
    assert [f.subject for f in flags] == ["ridge"] * flagged
    assert [f.values["leak"] for f in flags] == [pytest.approx((alone - 0.2) / 0.8)] * flagged
