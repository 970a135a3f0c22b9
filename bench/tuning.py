"""Settings of defenses that lose just so much accuracy, found by trainings alone.

A defense declares which setting trades accuracy for protection (`Strength`). For each task, and
each loss of accuracy that is asked for, the strongest value is searched that loses no more: the
ends first, then by bisection on a logarithmic scale, all defenses side by side. No attack runs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.contract.defense import Strength
from bench.errors import UserError
from bench.records import Row
from bench.registry import Registry
from bench.report.overview import LOSSES
from bench.report.verdicts import UNDEFENDED, at_most, has_use
from bench.suite import DefenseSettings, Suite, grid, to_toml

STEPS = 6
"""Trainings per loss that a search makes at most beside those at the two ends."""
_DIGITS = 3
"""Significant digits of a value that is tried."""

Play = Callable[[Suite], Sequence[Row]]
"""Runs a suite's trainings and gives the rows of its leaderboard."""


@dataclass(kw_only=True)
class Search:
    """One defense on one task.

    Attributes:
        defense: Its name.
        settings: The others of its settings.
        strength: What is searched.
        task: Place of the task in the suite.
        lost: Accuracy lost by value tried, infinite where nothing is learnt.
    """

    defense: str
    settings: Mapping[str, Any]
    strength: Strength
    task: int
    lost: dict[float, float] = field(default_factory=dict)

    def best(self, loss: float) -> float | None:
        """The strongest value tried that loses at most so much; None if none does."""
        allowed = [v for v, drop in self.lost.items() if at_most(drop, loss)]
        return max(allowed, key=self._strength) if allowed else None

    def next(self, losses: Sequence[float]) -> list[float]:
        """Values that are to be tried now."""
        ends = [self.strength.weak, self.strength.strong]
        if not set(ends) <= set(self.lost):
            return ends
        return list(dict.fromkeys(v for loss in losses if (v := self._between(loss)) is not None))

    def _between(self, loss: float) -> float | None:
        """Return the middle of the strongest allowed value and the weakest stronger one."""
        best = self.best(loss)
        if best is None:
            return None
        stronger = [v for v in self.lost if self._strength(v) > self._strength(best)]
        if not stronger:
            return None
        middle = math.sqrt(best * min(stronger, key=self._strength))
        value = float(f"{middle:.{_DIGITS}g}")
        return None if value in self.lost else value

    def _strength(self, value: float) -> float:
        """Grows with protection."""
        sign = 1 if self.strength.strong > self.strength.weak else -1
        return sign * math.log(value)

    def entry(self, values: Sequence[float]) -> DefenseSettings:
        """Return the suite's entry with these values."""
        settings = {**self.settings, self.strength.setting: list(values)}
        return DefenseSettings(name=self.defense, settings=settings, tasks=[self.task])


def searches(suite: Suite, registry: Registry) -> list[Search]:
    """Return one search per task and per defense that declares a strength, for each combination of
    its other settings.

    Raises:
        UserError: If there is none, or a task has no undefended row.
    """
    out: list[Search] = []
    for defense in suite.defenses:
        strength = strength_of(defense, registry)
        if strength is None:
            continue
        others = {k: v for k, v in defense.settings.items() if k != strength.setting}
        for task in filter(defense.runs_on, range(len(suite.tasks))):
            out += [
                Search(defense=defense.name, settings=s, strength=strength, task=task)
                for s in grid(others)
            ]
    if not out:
        raise UserError(f"no defense of suite {suite.name} declares a strength to tune.")
    for task in {s.task for s in out}:
        if not any(d.name == UNDEFENDED and d.runs_on(task) for d in suite.defenses):
            raise UserError(f"task {task} of suite {suite.name} has no row '{UNDEFENDED}'.")
    return out


def strength_of(defense: DefenseSettings, registry: Registry) -> Strength | None:
    """Return what the defense of a suite's entry declares."""
    return registry.defense(defense.name, next(iter(grid(defense.settings)))).strength


