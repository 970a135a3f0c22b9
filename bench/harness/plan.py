"""A suite expanded: the trainings and the attacks on them."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from bench.errors import UserError
from bench.names import check_known
from bench.records import AttackJob, TrainJob, attack_job, labels
from bench.suite import Suite, as_text, check_once, grid


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A suite expanded.

    Attributes:
        suite: What was asked for.
        trainings: Each once, in the suite's order.
        cells: The attacks on them, each once, in the same order.
    """

    suite: Suite
    trainings: tuple[TrainJob, ...]
    cells: tuple[AttackJob, ...]

    def __post_init__(self) -> None:
        planned = {(c.train, c.checkpoint, c.label) for c in self.cells}
        for cell in self.cells:
            if any((a.train, a.checkpoint, a.label) not in planned for a in cell.after):
                # It would wait for ever.
                raise ValueError(f"{cell.name} is planned without what it goes after.")

    def by_training(self) -> dict[TrainJob, list[AttackJob]]:
        """Return the attacks on every training; some have none."""
        attacks: dict[TrainJob, list[AttackJob]] = {job: [] for job in self.trainings}
        for cell in self.cells:
            attacks[cell.train].append(cell)
        return attacks

    def part(self, number: int, of: int) -> Self:
        """Return part `number`, from 1, of `of`: every `of`-th training with its attacks, which
        makes parts cost the same. Raises UserError for a missing or empty part."""
        if not 1 <= number <= of:
            raise UserError(f"shard {number}/{of} does not exist: give i/n with 1 <= i <= n.")
        if number > len(self.trainings):
            raise UserError(
                f"shard {number}/{of} is empty: the plan has {len(self.trainings)} trainings."
            )
        mine = dict.fromkeys(self.trainings[number - 1 :: of])
        cells = tuple(c for c in self.cells if c.train in mine)
        return replace(self, trainings=tuple(mine), cells=cells)


FILTERS: Mapping[str, Callable[[Suite], Iterable[Any]]] = {
    "dataset": lambda suite: (t.dataset for t in suite.tasks),
    "model": lambda suite: (t.model for t in suite.tasks),
    "protocol": lambda suite: (suite.protocol_of(t).name for t in suite.tasks),
    "defense": lambda suite: (d.name for d in suite.defenses),
    "attack": lambda suite: (a.name for a in suite.attacks),
    "checkpoint": lambda suite: suite.checkpoints,
    "threat": lambda suite: (t.name for t in suite.threats),
    "seed": lambda suite: suite.seeds,
    "task": lambda suite: range(len(suite.tasks)),
    "variant": lambda suite: (
        s.get("variant", "") for d in suite.defenses for s in grid(d.settings)
    ),
}
"""Keys of a filter, and the values that each may have in a suite."""


def expand(suite: Suite, only: Mapping[str, Any] | None = None) -> Plan:
    """Return all trainings and attacks of a suite, or those that match a filter.

    A task that no attack names is trained for its accuracy alone, and not observed.

    Args:
        suite: The suite.
        only: Key of FILTERS -> value, or several with commas between them; a task is its place
            in the file, from 0.

    Raises:
        UserError: For an unknown key, a value named twice, and a filter that leaves nothing.
    """
    only = {k: as_text(v) for k, v in (only or {}).items()}
    for key in only:
        check_known("--only key", key, FILTERS)

    parts = {k: [part.strip() for part in v.split(",")] for k, v in only.items()}
    for key, values in parts.items():
        check_once(f"--only {key}", values)
    choices = {k: {v, *parts[k]} for k, v in only.items()}
    for key, value in only.items():
        known = list(dict.fromkeys(map(str, FILTERS[key](suite))))
        for part in [] if value in known else parts[key]:
            check_known(key, part, known, where=f"suite {suite.name}")

    def is_wanted(**values: Any) -> bool:
        return all(str(v) in choices.get(k, (str(v),)) for k, v in values.items())

    first = suite.threats[0].name
    attacks = labels(suite)
    only_attacks = not choices.keys().isdisjoint(("attack", "threat", "checkpoint"))
    trainings = dict[TrainJob, None]()
    cells = list[AttackJob]()
    axes = itertools.product(enumerate(suite.tasks), suite.defenses, suite.seeds)
    for (place, task), defense, seed in axes:
        protocol = suite.protocol_of(task)
        for settings in grid(defense.settings):
            if not defense.runs_on(place) or not is_wanted(
                task=place,
                dataset=task.dataset,
                model=task.model,
                protocol=protocol.name,
                defense=defense.name,
                seed=seed,
                variant=settings.get("variant", ""),
            ):
                continue
            job = TrainJob(
                task=task,
                protocol=protocol,
                defense=defense.name,
                settings=settings,
                threats=tuple(suite.threats_of(place)),
                checkpoints=tuple(suite.checkpoints),
                delta=suite.delta,
                seed=seed,
                audit=suite.audit,
                course=suite.course,
            )
            if job in trainings:  # named twice by the suite of an older run
                continue
            mine = [
                attack_job(job, suite, attacks, label, checkpoint)
                for checkpoint in suite.checkpoints
                for label, attack in attacks.items()
                if checkpoint in suite.checkpoints_of(attack)
                and attack.runs_on(place)
                and is_wanted(
                    attack=attack.name, checkpoint=checkpoint, threat=attack.threat or first
                )
            ]
            if mine or not (only_attacks or (suite.attacks and job.threats)):
                trainings[job] = None
                # What several attacks go after is made once.
                before = (part for cell in mine for part in (*cell.before(), cell))
                cells.extend({(part.checkpoint, part.label): part for part in before}.values())
    if not trainings:
        raise UserError(
            f"--only {', '.join(f'{k}={v}' for k, v in only.items())} leaves nothing of suite "
            f"{suite.name}."
        )
    return Plan(suite=suite, trainings=tuple(trainings), cells=tuple(cells))
