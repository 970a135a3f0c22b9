"""Worker processes of this machine that stay alive, with limits, and deaths survived."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Literal

from bench.attempts import watch_as_told
from bench.harness.executors.memory import keep_to_share, resident
from bench.harness.executors.task import Outcome, Task, guarded, lost, next_of, outcome_of
from bench.toolkit.processes import GPU_SHARE, KEEP_MEMORY, environment_variables

_TICK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Worker processes that carry out tasks.

    Attributes:
        count: Processes.
        threads: Of each.
        timeout_s: Limit of one job.
        memory: Bytes that one worker may hold, None for no limit.
        gpus: Names of the GPUs as CUDA_VISIBLE_DEVICES has them, which the workers take in turn;
            empty on a CPU.
    """

    count: int
    threads: int
    timeout_s: float
    memory: int | None = None
    gpus: tuple[str, ...] = ()

    def surroundings(self, number: int) -> dict[str, str]:
        """Environment variables of worker `number` that pick its GPU and its share of it."""
        if not self.gpus:
            return {}
        from bench.toolkit.memory import gpu_share

        mine = number % len(self.gpus)
        beside = len(range(mine, self.count, len(self.gpus)))
        share = gpu_share() / beside
        return {"CUDA_VISIBLE_DEVICES": self.gpus[mine], GPU_SHARE: f"{share:.6f}"}

    def __call__(self, tasks: deque[Task]) -> Generator[Outcome]:
        """Carry out the tasks in their order, and those added meanwhile.

        A task over a limit kills its worker and ends as `timeout` or `failed`; a worker that dies
        (signal, exit) ends its task as `failed`; both workers are replaced and the run goes on.
        """
        pool: list[_Worker] = []
        try:
            while tasks or any(w.task for w in pool):
                needed = len(tasks) + sum(w.task is not None for w in pool)
                while len(pool) < min(self.count, needed):
                    pool.append(_Worker(self, len(pool)))
                for worker in pool:
                    if worker.task is None and tasks:
                        others = {w.group for w in pool if w is not worker}
                        worker.give(next_of(tasks, worker.group, others))
                busy = [w for w in pool if w.task]
                wait([w.pipe for w in busy], timeout=_TICK_S)
                for worker in busy:
                    outcome = worker.outcome()
                    if outcome is not None:
                        yield outcome
        finally:
            for worker in pool:
                worker.stop()


class _Worker:
    """One process and the pipe to it; respawned when it dies or is killed."""

    def __init__(self, settings: Workers, number: int) -> None:
        self.settings, self.number = settings, number
        self.task: Task | None = None
        self.group = ""
        self.began = 0.0
        self._spawn()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        own = self.settings.surroundings(self.number)
        threads = self.settings.threads
        self.process = context.Process(target=_serve, args=(far, threads, own), daemon=True)
        with environment_variables({"OMP_NUM_THREADS": str(threads), **KEEP_MEMORY}):
            self.process.start()
        far.close()

    def give(self, task: Task) -> None:
        limit = self.settings.memory
        if limit is not None and resident(self.process.pid or 0) > limit // 2:
            # What earlier jobs leaked must not fail this one.
            self.stop()
            self._spawn()
        self.task, self.group, self.began = task, task.group, time.monotonic()
        try:
            self.pipe.send(task.work)
        except OSError:
            return  # it died between two tasks: `outcome` finds that

    def outcome(self) -> Outcome | None:
        """The finished task's outcome, or None while it runs."""
        assert self.task is not None
        task, settings = self.task, self.settings
        try:
            if self.pipe.poll():
                ended = self.pipe.recv()
                self.task = None
                return outcome_of(task, ended)
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            end = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
            return self._ended(task, "failed", f"the worker process {end}")
        if time.monotonic() - self.began > settings.timeout_s:
            return self._ended(task, "timeout", f"over the limit of {settings.timeout_s:g} s")
        held = resident(self.process.pid or 0) if settings.memory is not None else 0
        if settings.memory is not None and held > settings.memory:
            reason = f"over the memory limit of {settings.memory / 1e9:.3g} GB for one worker"
            return self._ended(task, "failed", reason)
        return None

    def _ended(self, task: Task, status: Literal["failed", "timeout"], reason: str) -> Outcome:
        self.stop()
        self.task = None
        self._spawn()
        return lost(task, status, reason)

    def stop(self) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _serve(pipe: Connection, threads: int, own: dict[str, str]) -> None:
    """A worker's loop: take work, give back what it left."""
    import signal
    import threading

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when to stop
    threading.Thread(target=_end_with_driver, daemon=True).start()
    os.environ.update(own)
    watch_as_told()
    import torch

    torch.set_num_threads(threads)
    keep_to_share()
    while True:
        try:
            work = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(guarded(work))


def _end_with_driver() -> None:
    """A driver that is killed takes its workers along: they would go on for hours, for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
