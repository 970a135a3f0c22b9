"""Jobs on a Ray cluster: each is a Ray task, begun anew where its process or node is lost.

Ray moves what a job reads and leaves; only the driver writes to the result folder, so that nodes
need no shared file system. Ray is an optional dependency, imported when this is used.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.files import read_bytes
from bench.harness.environment import Environment, dataset_of, registry_for
from bench.harness.executors.integrity import OwnFunctions
from bench.harness.executors.memory import keep_to_share
from bench.harness.executors.task import (
    SCORES,
    Ended,
    Outcomes,
    Task,
    guard,
    lost,
    over_time,
    prepare,
)
from bench.harness.keys import Code
from bench.harness.work import Work
from bench.names import PluginKind
from bench.records import NoResult
from bench.toolkit.processes import GPU_SHARE, KEEP_MEMORY

_TICK_S = 0.5
_LOSSES = 3
"""So often a job is begun anew because its process or its node was lost."""
_ANSWER_S = 10.0
"""How long a cluster may take to answer at all."""
_KEPT = 64
"""Folders and data sets that stay in the object store, for the jobs that read them."""
Files = Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster that carries out tasks.

    Attributes:
        address: Of a running cluster, "auto" for the one that this machine belongs to.
        cpus: Of each job.
        gpus: Of each job.
        timeout_s: Limit of one job, counted from when the cluster has room for it.
        env: Where jobs run.
        code: Hashes of the source of leakbench and the plan's plugins, which every node must have.
    """

    address: str
    cpus: float
    gpus: float
    timeout_s: float
    env: Environment
    code: Mapping[str, str]

    def __call__(self, tasks: deque[Task]) -> Outcomes:
        """Carry out the tasks in their order, and those added meanwhile.

        A job over its limit ends as `timeout`; one whose process or node is lost is begun anew,
        three times at most, and then ends as `failed`. Raises UserError if there is no cluster, if
        no node could ever hold a job, or if a node has other code.
        """
        ray = _ray()
        connected = _connect(ray, self.address)
        going = _Going(ray, self)
        try:
            while tasks or going.jobs or going.scores:
                for _ in range(min(len(tasks), going.room())):
                    going.begin(tasks.popleft())
                yield from going.ended()
        finally:
            going.stop()
            if connected:
                ray.shutdown()


def _ray() -> Any:
    # Under `uv run` Ray would pack the working folder and start every worker by `uv run` in a copy
    # of it; jobs need this Python alone, and its packages.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "--executor ray needs Ray, which is not installed: pip install 'leakbench[ray]'."
        ) from error
    return ray


def _connect(ray: Any, address: str) -> bool:
    """Return whether this call connected. Raises UserError if there is nothing to connect to."""
    if ray.is_initialized():
        return False
    host, colon, port = address.rpartition(":")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray hides GPUs from jobs that ask for none, and warns that it will not; those use none anyway.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        if colon and port.isdigit() and "://" not in host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray cluster answers at '{address}' ({error}).") from error
    return True


