"""What goes wrong in long runs: nothing is lost, nothing is made twice, figures stay the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.harness import launch, runner, store
from bench.harness.plan import Plan
from bench.harness.store import Store
from bench.records import read_outcome
from bench.seeding import numpy_generator
from tests import runs
from tests.runs import contents, planned

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


def made(plan: Plan, keys: runner.Keys, place: Store, **settings: Any) -> runner.Report:
    """By local workers, or in this process without a word of them."""
    executor = launch.local(plan, keys.env, **(settings or {"workers": 0}))
    return runs.made(plan, keys, place, executor)


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
    report = made(plan, keys, place, workers=1, memory=2.2)
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


def test_a_record_that_cannot_be_written_ends_the_run_with_one_sentence(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, out = tiny(), tmp_path / "out"
    whole = store.write_whole

    def full(path: Path, text: str) -> None:
        if path.parent.name == "attack":
            raise OSError(28, "No space left on device")
        whole(path, text)

    command = ["run", str(suite), "--device", "cpu", "--jobs", "0", "--out", str(out),
               "--only", "defense=none"]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_whole", full)
        stopped = CliRunner().invoke(app, command)
    assert stopped.exit_code == 2
    assert "No space left on device" in stopped.output
    assert "run the same command to go on" in " ".join(stopped.output.split())
    assert "Traceback" not in stopped.output
    assert len(list(out.glob("records/train/*.json"))) == 1
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert "4 run, 1 cached, 0 failed" in again.output


# --- clock and company --------------------------------------------------------------------------


def test_a_second_driver_is_refused_and_disturbs_nothing(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    suite, place = tiny(), Store(tmp_path / "out")
    place.prepare()
    under_way = place.scratch("key")
    under_way.mkdir(parents=True)
    with place.locked():
        second = CliRunner().invoke(
            app, ["run", str(suite), "--device", "cpu", "--jobs", "0", "--out", str(place.folder)]
        )
    assert second.exit_code == 2
    assert "another leakbench run is writing to" in " ".join(second.output.split())
    assert under_way.is_dir()
    assert not list(place.folder.glob("records/*/*.json"))
