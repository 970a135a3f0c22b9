"""How a suite is run, whether the command line or `bench.run` asks: environment, plan, workers."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import models
from bench import suite as suites
from bench.errors import UserError
from bench.harness import runner
from bench.harness.environment import Environment, registry_for
from bench.harness.executors.local import Workers
from bench.harness.executors.task import Executor, run_here
from bench.harness.keys import Keys
from bench.harness.plan import Plan, expand
from bench.harness.store import Store

_LINUX = sys.platform == "linux"
_MOST_WORKERS = 1024


def environment(
    device: str = "auto",
    data_dir: Path | None = None,
    download: bool = False,
    plugins: Sequence[Path] = (),
    *,
    here: bool = True,
) -> Environment:
    """Return where jobs run.

    Args:
        device: auto, cpu or cuda.
        data_dir: Where data sets lie; by default the environment variable LEAKBENCH_DATA.
        download: Whether missing ones are fetched.
        plugins: Files of defenses and attacks.
        here: Whether on this machine; another one may have a device that it lacks.

    Raises:
        UserError: For a device or a data folder that this machine does not have.
    """
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device must be auto, cpu or cuda, got '{device}'.")
    if device == "cuda" and here and not torch.cuda.is_available():
        raise UserError("device cuda: this machine has no CUDA device that torch can use.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if data_dir is None and os.environ.get("LEAKBENCH_DATA"):
        data_dir = Path(os.environ["LEAKBENCH_DATA"])
    if data_dir is not None and not data_dir.is_dir() and not download:
        raise UserError(f"no such data folder: {data_dir}.")
    return Environment(
        device=device,
        data_dir=data_dir.resolve() if data_dir else None,
        download=download,
        plugins=tuple(p.resolve() for p in plugins),
    )


def plan_suite(
    suite: suites.Suite, only: Mapping[str, Any], env: Environment, shard: tuple[int, int] = (1, 1)
) -> tuple[Plan, Keys]:
    """The checked plan of part `shard`, (i, n), and the keys of its jobs; `only` as in `expand`.

    Raises UserError for whatever can be found wrong before any work.
    """
    registry_for.cache_clear()  # a plugin that was edited since this process ran it is another one
    registry = registry_for(env.plugins)
    plan = expand(suite, only).part(*shard)
    runner.check(plan, registry, env)
    return plan, Keys(registry, env)


def store_of(plan: Plan, out: Path | None, shard: tuple[int, int] = (1, 1)) -> Store:
    """The result folder: `out`, or leakbench-runs/SUITE, of a shard leakbench-runs/SUITE-i-of-n."""
    part = f"-{shard[0]}-of-{shard[1]}" if shard[1] > 1 else ""
    return Store(out or Path("leakbench-runs") / f"{plan.suite.name}{part}")


def default_workers(device: str) -> int:
    """One worker per GPU; on a CPU one single-threaded worker per core, up to four, since each
    takes about 0.9 GB."""
    if device != "cpu":
        return max(1, len(_gpus()))
    return max(1, min(4, len(os.sched_getaffinity(0)) if _LINUX else os.cpu_count() or 1))


def _gpus() -> tuple[str, ...]:
    """Names of the GPUs that CUDA programs may use here, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(v.strip() for v in visible.split(",") if v.strip())
    return tuple(str(i) for i in range(torch.cuda.device_count()))


def local(plan: Plan, env: Environment, *, workers: int | None = None) -> Executor:
    """Return what carries out the jobs on this machine.

    Args:
        plan: What is run.
        env: Where jobs run.
        workers: Worker processes, None for the machine's default; 0 for none: here, where of all
            limits that of time alone holds, and for code that comes back to Python.

    Raises:
        UserError: For a number out of range, and a model that workers would not have.
    """
    workers = default_workers(env.device) if workers is None else workers
    for model in dict.fromkeys(task.model for task in plan.suite.tasks):
        if models.named.is_handed(model) and workers != 0:
            raise UserError(
                f"model {model} is held by this process alone, which must run the jobs itself: "
                "give jobs=0, or write the model into a file and name it FILE.py:Net."
            )
    if not 0 <= workers <= _MOST_WORKERS:
        raise UserError(f"jobs must lie in [0, {_MOST_WORKERS}] worker processes, got {workers}.")
    if workers == 0:
        return partial(run_here, timeout_s=plan.suite.timeout_s)
    return Workers(
        count=workers, timeout_s=plan.suite.timeout_s, gpus=_gpus() if env.device == "cuda" else ()
    )
