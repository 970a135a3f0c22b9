"""The Ray executor: the same records as local workers, jobs lost with their node made again."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bench
from bench.harness import launch, runner
from bench.harness.plan import Plan
from bench.harness.store import Store
from tests.broken_plugins import DEADLY
from tests.runs import contents, made, planned

# Read when Ray is imported, which `_ray` sets for a driver that has not done so (`uv run pytest`).
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
ray = pytest.importorskip("ray", reason="Ray is not installed")
from ray.cluster_utils import Cluster as Nodes  # noqa: E402

pytestmark = pytest.mark.slow

SLOW = '''
import time
from pathlib import Path
import ray
import torch
from bench.contract.attack import Attack, Reconstruction

class Slow(Attack):
    """Takes a while, and says that it began, and on which node."""
    def run(self, seen, ctx):
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "here"
        Path("{marks}", str(time.time_ns())).write_text(node)
        time.sleep(3)
        x = torch.rand(len(seen.clients), 1, *ctx.network.shape, generator=ctx.rng)
        return Reconstruction(images=x)
'''


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of a head that holds no job and one node of one CPU."""
    cluster = Nodes(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def plugins(tmp_path: Path) -> tuple[Path, ...]:
    path = tmp_path / "cluster_plugins.py"
    (tmp_path / "marks").mkdir()
    path.write_text(SLOW.replace("{marks}", str(tmp_path / "marks")) + DEADLY)
    return (path,)


def on_cluster(plan: Plan, keys: runner.Keys, address: str) -> launch.Executor:
    return launch.executor_of(plan, keys, "ray", ray_address=address)


def test_a_lost_node_costs_no_record_and_all_are_those_of_local_workers(
    nodes: Any, tiny: Callable[..., Path], plugins: tuple[Path, ...], tmp_path: Path
) -> None:
    suite = tiny(append='\n[[attacks]]\nname = "slow"\n\n[[attacks]]\nname = "dlg"\n')
    plan, keys = planned(suite, plugins)
    doomed = nodes.add_node(num_cpus=1)
    local, cluster = Store(tmp_path / "local"), Store(tmp_path / "cluster")

    def kill() -> None:
        marks = tmp_path / "marks"
        while doomed.node_id not in [mark.read_text() for mark in marks.iterdir()]:
            time.sleep(0.05)  # until the node is at a job that lasts
        nodes.remove_node(doomed, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    report = made(plan, keys, cluster, on_cluster(plan, keys, nodes.address))
    killer.join(timeout=1)
    assert not killer.is_alive()
    assert report.failures == []
    cells = [c for c in plan.cells if c.attack == "slow"]
    begun = len(list((tmp_path / "marks").iterdir()))
    assert begun == len(cells) + 1  # the one that was on the lost node, again
    assert made(plan, keys, local, launch.local(plan, keys.env, workers=0)).failures == []
    assert contents(cluster) == contents(local)


def test_dying_and_hanging_jobs_end_alone_on_a_cluster_too(
    nodes: Any, tiny: Callable[..., Path], plugins: tuple[Path, ...], tmp_path: Path
) -> None:
    suite = tiny(
        append='\n[[attacks]]\nname = "dies"\n\n[[attacks]]\nname = "sleeps"\n',
        **{"budget = 5": "budget = 5\ntimeout_s = 60"},
    )
    plan, keys = planned(suite, plugins, defense="none", checkpoint="init")
    store = Store(tmp_path / "out")
    report = made(plan, keys, store, on_cluster(plan, keys, nodes.address))
    reasons = {label.split()[-3]: reason for label, reason in report.failures}
    assert set(reasons) == {"dies", "sleeps"}
    assert reasons["dies"].startswith("failed: the worker process died")
    assert reasons["sleeps"] == "timeout: over the limit of 60 s"
    done = [json.loads(p.read_text()) for p in (store.folder / "records/attack").iterdir()]
    assert sorted(r["status"] for r in done) == ["done", "done", "failed", "timeout"]


def test_the_python_api_runs_on_a_cluster_too(
    nodes: Any, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    same: dict[str, Any] = {"only": {"defense": "none"}, "device": "cpu", "progress": False}
    there = bench.run(tiny(), out=tmp_path / "there", executor="ray", ray_address=nodes.address,
                      **same)  # fmt: skip
    here = bench.run(tiny(), out=tmp_path / "here", jobs=0, **same)
    assert there.failures == []
    assert contents(Store(there.folder)) == contents(Store(here.folder))


def test_what_a_cluster_cannot_do_is_said_in_one_sentence(
    nodes: Any, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    plan, keys = planned(tiny(), (), defense="none")
    executor = on_cluster(plan, keys, nodes.address)
    assert isinstance(executor, launch.Cluster)
    with pytest.raises(ValueError, match="no node of the Ray cluster can hold a job of 64 CPUs"):
        made(plan, keys, Store(tmp_path / "a"), replace(executor, cpus=64.0))
    other = {**executor.code, "leakbench": "0"}
    with pytest.raises(ValueError, match="has other code of leakbench than this machine"):
        made(plan, keys, Store(tmp_path / "b"), replace(executor, code=other))
    ray.shutdown()
    with pytest.raises(ValueError, match="executor ray needs ray_address, or RAY_ADDRESS"):
        launch.executor_of(plan, keys, "ray")
    with pytest.raises(ValueError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        list(replace(executor, address="127.0.0.1:1")(deque()))
