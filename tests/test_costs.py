"""What `leakbench plan` says of hours and disk, from what finished jobs took."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench import suite as suites
from bench.cli import planning
from bench.cli.options import console
from bench.harness import forecast as module
from bench.harness import launch
from bench.harness.environment import Environment
from bench.harness.forecast import Cost, Costs, Group, finished, group_of, shipped
from bench.harness.plan import Plan, expand
from bench.harness.store import Store
from bench.records import (
    ARCHIVE,
    AttackInputs,
    AttackJob,
    AttackRecord,
    DoneRecord,
    DoubledRun,
    Kind,
    NoResult,
    TrainJob,
    pack,
)
from tests.made_records import attacked, trained

ROOT = Path(__file__).parents[1]
KINDS: tuple[Kind, ...] = ("train", "attack")
app = typer.Typer()
app.command()(planning.plan)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 200)


@pytest.fixture
def suite(tiny: Callable[..., Path]) -> Path:
    return tiny(**{'name = "ilrg"': 'name = "dlg"'})


def plan(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"LEAKBENCH_DATA": ""})
    assert result.exit_code == 0, result.output
    return result.stdout


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


def cost(job: TrainJob | AttackJob, seconds: float, **changes: Any) -> Cost:
    """What a job took per unit of work; changes: of its group and of the cost."""
    own = {name: changes.pop(name) for name in Group._fields if name in changes}
    made = Cost(group_of(job, "cpu")._replace(**own), seconds, grows=True, n_bytes=100.0)
    return made._replace(**changes)


def estimate(job: TrainJob | AttackJob, *sources: Iterable[Cost | None]) -> Cost | None:
    return Costs(sources, Environment()).of(job, "cpu")


# --- estimates ------------------------------------------------------------------------------


def test_more_work_takes_proportionally_longer_where_the_plugin_computes_gradients(
    suite: Path, tmp_path: Path
) -> None:
    write(tmp_path / "run", expand(suites.read_suite(str(suite))))
    known = Costs([finished(tmp_path / "run").values()], Environment())
    more = expand(suites.read_suite(str(suite), ["protocol.rounds=100", "budget=500"]))
    for job in (*more.trainings, *more.cells):
        found = known.of(job, "cpu")
        assert found is not None
        assert found.group == group_of(job, "cpu")
        assert found.seconds == pytest.approx(took(job))


NEAR = {"model": "other"}


@pytest.mark.parametrize(
    ("sources", "seconds"),
    [
        ([[(1, {}), (2, {}), (90, {}), (7, NEAR)]], 2),  # the median
        ([[(1, NEAR), (7, {"plugin": "other"})]], 1),
        ([[(1, {"protocol": "other"}), (7, {"plugin": "other"})]], 1),
        ([[(1, {"plugin": "other", "model": "other"})]], 1),
        ([[(1, {"stage": "attack"}), (1, {"device": "cuda"})]], None),
        ([[(1, {})], [(7, {})]], 1),  # the first origin
        ([[(7, NEAR)], [(1, {})]], 1),
    ],
)
def test_the_most_similar_jobs_count(
    suite: Path, sources: list[list[tuple[float, dict[str, str]]]], seconds: float | None
) -> None:
    job = expand(suites.read_suite(str(suite), ["protocol.rounds=1"])).trainings[0]
    found = estimate(job, *([cost(job, s, **group) for s, group in source] for source in sources))
    work = job.protocol.participants * (job.protocol.local_steps or 1)
    assert (found and found.seconds) == (seconds and pytest.approx(seconds * work))


def test_local_epochs_are_counted_in_steps_of_the_largest_client() -> None:
    store = Store(ROOT / "results" / "quick")  # its records say how many steps there were
    for record in (store.read("train", key) for key in store.keys("train")[::3]):
        job = record.inputs
        found = estimate(job, [cost(job, 1.0)])
        assert found is not None
        rounds = job.protocol.rounds * job.protocol.participants
        assert found.seconds == rounds * record.facts.local_steps


# --- costs of finished jobs -----------------------------------------------------------------


def test_what_was_published_of_a_folder_says_the_same(suite: Path, tmp_path: Path) -> None:
    write(tmp_path / "run", expand(suites.read_suite(str(suite))))
    store = Store(tmp_path / "run")
    (tmp_path / "out").mkdir()
    archive = pack([(k, store.read(k, key)) for k in KINDS for key in store.keys(k)])
    (tmp_path / "out" / ARCHIVE).write_bytes(archive)
    assert finished(tmp_path / "out") == finished(tmp_path / "run")
    assert len(finished(tmp_path / "out")) == 15


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
    found = finished(tmp_path)
    assert found.keys() == {"a" * 24, "b" * 24, "c" * 24}  # a failed job is run again
    assert found["c" * 24] is None
    taken = found["b" * 24]
    assert taken is not None
    assert (taken.seconds, taken.grows) == (7.0, False)


def test_the_shipped_costs_say_where_they_were_measured() -> None:
    data = json.loads(Path(module.__file__).with_name("costs.json").read_text())
    for source in data["sources"]:
        assert {"device", "name", "command", "clock", "versions", "date"} <= set(source)
        assert {Group(*row[0]).device for row in source["costs"]} == {source["device"]}
    groups = [c.group for c in shipped()]
    assert len(set(groups)) == len(groups)


def test_the_shipped_costs_tell_what_the_published_run_of_quick_took() -> None:
    store = Store(ROOT / "results" / "quick")
    records = [store.read(kind, key) for kind in KINDS for key in store.keys(kind)]
    seconds = sum(r.seconds for r in records if isinstance(r, DoneRecord))
    seconds += sum(r.doubled.seconds for r in records if isinstance(r, AttackRecord) and r.doubled)
    made = expand(suites.read_suite("quick", ["seeds=[0, 1, 2]"]))
    known = Costs([shipped()], Environment())
    found = [known.of(job, "cpu") for job in (*made.trainings, *made.cells)]
    assert sum(cost.seconds for cost in found if cost) == pytest.approx(seconds, rel=0.2)


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
    assert told["hours"]["cpu"] * 3600 == pytest.approx(sum(seconds))
    assert told["wall_hours"] == pytest.approx(told["hours"]["cpu"] / 2)
    assert told["unlike"]["cpu"] == 0
    assert told["bytes"] > 3 * 5000
    assert told["peak_host_bytes"] == 7e8
    assert (told["rows"][0]["trainings"], told["rows"][0]["cells"]) == (3, 12)
    text = " ".join(plan(*arguments).split())
    assert "3 trainings (0 cached), 12 attack cells (0 cached)." in text
    assert "core-hours, by medians of measured jobs." in text
    assert "epsilon=0.5" not in text
    assert "epsilon=0.5" in plan(*arguments, "--list")
    # What the folder holds costs nothing.
    planned, keys = launch.planned(suites.load(str(suite)), {}, Environment(device="cpu"))
    for job in planned.trainings:
        none = NoResult(status="not_applicable", reason="", inputs=job)
        Store(out).write("train", keys.train(job), none)
    told = json.loads(plan(*arguments, "--json"))
    assert (told["cached_trainings"], told["cached_cells"]) == (3, 0)
    assert told["hours"]["cpu"] * 3600 == pytest.approx(sum(seconds[3:]))


def test_a_device_on_which_nothing_was_measured_is_said_to_be_unknown(suite: Path) -> None:
    text = plan(suite, "--device", "cuda")
    assert "No cell was measured on a GPU yet, so no GPU-hours" in text
    assert "core-hours" in text
    assert "With --jobs" not in text


def test_a_disk_that_is_too_small_is_pointed_out(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: small)
    assert "likely too small" in plan(suite)


def test_a_folder_without_records_is_refused(suite: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(suite), "--costs", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no records" in result.stderr
