"""Running, resuming, failing: records are whole, nothing is lost or made twice."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from safetensors.torch import load_file
from skimage.metrics import structural_similarity

from bench import suite as suites
from bench.cli.reports import publish
from bench.contract.compose import Composed
from bench.harness import launch, runner
from bench.harness.environment import Environment, registry_for
from bench.harness.executors.local import Workers
from bench.harness.executors.task import Task
from bench.harness.plan import expand
from bench.harness.runner import Keys
from bench.harness.store import Store, write_whole
from bench.records import NoResult, read_json, to_json
from bench.records import Run as WholeRun
from bench.registry import Registry
from bench.report import leaderboard, terminal
from bench.report.text import cells, markdown, to_csv
from bench.report.verdicts import Trained, at_chance
from tests import test_report_html as made_up
from tests.board import board, written
from tests.made_records import trained

SCHEMA_FILE = Path(leaderboard.__file__).with_name("schema.json")
Run = Callable[..., tuple[Store, runner.Report]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def go(
        suite: Path, *, out: str = "out", plugins: tuple[Path, ...] = (), workers: int = 0,
        only: dict[str, Any] | None = None, fresh: bool = False,
    ) -> tuple[Store, runner.Report]:  # fmt: skip
        env = Environment(plugins=plugins)
        registry = registry_for(plugins)
        plan = expand(suites.read_suite(str(suite)), only)
        runner.check(plan, registry, env)
        store = Store(tmp_path / out)
        store.prepare()
        report = runner.run(
            plan, store, Keys(registry, env), executor=launch.local(plan, env, workers=workers),
            fresh=fresh, command=["test"],
        )  # fmt: skip
        return store, report

    return go


def figures(store: Store) -> list[dict[str, Any]]:
    """Leaderboard rows without the clock's readings."""
    rows = board(store.folder)
    for row in rows:
        row.pop("client_seconds")
        for entry in row["attacks"].values():
            entry.pop("seconds")
    return rows


def test_a_run_fills_the_leaderboard_and_a_second_one_repeats_nothing(
    run: Run, tiny: Callable[..., Path]
) -> None:
    store, report = run(tiny())
    assert (report.ran, report.cached, report.failures) == (15, 0, [])
    rows = board(store.folder)
    jsonschema.validate(written(store.folder), json.loads(SCHEMA_FILE.read_text()))
    assert len(rows) == 6
    undefended = next(r for r in rows if (r["defense"], r["checkpoint"]) == ("none", "init"))
    assert undefended["eps_record"] == "inf"
    assert undefended["attacks"]["ilrg"]["lnacc"]["mean"] == 1.0
    stamp = {p: p.stat().st_mtime_ns for p in store.folder.rglob("*.json") if p.name != "run.json"}
    _, again = run(tiny())
    assert (again.ran, again.cached) == (0, 15)
    assert all(p.stat().st_mtime_ns == t for p, t in stamp.items())


def test_records_are_ranked_by_their_error_and_audits_join_the_board(
    run: Run, tiny: Callable[..., Path]
) -> None:
    """No SSIM for tables: the least error of any attack per victim, the larger the safer."""
    suite = tiny(
        **{
            'dataset = "digits"': 'dataset = "breast_cancer"',
            'model = "mlp_spm"': 'model = "logistic"',
            "audit = 0": "audit = 400",
            'name = "spm"\nsettings = { epsilon = [0.5, 2.0] }':
                'name = "gaussian"\nsettings = { noise_multiplier = 1.0, clip_norm = 1.0 }',
            'name = "ilrg"': 'name = "analytic"',
        }
    )  # fmt: skip
    store, report = run(suite, only={"checkpoint": "init"})
    assert report.failures == []
    rows = board(store.folder)
    jsonschema.validate(written(store.folder), json.loads(SCHEMA_FILE.read_text()))
    by_name = {r["defense"]: r for r in rows}
    none, noised = by_name["none"], by_name["gaussian"]
    assert (noised["rank"], none["rank"]) == (1, 2)
    assert none["worst"]["metric"] == "mse"
    assert none["worst"]["mse"]["mean"] < 1e-6 < noised["worst"]["mse"]["mean"]
    assert none["audit"]["eps_at_least"]
    assert none["audit"]["verdict_claim"] == "no claim"
    assert noised["audit"]["verdict_proof"] == "consistent"
    assert 0 < noised["audit"]["eps_audited"] < noised["eps_record"]
    text = markdown(leaderboard.rows(store.folder), WholeRun.read(store.folder))
    assert "eps audited" in text
    assert re.search(r"\| MSE \d\.?\d*e-\d+ \[", text)  # the undefended row's, to its own scale


