"""Worker processes of this machine that stay alive, with limits, and deaths survived."""

import multiprocessing
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait

from bench.harness.executors.integrity import OwnFunctions
from bench.harness.executors.memory import keep_to_share, resident, share_of
from bench.harness.executors.task import BROKEN, SCORES, Ended, Outcomes, Task, carry_out, next_of
from bench.toolkit import processes

_TICK_S = 0.5
GRACE_S = 600.0
"""How long beyond a job's limit its worker may take to start, to import what the job needs and to
stop it; on a machine that is overloaded, a minute is not rare."""
_PRELOADED = (
    *("torch", "torchvision", "sklearn.datasets", "scipy.optimize", "skimage.metrics"),
    *("bench.harness.train", "bench.harness.attack", "bench.harness.scoring"),
)
"""What the server process imports from which workers are forked: no plugin."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Worker processes of one thread that carry out tasks.

    Attributes:
        count: Processes.
        timeout_s: Limit of one job, from when its worker has imported what it needs.
        memory: Bytes that one worker may hold, None for its share of the machine's.
        gpus: Names of the GPUs as CUDA_VISIBLE_DEVICES has them, which the workers take in turn;
            empty on a CPU.
    """

    count: int
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
        return {"CUDA_VISIBLE_DEVICES": self.gpus[mine], processes.GPU_SHARE: f"{share:.6f}"}

    def __call__(self, tasks: deque[Task]) -> Outcomes:
        """Carry out the tasks in their order, and those added meanwhile; scores in a process of
        their own beside the workers.

        A task over a limit kills its worker and ends as `timeout` or `failed`; a worker that dies
        (signal, exit) ends its task as `failed`; both workers are replaced and the run goes on.
        """
        pool: list[_Worker] = []
        try:
            while tasks or any(w.task for w in pool):
                waiting = sum(t.room != SCORES for t in tasks)
                at_work = [w for w in pool if not w.scores]
                needed = waiting + sum(w.task is not None for w in at_work)
                for number in range(len(at_work), min(self.count, needed)):
                    pool.append(_Worker(self, number))
                if len(tasks) > waiting and len(pool) == len(at_work):
                    pool.append(_Worker(self, self.count, scores=True))
                for worker in pool:
                    if worker.task is None:
                        others = {w.at for w in pool if w is not worker}
                        task = next_of(tasks, worker.at, others, worker.scores)
                        if task is not None:
                            worker.give(task)
                busy = [w for w in pool if w.task]
                wait([w.pipe for w in busy], timeout=_TICK_S)
                for worker in busy:
                    task = worker.task
                    ended = worker.collect()
                    if task is not None and ended is not None:
                        yield task, ended
        finally:
            for worker in pool:
                worker.stop()


def start_server() -> None:
    """Start the server process from which workers are forked, if there is none: its imports take
    seconds, in which a run can be planned."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOADED))
    with processes.environment_variables({"OMP_NUM_THREADS": "1", **processes.KEEP_MEMORY}):
        forkserver.ensure_running()


class _Worker:
    """One process and the pipe to it; replaced when it dies or is killed, and before a task of
    another room.

    Attributes:
        task: What it is at.
        at: Room and group of its last task.
        scores: Whether it takes scores only.
        began: When the task was given.
    """

    def __init__(self, settings: Workers, number: int, *, scores: bool = False) -> None:
        self.settings, self.number, self.scores = settings, number, scores
        self.memory = settings.memory or share_of(settings.count)
        self.task: Task | None = None
        self.at = ("", "")
        self.began = 0.0
        self._spawn()

    def _spawn(self) -> None:
        start_server()
        context = multiprocessing.get_context("forkserver")
        self.pipe, far = context.Pipe()
        own = {"OMP_NUM_THREADS": "1", **os.environ}
        own |= {} if self.scores else self.settings.surroundings(self.number)
        given = far, own, self.settings.timeout_s
        self.process = context.Process(target=_serve, args=given, daemon=True)
        self.process.start()
        far.close()

    def give(self, task: Task) -> None:
        full = resident(self.process.pid or 0) > self.memory // 2
        if full or self.at[0] not in ("", task.room):
            # What earlier jobs leaked must not fail this one, nor what they changed reach it.
            self._renew()
        self.task, self.at = task, (task.room, task.group)
        self.began = time.monotonic()
        with suppress(OSError):  # it died between two tasks: `collect` finds that
            self.pipe.send(task.work)

    def collect(self) -> Ended | None:
        """What the finished task left, or None while it runs."""
        try:
            ended = self.pipe.recv() if self.pipe.poll() else self._check_limits()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            end = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
            ended = Ended.lost(f"the worker process {end}")
        if ended is not None:
            self.task = None
            if ended.record.status in BROKEN:
                self._renew()
        return ended

    def _check_limits(self) -> Ended | None:
        """Return the end of a task that its worker could not stop in time, or that takes too much
        memory."""
        limit = self.settings.timeout_s
        if time.monotonic() - self.began > limit + GRACE_S:
            return Ended.over_time(limit)
        if resident(self.process.pid or 0) > self.memory:
            return Ended.lost(f"over the memory limit of {self.memory / 1e9:.3g} GB for one worker")
        return None

    def _renew(self) -> None:
        self.stop()
        self._spawn()

    def stop(self) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _serve(pipe: Connection, own: dict[str, str], timeout_s: float) -> None:
    """A worker's loop: take work, give back what it left."""
    processes.serve_parent()
    os.environ.clear()  # those of the server process may be older
    os.environ.update(own)
    import torch

    torch.set_num_threads(1)
    keep_to_share()
    functions = OwnFunctions()
    while True:
        try:
            work = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(carry_out(work, timeout_s, functions))
