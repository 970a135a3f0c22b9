"""Jobs on a Ray cluster: one actor per slot, data by the object store, lost nodes survived.

Ray moves what a job reads and leaves; the driver alone writes to the result folder, so that nodes
need no shared file system. Ray is an optional dependency, imported when this is used.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.files import read_bytes
from bench.harness import environment
from bench.harness.attack import Attacking
from bench.harness.environment import DATASETS_KEPT, Environment, dataset_of
from bench.harness.executors.memory import keep_to_share
from bench.harness.executors.task import (
    Ended,
    Outcome,
    Task,
    guarded,
    lost,
    outcome_of,
    over_time,
)
from bench.harness.keys import Code
from bench.records import NoResult, TrainJob
from bench.registry import PluginKind
from bench.toolkit.processes import GPU_SHARE, KEEP_MEMORY

_TICK_S = 0.5
_LOSSES = 3
"""So often a job is begun anew because its node was lost."""
_VERDICT_S = 10.0
"""How long after a process's death the cluster may take to say that its whole node is gone."""
_ANSWER_S = 10.0
"""How long a cluster may take to answer at all."""
_KEPT = 64
"""Observations that stay in the object store, for the attacks on them."""
_MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
_WITH_TOKENS = (2, 52)
"""The version of Ray that brought them."""
_OPEN = (
    "Ray would start a cluster that obeys whoever reaches it: it is older than 2.52, or was "
    f"imported with {_MODE} other than token. Set {_MODE}=token before, or give ray_address."
)
_BEYOND_THIS_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's name for whether a cluster may have several machines, on any system; if not, it listens on
127.0.0.1 alone."""
Files = Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster that carries out tasks.

    Attributes:
        address: Of a running cluster, "auto" for the one of this machine, None to start one.
        cpus: Of each job.
        gpus: Of each job.
        timeout_s: Limit of one job.
        env: Where jobs run.
        plugins: Kind and name of what the plan runs.
        code: Hashes of its source, which every node must have.
    """

    address: str | None
    cpus: float
    gpus: float
    timeout_s: float
    env: Environment
    plugins: tuple[tuple[PluginKind, str], ...]
    code: Mapping[str, str]

    def __call__(self, tasks: deque[Task]) -> Generator[Outcome]:
        """Carry out the tasks in their order, and those added meanwhile.

        A job over its limit ends as `timeout`, one whose process dies as `failed`; one whose node
        is lost is begun anew elsewhere, three times at most. Raises UserError if there is no
        cluster, if no node could ever hold a job, or if a node has other code.
        """
        address = None if self.address == "local" else self.address  # Ray's name for a new one
        if address is None:
            _lock()
        ray = _ray()
        started = _connect(ray, address)
        going = _Pool(ray, self, tasks)
        try:
            while tasks or going.busy:
                going.grow()
                going.distribute()
                yield from going.collect()
        finally:
            going.stop()
            if started:
                ray.shutdown()


def _lock() -> None:
    """Have a cluster that is started here listen on this machine alone, to who has its token.

    Whoever can speak to a cluster can run code in it. Ray reads both settings when it is imported;
    where it was, `_connect` refuses a cluster without a token.
    """
    if not {_TOKEN, f"{_TOKEN}_PATH"} & os.environ.keys():
        os.environ[_TOKEN] = secrets.token_hex(32)
    if "ray" not in sys.modules:
        os.environ[_MODE] = "token"
        os.environ[_BEYOND_THIS_MACHINE] = "0"


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


def _connect(ray: Any, address: str | None) -> bool:
    """Whether this call connected. Raises UserError if there is nothing to connect to."""
    if ray.is_initialized():
        return False
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit() and "://" not in host:
        try:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
        except OSError as error:
            raise UserError(
                f"no Ray cluster answers at '{address}' ({error.strerror or error})."
            ) from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray hides GPUs from jobs that ask for none, and warns that it will not; those use none anyway.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    guarded = version >= _WITH_TOKENS and os.environ.get(_MODE, "token").lower() == "token"
    if address is None and not guarded:
        raise UserError(_OPEN)
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level="ERROR",
            **({} if address else {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}),
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray cluster answers at '{address}' ({error}).") from error
    if address is None and _MODE not in os.environ:  # imported before, and without a token
        ray.shutdown()
        raise UserError(_OPEN)
    return True


