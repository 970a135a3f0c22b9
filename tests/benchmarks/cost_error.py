"""How far the lookup's estimates are off on what comes along with leakbench.

python -m tests.benchmarks.cost_error
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.harness.costs import lookup
from bench.harness.costs.cost import Cost
from bench.records import Kind


@dataclass(frozen=True, kw_only=True)
class Error:
    """How far estimates are off.

    Attributes:
        jobs: Of at least `least_s` seconds.
        median: Of |estimate / measured - 1| over them.
        total: Sum of estimates over sum of measured seconds.
    """

    jobs: int
    median: float
    total: float


def left_out_error(costs: Sequence[Cost], stage: Kind, *, least_s: float = 0.1) -> Error:
    """The lookup's error on jobs whose own measurement is left out."""
    off, told, took = [], 0.0, 0.0
    mine = [c for c in costs if c.stage == stage and not c.skipped]
    for cost in mine:
        table = lookup.Table([c for c in costs if c is not cost])
        point = cost.points[0]
        guess = table.estimate(stage, cost.features, work=point.work, size=cost.size)
        if guess.match != "none" and point.seconds >= least_s:
            off.append(abs(guess.seconds / point.seconds - 1))
            told, took = told + guess.seconds, took + point.seconds
    if not off:
        raise ValueError(f"no {stage} of at least {least_s} s can be told from the others.")
    return Error(jobs=len(off), median=median(off), total=told / took)


if __name__ == "__main__":
    kinds: tuple[Kind, ...] = ("train", "attack")
    for kind in kinds:
        print(kind, left_out_error(lookup.shipped(), kind))
