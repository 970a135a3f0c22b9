"""What jobs of one kind took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from bench.harness.costs.features import Features
from bench.records import Kind


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one job took.

    Attributes:
        work: Rounds of a training, budget of an attack.
        seconds: Of the job.
        again: Of the run at twice the budget, None where there was none.
    """

    work: float
    seconds: float
    again: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What jobs of the same features took.

    Attributes:
        stage: Training or attack.
        features: By which jobs are held against each other.
        points: What was measured.
        grows: Whether seconds follow the work.
        size: Samples that the work is done on.
        n_bytes: On disk, record included.
        skipped: Whether the job was found not to apply.
        host: Peak bytes of memory.
        device: Peak bytes of the GPU's.
        step_s: Client seconds of one local step, of trainings alone.
        parameters: Of the network, of trainings alone.
        runs: How many were joined.
    """

    stage: Kind
    features: Features
    points: tuple[Point, ...]
    grows: bool
    size: float
    n_bytes: float
    skipped: bool = False
    host: float | None = None
    device: float | None = None
    step_s: float | None = None
    parameters: int | None = None
    runs: int = 1

    @cached_property
    def _line(self) -> tuple[float, float]:
        """Seconds = first + second * work, neither negative."""
        works = np.array([p.work for p in self.points])
        seconds = np.array([p.seconds for p in self.points])
        if len(set(works)) > 1:
            # Relative errors count, so that the short runs say what does not grow.
            weights = 1 / np.maximum(seconds, 1e-3)
            rows = np.stack([np.ones_like(works), works], axis=1) * weights[:, None]
            (start, slope), _ = nnls(rows, seconds * weights)
            return float(start), float(slope)
        mean, work = float(seconds.mean()), float(works[0])
        if not self.grows:
            return mean, 0.0
        if self.step_s is None:
            return 0.0, mean / work
        # Of a training at one number of rounds, what the clients did is known to grow.
        slope = min(self.step_s * self.size / float(self.features["batch"]), mean / work)
        return mean - slope * work, slope

    def seconds(self, work: float) -> float:
        """Of the first run at that work: as measured there, else on the line through what was."""
        same = [p.seconds for p in self.points if p.work == work]
        if same:
            return median(same)
        start, slope = self._line
        return start + slope * work

    def again(self, work: float) -> float:
        """Of a second run at twice the budget; none for what does not grow with it."""
        same = [p.again for p in self.points if p.work == work and p.again is not None]
        if same:
            return median(same)
        return self.seconds(2 * work) if self.grows else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without what is as by default; `from_dict` reads it."""
        defaults = {f.name: f.default for f in fields(self)}
        kept = {k: getattr(self, k) for k in defaults if getattr(self, k) != defaults[k]}
        points = [[p.work, p.seconds, *([] if p.again is None else [p.again])] for p in self.points]
        return {**kept, "features": dict(self.features), "points": points}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cost:
        names = ("work", "seconds", "again")
        points = tuple(Point(**dict(zip(names, p, strict=False))) for p in data["points"])
        return Cost(**{**data, "points": points})


def joined(costs: Iterable[Cost]) -> list[Cost]:
    """One cost per stage and features: points of all, medians of their seconds at each work."""
    groups: dict[tuple[Any, ...], list[Cost]] = defaultdict(list)
    for cost in costs:
        groups[cost.stage, cost.skipped, *sorted(cost.features.items())].append(cost)
    return [g[0] if len(g) == 1 else _join(g) for g in groups.values()]


def _join(group: Sequence[Cost]) -> Cost:
    works: dict[float, list[Point]] = defaultdict(list)
    for cost in group:
        for point in cost.points:
            works[point.work].append(point)
    first = group[0]
    return Cost(
        stage=first.stage,
        features=first.features,
        points=tuple(_middle(works[w]) for w in sorted(works)),
        grows=any(c.grows for c in group),
        size=first.size,
        n_bytes=median(c.n_bytes for c in group),
        skipped=first.skipped,
        host=most(c.host for c in group),
        device=most(c.device for c in group),
        step_s=median_of(c.step_s for c in group),
        parameters=first.parameters,
        runs=sum(c.runs for c in group),
    )


def _middle(points: Sequence[Point]) -> Point:
    return Point(
        work=points[0].work,
        seconds=median(p.seconds for p in points),
        again=median_of(p.again for p in points),
    )


def median_of(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None


def most(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)
