"""What trainings and attack cells cost in seconds, bytes and memory, told from finished ones.

A `Table` holds what was measured. It is made from the records of result folders (`measure`) and
comes with one of its own, `costs.json`. A job that was not measured is told from the nearest that
was: `_TRAININGS` and `_ATTACKS` say what is given up, step by step. Times between networks are
scaled by the measured seconds of one local step, bytes by the number of parameters.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from scipy.optimize import nnls

from bench.store import read_record
from bench.suite import AttackCell, TrainJob

Stage = Literal["train", "attack"]
Record = Mapping[str, Any]
Features = Mapping[str, str]
_SETTLED = ("done", "not_applicable")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the lookup: what need no longer agree, beyond what the steps before gave up."""

    drops: frozenset[str]
    why: str


def _steps(*steps: tuple[str, str]) -> tuple[Step, ...]:
    """Of (names of features, why): each drops what those before it drop."""
    out: list[Step] = []
    dropped: frozenset[str] = frozenset()
    for names, why in steps:
        dropped |= frozenset(names.split())
        out.append(Step(drops=dropped, why=why))
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
class Point:
    """work: rounds of a training, budget of an attack. again: seconds of the run at twice the
    budget, None where there was none."""

    work: float
    seconds: float
    again: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What jobs of the same features took. grows: whether seconds follow the work. size: samples
    that the work is done on. n_bytes: on disk, record included. skipped: the job was found not to
    apply. step_s: client seconds of one local step, parameters: of the network; both of trainings
    alone."""

    stage: Stage
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
        points = tuple(
            Point(work=p[0], seconds=p[1], again=p[2] if len(p) > 2 else None)
            for p in data["points"]
        )
        return Cost(**{**data, "points": points})


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one job. match: exact (this very job was measured), near, or none (then all else is 0).
    host, device: peak bytes of memory, None where none was measured."""

    seconds: float = 0.0
    n_bytes: float = 0.0
    host: float | None = None
    device: float | None = None
    match: Literal["exact", "near", "none"] = "none"
    why: str = ""


# --- what a job is, for its cost ------------------------------------------------------------


def _text(settings: Mapping[str, Any]) -> str:
    return ",".join(f"{k}={settings[k]}" for k in sorted(settings))


def _threat(threat: Mapping[str, Any]) -> str:
    return f"{threat['victims']}x{threat['batch']}x{threat['local_steps']}"


def _setup(inputs: Mapping[str, Any], device: str) -> dict[str, str]:
    """What matters to a training as to the attacks on it."""
    task, protocol = inputs["task"], inputs["protocol"]
    cut = protocol["cut"]
    split = f"{cut if isinstance(cut, str) else '+'.join(cut or [])}/{protocol['labels']}"
    return {
        "device": device.split(":")[0],
        "protocol": protocol["name"],
        "channel": split if cut else "whole",
        "model": f"{task['model']}({_text(task['model_settings'])})",
        "data": f"{task['dataset']}({_text(task['dataset_settings'])})",
        "defense": inputs["defense"],
        "settings": _text(inputs["settings"]),
    }


def training_features(inputs: Mapping[str, Any], device: str) -> dict[str, str]:
    """What the cost of a training depends on, but for its rounds. inputs: `TrainJob.inputs`."""
    protocol = inputs["protocol"]
    steps, epochs = protocol["local_steps"], protocol["local_epochs"]
    local = f"{epochs:g} epochs" if epochs else f"{steps or 1} steps"
    return _setup(inputs, device) | {
        "clients": str(protocol["clients"]),
        "participation": f"{protocol['participation']:g}",
        "batch": str(protocol["batch"]),
        "local": local,
        "threats": " ".join(_threat(t) for t in inputs["threats"]),
        "checkpoints": " ".join(inputs["checkpoints"]),
        "audit": str(inputs["audit"]),
    }


def attack_features(
    inputs: Mapping[str, Any], training: Mapping[str, Any], device: str
) -> dict[str, str]:
    """What the cost of a cell depends on, but for its budget. inputs: `AttackCell.inputs`;
    training: those of its training."""
    (threat,) = (t for t in training["threats"] if t["name"] == inputs["threat"])
    return _setup(training, device) | {
        "attack": inputs["attack"],
        "options": _text(inputs["settings"]),
        "checkpoint": inputs["checkpoint"],
        "threat": f"{_threat(threat)} aux {threat['aux']}",
    }


def _round_size(inputs: Mapping[str, Any], steps: float) -> float:
    """Samples of all clients' steps in a round."""
    protocol = inputs["protocol"]
    taking_part = max(1, round(protocol["participation"] * protocol["clients"]))
    return float(taking_part * steps * protocol["batch"])


