"""Suites: a TOML file of tasks, protocol, threats, defenses, attacks and seeds."""

from __future__ import annotations

import itertools
import json
import re
import reprlib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from bench.errors import UserError
from bench.names import GivenName, close_name, did_you_mean
from bench.protocols.settings import (
    LEAST_DRAWS,
    Checkpoint,
    ProtocolSettings,
    TaskSettings,
    ThreatSettings,
    rounds_before,
)

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_STRICT = ConfigDict(extra="forbid", frozen=True)
RECORDED = {"recorded": True}
"""Context of validating the suite of an older run, which may name a thing twice; what it made of it
is counted once all the same."""
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = 60


class _OnTasks(BaseModel):
    """What runs on some of a suite's tasks."""

    model_config = _STRICT

    tasks: list[int] | None = Field(None, min_length=1)

    def runs_on(self, place: int) -> bool:
        """Whether it runs on the task at that place in the file."""
        return self.tasks is None or place in self.tasks


class DefenseSettings(_OnTasks):
    """A defense with its settings.

    Attributes:
        name: Name of the defense, or `a+b`.
        settings: Its settings; a list of values makes one setting per value (grid).
        tasks: The tasks on which it runs, by their places in the file from 0; all by default.
    """

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)


class AttackSettings(_OnTasks):
    """An attack with its settings and what it attacks.

    Attributes:
        name: Name of the attack.
        settings: Its settings; here a list is a value.
        threat: Name of the threat under which it runs; the first by default.
        budget: Gradient evaluations per start; the suite's by default.
        checkpoints: The checkpoints that it attacks; all of the suite's by default.
        tasks: The tasks that it attacks, by their places in the file from 0; all by default.
    """

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    threat: str | None = None
    budget: int | None = Field(None, ge=1)
    checkpoints: list[Checkpoint] | None = Field(None, min_length=1)


