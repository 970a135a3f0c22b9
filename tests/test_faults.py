"""What goes wrong in long runs: nothing is lost, nothing is made twice, figures stay the same, and
what has not run is called pending, never failed."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.errors import UserError
from bench.harness import launch, runner
from bench.harness.executors.local import Workers
from bench.harness.executors.task import Executor, Outcomes, Task, guard
from bench.harness.keys import Keys
from bench.harness.plan import Plan
from bench.harness.store import Store
from bench.harness.train import Training
from bench.records import FlagCode, read_json, read_outcome
from bench.report import leaderboard, site
from bench.report.files import Files
from bench.report.overview import overview
from bench.seeding import numpy_generator
from tests import runs
from tests.conftest import Run
from tests.runs import contents, planned
from tests.small_folders import SUITE, call, said

LEAKY = '''
import ctypes, time
import torch
from bench.contract.attack import Attack, Reconstruction

KEPT = []

def answer(seen, ctx):
    x = torch.rand(len(seen.clients), 1, *ctx.network.shape, generator=ctx.rng)
    return Reconstruction(images=x)

class Leaks(Attack):
    """Takes memory until it is stopped."""
    def run(self, seen, ctx):
        while True:
            KEPT.append(torch.ones(25_000_000))
            time.sleep(0.05)

class Keeps(Attack):
    """Ends well, and keeps a gigabyte for ever."""
    def run(self, seen, ctx):
        KEPT.append(torch.ones(250_000_000))
        return answer(seen, ctx)

class Segfaults(Attack):
    """Reads what is not there."""
    def run(self, seen, ctx):
        ctypes.string_at(0)
'''


def made(plan: Plan, keys: runner.Keys, place: Store, workers: int = 0) -> runner.Report:
    """By local workers, or in this process without a word of them."""
    return runs.made(plan, keys, place, launch.local(plan, keys.env, workers=workers))


@pytest.fixture
def leaky(tmp_path: Path) -> tuple[Path, ...]:
    path = tmp_path / "leaky.py"
    path.write_text(LEAKY)
    return (path,)


# --- processes that die or grow ---------------------------------------------------------------


@pytest.mark.slow
def test_a_leaking_and_a_crashing_plugin_end_alone(
    tiny: Callable[..., Path], leaky: tuple[Path, ...], tmp_path: Path
) -> None:
    """`keeps` runs twice and would be over the limit in one process: it gets a fresh one."""
    names = ("keeps", "leaks", "segfaults")
    suite = tiny(append="".join(f'\n[[attacks]]\nname = "{n}"\n' for n in names))
    plan, keys = planned(suite, leaky, defense="none", attack=[*names, "ilrg"])
    place = Store(tmp_path / "out")
    workers = Workers(count=1, timeout_s=plan.suite.timeout_s, memory=int(2.2e9))
    report = runs.made(plan, keys, place, workers)
    reasons = {label.split()[-3]: reason for label, reason in report.failures}
    assert reasons == {
        "leaks": "failed: over the memory limit of 2.2 GB for one worker",
        "segfaults": "failed: the worker process was killed by signal 11",
    }
    records = [json.loads(p.read_text()) for p in place.folder.glob("records/attack/*.json")]
    kept = [r for r in records if r["inputs"]["attack"] == "keeps"]
    assert [r["status"] for r in kept] == ["done", "done"]
    assert all(1e9 < r["memory"]["host"] < 2.2e9 for r in kept)


@pytest.mark.slow
def test_a_driver_killed_at_random_times_takes_its_workers_along_and_loses_nothing(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    suite = tiny(append='\n[[attacks]]\nname = "dlg"\n')
    plan, keys = planned(suite)
    place, undisturbed = Store(tmp_path / "out"), Store(tmp_path / "undisturbed")
    command = [sys.executable, "-m", "bench.cli", "run", str(suite), "--device", "cpu",
               "--out", str(place.folder), "--jobs", "2"]  # fmt: skip
    rng = numpy_generator(1, "kills")
    kills = 0
    whole: dict[Path, int] = {}
    while True:
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert driver.wait(timeout=float(rng.uniform(5, 25))) == 0
            break
        except subprocess.TimeoutExpired:
            workers = psutil.Process(driver.pid).children(recursive=True)
            driver.kill()
            driver.wait()
        kills += 1
        assert kills < 30
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
        for path in place.folder.glob("records/*/*.json"):
            assert read_outcome(path, path.parent.name)  # type: ignore[call-overload]
            stamp = path.stat().st_mtime_ns
            assert whole.setdefault(path, stamp) == stamp  # made once
    assert kills
    made(plan, keys, undisturbed)
    assert contents(place) == contents(undisturbed)


# --- files --------------------------------------------------------------------------------------


def test_cut_or_lost_files_are_made_again(tiny: Callable[..., Path], tmp_path: Path) -> None:
    plan, keys = planned(tiny(), defense="none", checkpoint="init", attack="ilrg")
    place = Store(tmp_path / "out")
    made(plan, keys, place)
    before = contents(place)
    (training,), cell = plan.trainings, plan.cells[0]
    record = place.path("train", keys.train(training))
    seen = next(place.artifacts(keys.train(training)).glob("*-seen.safetensors"))

    everything = 1 + len(plan.cells)

    os.truncate(record, 40)
    assert made(plan, keys, place).ran == everything
    assert contents(place) == before

    os.truncate(seen, 100)
    assert made(plan, keys, place).ran == 0  # no cell is open that needs it
    place.path("attack", keys.attack(cell)).unlink()
    assert made(plan, keys, place).ran == everything
    assert contents(place) == before

    shutil.rmtree(place.artifacts(keys.train(training)))
    place.path("attack", keys.attack(cell)).unlink()
    assert made(plan, keys, place).ran == everything
    assert contents(place) == before

    (place.folder / "run.json").write_text("{")
    (place.folder / "scratch" / "left").mkdir(parents=True)
    assert made(plan, keys, place).ran == 0
    assert json.loads((place.folder / "run.json").read_text())["suite"]["name"] == "tiny"
    assert not (place.folder / "scratch").exists()


# --- clock and company --------------------------------------------------------------------------


def test_a_second_driver_is_refused_and_disturbs_nothing(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    suite, place = tiny(), Store(tmp_path / "out")
    under_way = place.scratch("key")
    under_way.mkdir(parents=True)
    with place.lock():
        second = CliRunner().invoke(
            app, ["run", str(suite), "--device", "cpu", "--jobs", "0", "--out", str(place.folder)]
        )
    assert second.exit_code == 2
    assert "another leakbench run is writing to" in " ".join(second.output.split())
    assert under_way.is_dir()
    assert not list(place.folder.glob("records/*/*.json"))


# --- writing ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Keys, Store]:
    """A run that nothing disturbed."""
    place = tmp_path_factory.mktemp("finished")
    (place / "tiny.toml").write_text(SUITE)
    plan, keys = planned(place / "tiny.toml")
    store = Store(place / "out")
    assert made(plan, keys, store).failures == []
    return plan, keys, store


def replaying(made: Store) -> Executor:
    """Leaves what an earlier run made at once, so that a run does little but write."""

    def copy(task: Task) -> Any:
        key = task.work.artifacts.name
        if made.artifacts(key).is_dir():
            shutil.copytree(made.artifacts(key), task.work.artifacts)
        kind: Any = "train" if isinstance(task.work, Training) else "attack"
        return made.read(kind, key)

    def go(tasks: deque[Task]) -> Outcomes:
        while tasks:
            task = tasks.popleft()
            yield task, guard(lambda task=task: copy(task))  # type: ignore[arg-type,misc]

    return go


def check_whole(place: Store, made: Store, stamps: dict[Path, int]) -> None:
    """Every record that is there is the one that it should be, with its files, and as it was."""
    wanted, there = contents(made), contents(place)
    for path in place.folder.glob("records/*/*.json"):
        record = read_outcome(path, path.parent.name)  # type: ignore[call-overload]
        assert place.damage(path.stem, record) is None
        name = str(path.relative_to(place.folder))
        assert there[name] == wanted[name]
        assert stamps.setdefault(path, path.stat().st_mtime_ns) == path.stat().st_mtime_ns
    assert all(path.exists() for path in stamps)


def killed(plan: Plan, keys: Keys, place: Store, made: Store, after_s: float | None) -> bool:
    """Run in a process of its own, and kill it after so long; whether it was not done before."""
    child = os.fork()
    if child == 0:
        try:
            runs.made(plan, keys, place, replaying(made))
        finally:
            os._exit(0)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    "count", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_a_driver_killed_while_it_writes_loses_and_changes_no_record(
    finished: tuple[Plan, Keys, Store], tmp_path: Path, count: int
) -> None:
    plan, keys, made = finished
    began = time.monotonic()
    assert not killed(plan, keys, Store(tmp_path / "whole"), made, None)
    takes = time.monotonic() - began
    assert contents(Store(tmp_path / "whole")) == contents(made)
    rng = numpy_generator(count, "kills")
    kills = turn = 0
    while kills < count:
        place, stamps, turn = Store(tmp_path / str(turn)), {}, turn + 1  # type: ignore[var-annotated]
        assert turn < 20 * count
        while killed(plan, keys, place, made, float(rng.uniform(0, takes))):
            kills += 1
            check_whole(place, made, stamps)
        check_whole(place, made, stamps)
        assert contents(place) == contents(made)
        assert runs.made(plan, keys, place, replaying(made)).ran == 0


@pytest.mark.parametrize("call", ["replace", pytest.param("fsync", marks=pytest.mark.slow)])
def test_a_disk_that_is_full_at_any_write_leaves_nothing_half_written(
    finished: tuple[Plan, Keys, Store], tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, keys, made = finished
    real, calls = getattr(os, call), 0

    def written(place: Store, fails: int) -> None:
        nonlocal calls
        calls = 0

        def counted(*arguments: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, counted)
            runs.made(plan, keys, place, replaying(made))

    written(Store(tmp_path / "whole"), 0)
    everything = calls
    assert everything
    for fails in range(1, everything + 1):
        place = Store(tmp_path / str(fails))
        with pytest.raises(UserError, match=r"No space left.* is kept; .*run the same command"):
            written(place, fails)
        assert {p.name for p in place.folder.rglob(".*")} <= {".lock"}
        check_whole(place, made, {})
        assert runs.made(plan, keys, place, replaying(made)).failures == []
        assert contents(place) == contents(made)
        shutil.rmtree(place.folder)


def test_a_site_for_which_there_is_no_room_is_not_there(
    finished: tuple[Plan, Keys, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, left = site.write_whole, [3]

    def full(path: Path, text: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        right(path, text)

    monkeypatch.setattr(site, "write_whole", full)
    result = call("site", finished[2].folder, "--out", tmp_path / "site")
    assert result.exit_code == 2
    assert "No space left on device" in said(result)
    assert list(tmp_path.iterdir()) == []


# --- runs that were stopped -----------------------------------------------------------------------


def _forget(store: Store, kind: str, label: str = "") -> None:
    """Remove the records of a kind, or of one attack, of the last setting."""
    run = read_json(store.folder / "run.json")
    training = run["trainings"][-1]
    keys = [training["key"]] if kind == "train" else []
    keys += [c["key"] for c in training["cells"] if label in ("", c["label"])]
    for key in keys:
        for kind_ in ("train", "attack"):
            Store(store.folder).path(kind_, key).unlink(missing_ok=True)  # type: ignore[arg-type]


@pytest.fixture
def stopped(tiny_copy: Path) -> Store:
    return Store(tiny_copy)


def test_a_finished_run_says_nothing_of_it(stopped: Store) -> None:
    assert Files(stopped.folder).missing == []
    assert 'class="missing"' not in Files(stopped.folder).text("html")


def test_an_attack_that_has_not_run_is_pending_and_not_failed(stopped: Store) -> None:
    _forget(stopped, "attack", "ilrg")
    row = next(r for r in leaderboard.rows(stopped.folder) if r.settings == {"epsilon": 2.0})
    entry = row.attacks["ilrg"]
    assert (entry.status, entry.failed) == ("pending", 0)
    codes = [f.code for f in row.flags]
    assert FlagCode.ATTACK_PENDING in codes
    assert FlagCode.ATTACK_FAILED not in codes
    lines = overview([row], 1.0).lines
    assert all(v.doubtful for line in lines for v in line.verdicts if v.row is not None)


def test_every_form_of_a_report_says_how_far_a_stopped_run_is(stopped: Store) -> None:
    _forget(stopped, "train")
    jobs = len(list(stopped.folder.glob("records/*/*.json")))
    words = f"5 of {jobs + 5} jobs have not run yet: the same command goes on with them."
    assert Files(stopped.folder).missing == [words]
    files = Files(stopped.folder)
    assert words in files.text("html")
    assert f"**Missing**: {words}" in files.text("md")
    result = CliRunner().invoke(app, ["report", str(stopped.folder)])
    assert result.exit_code == 0
    assert words in result.stdout


@pytest.mark.slow
def test_every_form_of_a_report_says_that_a_part_of_a_suite_was_run(
    tiny: Callable[..., Path], run: Run
) -> None:
    """Its jobs are counted."""
    split = '[[tasks]]\ndataset = "digits"\nmodel = "mlp_spm"\nprotocol = { rounds = 2 }\n'
    suite = tiny(
        **{"version = 1": "version = 1\nseeds = [0, 1]", "[[threats]]": f"{split}[[threats]]"}
    )
    folder = run(suite, only={"seed": 1, "task": 0})[0].folder
    jobs = len(list(folder.glob("records/*/*.json")))
    words = f"A part of suite tiny was run: {jobs} of its {4 * jobs} jobs."
    files = Files(folder)
    assert files.missing == [words]
    assert words in files.text("html")
    assert f"**Missing**: {words}" in files.text("md")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert words in " ".join(result.stdout.split())