def test_the_same_seed_gives_the_same_figures_here_and_in_workers(
    run: Run, tiny: Callable[..., Path]
) -> None:
    one, _ = run(tiny(), out="a")
    two, report = run(tiny(), out="b", workers=2)
    assert report.failures == []
    assert figures(one) == figures(two)


def test_a_run_continues_where_it_stopped(run: Run, tiny: Callable[..., Path]) -> None:
    store, _ = run(tiny())
    before = figures(store)
    victims = sorted((store.folder / "records" / "attack").iterdir())[:5]
    for path in victims[:4]:
        path.unlink()
    victims[4].write_text(victims[4].read_text()[:40])  # cut short by a crash
    _, report = run(tiny())
    assert (report.ran, report.cached) == (5, 10)
    assert figures(store) == before


def test_a_change_of_settings_or_seed_makes_new_records(
    run: Run, tiny: Callable[..., Path]
) -> None:
    run(tiny())
    _, report = run(tiny(**{"version = 1": "version = 1\nseeds = [1]"}))
    assert report.cached == 0


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

class Dies(Attack):
    """Takes its process with it."""
    def run(self, seen, ctx):
        import os
        os.kill(os.getpid(), 9)

class Sleeps(Attack):
    """Never ends."""
    def run(self, seen, ctx):
        import time
        time.sleep(600)