def tune(
    suite: Suite,
    registry: Registry,
    play: Play,
    *,
    losses: Sequence[float] = LOSSES,
    steps: int = STEPS,
) -> list[Search]:
    """Search all settings of a suite's defenses, and return what each search found.

    Args:
        suite: Its attacks, checkpoints and audit are left out. Accuracies are measured on a fifth
            of the clients' samples, which do not train, and with seeds of their own, so that no
            setting is chosen on what it is later reported on.
        registry: Where defenses are found.
        play: Trains.
        losses: Accuracies that may be lost, as shares of the test samples.
        steps: Bisections.
    """
    tasks = [  # with validation samples in place of test samples
        task.model_copy(update={"dataset_settings": {**task.dataset_settings, "validation": True}})
        for task in suite.tasks
    ]
    suite = suite.model_copy(update={"tasks": tasks, "seeds": own_seeds(suite)})
    tuned = searches(suite, registry)
    bare = [d for d in suite.defenses if d.name == UNDEFENDED]
    for _ in range(1 + steps):
        tried = [(search, values) for search in tuned if (values := search.next(losses))]
        if not tried:
            break
        entries = [*bare, *(search.entry(values) for search, values in tried)]
        changes = {"defenses": entries, "attacks": [], "audit": 0, "checkpoints": ["final"]}
        rows = play(suite.model_copy(update=changes))
        for search, values in tried:
            search.lost |= dict(_losses(search, values, rows, suite))
    return tuned


def own_seeds(suite: Suite) -> list[int]:
    """Seeds with which settings are searched: none of the suite's."""
    return [max(suite.seeds) + 1000 + n for n in range(len(suite.seeds))]


def _losses(
    search: Search, values: Sequence[float], rows: Sequence[Row], suite: Suite
) -> Iterator[tuple[float, float]]:
    """Yield what each value loses on the search's task."""
    task = suite.tasks[search.task]
    protocol = suite.protocol_of(task)
    mine = [
        r
        for r in rows
        if (r.dataset, r.model, r.protocol_settings) == (task.dataset, task.model, protocol)
        and (r.dataset_settings, r.model_settings) == (task.dataset_settings, task.model_settings)
    ]
    for value in values:
        setting = {**search.settings, search.strength.setting: value}
        row = next((r for r in mine if (r.defense, r.settings) == (search.defense, setting)), None)
        drop = row.accuracy_drop if row is not None and has_use(row) else None
        yield value, math.inf if drop is None else drop.mean


# --- the suite that comes of it ---------------------------------------------------------------


def write_tuned(
    suite: Suite, tuned: Sequence[Search], losses: Sequence[float], registry: Registry
) -> str:
    """Return a suite as a file with the tuned settings, a comment on each, under the name
    NAME_tuned; defenses without a strength stay as they are.

    Args:
        suite: The suite.
        tuned: See `tune`.
        losses: Those that were asked for.
        registry: Where defenses are found.
    """
    seeds = ", ".join(map(str, own_seeds(suite)))
    given = suite.model_dump(exclude_unset=True, exclude_none=True)
    given["name"] += "_tuned"
    lists = {key: given.pop(key) for key in ("tasks", "threats", "attacks") if key in given}
    blocks = ["".join(f"{k} = {to_toml(v, k)}\n" for k, v in given.items() if k != "defenses")]
    blocks += [_block(key, entry) for key, entries in lists.items() for entry in entries]
    pairs = zip(suite.defenses, given["defenses"], strict=True)
    blocks += [_block("defenses", e) for d, e in pairs if strength_of(d, registry) is None]
    for search in tuned:
        by_value: dict[float, list[float]] = {}
        for loss in losses:
            best = search.best(loss)
            if best is None:
                blocks.append(
                    f"# {search.defense} on task {search.task}: no {search.strength.setting} "
                    f"loses {100 * loss:g} point{'' if loss == 0.01 else 's'} or less.\n"
                )
            else:
                by_value.setdefault(best, []).append(loss)
        for value, allowed in by_value.items():
            points = ", ".join(f"{100 * loss:g}" for loss in allowed)
            comment = (
                f"# Loses {100 * search.lost[value]:.1f} points of accuracy on validation samples; "
                f"at most {points} were allowed (seeds {seeds}).\n"
            )
            settings = {**search.settings, search.strength.setting: value}
            entry = {"name": search.defense, "settings": settings, "tasks": [search.task]}
            blocks.append(comment + _block("defenses", entry))
    return "\n".join(blocks)


def _block(key: str, entry: Mapping[str, Any]) -> str:
    return f"[[{key}]]\n" + "".join(f"{k} = {to_toml(v, k)}\n" for k, v in entry.items())
