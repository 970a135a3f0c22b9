"""What a run shows while it goes."""

import io
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from bench.harness import progress, runner
from bench.harness.executors.task import Ended, Outcomes, Task
from bench.harness.keys import Keys
from bench.harness.plan import Plan
from bench.harness.store import Store
from bench.records import NoResult
from bench.report.console import PlainConsole
from tests.runs import planned


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (3.6, "4 s"), (360, "6 min"), (13176, "3 h 40 min"), (181440, "2.1 days")],
)
def test_a_duration_is_read_in_seconds_minutes_hours_or_days(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text


def without_work(tasks: deque[Task]) -> Outcomes:
    while tasks:
        yield tasks.popleft(), Ended(record=NoResult(status="not_applicable", reason="made up"))


def _lines(plan: Plan, keys: Keys, store: Store) -> list[str]:
    text = io.StringIO()
    with progress.live(plan, Console(file=text, width=80)) as on_progress:
        runner.run(plan, store, keys, executor=without_work, on_progress=on_progress)
    return text.getvalue().splitlines()


def test_without_a_terminal_lines_tell_of_the_way_and_of_the_time_left(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plan, keys = planned(tiny())
    store = Store(tmp_path / "out")
    lines = _lines(plan, keys, store)
    total = len(plan.trainings) + len(plan.cells)
    assert len(lines) == 10
    assert all(line.endswith(" left") for line in lines[:-1])
    assert lines[-1] == f"{total} of {total} done, 0 failed"
    assert not any("left" in line for line in _lines(plan, keys, store))  # nothing was run


def test_a_notebook_gets_plain_lines_though_it_asks_for_colours(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert PlainConsole(file=io.StringIO()).is_terminal
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    plan, keys = planned(tiny())
    text = io.StringIO()
    with progress.live(plan, PlainConsole(file=text)) as on_progress:
        runner.run(
            plan, Store(tmp_path / "out"), keys, executor=without_work, on_progress=on_progress
        )
    assert text.getvalue().count(" done, 0 failed") == 10
    assert "\x1b" not in text.getvalue()


def test_a_line_comes_after_a_minute_of_silence(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, keys = planned(tiny())
    store = Store(tmp_path / "out")
    monkeypatch.setattr(progress, "_SILENCE_S", 0.0)
    assert len(_lines(plan, keys, store)) == len(plan.trainings) + len(plan.cells)