'''


@pytest.fixture
def bad(tmp_path: Path) -> tuple[Path, ...]:
    path = tmp_path / "bad_plugins.py"
    path.write_text(BAD)
    return (path,)


def test_a_failing_cell_is_recorded_and_the_run_goes_on(
    run: Run, tiny: Callable[..., Path], bad: tuple[Path, ...]
) -> None:
    attacks = "".join(
        f'\n[[attacks]]\nname = "{n}"\n'
        for n in ("raises", "wrong_shape", "not_a_number", "forgetful")
    )
    store, report = run(tiny(append=attacks), plugins=bad, only={"defense": "none"})
    reasons = {label.split()[-3]: reason for label, reason in report.failures}
    assert reasons["raises"] == "failed: RuntimeError: boom"
    assert "images must be a tensor [2, 1, 1, 16, 16], got [1]" in reasons["wrong_shape"]
    assert "must return a Reconstruction, got NoneType" in reasons["forgetful"]
    assert set(reasons) == {"raises", "wrong_shape", "forgetful"}
    row = board(store.folder)[0]
    assert row["attacks"]["ilrg"]["status"] == "done"
    nan = row["attacks"]["not_a_number"]
    assert (nan["status"], nan["failed"], nan["n"]) == ("done", 2, 2)
    assert nan["ssim"]["mean"] == pytest.approx(nan["floor"]["ssim"])
    assert row["attacks"]["raises"]["ssim"] is None
    assert row["attacks"]["raises"]["failed"] == 2
    assert "raises failed" in row["flags"]
    _, again = run(tiny(append=attacks), plugins=bad, only={"defense": "none"})
    assert again.ran == 6  # failures are tried again, the rest is cached


def test_a_diverged_training_is_a_result_with_its_attacks_not_applicable(
    run: Run, tiny: Callable[..., Path], bad: tuple[Path, ...]
) -> None:
    suite = tiny(append='\n[[defenses]]\nname = "explodes"\n')
    store, report = run(suite, plugins=bad, only={"defense": "explodes", "attack": "prior_only"})
    assert report.failures == []
    rows = {r["checkpoint"]: r for r in board(store.folder)}
    final = rows["final"]["attacks"]["prior_only"]
    assert final["status"] == "not_applicable"
    assert "training diverged (weights not finite after round 1)" in final["reason"]
    assert any(f.startswith("diverged") for f in rows["final"]["flags"])
    assert rows["final"]["rank"] is None
    assert rows["init"]["attacks"]["prior_only"]["status"] == "done"
    assert 0 <= rows["final"]["accuracy"]["mean"] <= 0.2


def test_participation_samples_clients_and_the_ledger_counts_real_uploads(
    run: Run, tiny: Callable[..., Path]
) -> None:
    suite = tiny(**{"rounds = 1": "rounds = 6\nparticipation = 0.34"})
    store, _ = run(suite, only={"defense": "none", "checkpoint": "final"})
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
    store, report = run(suite, plugins=bad, only={"checkpoint": "init"})
    ((label, reason),) = report.failures
    assert "refuses" in label
    assert reason == "failed: RuntimeError: no upload"
    rows = {r["defense"]: r for r in board(store.folder)}
    assert rows["none"]["attacks"]["ilrg"]["status"] == "done"
    assert rows["refuses"]["attacks"]["ilrg"]["status"] == "not_applicable"
    assert rows["refuses"]["accuracy"] is None
    assert rows["refuses"]["flags"] == ["training failed: RuntimeError: no upload"]
    document = written(store.folder)
    jsonschema.validate(document, json.loads(SCHEMA_FILE.read_text()))


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


def test_a_killed_driver_leaves_whole_records_and_the_next_run_finishes(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    suite, out = tiny(), tmp_path / "killed"
    command = [
        sys.executable,
        "-m",
        "bench.cli",
        "run",
        str(suite),
        "--out",
        str(out),
        "--jobs",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list(out.glob("records/attack/*.json"))) < 2:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = list(out.glob("records/*/*.json"))
    assert len(done) >= 2
    assert all(read_json(p)["status"] == "done" for p in done)
    stamps = {p: p.stat().st_mtime_ns for p in done}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert all(p.stat().st_mtime_ns == t for p, t in stamps.items())
    assert len(list(out.glob("records/*/*.json"))) == 15


def test_two_drivers_on_one_folder_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.prepare()
    with (
        store.locked(),
        pytest.raises(ValueError, match="another leakbench run is writing"),
        Store(tmp_path).locked(),
    ):
        pass


def test_files_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new" * 1000)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_infinities_become_text_so_that_any_json_reader_takes_them() -> None:
    text = to_json({"a": float("inf"), "b": [float("nan"), -float("inf")]})
    assert json.loads(text) == {"a": "inf", "b": ["nan", "-inf"]}


def test_reports_come_in_three_formats(run: Run, tiny: Callable[..., Path]) -> None:
    store, _ = run(tiny(), only={"checkpoint": "init"})
    paths = {p.suffix: p.read_text() for p in publish(store.folder, ("md", "csv", "json"))}
    assert "| # | defense | accuracy |" in paths[".md"]
    assert "Command: `test`" in paths[".md"]
    lines = paths[".csv"].splitlines()
    assert len(lines) == 1 + 3 * 2
    assert len({len(line.split(",")) for line in lines[:1]}) == 1
    assert len(json.loads(paths[".json"])) == 3


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
    jsonschema.validate(written(store.folder), json.loads(SCHEMA_FILE.read_text()))
    row = {r["defense"]: r for r in rows}
    assert row["standalone"]["accuracy"] is None
    assert row["standalone"]["attacks"]["ilrg"]["status"] == "not_applicable"
    mean = sum(alone["personal_accuracies"]) / 3
    assert row["standalone"]["personal_accuracy"]["mean"] == pytest.approx(mean)
    assert [row[d]["personalised"] for d in ("none", "standalone", "lg_fedavg")] == [0, 1, 1]
    typed = leaderboard.rows(store.folder)
    header, body = cells(typed)
    assert header[2:5] == ["accuracy", "personal accuracy", "eps claimed"]
    line = next(b for b in body if b[1] == "standalone")
    assert line[2] == "-"
    assert line[3].startswith(f"{mean:.3f} [")
    assert "own\nacc" in [c.header for c in terminal.shown(typed)[0].columns]
    read = list(csv.DictReader(to_csv(leaderboard.rows(store.folder)).splitlines()))
    assert {r["accuracy"] for r in read if r["defense"] == "standalone"} == {""}
    own = [float(r["personal_accuracy"]) for r in read if r["defense"] == "standalone"]
    assert own == pytest.approx([mean] * 2)
    plain_rows = [r for r in typed if not r.personalised]
    assert cells(plain_rows)[0][2:4] == ["accuracy", "eps claimed"]
    assert "own\nacc" not in [c.header for c in terminal.shown(plain_rows)[0].columns]


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
    record = trained(class_chance=0.1, personal_chance=0.4)
    assert at_chance(made, [Trained.of(record)]) == flagged


SPENDERS = """
import torch
from bench.contract.attack import Attack, Reconstruction
from bench.contract.defense import Defense

def exact(seen):
    "The sample [V, 1, ...] behind one gradient of a first linear layer that has a bias."
    sent, _ = seen.stack(seen.upload_kind(), seen.clients)
    rows, bias = sent["hidden1.linear.weight"], sent["hidden1.linear.bias"]
    victims, best = torch.arange(len(bias)), bias.abs().argmax(dim=1)
    return (rows[victims, best] / bias[victims, best, None]).view(-1, 1, 1, 16, 16)

class Slow(Attack):
    "Half-way from gray to the sample at a budget of 5, there at 10."
    def run(self, seen, ctx):
        images = 0.5 + (exact(seen) - 0.5) * min(1.0, ctx.budget / 10)
        return Reconstruction(images=images, evaluations=7 * ctx.budget)

class Quick(Attack):
    "There at any budget."
    def run(self, seen, ctx):
        return Reconstruction(images=exact(seen), evaluations=ctx.budget)

class SlowIfUndefended(Slow):
    "Slow, and fails where there is a defense."
    def run(self, seen, ctx):
        if seen.known["defense"]["name"] != "none":
            raise RuntimeError("boom")
        return super().run(seen, ctx)

class SlowOrNotAtAll(Slow):
    "Slow, and does not apply where there is a defense."
    def applies(self, seen):
        return None if seen.known["defense"]["name"] == "none" else "there is a defense"

class Draws(Attack):
    "Random images, and marks on all that it got."
    def run(self, seen, ctx):
        assert not hasattr(self, "ran") and "ran" not in seen.known
        self.ran = seen.known["ran"] = True
        assert float(ctx.aux_x.min()) >= 0
        ctx.aux_x.sub_(2)
        images = torch.rand(len(seen.clients), 1, *ctx.network.shape, generator=ctx.rng)
        return Reconstruction(images=images, evaluations=1)

class ClosedForm(Attack):
    "Runs at budget 5 alone, spends no gradient evaluation."
    def run(self, seen, ctx):
        assert ctx.budget == 5
        return Reconstruction(images=exact(seen))

class CountsAlone(Attack):
    "Runs at budget 5 alone, gives no images."
    def run(self, seen, ctx):
        assert ctx.budget == 5
        counts = torch.zeros(len(seen.clients), ctx.network.classes, dtype=torch.int64)
        return Reconstruction(label_counts=counts, evaluations=9)

class SpendingFloor(Attack):
    "A floor that runs at budget 5 alone."
    is_floor = True
    def run(self, seen, ctx):
        assert ctx.budget == 5
        return Reconstruction(images=exact(seen), evaluations=9)

class Breaks(Attack):
    "Cannot make use of a budget of 10."
    def run(self, seen, ctx):
        if ctx.budget == 10:
            raise RuntimeError("too much")
        return Reconstruction(images=exact(seen), evaluations=9)

class AlsoOpen(Defense):
    "A second undefended protocol."
    is_reference = True
"""
Cell = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], None]


@pytest.fixture
def spenders(tmp_path: Path) -> tuple[Path, ...]:
    path = tmp_path / "spenders.py"
    path.write_text(SPENDERS)
    return (path,)


def listed(*attacks: str) -> str:
    return "".join(f'\n[[attacks]]\nname = "{n}"\n' for n in attacks)


def each_cell(store: Store, act: Cell) -> None:
    """act(training, cell, record) on every attack record, which is then written back."""
    for training in read_json(store.folder / "run.json")["trainings"]:
        for cell in training["cells"]:
            path = store.path("attack", cell["key"])
            record = json.loads(path.read_text())
            act(training, cell, record)
            path.write_text(to_json(record))


def codes(folder: Path) -> list[str]:
    """The letters at the end of each row."""
    (table,) = terminal.shown(leaderboard.rows(folder))
    return [str(cell) for cell in table.columns[-1].cells]


def test_convergence_is_the_ssim_gained_from_twice_the_budget_where_nothing_defends(
    run: Run, tiny: Callable[..., Path], spenders: tuple[Path, ...]
) -> None:
    suite = tiny(append=listed("slow", "quick"), **{"version = 1": "version = 1\nseeds = [0, 1]"})
    store, report = run(suite, plugins=spenders, only={"checkpoint": "init"})
    assert report.failures == []
    doubled: dict[tuple[str, str, int], Any] = {}

    def collect(training: dict[str, Any], cell: dict[str, Any], record: dict[str, Any]) -> None:
        doubled[training["defense"], cell["label"], training["seed"]] = record["doubled"]
        assert record["budget"] == 5
        if cell["label"] == "slow":
            assert record["gradient_evaluations"] == 35

    each_cell(store, collect)
    ran_twice = {k[:2] for k, v in doubled.items() if v is not None}
    assert ran_twice == {("none", "slow"), ("none", "quick")}
    gains = []
    for training in read_json(store.folder / "run.json")["trainings"]:
        if training["defense"] != "none":
            continue
        again = doubled["none", "slow", training["seed"]]
        assert (again["budget"], again["gradient_evaluations"]) == (10, 70)
        assert again["seconds"] > 0
        truth = load_file(store.artifacts(training["key"]) / "init-server-truth.safetensors")["x"]
        assert again["values"]["ssim"] == pytest.approx([1.0] * len(truth), abs=1e-3)
        for x in truth.double().numpy()[:, 0, 0]:
            half_way = 0.5 + (x - 0.5) / 2
            gains.append(1 - structural_similarity(
                x, half_way, data_range=1.0, gaussian_weights=True, sigma=1.5,
                use_sample_covariance=False,
            ))  # fmt: skip
    expected = sum(gains) / 4
    assert len(gains) == 4
    assert expected > 0.02
    rows = board(store.folder)
    assert {r["defense"] for r in rows} == {"none", "spm"}
    for row in rows:
        slow, quick = row["attacks"]["slow"], row["attacks"]["quick"]
        assert slow["convergence"] == {
            "gain": pytest.approx(expected, abs=1e-3), "budget": 5, "converged": False,
        }  # fmt: skip
        assert quick["convergence"] == {
            "gain": pytest.approx(0, abs=1e-9), "budget": 5, "converged": True,
        }  # fmt: skip
        gain = slow["convergence"]["gain"]
        flag = f"slow cut short: +{gain:.2f} SSIM on the undefended row at twice its budget"
        assert [f for f in row["flags"] if "cut short" in f] == [flag]
    undefended = next(r for r in rows if r["defense"] == "none")
    assert undefended["attacks"]["slow"]["ssim"]["mean"] == pytest.approx(1 - expected, abs=1e-3)
    assert all("B" in letters for letters in codes(store.folder))
    assert "B: an attack was cut short" in terminal.legend(leaderboard.rows(store.folder))
    shown = markdown(leaderboard.rows(store.folder), WholeRun.read(store.folder))
    assert "slow cut short" in shown
    for line in csv.DictReader(to_csv(leaderboard.rows(store.folder)).splitlines()):
        told = line["gain_at_twice_budget"]
        if line["attack"] in ("slow", "quick"):
            wanted = expected if line["attack"] == "slow" else 0
            assert float(told) == pytest.approx(wanted, abs=1e-3)
        else:
            assert told == ""
    jsonschema.validate(written(store.folder), json.loads(SCHEMA_FILE.read_text()))


def test_the_run_at_twice_the_budget_makes_the_same_draws_from_untouched_inputs(
    run: Run, tiny: Callable[..., Path], spenders: tuple[Path, ...]
) -> None:
    suite = tiny(append=listed("draws"))
    only = {"checkpoint": "init", "defense": "none", "attack": "draws"}
    store, report = run(suite, plugins=spenders, only=only)
    assert report.failures == []

    def equal(training: dict[str, Any], cell: dict[str, Any], record: dict[str, Any]) -> None:
        assert record["doubled"]["values"] == record["values"]

    each_cell(store, equal)


def test_attacks_without_a_budget_to_double_run_once_and_have_no_convergence(
    run: Run, tiny: Callable[..., Path], spenders: tuple[Path, ...]
) -> None:
    names = ("closed_form", "counts_alone", "spending_floor")
    store, report = run(tiny(append=listed(*names)), plugins=spenders, only={"checkpoint": "init"})
    assert report.failures == []

    def once(training: dict[str, Any], cell: dict[str, Any], record: dict[str, Any]) -> None:
        assert record["doubled"] is None

    each_cell(store, once)
    for row in board(store.folder):
        assert set(row["attacks"]) == {"ilrg", "prior_only", *names}
        assert all(e["convergence"] is None for e in row["attacks"].values())
        assert not any("cut short" in f for f in row["flags"])
    assert not any("B" in letters for letters in codes(store.folder))


def test_entries_without_figures_are_not_flagged_as_cut_short(
    run: Run, tiny: Callable[..., Path], spenders: tuple[Path, ...]
) -> None:
    suite = tiny(append=listed("slow_if_undefended", "slow_or_not_at_all", "breaks"))
    store, report = run(suite, plugins=spenders, only={"checkpoint": "init"})
    rows = board(store.folder)
    for row in rows:
        cut = [f.split()[0] for f in row["flags"] if "cut short" in f]
        defended = row["defense"] != "none"
        assert cut == ([] if defended else ["slow_if_undefended", "slow_or_not_at_all"])
        assert not row["attacks"]["slow_or_not_at_all"]["convergence"]["converged"]
        assert row["attacks"]["breaks"]["convergence"] is None
        assert row["attacks"]["breaks"]["status"] == ("done" if defended else "failed")
    assert "failed: RuntimeError: too much" in [reason for _, reason in report.failures]


def test_convergence_is_taken_from_the_first_reference_of_the_same_network_and_checkpoint(
    run: Run, tiny: Callable[..., Path], spenders: tuple[Path, ...]
) -> None:
    suite = tiny(
        append=listed("quick")
        + '\n[[tasks]]\ndataset = "digits"\nmodel = "mlp_spm"\nprotocol = { lr = 0.2 }\n'
        + '\n[[defenses]]\nname = "also_open"\n',
        **{"version = 1": "version = 1\nseeds = [0, 1]"},
    )
    store, report = run(suite, plugins=spenders, only={"attack": "quick"})
    assert report.failures == []
    gains = {
        (0.1, "init"): ([0.00, 0.04], [0.07, 0.05]),  # 0.04 over both victims and both seeds
        (0.1, "final"): ([0.03, 0.01], [0.01, 0.01]),
        (0.2, "init"): ([-0.3, -0.1], [0.0, 0.0]),
    }

    def invent(training: dict[str, Any], cell: dict[str, Any], record: dict[str, Any]) -> None:
        reference = training["defense"] in ("none", "also_open")
        assert (record["doubled"] is not None) == reference
        if not reference:
            return
        where = (training["protocol"]["lr"], cell["checkpoint"])
        if where not in gains:  # as on data without SSIM
            del record["values"]["ssim"], record["doubled"]["values"]["ssim"]
            return
        gain = gains[where][training["seed"]] if training["defense"] == "none" else [0.5, 0.5]
        record["values"]["ssim"] = [0.4, 0.3]
        record["doubled"]["values"]["ssim"] = [0.4 + gain[0], 0.3 + gain[1]]

    each_cell(store, invent)
    rows = board(store.folder)
    assert len(rows) == 2 * 2 * 4
    expected = {(0.1, "init"): 0.04, (0.1, "final"): 0.015, (0.2, "init"): -0.1}
    for row in rows:
        where = (row["protocol_settings"]["lr"], row["checkpoint"])
        found = row["attacks"]["quick"]["convergence"]
        if where in expected:
            assert found["gain"] == pytest.approx(expected[where])
            assert found["converged"] == (where != (0.1, "init"))
        else:
            assert found is None
        cut = [f for f in row["flags"] if "cut short" in f]
        flag = "quick cut short: +0.04 SSIM on the undefended row at twice its budget"
        assert cut == ([flag] if where == (0.1, "init") else [])


def test_records_made_before_convergence_was_measured_are_still_reported(
    run: Run, tiny: Callable[..., Path], spenders: tuple[Path, ...]
) -> None:
    store, _ = run(tiny(append=listed("slow")), plugins=spenders, only={"checkpoint": "init"})

    def age(training: dict[str, Any], cell: dict[str, Any], record: dict[str, Any]) -> None:
        del record["doubled"], record["budget"]

    each_cell(store, age)
    rows = board(store.folder)
    assert len(rows) == 3
    for row in rows:
        assert row["attacks"]["slow"]["ssim"] is not None
        assert all(e["convergence"] is None for e in row["attacks"].values())
        assert not any("cut short" in f for f in row["flags"])
    assert not any("B" in letters for letters in codes(store.folder))
    assert len(publish(store.folder, ("md", "csv", "json"))) == 3


def test_without_an_undefended_row_convergence_is_unknown(
    run: Run, tiny: Callable[..., Path], spenders: tuple[Path, ...]
) -> None:
    only = {"checkpoint": "init", "defense": "spm", "attack": "slow"}
    store, _ = run(tiny(append=listed("slow")), plugins=spenders, only=only)
    entries = [r["attacks"]["slow"] for r in board(store.folder)]
    assert [(e["status"], e["convergence"]) for e in entries] == [("done", None)] * 2


def test_a_defense_composed_of_references_is_none_itself(registry: Registry) -> None:
    undefended = registry.defense("none", {})
    assert undefended.is_reference
    assert not Composed({"none": undefended}).is_reference
    assert not registry.defense("none+spm", {"spm.epsilon": 1.0}).is_reference
    for name in registry.names("defense"):
        assert registry.get("defense", name).cls.is_reference == (name == "none")  # type: ignore[union-attr]


@dataclass(frozen=True)
class Nothing:
    artifacts: Path = Path("unused")

    def __call__(self) -> NoResult:
        return NoResult(status="not_applicable", reason="nothing to do")


def test_workers_are_reused_and_everything_is_answered() -> None:
    tasks = deque(Task(id=i, label=str(i), work=Nothing()) for i in range(7))
    outcomes = list(Workers(count=2, threads=1, timeout_s=60)(tasks))
    assert sorted(o.task.id for o in outcomes) == list(range(7))
    assert all(o.record.status == "not_applicable" for o in outcomes)
    assert all(o.record.memory["host"] > 1e7 for o in outcomes)


def test_workers_take_gpus_in_turn_and_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(count=3, threads=1, timeout_s=60, gpus=("0", "GPU-5"))
    found = [workers.surroundings(i) for i in range(3)]
    assert [f["CUDA_VISIBLE_DEVICES"] for f in found] == ["0", "GPU-5", "0"]
    assert [float(f["LEAKBENCH_GPU_SHARE"]) for f in found] == [0.5, 1.0, 0.5]
    monkeypatch.setenv("LEAKBENCH_GPU_SHARE", "0.5")
    assert float(workers.surroundings(2)["LEAKBENCH_GPU_SHARE"]) == 0.25
    assert Workers(count=3, threads=1, timeout_s=60).surroundings(0) == {}