class _Going:
    """The jobs that a cluster is at, and what they read."""

    def __init__(self, ray: Any, settings: Cluster) -> None:
        self.ray, self.settings = ray, settings
        self.jobs: dict[Any, tuple[Task, float]] = {}
        self.scores: dict[Future[Ended], Task] = {}
        # Here, since the truth need not travel; in a process that has loaded no plugin.
        self.scorer = ProcessPoolExecutor(1, mp_context=get_context("forkserver"))
        self.shelf: OrderedDict[str, Any] = OrderedDict()
        self.sources = {p.name: p.read_text(encoding="utf-8") for p in settings.env.plugins}

    def room(self) -> int:
        """Count the further jobs that the cluster's nodes can hold. Raises UserError if none
        fits."""
        cpus, gpus = self.settings.cpus, self.settings.gpus
        alive = [n["Resources"] for n in self.ray.nodes() if n["Alive"]]
        room = 0
        for node in alive:
            fits = [node.get("CPU", 0.0) // cpus] if cpus else []
            fits += [node.get("GPU", 0.0) // gpus] if gpus else []
            room += int(min(fits, default=0))
        if not room and not self.jobs:
            sizes = ", ".join(
                f"{n.get('CPU', 0):g} CPUs and {n.get('GPU', 0):g} GPUs" for n in alive
            )
            raise UserError(
                f"no node of the Ray cluster can hold a job of {cpus:g} CPUs and {gpus:g} GPUs: "
                f"its nodes have {sizes or 'nothing'}."
            )
        return max(0, room - len(self.jobs))

    def begin(self, task: Task) -> None:
        """Have the cluster begin a job, or this machine a score."""
        work, settings = task.work, self.settings
        if task.room == SCORES:
            self.scores[self.scorer.submit(guard, work)] = task
            return
        share = settings.gpus if 0 < settings.gpus < 1 else 1.0
        # Ray keeps processes of other variables apart, and so the rooms.
        variables = {"OMP_NUM_THREADS": "1", **KEEP_MEMORY, GPU_SHARE: f"{share:.6f}"}
        perform = self.ray.remote(_perform).options(
            num_cpus=settings.cpus,
            num_gpus=settings.gpus,
            max_retries=_LOSSES,
            runtime_env={"env_vars": {**variables, "LEAKBENCH_ROOM": task.room}},
        )
        names = [p.name for p in work.env.plugins]
        dataset = None
        if work.needs_data:
            job = work.training
            name = f"{job.task.dataset} {job.task.dataset_settings!r} {job.seed}"
            dataset = self._stored(name, lambda: dataset_of(job, settings.env))
        folders = [
            self._stored(f"{task.room} {folder}", partial(_contents, folder, work.reads))
            for folder in work.folders
        ]
        answer = perform.remote(
            work, {n: self.sources[n] for n in names}, settings.code, dataset, *folders
        )
        self.jobs[answer] = task, time.monotonic()

    def _stored(self, name: str, make: Callable[[], Any]) -> Any:
        """Put what several jobs read into the object store once."""
        if name not in self.shelf:
            self.shelf[name] = self.ray.put(make())
        self.shelf.move_to_end(name)
        while len(self.shelf) > _KEPT:
            self.shelf.popitem(last=False)
        return self.shelf[name]

    def ended(self) -> Outcomes:
        """The jobs that ended, after waiting a little for one."""
        waited = wait(self.scores, timeout=0 if self.jobs else _TICK_S, return_when=FIRST_COMPLETED)
        for future in waited.done:
            yield self.scores.pop(future), future.result()
        if not self.jobs:
            return
        done, _ = self.ray.wait([*self.jobs], timeout=_TICK_S, fetch_local=False)
        for answer in done:
            task, _ = self.jobs.pop(answer)
            yield task, self._receive(answer, task)
        limit = self.settings.timeout_s
        for answer, (task, began) in list(self.jobs.items()):
            if time.monotonic() - began > limit:
                del self.jobs[answer]
                self.ray.cancel(answer, force=True)
                yield task, over_time(limit)

    def _receive(self, answer: Any, task: Task) -> Ended:
        try:
            host, differing, ended, files = self.ray.get(answer)
        except self.ray.exceptions.RayError as error:
            brief = " ".join(str(error).split())[:300]
            return lost(f"the worker process died ({brief})")
        if differing:
            raise UserError(
                f"node {host} of the Ray cluster has other code of {differing} than this "
                "machine: install the same version there."
            )
        try:
            if files:
                task.work.artifacts.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (task.work.artifacts / name).write_bytes(content)
        except OSError as error:
            return Ended(record=NoResult(status="failed", reason=str(error)), no_space=True)
        return ended

    def stop(self) -> None:
        self.scorer.shutdown(cancel_futures=True)
        for answer in self.jobs:
            self.ray.cancel(answer, force=True)


def _contents(folder: Path, reads: Callable[[str], bool] = lambda name: True) -> Files:
    """Files of a folder that a job reads; nothing of a training that left none."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return {p.name: read_bytes(p, most=sys.maxsize) for p in paths if reads(p.name)}


def _perform(
    work: Work,
    sources: Mapping[str, str],
    code: Mapping[str, str],
    dataset: Dataset | None,
    *folders: Files,
) -> tuple[str, str | None, Ended | None, Files]:
    """Carry out a job on a node.

    Args:
        work: The job.
        sources: Its plugin files, name -> text.
        code: Hashes that its code must have.
        dataset: For the jobs that need one.
        folders: What it reads, in the order of its `folders`.

    Returns:
        The node's name, the name of code that is not the same here, what the job left, and its
        files.
    """
    import torch

    torch.set_num_threads(1)
    keep_to_share()
    host, plugins = socket.gethostname(), _plugin_folder()
    _write(plugins, sources)
    env = replace(work.env, plugins=tuple(plugins / n for n in sources), data_dir=None)
    work = replace(work, env=env)
    functions = _functions_at_start()
    prepare(work, functions)
    here = _code_here(env.plugins, work.needed)
    differing = next((name for name, digest in here.items() if code.get(name) != digest), None)
    if differing is not None:
        return host, differing, None, {}
    with tempfile.TemporaryDirectory(prefix="leakbench-") as name:
        place = Path(name)
        moved = {folder: place / str(i) for i, folder in enumerate(work.folders)}
        for folder, files in zip(work.folders, folders, strict=True):
            _write(moved[folder], files)
        out = place / "out"
        work = replace(work.with_folders(moved), artifacts=out, dataset=dataset)
        return host, None, guard(work, functions), _contents(out)


@cache
def _functions_at_start() -> OwnFunctions:
    """Return this process's functions; see `prepare`."""
    return OwnFunctions()


@cache
def _code_here(
    plugins: tuple[Path, ...], needed: frozenset[tuple[PluginKind, str]]
) -> Mapping[str, str]:
    """Hashes of the code of leakbench and of some plugins in this process."""
    return Code(registry_for(plugins, needed)).of(needed)


@cache
def _plugin_folder() -> Path:
    """Return this process's folder for the plugin files of its jobs."""
    return Path(tempfile.mkdtemp(prefix="leakbench-plugins-"))


def _write(folder: Path, files: Mapping[str, bytes | str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
