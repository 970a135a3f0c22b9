"""A suite expanded: the trainings and the attack cells on them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.errors import UserError
from bench.names import did_you_mean
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.suite import Checkpoint, Suite, TaskSettings, as_text, grid


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """One training: everything that decides its outcome."""

    task: TaskSettings
    protocol: ProtocolSettings
    defense: str
    settings: Mapping[str, Any]
    threats: tuple[ThreatSettings, ...]
    checkpoints: tuple[Checkpoint, ...]
    delta: float
    seed: int
    audit: int

    def inputs(self) -> dict[str, Any]:
        return {
            "task": self.task.model_dump(exclude={"protocol"}),
            "protocol": self.protocol.model_dump(),
            "defense": self.defense,
            "settings": dict(self.settings),
            "threats": [t.model_dump() for t in self.threats],
            "checkpoints": list(self.checkpoints),
            "delta": self.delta,
            "seed": self.seed,
            "audit": self.audit,
        }


@dataclass(frozen=True, kw_only=True)
class AttackCell:
    """One attack on one observation of a training. label: its column in the leaderboard."""

    train: TrainJob
    attack: str
    label: str
    settings: Mapping[str, Any]
    threat: ThreatSettings
    checkpoint: Checkpoint
    budget: int

    def inputs(self) -> dict[str, Any]:
        return {
            "attack": self.attack,
            "settings": dict(self.settings),
            "threat": self.threat.name,
            "checkpoint": self.checkpoint,
            "budget": self.budget,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A suite expanded: the trainings and the attack cells on them."""

    suite: Suite
    trainings: tuple[TrainJob, ...]
    cells: tuple[AttackCell, ...]

    def part(self, number: int, of: int) -> Plan:
        """The `number`-th (from 1) of so many parts: every `of`-th training with its cells, so that
        parts are alike in cost. Raises UserError for a part that does not exist or is empty."""
        if not 1 <= number <= of:
            raise UserError(f"shard {number}/{of} does not exist: give i/n with 1 <= i <= n.")
        if number > len(self.trainings):
            raise UserError(
                f"shard {number}/{of} is empty: the plan has {len(self.trainings)} trainings."
            )
        mine = self.trainings[number - 1 :: of]
        kept = {id(t) for t in mine}
        return Plan(
            suite=self.suite, trainings=mine,
            cells=tuple(c for c in self.cells if id(c.train) in kept),
        )  # fmt: skip


ONLY_KEYS = (
    "dataset", "model", "protocol", "defense", "attack", "checkpoint", "threat", "seed", "task",
    "variant",
)  # fmt: skip


def expand(suite: Suite, only: Mapping[str, Any] | None = None) -> Plan:
    """All trainings and cells, or those that match every `only` pair (values as text, several
    with commas between them; a task is its place in the file, from 0).

    Raises UserError for an unknown key and for a filter that leaves nothing.
    """
    only = {k: as_text(v) for k, v in (only or {}).items()}
    for key in only:
        if key not in ONLY_KEYS:
            raise UserError(did_you_mean("--only key", key, ONLY_KEYS))

    choices = {k: {v, *(one.strip() for one in v.split(","))} for k, v in only.items()}

    def wanted(**values: Any) -> bool:
        return all(str(v) in choices.get(k, (str(v),)) for k, v in values.items())

    first = suite.threats[0].name
    names = [a.name for a in suite.attacks]
    attacks = [
        (a, a.name if names.count(a.name) == 1 else f"{a.name}@{a.threat or first}")
        for a in suite.attacks
    ]
    threats = {t.name: t for t in suite.threats}
    trainings, cells = [], []
    axes = itertools.product(enumerate(suite.tasks), suite.defenses, suite.seeds)
    for (place, task), defense, seed in axes:
        protocol = suite.protocol_of(task)
        for settings in grid(defense.settings):
            if defense.tasks is not None and place not in defense.tasks:
                continue
            if not wanted(
                task=place, dataset=task.dataset, model=task.model, protocol=protocol.name,
                defense=defense.name, seed=seed, variant=settings.get("variant", ""),
            ):  # fmt: skip
                continue
            job = TrainJob(
                task=task,
                protocol=protocol,
                defense=defense.name,
                settings=settings,
                threats=tuple(suite.threats),
                checkpoints=tuple(suite.checkpoints),
                delta=suite.delta,
                seed=seed,
                audit=suite.audit,
            )
            mine = [
                AttackCell(
                    train=job,
                    attack=attack.name,
                    label=label,
                    settings=attack.settings,
                    threat=threats[attack.threat or first],
                    checkpoint=checkpoint,
                    budget=suite.budget if attack.budget is None else attack.budget,
                )
                for checkpoint in suite.checkpoints
                for attack, label in attacks
                if checkpoint in (attack.checkpoints or suite.checkpoints)
                and (attack.tasks is None or place in attack.tasks)
                and wanted(attack=attack.name, checkpoint=checkpoint, threat=attack.threat or first)
            ]
            if mine or not attacks:
                trainings.append(job)
                cells.extend(mine)
    if not trainings:
        raise UserError(
            f"--only {', '.join(f'{k}={v}' for k, v in only.items())} leaves nothing of suite "
            f"{suite.name}."
        )
    return Plan(suite=suite, trainings=tuple(trainings), cells=tuple(cells))