class _Pool:
    """Slots for as many jobs as the cluster can hold at once, and what they share."""

    def __init__(self, ray: Any, settings: Cluster, tasks: deque[Task]) -> None:
        self.ray, self.settings, self.tasks = ray, settings, tasks
        self.slots: list[_Slot] = []
        self.shelf = _Shelf(ray)
        self.losses: dict[int, int] = {}
        self.actor = ray.remote(_Runner)

    @property
    def busy(self) -> bool:
        return any(s.task for s in self.slots)

    def capacity(self) -> int:
        """Jobs that the cluster's nodes hold at once. Raises UserError if none could."""
        cpus, gpus = self.settings.cpus, self.settings.gpus
        alive = [n["Resources"] for n in self.ray.nodes() if n["Alive"]]
        room = 0
        for node in alive:
            fits = [node.get("CPU", 0.0) // cpus] if cpus else []
            fits += [node.get("GPU", 0.0) // gpus] if gpus else []
            room += int(min(fits, default=0))
        if not room and not self.slots:
            found = ", ".join(
                f"{n.get('CPU', 0):g} CPUs and {n.get('GPU', 0):g} GPUs" for n in alive
            )
            raise UserError(
                f"no node of the Ray cluster can hold a job of {cpus:g} CPUs and {gpus:g} GPUs: "
                f"its nodes have {found or 'nothing'}."
            )
        return room

    def grow(self) -> None:
        """New slots where nodes joined or slots were lost, never more than there is work."""
        wanted = len(self.tasks) + sum(s.task is not None for s in self.slots)
        while len(self.slots) < min(wanted, self.capacity()):
            self.slots.append(_Slot(self))

    def distribute(self) -> None:
        for slot in self.slots:
            if self.tasks and slot.task is None and slot.ready():
                slot.give(self.tasks.popleft())

    def collect(self) -> Iterator[Outcome]:
        """Outcomes of the jobs that ended, after waiting a little for one."""
        waiting = [s.answer for s in self.slots if s.answer is not None]
        if waiting:
            self.ray.wait(waiting, num_returns=1, timeout=_TICK_S, fetch_local=False)
        else:
            time.sleep(_TICK_S)
        for slot in list(self.slots):
            outcome = slot.outcome()
            if outcome is not None:
                yield outcome
            if slot.dead:
                self.slots.remove(slot)

    def again(self, task: Task) -> Outcome | None:
        """Queue a job whose node was lost, or end it."""
        self.losses[task.id] = self.losses.get(task.id, 0) + 1
        if self.losses[task.id] > _LOSSES:
            return lost(task, "failed", f"its node was lost {self.losses[task.id]} times")
        self.tasks.appendleft(task)
        return None

    def stop(self) -> None:
        for slot in self.slots:
            slot.stop()


class _Slot:
    """Room for one job at a time: an actor somewhere on the cluster. answer: what it owes, first
    who it is, then a job's record. cause: what the cluster says of its death; began: when the job
    was given, or when it died. cut_off: whether the network lost its answer."""

    def __init__(self, pool: _Pool) -> None:
        self.pool = pool
        settings = pool.settings
        share = settings.gpus if 0 < settings.gpus < 1 else 1.0
        variables = {"OMP_NUM_THREADS": "1", **KEEP_MEMORY, GPU_SHARE: f"{share:.6f}"}
        self.actor = pool.actor.options(
            num_cpus=settings.cpus,
            num_gpus=settings.gpus,
            max_restarts=0,
            runtime_env={"env_vars": variables},
        ).remote({p.name: p.read_text() for p in settings.env.plugins})
        self.answer: Any = self.actor.introduce.remote(settings.plugins)
        self.node: str | None = None
        self.task: Task | None = None
        self.began = 0.0
        self.cause: str | None = None
        self.cut_off = self.dead = False

    def ready(self) -> bool:
        return self.node is not None and self.cause is None and not self.dead

    def give(self, task: Task) -> None:
        work: Any = task.work
        shelf = self.pool.shelf
        observed = shelf.observed(work.observed) if isinstance(work, Attacking) else None
        dataset = shelf.dataset(work.job, self.pool.settings.env)
        self.task, self.began = task, time.monotonic()
        # In lists: Ray would fetch bare references anew for every job.
        self.answer = self.actor.perform.remote(work, [observed], [dataset])

    def outcome(self) -> Outcome | None:
        """The finished job's outcome, or None while it runs or where it is begun anew."""
        ray, settings = self.pool.ray, self.pool.settings
        if self.cause is not None:
            return self._inquest(self.cause)
        if self.answer is None:
            return None
        if ray.wait([self.answer], timeout=0)[0]:
            try:
                value = ray.get(self.answer)
            except ray.exceptions.ActorUnavailableError:
                # Its node may be lost, or the network for a moment: the next answer tells.
                self.answer, self.cut_off = self.actor.introduce.remote(settings.plugins), True
                return None
            except ray.exceptions.RayError as error:
                self.answer, self.cause, self.began = None, str(error), time.monotonic()
                return self._inquest(self.cause)
            self.answer = None
            return self._heard(value)
        if self.task is not None and time.monotonic() - self.began > settings.timeout_s:
            self.stop()
            return over_time(self.task, settings.timeout_s)
        return None

    def _heard(self, value: Any) -> Outcome | None:
        if self.cut_off:  # the job's own answer was lost on the way
            self.stop()
            return self.pool.again(self.task) if self.task is not None else None
        if self.node is None:
            self.node, host, code = value
            for name, digest in self.pool.settings.code.items():
                if code.get(name) != digest:
                    raise UserError(
                        f"node {host} of the Ray cluster has other code of {name} than this "
                        "machine: install the same version there."
                    )
            return None
        assert self.task is not None
        task, self.task = self.task, None
        ended, files = value
        if ended.spoilt:
            self.stop()
        try:
            if files:
                task.work.artifacts.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (task.work.artifacts / name).write_bytes(content)
        except OSError as error:
            return Outcome(
                task=task, record=NoResult(status="failed", reason=str(error)), no_space=True
            )
        return outcome_of(task, ended)

    def _inquest(self, cause: str) -> Outcome | None:
        """Of an actor that died: whether its node is lost, or, after a while, its process alone."""
        nodes = [n["NodeID"] for n in self.pool.ray.nodes() if n["Alive"]]
        gone = "its node has died" in cause or (self.node is not None and self.node not in nodes)
        if not gone and time.monotonic() - self.began < _VERDICT_S:
            return None
        self.stop()
        if self.task is not None:
            brief = " ".join(cause.split())[:300]
            return (
                self.pool.again(self.task)
                if gone
                else lost(self.task, "failed", f"the worker process died ({brief})")
            )
        if self.node is None and not gone:
            raise UserError(
                f"a worker of the Ray cluster cannot start ({' '.join(cause.split())[:300]})."
            )
        return None

    def stop(self) -> None:
        self.dead, self.answer = True, None
        self.pool.ray.kill(self.actor, no_restart=True)


class _Shelf:
    """What several jobs read, put into the object store once."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.datasets: OrderedDict[str, Any] = OrderedDict()
        self.seen: OrderedDict[Path, Any] = OrderedDict()

    def dataset(self, job: TrainJob, env: Environment) -> Any:
        name = f"{job.task.dataset} {job.task.dataset_settings!r} {job.seed}"
        if name not in self.datasets:
            self.datasets[name] = self.ray.put(dataset_of(job, env))
        return _recent(self.datasets, name)

    def observed(self, folder: Path) -> Any:
        if folder not in self.seen:
            self.seen[folder] = self.ray.put(_contents(folder))
        return _recent(self.seen, folder)


def _recent(shelf: OrderedDict[Any, Any], name: Any, kept: int = _KEPT) -> Any:
    """What has that name, which is now the last to go."""
    shelf.move_to_end(name)
    while len(shelf) > kept:
        shelf.popitem(last=False)
    return shelf[name]


def _contents(folder: Path) -> Files:
    """Files of a folder; nothing of a training that left none."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return {p.name: read_bytes(p, most=sys.maxsize) for p in paths}


@dataclass
class _Runner:
    """The actor: carries out jobs on its node. sources: the plugin files, name -> text."""

    sources: Mapping[str, str]
    datasets: OrderedDict[str, Dataset] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        keep_to_share()
        # The process ends with the run, its folder with the process.
        self.folder = tempfile.TemporaryDirectory(prefix="leakbench-")
        self.plugins = []
        for name, text in self.sources.items():
            path = Path(self.folder.name) / name
            path.write_text(text)
            self.plugins.append(path)

    def introduce(
        self, plugins: tuple[tuple[PluginKind, str], ...]
    ) -> tuple[str, str, dict[str, str]]:
        """The node's id and name, and hashes of the code that it would run."""
        import ray

        code = Code(environment.registry_for(tuple(self.plugins))).of(plugins)
        return ray.get_runtime_context().get_node_id(), socket.gethostname(), code

    def perform(self, work: Any, observed: list[Any], dataset: list[Any]) -> tuple[Ended, Files]:
        """What a job left, and its files. observed, dataset: a reference each, of what it reads."""
        import ray

        with tempfile.TemporaryDirectory(dir=self.folder.name) as name:
            folder = Path(name)
            more: dict[str, Any] = {
                "env": replace(work.env, plugins=tuple(self.plugins), data_dir=None),
                "artifacts": folder / "out",
                "dataset": self._dataset(dataset[0]),
            }
            if observed[0] is not None:
                more["observed"] = folder / "seen"
                more["observed"].mkdir()
                for file, content in ray.get(observed[0]).items():
                    (more["observed"] / file).write_bytes(content)
            return guarded(replace(work, **more)), _contents(folder / "out")

    def _dataset(self, reference: Any) -> Dataset:
        import ray

        name = reference.hex()
        if name not in self.datasets:
            self.datasets[name] = ray.get(reference)
        return _recent(self.datasets, name, DATASETS_KEPT)
