"""What a run shows while it goes: jobs that are done, and the time that is left."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.harness import runner
from bench.harness.costs import Costs, shipped
from bench.harness.keys import Keys
from bench.harness.plan import Plan
from bench.records import AttackJob, TrainJob

if TYPE_CHECKING:
    from rich.console import Console

_SILENCE_S = 60.0
"""Without a terminal, a line is printed at the latest so long after the last one, as jobs end."""


def duration(seconds: float) -> str:
    """Format seconds as 40 s, 6 min, 3 h 40 min or 2.1 days."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:,.{1 if seconds < 864000 else 0}f} days"
    minutes = round(seconds / 60)
    whole, left = divmod(minutes, 60)
    return f"{whole} h {left} min" if whole else f"{left} min"


def estimated_seconds(plan: Plan, keys: Keys) -> dict[TrainJob | AttackJob, float]:
    """Seconds of each job of a plan, by the costs that come with leakbench.

    Where none was measured on the plan's kind of device, those of a CPU are used: how jobs compare
    is what matters to the time left.
    """
    costs, kind = Costs([shipped()], keys.env), keys.env.device.split(":")[0]
    device = kind if kind in costs.devices else "cpu"
    jobs: list[TrainJob | AttackJob] = [*plan.trainings, *plan.cells]
    # None is free: starting a job takes time as well.
    return {j: max(0.05, c.seconds if (c := costs.of(j, device)) else 0.0) for j in jobs}


@dataclass(kw_only=True)
class TimeLeft:
    """Estimates when a run ends: the estimated seconds of the jobs that are left, at the pace of
    those that were run since it began. What was finished before tells nothing of the pace.

    Attributes:
        seconds: Estimated, by job.
        began: When the run did, by `time.monotonic`.
    """

    seconds: dict[TrainJob | AttackJob, float]
    began: float
    _left: float = field(init=False)
    _ran: float = 0.0
    _end: float | None = None

    def __post_init__(self) -> None:
        self._left = sum(self.seconds.values())

    def take(self, progress: runner.Progress, now: float) -> None:
        """Count a job that ended at `now`."""
        took = self.seconds[progress.job]
        self._left -= took
        if not progress.cached:
            self._ran += took
            self._end = now + self._left * (now - self.began) / self._ran

    def at(self, now: float) -> float | None:
        """Seconds, None before a job was run."""
        return None if self._end is None else max(0.0, self._end - now)


@contextmanager
def live(plan: Plan, keys: Keys, console: Console) -> Iterator[runner.OnProgress]:
    """Show progress with the time left: a bar on a terminal; elsewhere a line every tenth of the
    way and every minute."""
    from rich import progress as bars
    from rich.table import Column

    left = TimeLeft(seconds=estimated_seconds(plan, keys), began=time.monotonic())

    def words() -> str:
        seconds = left.at(time.monotonic())
        return "" if seconds is None else f"{duration(seconds)} left"

    class LeftColumn(bars.ProgressColumn):
        def render(self, task: bars.Task) -> str:
            return words()

    view = bars.Progress(
        bars.TextColumn("{task.fields[suite]}", style="bold", markup=False),
        bars.BarColumn(bar_width=20),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[failed]} failed"),
        bars.TimeElapsedColumn(),
        LeftColumn(),
        bars.TextColumn(
            "{task.fields[label]}",
            style="dim",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        expand=True,
    )
    total = len(plan.trainings) + len(plan.cells)
    tenth, printed = 0, left.began
    with view:
        bar = view.add_task("", total=total, suite=plan.suite.name, failed=0, label="starting")

        def on_progress(progress: runner.Progress) -> None:
            nonlocal tenth, printed
            now = time.monotonic()
            left.take(progress, now)
            view.update(bar, completed=progress.done, failed=progress.failed, label=progress.label)
            reached = 10 * progress.done // progress.total
            if not console.is_terminal and (reached > tenth or now - printed > _SILENCE_S):
                tenth, printed = reached, now
                ending = f", {words()}" if words() and progress.done < progress.total else ""
                console.print(
                    f"{progress.done} of {progress.total} done, {progress.failed} failed{ending}",
                    highlight=False,
                )

        yield on_progress
