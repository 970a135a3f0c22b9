"""What a run consists of: trainings and the attacks on them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from bench.protocols.settings import Checkpoint, ProtocolSettings, TaskSettings, ThreatSettings
from bench.records.text import plain


def canonical(value: Any) -> str:
    """One text for equal values, whatever their order."""
    return json.dumps(plain(value), sort_keys=True)


def short(value: Any) -> str:
    """A setting's value as tables show it."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def setting_text(name: str, settings: Mapping[str, Any]) -> str:
    """spm(epsilon=1.5, variant=printed)."""
    inner = ", ".join(f"{k}={short(v)}" for k, v in settings.items())
    return f"{name}({inner})" if inner else name


class Job:
    """Something to be made, equal to another of the same kind and inputs, and hashable."""

    def inputs(self) -> dict[str, Any]:
        """All that decides the outcome, as its record and run.json hold it."""
        raise NotImplementedError

    @cached_property
    def text(self) -> str:
        """The inputs as one text."""
        return canonical(self.inputs())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and type(self) is type(other) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainJob(Job):
    """One training: everything that decides its outcome.

    Attributes:
        task: Data set and network.
        protocol: How it trains; the task's overrides are in it.
        defense: Its registered name.
        settings: The defense's, by name.
        threats: Under which it is observed.
        checkpoints: When it is observed.
        delta: Of every epsilon.
        seed: Of every draw.
        audit: Draws of the empirical audit, 0 for none.
        course: Rounds after which accuracy and epsilon are measured; see `Suite`.
    """

    task: TaskSettings
    protocol: ProtocolSettings
    defense: str
    settings: Mapping[str, Any]
    threats: tuple[ThreatSettings, ...]
    checkpoints: tuple[Checkpoint, ...]
    delta: float
    seed: int
    audit: int = 0
    course: int = 0

    def inputs(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(TrainJob)} | {
            "task": self.task.model_dump(exclude={"protocol"}),
            "protocol": self.protocol.model_dump(),
            "settings": dict(self.settings),
            "threats": [t.model_dump() for t in self.threats],
            "checkpoints": list(self.checkpoints),
        }

    to_json_value = inputs

    @property
    def setting(self) -> str:
        """spm(epsilon=1.5)."""
        return setting_text(self.defense, self.settings)

    @property
    def name(self) -> str:
        """digits/lenet/spm(epsilon=1.5)/seed=0."""
        return f"{self.task.dataset}/{self.task.model}/{self.setting}/seed={self.seed}"

    def threat(self, name: str) -> ThreatSettings:
        """The threat of that name. Raises KeyError if the training has none."""
        return {t.name: t for t in self.threats}[name]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackJob(Job):
    """One attack on one observation of a training.

    Attributes:
        train: The training.
        attack: Its registered name.
        label: Its column in the leaderboard.
        settings: The attack's, by name.
        threat: Under which the observation was made.
        checkpoint: When it was made.
        budget: Gradient evaluations allowed per start.
        after: Attacks on the same observation that go before; it spares the victims that they
            rebuilt (see `bench.harness.cascade`).
    """

    train: TrainJob
    attack: str
    label: str
    settings: Mapping[str, Any]
    threat: ThreatSettings
    checkpoint: Checkpoint
    budget: int
    after: tuple[AttackJob, ...] = ()

    def inputs(self) -> dict[str, Any]:
        own = {
            "attack": self.attack,
            "settings": dict(self.settings),
            "threat": self.threat.name,
            "checkpoint": self.checkpoint,
            "budget": self.budget,
        }
        return own | {"after": [a.inputs() for a in self.after]} if self.after else own

    def before(self) -> Iterator[AttackJob]:
        """The attacks that must have gone before, the first of all first."""
        for job in self.after:
            yield from job.before()
            yield job

    @cached_property
    def text(self) -> str:
        return f"{self.train.text} {self.label} {canonical(self.inputs())}"

    @property
    def name(self) -> str:
        """digits/lenet/spm(epsilon=1.5)/dlg/final, unique up to protocol and seed."""
        task = self.train.task
        return "/".join((task.dataset, task.model, self.train.setting, self.label, self.checkpoint))
