"""What `leakbench plan` says of hours and disk, from what finished jobs took."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench import suite as suites
from bench.harness import launch
from bench.harness.environment import Environment
from bench.harness.forecast import Cost, Costs, Group, group_of, read_finished, read_shipped
from bench.harness.plan import Plan, expand
from bench.harness.store import Store
from bench.records import (
    ARCHIVE,
    AttackJob,
    AttackRecord,
    DoneRecord,
    DoubledRun,
    NoResult,
    TrainJob,
)
from bench.records.files import pack
from bench.records.outcomes import AttackInputs
from tests.conftest import require
from tests.made_records import attacked, trained
from tests.small_folders import leakbench

ROOT = Path(__file__).parents[1]


@pytest.fixture
def suite(tiny: Callable[..., Path]) -> Path:
    return tiny(**{'name = "ilrg"': 'name = "dlg"'})


def plan(*arguments: object) -> str:
    code, text = leakbench("plan", *arguments)
    assert code == 0, text
    return text


def took(job: TrainJob | AttackJob) -> float:
    """Seconds that depend on the plugin and its work."""
    if isinstance(job, AttackJob):
        return 0.1 * job.budget if job.attack == "dlg" else 3.0
    return job.protocol.rounds * (6.0 if job.defense == "spm" else 2.0)


def write(folder: Path, made: Plan) -> None:
    """A folder of records as if the plan had run there."""
    store = Store(folder)
    keys = {job: f"{i:024x}" for i, job in enumerate(made.trainings)}
    for job, key in keys.items():
        record = trained(
            seconds=took(job), inputs=job, rounds_played=job.protocol.rounds,
            files={"seen.safetensors": 5000}, memory={"host": int(7e8), "device": None},
        )  # fmt: skip
        store.write("train", key, record)
    for i, cell in enumerate(made.cells):
        record = attacked(
            seconds=took(cell), gradient_evaluations=40 if cell.attack == "dlg" else 0, files={},
            inputs=AttackInputs.of(cell), train=keys[cell.train],
        )  # fmt: skip
        store.write("attack", f"{i + 1000:024x}", record)


# --- estimates ------------------------------------------------------------------------------


def test_more_work_takes_proportionally_longer_where_the_plugin_computes_gradients(
    suite: Path, tmp_path: Path
) -> None:
    write(tmp_path / "run", expand(suites.read_suite(str(suite))))
    known = Costs([read_finished(tmp_path / "run").values()], Environment())
    more = expand(suites.read_suite(str(suite), ["protocol.rounds=100", "budget=500"]))
    for job in (*more.trainings, *more.cells):
        expected = require(known.of(job))
        assert expected.group == group_of(job, "cpu")
        assert expected.seconds == pytest.approx(took(job))


# --- costs of finished jobs -----------------------------------------------------------------


def test_what_was_published_of_a_folder_says_the_same(suite: Path, tmp_path: Path) -> None:
    write(tmp_path / "run", expand(suites.read_suite(str(suite))))
    store = Store(tmp_path / "run")
    (tmp_path / "out").mkdir()
    archive = pack([(kind, store.read(kind, key)) for kind, key in sorted(store.names)])
    (tmp_path / "out" / ARCHIVE).write_bytes(archive)
    assert read_finished(tmp_path / "out") == read_finished(tmp_path / "run")
    assert len(read_finished(tmp_path / "out")) == 15


def test_a_run_at_twice_the_budget_counts_and_what_did_not_apply_costs_nothing(
    suite: Path, tmp_path: Path
) -> None:
    made = expand(suites.read_suite(str(suite)))
    cell = next(c for c in made.cells if c.attack == "dlg")
    store = Store(tmp_path)
    store.write("train", "a" * 24, trained(inputs=cell.train))
    again = DoubledRun(budget=2, seconds=4.0, values={"ssim": [0.5]}, gradient_evaluations=9)
    inputs = AttackInputs.of(cell)
    record = attacked(seconds=3.0, doubled=again, inputs=inputs, train="a" * 24)
    store.write("attack", "b" * 24, record)
    none = NoResult(status="not_applicable", reason="", inputs=inputs, train="a" * 24)
    store.write("attack", "c" * 24, none)
    store.write("attack", "d" * 24, replace(none, status="failed"))
    costs = read_finished(tmp_path)
    assert costs.keys() == {"a" * 24, "b" * 24, "c" * 24}  # a failed job is run again
    assert costs["c" * 24] is None
    taken = require(costs["b" * 24])
    assert (taken.seconds, taken.grows) == (7.0, False)


def test_the_shipped_costs_tell_what_the_published_run_of_quick_took() -> None:
    store = Store(ROOT / "results" / "quick")
    records = [store.read(kind, key) for kind, key in store.names]
    seconds = sum(r.seconds for r in records if isinstance(r, DoneRecord))
    seconds += sum(r.doubled.seconds for r in records if isinstance(r, AttackRecord) and r.doubled)
    made = expand(suites.read_suite("quick", ["seeds=[0, 1, 2]"]))
    known = Costs([read_shipped()], Environment())
    costs = [known.of(job) for job in (*made.trainings, *made.cells)]
    assert sum(cost.seconds for cost in costs if cost) == pytest.approx(seconds, rel=0.2)


def test_an_unmeasured_defense_costs_what_others_do_on_its_network() -> None:
    groups = {"none": ("lenet", 1.0), "spm": ("lenet", 3.0), "pm_sfl": ("resnet18", 50.0)}
    measured = [
        Cost(Group("train", "cpu", name, "fedavg", model), seconds, True, 1.0)
        for name, (model, seconds) in groups.items()
    ]
    job = expand(suites.read_suite("first", ["tasks.0.model=lenet"])).trainings[-1]
    cost = require(Costs([measured], Environment()).of(job))
    work = job.protocol.rounds * job.protocol.participants
    assert cost.seconds == pytest.approx(2.0 * work)


# --- what is printed ------------------------------------------------------------------------


def test_plan_says_what_is_not_cached_would_take_and_writes_nothing(
    suite: Path, tmp_path: Path
) -> None:
    made = expand(suites.read_suite(str(suite)))
    write(tmp_path / "measured", made)
    seconds = [took(job) for job in (*made.trainings, *made.cells)]
    out = tmp_path / "out"
    arguments = (suite, "--device", "cpu", "--out", out, "--costs", tmp_path / "measured",
                 "--jobs", "2")  # fmt: skip
    told = json.loads(plan(*arguments, "--json"))
    assert not out.exists()
    assert told["hours"] * 3600 == pytest.approx(sum(seconds))
    assert told["wall_hours"] == pytest.approx(told["hours"] / 2)
    assert told["unlike"] == 0
    assert told["bytes"] > 3 * 5000
    assert (told["rows"][0]["trainings"], told["rows"][0]["cells"]) == (3, 12)
    text = plan(*arguments)
    assert "3 trainings (0 cached), 12 attack cells (0 cached)." in text
    assert "core-hours, by medians of measured jobs." in text
    assert "epsilon=0.5" not in text
    assert "epsilon=0.5" in plan(*arguments, "--list")
    # What the folder holds costs nothing.
    planned, keys = launch.plan_suite(suites.load(str(suite)), {}, Environment(device="cpu"))
    for job in planned.trainings:
        none = NoResult(status="not_applicable", reason="", inputs=job)
        Store(out).write("train", keys.train(job), none)
    told = json.loads(plan(*arguments, "--json"))
    assert (told["cached_trainings"], told["cached_cells"]) == (3, 0)
    assert told["hours"] * 3600 == pytest.approx(sum(seconds[3:]))


def test_a_device_on_which_nothing_was_measured_is_said_to_be_unknown(suite: Path) -> None:
    text = plan(suite, "--device", "cuda")
    assert "No cell was measured on a GPU yet, so no GPU-hours" in text
    assert "core-hours" not in text
    assert "With --jobs" not in text


def test_a_disk_that_is_too_small_is_pointed_out(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: small)
    assert "likely too small" in plan(suite)
