"""`leakbench report` on folders of growing size: seconds in all, and milliseconds per record.

    uv run pytest tests/benchmarks/test_report_growth.py --benchmark-only -s

Each report is a process of its own, start and imports included, that writes all four files and
prints the tables. Figures are drawn (drawn_folder.py), with three seeds and nine attacks each; WIDE
is 20,000 records of one seed and six attacks, 3,328 rows in 52 tables. Counted are CPU seconds
of user and kernel, which a neighbour's load stretches less than the clock. Beside each size stands
its time per record over that of the size before, start and imports taken off: near 1 the cost is
linear. 100,000 records, whose folder alone takes minutes to write, with LEAKBENCH_GROWTH=1 in
the environment. Printed, not asserted: a machine under load would make any bound a coin toss.
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.drawn_folder import Extent, write

NARROW = [Extent(tasks=3, settings=15), Extent(tasks=6, settings=31), Extent(tasks=6, settings=62)]
WIDE = Extent(tasks=26, settings=64, seeds=1, attacks=6)
if os.environ.get("LEAKBENCH_GROWTH"):
    NARROW.append(Extent(tasks=27, settings=69))


def spent(*arguments: str) -> tuple[float, float]:
    """CPU and wall-clock seconds of a Python process that ends well."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


@pytest.fixture(scope="module")
def start() -> float:
    """CPU seconds that go by before the folder is looked at."""
    return min(spent("-c", "import bench.cli, bench.report.files, bench.report.html")[0]
               for _ in range(3))  # fmt: skip


@pytest.fixture(scope="module")
def per_record() -> list[float]:
    """Milliseconds per record of the sizes so far."""
    return []


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("extent", [*NARROW, WIDE], ids=lambda e: f"{e.records}-{e.rows}")
def test_report_of_a_growing_folder(
    benchmark: Any, tmp_path: Path, start: float, per_record: list[float], extent: Extent
) -> None:
    folder = tmp_path / "results"
    write(folder, extent)
    cpu, wall = benchmark.pedantic(
        lambda: spent("-m", "bench.cli", "report", str(folder)), rounds=1
    )
    each = 1000 * (cpu - start) / extent.records
    before = per_record[-1] if per_record else None
    if extent != WIDE:
        per_record.append(each)
    ratio = f", {each / before:.2f} x that of the size before" if before else ""
    sizes = ", ".join(f"{p.name} {p.stat().st_size / 1e6:.1f} MB"
                      for p in sorted(folder.iterdir()) if p.is_file())  # fmt: skip
    print(
        f"\n{extent.records:,} records, {extent.rows:,} rows: {cpu:.1f} s of CPU ({start:.1f} s of "
        f"it to start), {wall:.1f} s by the clock; {each:.2f} ms per record{ratio}; {sizes}"
    )
