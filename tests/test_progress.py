"""What a run shows while it goes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import suite as suites
from bench.harness import launch, progress, runner
from bench.harness.environment import Environment, registry_for
from bench.harness.keys import Keys
from bench.harness.plan import Plan, expand
from bench.harness.store import Store


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (3.6, "4 s"), (360, "6 min"), (13176, "3 h 40 min"), (181440, "2.1 days")],
)
def test_a_duration_is_read_in_seconds_minutes_hours_or_days(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text


def _told(job: Any, *, cached: bool = False) -> runner.Progress:
    return runner.Progress(total=4, done=1, failed=0, label="", job=job, cached=cached)


def test_time_left_stands_on_what_ran_and_not_on_what_was_finished_before() -> None:
    jobs: list[Any] = list("abcd")
    left = progress.TimeLeft(
        seconds=dict(zip(jobs, (100.0, 10.0, 20.0, 30.0), strict=True)), began=0.0
    )
    left.take(_told("a", cached=True), 0.1)
    assert left.at(0.1) is None  # what was read from disk says nothing of the machine's pace
    left.take(_told("b"), 5.0)  # twice as fast as estimated: 50 s of work are left
    assert left.at(5.0) == pytest.approx(25.0)
    assert left.at(15.0) == pytest.approx(15.0)
    left.take(_told("c"), 30.0)  # 30 s of work took 30 s
    assert left.at(30.0) == pytest.approx(30.0)
    assert left.at(99.0) == 0.0
    left.take(_told("d"), 60.0)
    assert left.at(60.0) == 0.0


def _planned(suite: Path) -> tuple[Plan, Keys]:
    env = Environment()
    return expand(suites.read_suite(str(suite))), Keys(registry_for(()), env)


def test_every_job_of_a_suite_has_estimated_seconds(tiny: Callable[..., Path]) -> None:
    plan, keys = _planned(tiny())
    told = progress.estimated_seconds(plan, keys)
    assert set(told) == {*plan.trainings, *plan.cells}
    assert all(s > 0 for s in told.values())


def _lines(plan: Plan, keys: Keys, store: Store) -> list[str]:
    text = io.StringIO()
    with progress.live(plan, keys, Console(file=text, width=80)) as on_progress:
        runner.run(
            plan, store, keys, executor=launch.local(plan, keys.env, workers=0),
            on_progress=on_progress,
        )  # fmt: skip
    return text.getvalue().splitlines()


def test_without_a_terminal_lines_tell_of_the_way_and_of_the_time_left(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plan, keys = _planned(tiny())
    store = Store(tmp_path / "out")
    store.prepare()
    lines = _lines(plan, keys, store)
    total = len(plan.trainings) + len(plan.cells)
    assert len(lines) == 10
    assert all(line.endswith(" left") for line in lines[:-1])
    assert lines[-1] == f"{total} of {total} done, 0 failed"
    assert not any("left" in line for line in _lines(plan, keys, store))  # nothing was run


@pytest.mark.slow
def test_a_line_comes_after_a_minute_of_silence(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, keys = _planned(tiny())
    store = Store(tmp_path / "out")
    store.prepare()
    monkeypatch.setattr(progress, "_SILENCE_S", 0.0)
    assert len(_lines(plan, keys, store)) == len(plan.trainings) + len(plan.cells)
