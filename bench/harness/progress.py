"""What a run shows while it goes: jobs that are done, and the time that is left."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from bench.harness import runner
from bench.harness.plan import Plan

_SILENCE_S = 60.0
"""Without a terminal, a line is printed at the latest so long after the last one, as jobs end."""


def duration(seconds: float) -> str:
    """Format seconds as 40 s, 6 min, 3 h 40 min or 2.1 days."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:,.{1 if seconds < 864000 else 0}f} days"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


@contextmanager
def live(plan: Plan, console: Console) -> Iterator[runner.OnProgress]:
    """Show progress with the time left: a bar on a terminal; elsewhere a line every tenth of the
    way and every minute.

    The time left is that of the jobs that are left at the mean pace of those that were run. What
    was finished before tells nothing of the pace.
    """
    from rich import progress as bars
    from rich.table import Column

    began = time.monotonic()
    end: float | None = None

    def words() -> str:
        return "" if end is None else f"{duration(max(0.0, end - time.monotonic()))} left"

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
        disable=console.quiet or not console.is_terminal,
        transient=True,
        expand=True,
    )
    total = len(plan.trainings) + len(plan.cells)
    tenth, printed = 0, began
    with view:
        bar = view.add_task("", total=total, suite=plan.suite.name, failed=0, label="starting")

        def on_progress(report: runner.Report, label: str, cached: bool) -> None:
            nonlocal tenth, printed, end
            now, done, failed = time.monotonic(), report.done, len(report.failures)
            if report.ran:
                end = now + (total - done) * (now - began) / report.ran
            view.update(bar, completed=done, failed=failed, label=label)
            reached = 10 * done // total
            if not console.is_terminal and (reached > tenth or now - printed > _SILENCE_S):
                tenth, printed = reached, now
                ending = f", {words()}" if words() and done < total else ""
                console.print(f"{done} of {total} done, {failed} failed{ending}", highlight=False)

        yield on_progress
