"""What `leakbench plan` tells of hours and disk, from what finished jobs took."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench import suite as suites
from bench.cli import planning
from bench.cli.options import console
from bench.harness.costs import lookup
from bench.harness.costs.cost import Cost, Point, joined
from bench.harness.costs.features import training_features
from bench.harness.costs.lookup import Estimate, Table
from bench.harness.costs.records import finished, measure
from bench.harness.plan import expand
from bench.harness.store import Store
from bench.records import (
    ARCHIVE,
    SUMS,
    AttackInputs,
    AttackJob,
    DoubledRun,
    Kind,
    NoResult,
    TrainJob,
    packed,
    sums,
)
from tests.made_records import attacked, trained

app = typer.Typer()
app.command()(planning.plan)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 200)


def plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"LEAKBENCH_DATA": ""})
    assert result.exit_code == 0, result.output
    return result.stdout


def took(job: TrainJob | AttackJob) -> float:
    """The law of these tests: a training takes 2 s and half a second per round, dlg 1 s and a
    tenth per evaluation allowed, other attacks 3 s; spm takes thrice that."""
    if isinstance(job, TrainJob):
        own, defense = 2 + 0.5 * job.protocol.rounds, job.defense
    else:
        own = 1 + 0.1 * job.budget if job.attack == "dlg" else 3.0
        defense = job.train.defense
    return own * (3 if defense == "spm" else 1)


def write(folder: Path, suite: suites.Suite, **changes: Any) -> list[float]:
    """A folder of records as if the suite had run there; returns the seconds of every job."""
    store, seconds = Store(folder), []
    plan_ = expand(suite)
    keys = {j: f"{i:024x}" for i, j in enumerate(plan_.trainings)}
    for job in plan_.trainings:
        seconds.append(took(job))
        same: dict[str, Any] = {
            "seconds": took(job), "client_seconds": 0.25, "parameters": 1000, "inputs": job,
            "files": {"init-server-seen.safetensors": 5000},
            "memory": {"host": int(7e8), "device": None},
        }  # fmt: skip
        store.write("train", keys[job], trained(**(same | changes)))
    for i, cell in enumerate(plan_.cells):
        grows = cell.attack == "dlg"
        again = None
        if grows and cell.train.defense == "none":
            again = DoubledRun(budget=2 * cell.budget, seconds=1 + 0.2 * cell.budget,
                               values={"ssim": [0.5]}, gradient_evaluations=80)  # fmt: skip
        seconds.append(took(cell) + (again.seconds if again else 0))
        record = attacked(
            seconds=took(cell), gradient_evaluations=40 if grows else 0, files={}, doubled=again,
            inputs=AttackInputs.of(cell), train=keys[cell.train],
        )  # fmt: skip
        store.write("attack", f"{i + 1000:024x}", record)
    return seconds


@pytest.fixture
def suite(tiny: Callable[..., Path]) -> suites.Suite:
    return suites.read_suite(str(tiny(**{'name = "ilrg"': 'name = "dlg"'})))


def table(folder: Path) -> Table:
    return Table(measure(folder))


def test_a_folder_tells_its_own_jobs_exactly(suite: suites.Suite, tmp_path: Path) -> None:
    seconds = write(tmp_path, suite)
    known, made = table(tmp_path), expand(suite)
    told = [known.training(j, device="cpu", samples=0) for j in made.trainings]
    told += [known.attack(c, device="cpu", reference=c.train.defense == "none")
             for c in made.cells]  # fmt: skip
    assert [t.match for t in told] == ["exact"] * len(seconds)
    assert [t.seconds for t in told] == pytest.approx(seconds)


def test_what_was_published_of_a_folder_tells_the_same(suite: suites.Suite, tmp_path: Path) -> None:
    write(tmp_path / "run", suite)
    store = Store(tmp_path / "run")
    kinds: tuple[Kind, ...] = ("train", "attack")
    found = [(kind, store.read(kind, key)) for kind in kinds for key in store.keys(kind)]
    (tmp_path / "out").mkdir()
    archive = packed([(kind, record) for kind, record in found if record is not None])
    (tmp_path / "out" / ARCHIVE).write_bytes(archive)
    (tmp_path / "out" / SUMS).write_text(sums({ARCHIVE: archive}))
    assert finished(tmp_path / "out") == finished(tmp_path / "run")
    assert measure(tmp_path / "out")


def test_more_rounds_and_larger_budgets_lie_on_the_line_through_what_was_measured(
    suite: suites.Suite, tmp_path: Path, tiny: Callable[..., Path]
) -> None:
    path = str(tiny(**{'name = "ilrg"': 'name = "dlg"'}))
    found = []
    for rounds, budget in ((1, 5), (4, 20)):
        part = tmp_path / str(rounds)
        write(part, suites.read_suite(path, [f"protocol.rounds={rounds}", f"budget={budget}"]))
        found += measure(part)
    known = Table(joined(found))
    more = expand(suites.read_suite(path, ["protocol.rounds=100", "budget=500"]))
    for job in more.trainings:
        estimate = known.training(job, device="cpu", samples=0)
        assert estimate.seconds == pytest.approx(took(job))
        assert estimate.match == "near"
    for cell in more.cells:
        assert known.attack(cell, device="cpu", reference=False).seconds == pytest.approx(
            took(cell), rel=1e-6
        )


def test_of_a_training_at_one_number_of_rounds_what_the_clients_did_grows(
    suite: suites.Suite, tmp_path: Path
) -> None:
    # 3 clients x 0.15 s per round of 1.5 s; the rest, 2.05 s, is done once.
    write(tmp_path, suite, client_seconds=0.15)
    of = training_features(expand(suite).trainings[0], "cpu")
    told = table(tmp_path).estimate("train", of, work=11, size=24)
    assert told.seconds == pytest.approx(2.05 + 11 * 0.45)


def test_another_setting_and_another_defense_are_told_from_their_like(
    suite: suites.Suite, tmp_path: Path
) -> None:
    write(tmp_path, suite)
    known = table(tmp_path)
    job = expand(suite).trainings[1]
    of = training_features(job, "cpu")

    def told(**changes: str) -> Estimate:
        return known.estimate("train", of | changes, work=1, size=24)

    assert told(settings="epsilon=9").seconds == pytest.approx(3 * 2.5)
    assert told(settings="epsilon=9").why == "the same defense with other settings"
    assert told(defense="laplace").seconds == pytest.approx(3 * 2.5)  # median of none, spm, spm
    assert told(defense="laplace").why == "another defense"
    assert told(device="cuda").match == "none"
    assert told(model="resnet18()").match == "none"  # no network of which the speed was measured


def test_another_network_is_scaled_by_measured_steps_and_parameters() -> None:
    def cost(model: str, step_s: float, parameters: int, defense: str) -> Cost:
        features = {"device": "cpu", "protocol": "fedavg", "channel": "whole", "model": model,
                    "data": "d", "defense": defense, "settings": "", "clients": "2",
                    "participation": "1", "batch": "8", "local": "1 steps", "threats": "1x1x1",
                    "checkpoints": "init", "audit": "0"}  # fmt: skip
        return Cost(stage="train", features=features, points=(Point(work=1, seconds=10.0),),
                    grows=True, size=16, n_bytes=100.0, step_s=step_s,
                    parameters=parameters)  # fmt: skip

    small, large = cost("small", 0.1, 10, "none"), cost("large", 0.5, 30, "none")
    known = Table([small, large, cost("small", 0.1, 10, "slow")])
    told = known.estimate("train", dict(large.features) | {"defense": "slow"}, work=1, size=16)
    assert (told.seconds, told.why) == (10.0, "another defense")
    attacked = Cost(stage="attack", features={"device": "cpu", "model": "small", "data": "d",
                                              "defense": "none"},
                    points=(Point(work=5, seconds=2.0),), grows=True, size=1,
                    n_bytes=8.0)  # fmt: skip
    known = Table([small, large, attacked])
    asked = dict(attacked.features) | {"model": "large"}
    told = known.estimate("attack", asked, work=10, size=1)
    assert told.seconds == pytest.approx(2.0 * 2 * 5)
    assert told.n_bytes == pytest.approx(8.0 * 3)
    assert told.why == "another network"


def test_costs_survive_json() -> None:
    cost = Cost(stage="attack", features={"device": "cpu"}, grows=True, size=3, n_bytes=4.5,
                points=(Point(work=1, seconds=2.0, again=3.0), Point(work=2, seconds=3.0)),
                host=1e9)  # fmt: skip
    assert Cost.from_dict(json.loads(json.dumps(cost.to_dict()))) == cost


def test_the_shipped_costs_say_where_they_were_measured() -> None:
    data = json.loads(Path(lookup.__file__).with_name("shipped.json").read_text())
    for source in data["sources"]:
        assert {"device", "name", "command", "clock", "versions", "date"} <= set(source)
        assert {c["features"]["device"] for c in source["costs"]} == {source["device"]}
    assert lookup.shipped()


def test_plan_tells_the_hours_of_what_is_not_cached_and_writes_nothing(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    from bench import suite as suites_
    from bench.harness import launch

    path = tiny(**{'name = "ilrg"': 'name = "dlg"'})
    seconds = write(tmp_path / "measured", suites_.load(str(path)))
    out = tmp_path / "out"
    arguments = (str(path), "--device", "cpu", "--out", str(out), "--costs",
                 str(tmp_path / "measured"), "--jobs", "2")  # fmt: skip
    told = json.loads(plan(*arguments, "--json"))
    assert not out.exists()
    assert told["hours"]["cpu"] * 3600 == pytest.approx(sum(seconds), rel=1e-9)
    assert told["wall_hours"] == pytest.approx(told["hours"]["cpu"] / 2)
    assert told["matches"]["cpu"] == {"exact": 15, "near": 0, "none": 0}
    assert told["bytes"] > 3 * 5000
    assert told["peak_host_bytes"] == 7e8
    assert (told["rows"][0]["trainings"], told["rows"][0]["cells"]) == (3, 12)
    text = " ".join(plan(*arguments).split())
    assert "3 trainings (0 cached), 12 attack cells (0 cached)." in text
    assert "No cell was measured on a GPU yet" in text
    assert "epsilon=0.5" not in text
    assert "epsilon=0.5" in plan(*arguments, "--list")
    # What the folder holds is not counted.
    env = launch.environment(device="cpu")
    made, keys = launch.planned(suites_.load(str(path)), {}, env)
    for job in made.trainings:
        none = NoResult(status="not_applicable", reason="", inputs=job)
        Store(out).write("train", keys.train(job), none)
    told = json.loads(plan(*arguments, "--json"))
    assert (told["cached_trainings"], told["cached_cells"]) == (3, 0)
    assert told["hours"]["cpu"] * 3600 == pytest.approx(sum(seconds[3:]), rel=1e-9)


def test_a_disk_that_is_too_small_is_told(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_free", lambda store: 10)
    path = tiny(**{'name = "ilrg"': 'name = "dlg"'})
    write(tmp_path / "measured", suites.read_suite(str(path)))
    text = plan(str(path), "--out", str(tmp_path / "o"), "--costs", str(tmp_path / "measured"))
    assert "likely too small" in text


def test_a_folder_without_records_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tiny()), "--costs", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no records" in result.stderr
