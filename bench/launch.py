"""How a suite is run, whether the command line or `bench.run` asks: environment, plan, workers,
progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import jobs, runner
from bench import suite as suites
from bench.store import Store

if TYPE_CHECKING:
    from rich.console import Console

OnProgress = Callable[[runner.Progress], None]
_LINUX = sys.platform == "linux"


def environment(
    *,
    device: str = "auto",
    data_dir: Path | None = None,
    download: bool = False,
    plugins: Sequence[Path] = (),
) -> jobs.Environment:
    """Where jobs run. data_dir: by default the environment variable LEAKBENCH_DATA.

    Raises ValueError for a device or a data folder that this machine does not have.
    """
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got '{device}'.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: this machine has no CUDA device that torch can use.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if data_dir is None and os.environ.get("LEAKBENCH_DATA"):
        data_dir = Path(os.environ["LEAKBENCH_DATA"])
    if data_dir is not None and not data_dir.is_dir() and not download:
        raise ValueError(f"no such data folder: {data_dir}.")
    return jobs.Environment(
        device=device,
        data_dir=data_dir.resolve() if data_dir else None,
        download=download,
        plugins=tuple(p.resolve() for p in plugins),
    )


def planned(
    suite: suites.Suite, only: Mapping[str, Any], env: jobs.Environment
) -> tuple[suites.Plan, runner.Keys]:
    """The checked plan and the keys of its jobs. Raises ValueError with one sentence for whatever
    can be found wrong before any work."""
    jobs.plugins.cache_clear()  # a plugin that was edited since this process ran it is another one
    registry = jobs.plugins(env.plugins)
    plan = suites.expand(suite, only)
    runner.check(plan, registry, env)
    return plan, runner.Keys(registry, env)


def store_of(plan: suites.Plan, out: Path | None) -> Store:
    """The result folder: `out`, or leakbench-runs/SUITE."""
    return Store(out or Path("leakbench-runs") / plan.suite.name)


def default_workers(device: str) -> int:
    """One worker on a GPU; on a CPU one single-threaded worker per core, up to four, since each
    takes about 0.9 GB."""
    if device != "cpu":
        return 1
    return max(1, min(4, len(os.sched_getaffinity(0)) if _LINUX else os.cpu_count() or 1))


def execute(
    plan: suites.Plan,
    keys: runner.Keys,
    store: Store,
    *,
    workers: int,
    fresh: bool,
    command: Sequence[str],
    on_progress: OnProgress,
) -> runner.Report:
    """Make what is missing while holding the folder; see `runner.run`. Raises ValueError if
    another driver holds it."""
    with store.locked(), _one_thread(workers == 0):
        return runner.run(
            plan, store, keys, workers=workers, fresh=fresh, command=command,
            on_progress=on_progress,
        )  # fmt: skip


@contextmanager
def _one_thread(here: bool) -> Iterator[None]:
    """Where jobs run in this process: one thread as in a worker, so that figures do not depend
    on the number of jobs."""
    import torch

    if not here:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def live(plan: suites.Plan, console: Console) -> Iterator[OnProgress]:
    """Progress with time left on a terminal, a line every tenth of the way elsewhere."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    view = Progress(
        TextColumn("[bold]{task.fields[suite]}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn(
            "{task.fields[label]}",
            style="dim",
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        expand=True,
    )
    total = len(plan.trainings) + len(plan.cells)
    last = 0
    with view:
        bar = view.add_task("", total=total, suite=plan.suite.name, failed=0, label="starting")

        def on_progress(progress: runner.Progress) -> None:
            nonlocal last
            view.update(bar, completed=progress.done, failed=progress.failed, label=progress.label)
            tenth = 10 * progress.done // progress.total
            if not console.is_terminal and tenth > last:
                last = tenth
                console.print(f"{progress.done} of {progress.total} done, {progress.failed} failed")

        yield on_progress
