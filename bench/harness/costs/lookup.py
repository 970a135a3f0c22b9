"""What a job costs that was not measured: as the nearest that was.

`_TRAININGS` and `_ATTACKS` say what is given up, step by step, until something was measured. Times
between networks are scaled by the measured seconds of one local step, bytes by the number of
parameters.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.resources import files
from statistics import median
from typing import Any, Literal

from bench.errors import UserError
from bench.harness.costs.cost import Cost, most
from bench.harness.costs.features import (
    Features,
    Stage,
    attack_features,
    round_size,
    threat_size,
    training_features,
)
from bench.records import AttackJob, TrainJob, canonical


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A step of the lookup: what need no longer agree, beyond what the steps before gave up."""

    drops: frozenset[str]
    why: str


def _steps(*steps: tuple[str, str]) -> tuple[Relaxation, ...]:
    """Of (names of features, why): each drops what those before it drop."""
    out: list[Relaxation] = []
    dropped: frozenset[str] = frozenset()
    for names, why in steps:
        dropped |= frozenset(names.split())
        out.append(Relaxation(drops=dropped, why=why))
    return tuple(out)


_NETWORK = frozenset({"model", "data"})
_TRAININGS = _steps(
    ("", "the same job"),
    ("settings audit", "the same defense with other settings"),
    ("data", "the same network on other data"),
    ("clients participation batch local threats checkpoints", "other clients and threats"),
    ("protocol", "another protocol"),
    ("defense", "another defense"),
    ("model channel", "another network or cut"),
)
_ATTACKS = _steps(
    ("", "the same job"),
    ("settings", "the same defense with other settings"),
    ("checkpoint", "the other checkpoint"),
    ("data", "the same network on other data"),
    ("protocol", "another protocol that hides as much of the network"),
    ("defense", "another defense"),
    ("threat options", "another threat or other settings of the attack"),
    ("channel", "any protocol"),
    ("model", "another network"),
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one job would cost.

    Attributes:
        seconds: On one worker.
        n_bytes: On disk.
        host: Peak bytes of memory, None where none was measured.
        device: Of the GPU's, likewise.
        match: exact (this very job was measured), near, or none (then all else is 0).
        why: What was given up to find the nearest.
    """

    seconds: float = 0.0
    n_bytes: float = 0.0
    host: float | None = None
    device: float | None = None
    match: Literal["exact", "near", "none"] = "none"
    why: str = ""


@dataclass(frozen=True)
class Table:
    """Measured costs, and what a job that was not measured costs by them."""

    costs: Sequence[Cost]
    _found: dict[Any, tuple[Relaxation, list[Cost]] | None] = field(
        default_factory=dict, repr=False
    )
    _told: dict[Any, Estimate] = field(default_factory=dict, repr=False)

    def devices(self) -> set[str]:
        """`cpu`, `cuda`: where something was measured."""
        return {c.features["device"] for c in self.costs if not c.skipped}

    def training(self, job: TrainJob, *, device: str, samples: int) -> Estimate:
        """Of one training.

        Args:
            job: The training.
            device: Where it would run.
            samples: Of the whole training set, which local epochs divide.
        """
        protocol = job.protocol
        steps = float(protocol.local_steps or 1)
        if protocol.local_epochs:
            own = samples / protocol.clients
            steps = max(1.0, round(protocol.local_epochs * own / min(protocol.batch, own)))
        known = (_but_for_seed(job), device, samples)
        if known not in self._told:
            self._told[known] = self.estimate(
                "train",
                training_features(job, device),
                work=protocol.rounds,
                size=round_size(job, steps),
            )
        return self._told[known]

    def attack(self, job: AttackJob, *, device: str, reference: bool) -> Estimate:
        """Of one attack.

        Args:
            job: The attack.
            device: Where it would run.
            reference: Whether an optimising attack runs again at twice its budget.
        """
        # Seeds, and the trainings of a suite that cost alike, are looked up once.
        known = (_but_for_seed(job.train), device, reference, canonical(job.inputs()))
        if known not in self._told:
            self._told[known] = self.estimate(
                "attack",
                attack_features(job, device),
                work=job.budget,
                size=threat_size(job.threat),
                reference=reference,
            )
        return self._told[known]

    def estimate(
        self,
        stage: Stage,
        features: Features,
        *,
        work: float,
        size: float,
        reference: bool = False,
    ) -> Estimate:
        """The median over the costs that are nearest in kind."""
        found = self._nearest(stage, features)
        if found is None:
            return Estimate()
        step, costs = found
        seconds, n_bytes = [], []
        for cost in costs:
            time, space = self._scales(cost, features, step, size)
            own = cost.seconds(work) + (cost.again(work) if reference else 0.0)
            seconds.append(time * own)
            n_bytes.append(space * cost.n_bytes)
        same = not step.drops and any(p.work == work for p in costs[0].points)
        return Estimate(
            seconds=median(seconds),
            n_bytes=median(n_bytes),
            host=most(c.host for c in costs),
            device=most(c.device for c in costs),
            match="exact" if same else "near",
            why=step.why,
        )

    def _nearest(self, stage: Stage, features: Features) -> tuple[Relaxation, list[Cost]] | None:
        known = (stage, tuple(features.values()))
        if known not in self._found:
            self._found[known] = self._look(stage, features)
        return self._found[known]

    def _look(self, stage: Stage, features: Features) -> tuple[Relaxation, list[Cost]] | None:
        for position, step in enumerate(_TRAININGS if stage == "train" else _ATTACKS):
            costs = self._index(stage, position).get(_key(features, step), [])
            costs = [c for c in costs if self._comparable(c, features, step)]
            if costs:
                return step, costs
        return None

    def _index(self, stage: Stage, position: int) -> dict[Any, list[Cost]]:
        return self._indices[stage][position]

    @cached_property
    def _indices(self) -> dict[Stage, list[dict[Any, list[Cost]]]]:
        out: dict[Stage, list[dict[Any, list[Cost]]]] = {"train": [], "attack": []}
        for stage, steps in (("train", _TRAININGS), ("attack", _ATTACKS)):
            for step in steps:
                index: dict[Any, list[Cost]] = defaultdict(list)
                for cost in self.costs:
                    # That a job does not apply says nothing of another defense or network.
                    if cost.stage == stage and not (
                        cost.skipped and step.drops & {"defense", "channel", "model"}
                    ):
                        index[_key(cost.features, step)].append(cost)
                out[stage].append(dict(index))  # type: ignore[index]
        return out

    @cached_property
    def _networks(self) -> dict[tuple[str, str, str], tuple[float, int]]:
        """Device, model, data -> client seconds of one local step per sample, parameters."""
        found: dict[tuple[str, str, str], list[Cost]] = defaultdict(list)
        for cost in self.costs:
            if cost.step_s is not None and cost.parameters is not None:
                found[_network(cost.features)].append(cost)
        return {
            network: (
                median(c.step_s / int(c.features["batch"]) for c in costs if c.step_s is not None),
                max(c.parameters or 0 for c in costs),
            )
            for network, costs in found.items()
        }

    def _pace(self, features: Features) -> tuple[float, float] | None:
        """Of a network, as in `_networks`; where it was not measured on that data, as on other
        data; None if it was nowhere."""
        device, model, data = _network(features)
        if (device, model, data) in self._networks:
            return self._networks[device, model, data]
        like = [v for (d, m, _), v in self._networks.items() if (d, m) == (device, model)]
        return (median(v[0] for v in like), median(v[1] for v in like)) if like else None

    def _comparable(self, cost: Cost, features: Features, step: Relaxation) -> bool:
        """Whether the speed of both networks was measured, where they differ."""
        if "model" not in step.drops or _network(features) == _network(cost.features):
            return True
        return self._pace(features) is not None and self._pace(cost.features) is not None

    def _scales(
        self, cost: Cost, features: Features, step: Relaxation, size: float
    ) -> tuple[float, float]:
        """Factors on seconds and on bytes from the measured job to the one asked for."""
        time = space = 1.0
        here, there = self._pace(features), self._pace(cost.features)
        if here and there and step.drops & _NETWORK:
            time = here[0] / there[0] if there[0] > 0 else 1.0
            space = here[1] / there[1]
        if step.drops & {"batch", "threat"} and cost.grows:
            time *= size / cost.size
        return time, space


@lru_cache(maxsize=1 << 14)
def _but_for_seed(job: TrainJob) -> str:
    return canonical({k: v for k, v in job.inputs().items() if k != "seed"})


def _key(features: Features, step: Relaxation) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, v) for k, v in features.items() if k not in step.drops))


def _network(features: Features) -> tuple[str, str, str]:
    return features["device"], features["model"], features["data"]


def shipped() -> list[Cost]:
    """The costs that come with leakbench; `shipped.json` says where and how they were measured."""
    data = json.loads((files("bench.harness.costs") / "shipped.json").read_text())
    return [Cost.from_dict(c) for source in data["sources"] for c in source["costs"]]


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


def left_out_error(costs: Sequence[Cost], stage: Stage, *, least_s: float = 0.1) -> Error:
    """The lookup's error on jobs whose own measurement is left out."""
    off, told, took = [], 0.0, 0.0
    mine = [c for c in costs if c.stage == stage and not c.skipped]
    for cost in mine:
        table = Table([c for c in costs if c is not cost])
        point = cost.points[0]
        guess = table.estimate(stage, cost.features, work=point.work, size=cost.size)
        if guess.match != "none" and point.seconds >= least_s:
            off.append(abs(guess.seconds / point.seconds - 1))
            told, took = told + guess.seconds, took + point.seconds
    if not off:
        raise UserError(f"no {stage} of at least {least_s} s can be told from the others.")
    return Error(jobs=len(off), median=median(off), total=told / took)
