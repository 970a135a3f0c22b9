"""A driver that is killed at any moment, and a disk that is full at any write: no record is lost,
changed or half there."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from bench.errors import UserError
from bench.harness.executors.task import Executor, Outcomes, Task, guard
from bench.harness.keys import Keys
from bench.harness.launch import local
from bench.harness.plan import Plan
from bench.harness.store import Store
from bench.harness.train import Training
from bench.records import read_outcome
from bench.report import site
from bench.seeding import numpy_generator
from tests import runs
from tests.runs import contents, planned
from tests.small_folders import SUITE, call, said


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Keys, Store]:
    """A run that nothing disturbed."""
    place = tmp_path_factory.mktemp("finished")
    (place / "tiny.toml").write_text(SUITE.replace("checkpoints", "seeds = [0, 1]\ncheckpoints"))
    plan, keys = planned(place / "tiny.toml")
    store = Store(place / "out")
    assert runs.made(plan, keys, store, local(plan, keys.env, workers=0)).failures == []
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
    wanted = contents(made)
    for path in place.folder.glob("records/*/*.json"):
        record = read_outcome(path, path.parent.name)  # type: ignore[call-overload]
        assert place.damage(path.stem, record) is None
        name = str(path.relative_to(place.folder))
        assert contents(place)[name] == wanted[name]
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
    finished: tuple[Plan, Keys, Store],
    tmp_path: Path,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
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
        with pytest.raises(UserError, match="No space left on device"):
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
