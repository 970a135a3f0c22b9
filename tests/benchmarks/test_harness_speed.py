"""What the harness costs beside trainings and attacks.

    uv run pytest tests/benchmarks/test_harness_speed.py --benchmark-only -s

Cached cells: a suite of many settings, every record of which is there, is run again: planning,
keys, reading, run.json. Printed per cell, for growing numbers of cells (LEAKBENCH_CELLS, by
default 1000,10000,100000), as a ratio to the least. Two workers and overhead: a slice of `quick`,
by one worker and by two; what is neither training nor attack, as a share of the attacks' time.
Printed, not asserted: neighbours' load would make any bound a coin toss.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import suite as suites
from bench.harness import launch, runner
from bench.harness.environment import Environment
from bench.harness.plan import Plan
from bench.harness.store import Store
from bench.records import to_json
from tests.made_records import attacked_for, trained_for

SIZES = [int(n) for n in os.environ.get("LEAKBENCH_CELLS", "1000,10000,100000").split(",")]
PER_TRAINING = 4  # two attacks at two checkpoints
per_cell: dict[int, float] = {}


def planned(suite: Path | str, **only: Any) -> tuple[Plan, runner.Keys]:
    return launch.plan_suite(suites.read_suite(str(suite)), only, Environment())


def fill(plan: Plan, keys: runner.Keys, place: Store) -> None:
    """Records as a run leaves them, without its waiting for the disk."""
    for kind in ("train", "attack"):
        (place.folder / "records" / kind).mkdir(parents=True)
    values = {m: [0.123456789012345] * 8 for m in ("ssim", "mse", "psnr", "success", "lnacc")}
    for job in plan.trainings:
        record = trained_for(job, key=keys.train(job), files={})
        place.path("train", keys.train(job)).write_text(to_json(record))
    for cell in plan.cells:
        key, train = keys.attack(cell), keys.train(cell.train)
        scored = attacked_for(cell, train, key=key, files={}, values=values, floors=values)
        place.path("attack", keys.attack(cell)).write_text(to_json(scored))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cells", SIZES)
def test_resuming_costs_the_same_for_every_cached_cell(
    benchmark: Any, tiny: Callable[..., Path], tmp_path: Path, cells: int
) -> None:
    grid = ", ".join(f"{1 + i / 10**6:.6f}" for i in range(cells // PER_TRAINING))
    plan, keys = planned(tiny(**{"epsilon = [0.5, 2.0]": f"epsilon = [{grid}]"}), defense="spm")
    assert len(plan.cells) == cells
    place = Store(tmp_path / "out")
    fill(plan, keys, place)

    def resume() -> float:
        began = time.perf_counter()
        again, anew = planned(tmp_path / "tiny.toml", defense="spm")
        report = runner.run(
            again, place, anew, executor=launch.local(again, anew.env, workers=1), command=["x"]
        )
        assert (report.ran, report.cached) == (0, len(again.trainings) + cells)
        return time.perf_counter() - began

    seconds = benchmark.pedantic(resume, rounds=1, iterations=1)
    per_cell[cells] = seconds / cells
    ratio = per_cell[cells] / per_cell[min(per_cell)]
    print(f"\n{cells} cached cells: {1e3 * per_cell[cells]:.3f} ms each, {ratio:.2f}x the least's")


@pytest.mark.timeout(3600)
def test_two_workers_against_one_and_what_the_harness_takes(benchmark: Any, tmp_path: Path) -> None:
    walls: dict[int, float] = {}
    for workers in (1, 2):
        plan, keys = planned("quick", task=0, defense=["none", "gaussian", "ms_pafl"])
        place = Store(tmp_path / str(workers))

        def go(
            plan: Plan = plan, keys: runner.Keys = keys, place: Store = place,
            workers: int = workers,
        ) -> None:  # fmt: skip
            executor = launch.local(plan, keys.env, workers=workers)
            assert runner.run(plan, place, keys, executor=executor).failures == []

        began = time.perf_counter()
        if workers == 2:
            benchmark.pedantic(go, rounds=1, iterations=1)
        else:
            go()
        walls[workers] = time.perf_counter() - began
        spent = [json.loads(p.read_text()) for p in place.folder.glob("records/*/*.json")]
        trained = sum(r["seconds"] for r in spent if "facts" in r)
        attacked = sum(r.get("seconds", 0) for r in spent if "facts" not in r)
        attacked += sum(r["doubled"]["seconds"] for r in spent if r.get("doubled"))
        rest = workers * walls[workers] - trained - attacked
        print(
            f"\n{workers} workers: {walls[workers]:.0f} s; trainings {trained:.0f} s, attacks "
            f"{attacked:.0f} s, the rest {rest:.0f} s ({100 * rest / attacked:.1f} % of attacks)"
        )
    print(f"two workers: {walls[1] / walls[2]:.2f}x one")