def _threat_size(inputs: Mapping[str, Any], training: Mapping[str, Any]) -> float:
    (threat,) = (t for t in training["threats"] if t["name"] == inputs["threat"])
    return float(threat["victims"] * threat["batch"] * threat["local_steps"])


# --- from records ---------------------------------------------------------------------------


def finished(folder: Path) -> dict[Stage, dict[str, Record]]:
    """Per stage and key, what a result folder's finished jobs tell of costs; none if it is none."""
    return {"train": dict(_records(folder, "train")), "attack": dict(_records(folder, "attack"))}


def measure(folder: Path, found: Mapping[Stage, Mapping[str, Record]] | None = None) -> list[Cost]:
    """The costs of a result folder's finished trainings and cells, one per set of features.

    found: its `finished` jobs, if they were read already. Raises ValueError for a folder without
    records.
    """
    if not (folder / "records").is_dir():
        raise ValueError(f"{folder} holds no records: give --costs a result folder.")
    found = finished(folder) if found is None else found
    trainings = {k: r for k, r in found["train"].items() if "inputs" in r}
    costs = [_of_training(folder, r) for r in trainings.values()]
    for record in found["attack"].values():
        trained = trainings.get(record.get("train", ""))
        if trained is not None and "inputs" in record:
            costs.append(_of_attack(folder, record, trained))
    return joined(costs)


_TOLD = ("key", "status", "seconds", "doubled", "gradient_evaluations", "files", "memory", "device",
         "train", "inputs", "facts", "client_seconds", "parameters")  # fmt: skip
"""Of a record: what is kept while a folder is read, which may hold a hundred thousand."""


def _records(folder: Path, stage: Stage) -> Iterator[tuple[str, Record]]:
    """Key and record of every job that need not be made again."""
    for path in sorted((folder / "records" / stage).glob("*.json")):
        record = read_record(path)
        if record is not None and record["status"] in _SETTLED:
            kept = {k: record[k] for k in _TOLD if k in record}
            if kept.get("doubled"):
                kept["doubled"] = {k: kept["doubled"][k] for k in ("budget", "seconds")}
            yield path.stem, kept


def _of_training(folder: Path, record: Record) -> Cost:
    inputs = record["inputs"]
    done = record["status"] == "done"
    steps = record["facts"]["local_steps"] if done else 1
    return Cost(
        stage="train",
        features=training_features(inputs, record.get("device", "cpu")),
        points=(
            Point(work=inputs["protocol"]["rounds"], seconds=float(record.get("seconds", 0.0))),
        ),
        grows=done,
        size=_round_size(inputs, steps),
        n_bytes=_bytes(folder, "train", record),
        skipped=not done,
        step_s=record["client_seconds"] / steps if done else None,
        parameters=record["parameters"] if done else None,
        host=_memory(record, "host"),
        device=_memory(record, "device"),
    )


def _of_attack(folder: Path, record: Record, trained: Record) -> Cost:
    inputs, done = record["inputs"], record["status"] == "done"
    seconds, budget = float(record.get("seconds", 0.0)), inputs["budget"]
    doubled = record.get("doubled")
    if doubled is None:
        points = [Point(work=budget, seconds=seconds)]
    else:  # the second run tells what twice the budget takes
        again = float(doubled["seconds"])
        points = [
            Point(work=budget, seconds=seconds, again=again),
            Point(work=doubled["budget"], seconds=again),
        ]
    return Cost(
        stage="attack",
        features=attack_features(inputs, trained["inputs"], trained.get("device", "cpu")),
        points=tuple(points),
        grows=done and record["gradient_evaluations"] > 0,
        size=_threat_size(inputs, trained["inputs"]),
        n_bytes=_bytes(folder, "attack", record),
        skipped=not done,
        host=_memory(record, "host"),
        device=_memory(record, "device"),
    )


def _memory(record: Record, of: str) -> float | None:
    found = (record.get("memory") or {}).get(of)
    return None if found is None else float(found)


def _bytes(folder: Path, stage: Stage, record: Record) -> float:
    """On disk: the record and its files, counted there where the record does not list them."""
    own = (folder / "records" / stage / f"{record['key']}.json").stat().st_size
    if "files" in record:
        return float(own + sum(record["files"].values()))
    place = folder / "artifacts" / record["key"]
    return float(own + sum(p.stat().st_size for p in place.rglob("*") if p.is_file()))


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
        host=_most(c.host for c in group),
        device=_most(c.device for c in group),
        step_s=_median(c.step_s for c in group),
        parameters=first.parameters,
        runs=sum(c.runs for c in group),
    )