class Suite(BaseModel):
    """A suite file.

    Nothing in it is named twice: what is repeated would show the same victims again.

    Attributes:
        name: Its name, and that of its result folder.
        version: A number that counts up when the suite's meaning changes.
        description: One sentence.
        seeds: Every training runs once per seed.
        checkpoints: Where in a training a round is observed.
        course: Rounds, spread evenly, after which accuracy and epsilon are measured; 0: after the
            last one and at the checkpoints alone.
        delta: The delta of every proven epsilon.
        budget: Gradient evaluations per start of an optimising attack that names none of its own.
        audit: Draws of the audit of each defense's setting, 0 for no audit.
        timeout_s: Most seconds of one training or cell.
        protocol: How the models are trained.
        tasks: Data sets with models.
        threats: What is observed and granted.
        defenses: What is trained.
        attacks: What attacks it.
    """

    model_config = _STRICT

    name: GivenName
    version: int = Field(ge=1)
    description: str = ""
    seeds: list[int] = Field(default=[0], min_length=1)
    checkpoints: list[Checkpoint] = Field(default=["init", "final"], min_length=1)
    course: int = Field(0, ge=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    budget: int = Field(200, ge=1)
    audit: int = Field(2000, ge=0)
    timeout_s: float = Field(3600.0, gt=0)
    protocol: ProtocolSettings
    tasks: list[TaskSettings] = Field(min_length=1)
    threats: list[ThreatSettings] = Field(min_length=1)
    defenses: list[DefenseSettings] = Field(min_length=1)
    attacks: list[AttackSettings] = Field(default_factory=list)

    @model_validator(mode="after")
    def _names_fit(self) -> Suite:
        if 0 < self.audit < LEAST_DRAWS:
            raise UserError(f"audit must be 0 or >= {LEAST_DRAWS} draws, got {self.audit}.")
        threats = [t.name for t in self.threats]
        if len(set(threats)) < len(threats):
            raise UserError(f"threat names must differ, got {', '.join(threats)}.")
        for attack in self.attacks:
            if attack.threat is not None and attack.threat not in threats:
                raise UserError(did_you_mean("threat", attack.threat, threats))
            for checkpoint in set(attack.checkpoints or []) - set(self.checkpoints):
                raise UserError(
                    f"attack {attack.name} is to run at checkpoint {checkpoint}, but the suite "
                    f"observes {', '.join(self.checkpoints)}."
                )
        entries: list[DefenseSettings | AttackSettings] = [*self.defenses, *self.attacks]
        for entry in entries:
            for place in set(entry.tasks or []) - set(range(len(self.tasks))):
                kind = "defense" if isinstance(entry, DefenseSettings) else "attack"
                raise UserError(
                    f"{kind} {entry.name} is to run on task {place}, but the suite has "
                    f"tasks 0 to {len(self.tasks) - 1}."
                )
        pairs = [(a.name, a.threat or threats[0]) for a in self.attacks]
        for pair in pairs:
            if pairs.count(pair) > 1:
                raise UserError(f"attack {pair[0]} is listed twice under threat {pair[1]}.")
        for place, task in enumerate(self.tasks):
            self._check_checkpoints(task)
            for threat in self.threats_of(place):
                self._check_threat(task, threat)
        return self

    def _check_checkpoints(self, task: TaskSettings) -> None:
        rounds = self.protocol_of(task).rounds
        for checkpoint in self.checkpoints:
            if rounds_before(checkpoint, rounds) > rounds:
                raise UserError(
                    f"checkpoint {checkpoint} lies beyond the {rounds} rounds of "
                    f"{task.dataset} with {task.model}."
                )

    def _check_threat(self, task: TaskSettings, threat: ThreatSettings) -> None:
        protocol = self.protocol_of(task)
        if threat.victims > protocol.clients:
            raise UserError(
                f"threat {threat.name} observes {threat.victims} victims, but "
                f"{task.dataset} has {protocol.clients} clients."
            )
        steps = threat.local_steps * threat.local_epochs
        if protocol.name == "fedsgd" and steps != 1:
            raise UserError(
                f"threat {threat.name} has local_steps {threat.local_steps} and local_epochs "
                f"{threat.local_epochs}; fedsgd takes one step."
            )
        for checkpoint in self.checkpoints:
            played = rounds_before(checkpoint, protocol.rounds)
            if checkpoint != "init" and threat.rounds > played + 1:
                raise UserError(
                    f"threat {threat.name} observes {threat.rounds} rounds, but checkpoint "
                    f"{checkpoint} has {played + 1} states to begin one from."
                )

    @model_validator(mode="after")
    def _nothing_is_named_twice(self, info: ValidationInfo) -> Suite:
        if info.context == RECORDED:
            return self
        check_once("seeds", self.seeds)
        check_once("checkpoints", self.checkpoints)
        for attack in self.attacks:
            check_once(f"the checkpoints of attack {attack.name}", attack.checkpoints or ())
        entries: list[DefenseSettings | AttackSettings] = [*self.defenses, *self.attacks]
        for entry in entries:
            check_once(f"the tasks of {entry.name}", entry.tasks or ())
        tasks = [
            task.model_dump(exclude={"protocol"}) | self.protocol_of(task).model_dump()
            for task in self.tasks
        ]
        check_once("tasks", tasks, show=lambda task: f"{task['dataset']} with {task['model']}")
        for place, task in enumerate(self.tasks):
            made = [
                (defense.name, settings)
                for defense in self.defenses
                if defense.runs_on(place)
                for settings in grid(defense.settings)
            ]
            where = f"the defenses of task {place} ({task.dataset} with {task.model})"
            check_once(where, made, show=lambda setting: _setting(*setting))
        return self

    def threats_of(self, place: int) -> list[ThreatSettings]:
        """What the trainings of the task at a place observe: every threat, but none where attacks
        name other tasks alone, which are trained for their accuracy."""
        attacked = any(attack.runs_on(place) for attack in self.attacks)
        return self.threats if attacked or not self.attacks else []

    def protocol_of(self, task: TaskSettings) -> ProtocolSettings:
        """The suite's protocol with the task's values in place of its own."""
        merged = self.protocol.model_dump() | task.protocol
        if "local_steps" in task.protocol:
            merged["local_epochs"] = task.protocol.get("local_epochs")
        elif "local_epochs" in task.protocol:
            merged["local_steps"] = None
        return ProtocolSettings.model_validate(merged)


def check_once(where: str, values: Iterable[Any], *, show: Callable[[Any], str] = str) -> None:
    """Raises UserError for the first of the values that is there again."""
    known: set[Any] = set()
    for value in values:
        one = _hashable(value)
        if one in known:
            raise UserError(
                f"{show(value)} is named twice in {where}, which would count the same victims "
                "again."
            )
        known.add(one)


def _hashable(value: Any) -> Any:
    """Equal for equal values, such as 1 and 1.0."""
    if isinstance(value, Mapping):
        return frozenset((k, _hashable(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return value


def shipped() -> list[str]:
    """Names of the suites that come with leakbench."""
    folder = files("bench") / "suites"
    return sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".toml"))


def suite_text(name: str) -> tuple[str, str]:
    """The text of a shipped suite or of a TOML file, and what to call it. Raises UserError if
    there is none."""
    if name in shipped():
        return (files("bench") / "suites" / f"{name}.toml").read_text(), f"{name}.toml"
    if Path(name).is_file():
        return Path(name).read_text(), name
    if name.endswith(".toml") or "/" in name:
        raise UserError(f"no such suite file: {name}.")
    raise UserError(did_you_mean("suite", name, [*shipped(), "FILE.toml"]))


def read_suite(name: str, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite.

    Args:
        name: Name of a shipped suite, or path of a TOML file.
        overrides: Changes of single values, each as `path.to.key=value`.

    Raises:
        UserError: For a file that is missing or no suite, naming the key and what was expected.
    """
    text, place = suite_text(name)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{place} is no valid TOML: {error}.") from error
    for override in overrides:
        _override(data, override)
    try:
        return Suite.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{place}: {_problems(error)}") from error


load = read_suite  # scripts that use this module may call it so


def _problems(error: ValidationError) -> str:
    """All that is wrong with a suite, a sentence each."""
    return " ".join(map(_problem, error.errors()))


def _problem(problem: ErrorDetails) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    path = ".".join(str(p) for p in problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = close_name(str(problem["loc"][-1]), _keys_beside(problem["loc"]))
        return f"unknown key '{path}'." + (f" Did you mean '{near}'?" if near else "")
    if problem["type"] == "missing":
        return f"the key '{path}' is missing."
    if not path:
        return message
    return f"{path}: {message[:1].lower()}{message[1:]}, got {_SHOWN.repr(problem['input'])}."


def _keys_beside(place: Sequence[int | str]) -> list[str]:
    """The keys that a suite may have where `place` is."""
    model: type[BaseModel] = Suite
    for part in place[:-1]:
        if isinstance(part, str) and part in model.model_fields:
            inner = _models_in(model.model_fields[part].annotation)
            model = inner[0] if inner else model
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Models in a type such as `tuple[TaskSettings, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in get_args(annotation) for m in _models_in(part)]


def parse_value(text: str) -> Any:
    """A TOML value (1, 0.5, true, [1, 2], "text") or, failing that, the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_pairs(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """Turn `key=value` texts into a dict.

    Args:
        pairs: The texts.
        option: The option that they were given by, for the message.

    Raises:
        UserError: For a text without `=`, or a key that is given twice.
    """
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UserError(f"{option} takes key=value, got '{pair}'.")
        if key in out:
            raise UserError(f"{option} {key} is given twice.")
        out[key] = parse_value(value)
    return out


def _override(data: dict[str, Any], override: str) -> None:
    """Apply `a.b.0.c=value`; a value of the protocol also replaces the tasks' own, and
    `threat.key=value` that of every threat."""
    ((path, value),) = parse_pairs([override], "--set").items()
    keys = path.split(".")
    if keys[0] == "threat" and len(keys) == 2:
        for threat in data.get("threats", []):
            if isinstance(threat, dict):
                threat[keys[1]] = value
        return
    place: Any = data
    for depth, name in enumerate(keys, start=1):
        key: str | int = name
        if isinstance(place, list) and name.isdigit() and int(name) < len(place):
            key = int(name)
        elif not isinstance(place, dict):
            raise UserError(f"--set {path}: the suite has no place '{name}'.")
        if depth == len(keys):
            place[key] = value
        elif isinstance(place, dict):
            place = place.setdefault(key, {})
        else:
            place = place[key]
    if keys[0] == "protocol" and len(keys) == 2:
        for task in data.get("tasks", []):
            if isinstance(task, dict) and isinstance(task.get("protocol"), dict):
                task["protocol"].pop(keys[1], None)


def as_text(value: Any) -> str:
    """The text of an `only` value, that of a list with commas between its members."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def to_toml(value: Any, place: str) -> str:
    """A value as `--set` takes it. Raises UserError for what TOML cannot hold."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(k, place)} = {to_toml(v, place)}" for k, v in value.items())
        return f"{{{inner}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(to_toml(v, place) for v in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007F")
    raise UserError(f"overrides: {place} cannot be {value!r}; a suite's file has no such value.")


def _key(key: Any, place: str) -> str:
    """A key, in quotes where it needs them."""
    text = str(key)
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else to_toml(text, place)


def grid(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the listed values; a value that is no list counts as one."""
    axes = [v if isinstance(v, list) else [v] for v in settings.values()]
    return [dict(zip(settings, values, strict=True)) for values in itertools.product(*axes)]


def _setting(name: str, settings: Mapping[str, Any]) -> str:
    inner = ", ".join(f"{k}={v}" for k, v in settings.items())
    return f"{name}({inner})" if inner else name
