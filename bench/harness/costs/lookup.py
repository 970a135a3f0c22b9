"""What a job costs that was not measured: as the nearest that was.

`_STEPS` says what is given up, step by step, until something was measured. Times
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

from bench.harness.costs.cost import Cost, most
from bench.harness.costs.features import (
    Features,
    attack_features,
    round_size,
    threat_size,
    training_features,
)
from bench.records import AttackJob, Kind, TrainJob, canonical


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
_STEPS: dict[Kind, tuple[Relaxation, ...]] = {
    "train": _steps(
        ("", "the same job"),
        ("settings audit", "the same defense with other settings"),
        ("data", "the same network on other data"),
        ("clients participation batch local threats checkpoints", "other clients and threats"),
        ("protocol", "another protocol"),
        ("defense", "another defense"),
        ("model channel", "another network or cut"),
    ),
    "attack": _steps(
        ("", "the same job"),
        ("settings", "the same defense with other settings"),
        ("checkpoint", "the other checkpoint"),
        ("data", "the same network on other data"),
        ("protocol", "another protocol that hides as much of the network"),
        ("defense", "another defense"),
        ("threat options", "another threat or other settings of the attack"),
        ("channel", "any protocol"),
        ("model", "another network"),
    ),
}


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
        """Of one training; `samples` are those of the whole training set, which local epochs
        divide."""
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
        """Of one attack; where `reference`, an optimising one runs again at twice its budget."""
        # Seeds, and the trainings of a suite that cost alike, are looked up once.
        known = (_but_for_seed(job.train), device, reference, canonical(job.inputs()))
        if known not in self._told:
            self._told[known] = self.estimate(
                "attack",
                attack_features(job, device),
                work=job.budget,
                size=threat_size(job),
                reference=reference,
            )
        return self._told[known]

    def estimate(
        self, kind: Kind, features: Features, *, work: float, size: float, reference: bool = False
    ) -> Estimate:
        """The median over the costs that are nearest in kind."""
        found = self._nearest(kind, features)
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

    def _nearest(self, kind: Kind, features: Features) -> tuple[Relaxation, list[Cost]] | None:
        known = (kind, tuple(features.values()))
        if known not in self._found:
            near = (
                (step, [c for c in costs if self._comparable(c, features, step)])
                for step, index in zip(_STEPS[kind], self._indices[kind], strict=True)
                if (costs := index.get(_key(features, step)))
            )
            self._found[known] = next(((step, costs) for step, costs in near if costs), None)
        return self._found[known]

    @cached_property
    def _indices(self) -> dict[Kind, list[dict[Any, list[Cost]]]]:
        return {kind: [self._index(kind, s) for s in steps] for kind, steps in _STEPS.items()}

    def _index(self, kind: Kind, step: Relaxation) -> dict[Any, list[Cost]]:
        # That a job does not apply says nothing of another defense or network.
        far = step.drops & {"defense", "channel", "model"}
        index: dict[Any, list[Cost]] = defaultdict(list)
        for cost in self.costs:
            if cost.stage == kind and not (cost.skipped and far):
                index[_key(cost.features, step)].append(cost)
        return dict(index)

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
