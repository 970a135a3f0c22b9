"""The local executor: worker processes that stay alive, with time limits, and deaths survived."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from bench.toolkit.processes import KEEP_MEMORY, environment

Function = Callable[..., dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A function of `bench.jobs` with its arguments; label: what to call it in errors."""

    id: int
    label: str
    function: Function
    arguments: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """status done (record from the job), failed (error) or timeout."""

    task: Task
    record: dict[str, Any]


def run_here(tasks: Sequence[Task]) -> Iterator[Outcome]:
    """Run tasks one after another in this process; time limits do not apply."""
    for task in tasks:
        yield Outcome(task=task, record=_guarded(task.function, task.arguments))


def run_in_workers(
    tasks: Sequence[Task], *, jobs: int, threads: int, timeout_s: float
) -> Iterator[Outcome]:
    """Run tasks on `jobs` worker processes of `threads` threads each, in order of `tasks`.

    A task over the limit kills its worker and ends as `timeout`; a worker that dies (signal,
    exit) ends its task as `failed`; both workers are replaced and the run goes on.
    """
    pending = deque(tasks)
    pool = [_Worker(threads) for _ in range(min(jobs, len(tasks)))]
    try:
        while pending or any(w.task for w in pool):
            for worker in pool:
                if worker.task is None and pending:
                    worker.give(pending.popleft())
            busy = [w for w in pool if w.task]
            wait([w.pipe for w in busy], timeout=0.5)
            for worker in busy:
                outcome = worker.outcome(timeout_s)
                if outcome is not None:
                    yield outcome
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    """One process and the pipe to it; respawned when it dies or is killed."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.task: Task | None = None
        self.began = 0.0
        self._spawn()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(far, self.threads), daemon=True)
        with environment({"OMP_NUM_THREADS": str(self.threads), **KEEP_MEMORY}):
            self.process.start()
        far.close()

    def give(self, task: Task) -> None:
        self.task, self.began = task, time.monotonic()
        self.pipe.send((task.function, task.arguments))

    def outcome(self, timeout_s: float) -> Outcome | None:
        """The finished task's outcome, or None while it runs."""
        assert self.task is not None
        task = self.task
        try:
            if self.pipe.poll():
                record = self.pipe.recv()
                self.task = None
                return Outcome(task=task, record=record)
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            end = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
            return self._ended(task, "failed", f"the worker process {end}")
        if time.monotonic() - self.began > timeout_s:
            return self._ended(task, "timeout", f"over the limit of {timeout_s:g} s")
        return None

    def _ended(self, task: Task, status: str, reason: str) -> Outcome:
        self.stop()
        self.task = None
        self._spawn()
        return Outcome(task=task, record={"status": status, "reason": reason})

    def stop(self) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _serve(pipe: Connection, threads: int) -> None:
    """A worker's loop: take (function, arguments), give back a record."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when to stop
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            function, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(_guarded(function, arguments))


def _guarded(function: Function, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The one place that catches Exception: a failing cell is recorded, the run goes on."""
    try:
        return function(*arguments)
    except Exception as error:
        import traceback

        text = " ".join(str(error).split())
        return {
            "status": "failed",
            "reason": f"{type(error).__name__}: {text}"[:500],
            "traceback": traceback.format_exc()[-4000:],
        }