def _middle(points: Sequence[Point]) -> Point:
    return Point(
        work=points[0].work,
        seconds=median(p.seconds for p in points),
        again=_median(p.again for p in points),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None


def _most(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


# --- the table ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Measured costs, and what a job that was not measured costs by them."""

    costs: Sequence[Cost]
    _found: dict[Any, tuple[Step, list[Cost]] | None] = field(default_factory=dict, repr=False)
    _jobs: dict[int, tuple[TrainJob, dict[str, Any], str]] = field(default_factory=dict, repr=False)
    _told: dict[Any, Estimate] = field(default_factory=dict, repr=False)

    def devices(self) -> set[str]:
        """`cpu`, `cuda`: where something was measured."""
        return {c.features["device"] for c in self.costs if not c.skipped}

    def training(self, job: TrainJob, *, device: str, samples: int) -> Estimate:
        """Of one training. samples: of the whole training set, which local epochs divide."""
        inputs, kind = self._inputs(job)
        protocol = job.protocol
        steps = float(protocol.local_steps or 1)
        if protocol.local_epochs:
            own = samples / protocol.clients
            steps = max(1.0, round(protocol.local_epochs * own / min(protocol.batch, own)))
        known = (kind, device, samples)
        if known not in self._told:
            self._told[known] = self.estimate(
                "train",
                training_features(inputs, device),
                work=protocol.rounds,
                size=_round_size(inputs, steps),
            )
        return self._told[known]

    def attack(self, cell: AttackCell, *, device: str, reference: bool) -> Estimate:
        """Of one cell. reference: whether an optimising attack runs again at twice its budget."""
        training, kind = self._inputs(cell.train)
        # Seeds, and the trainings of a suite that cost alike, are looked up once.
        known = (kind, device, reference, cell.attack, str(cell.settings), cell.threat.name,
                 cell.checkpoint, cell.budget)  # fmt: skip
        if known not in self._told:
            self._told[known] = self.estimate(
                "attack",
                attack_features(cell.inputs(), training, device),
                work=cell.budget,
                size=_threat_size(cell.inputs(), training),
                reference=reference,
            )
        return self._told[known]

    def _inputs(self, job: TrainJob) -> tuple[dict[str, Any], str]:
        """A training's inputs, and a text of all but its seed; made once per training."""
        if id(job) not in self._jobs:
            inputs = job.inputs()
            kind = repr({k: v for k, v in inputs.items() if k != "seed"})
            self._jobs[id(job)] = (job, inputs, kind)  # the job is kept: its id stays its own
        return self._jobs[id(job)][1:]

    def estimate(
        self, stage: Stage, features: Features, *, work: float, size: float,
        reference: bool = False,
    ) -> Estimate:  # fmt: skip
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
            host=_most(c.host for c in costs),
            device=_most(c.device for c in costs),
            match="exact" if same else "near",
            why=step.why,
        )

    def _nearest(self, stage: Stage, features: Features) -> tuple[Step, list[Cost]] | None:
        known = (stage, tuple(features.values()))
        if known not in self._found:
            self._found[known] = self._look(stage, features)
        return self._found[known]

    def _look(self, stage: Stage, features: Features) -> tuple[Step, list[Cost]] | None:
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

    def _comparable(self, cost: Cost, features: Features, step: Step) -> bool:
        """Whether the speed of both networks was measured, where they differ."""
        if "model" not in step.drops or _network(features) == _network(cost.features):
            return True
        return self._pace(features) is not None and self._pace(cost.features) is not None

    def _scales(
        self, cost: Cost, features: Features, step: Step, size: float
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


def _key(features: Features, step: Step) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, v) for k, v in features.items() if k not in step.drops))


def _network(features: Features) -> tuple[str, str, str]:
    return features["device"], features["model"], features["data"]


def shipped() -> list[Cost]:
    """The costs that come with leakbench; `costs.json` says where and how they were measured."""
    data = json.loads((files("bench") / "costs.json").read_text())
    return [Cost.from_dict(c) for source in data["sources"] for c in source["costs"]]


@dataclass(frozen=True, kw_only=True)
class Error:
    """How far estimates are off. median: of |estimate / measured - 1| over jobs of at least
    `least_s` seconds; total: sum of estimates over sum of measured seconds."""

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
        raise ValueError(f"no {stage} of at least {least_s} s can be told from the others.")
    return Error(jobs=len(off), median=median(off), total=told / took)
