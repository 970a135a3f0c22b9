"""Suites: a TOML file of tasks, protocol, threats, defenses, attacks and seeds."""

import itertools
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from bench.errors import MOST_OF_KEY, UserError, sentence_of
from bench.names import GivenName, close_name, did_you_mean
from bench.protocols.settings import (
    LEAST_DRAWS,
    MOST,
    MOST_DRAWS,
    RECORDED,
    STRICT,
    TRAINING,
    Checkpoint,
    Listed,
    ProtocolSettings,
    TaskSettings,
    ThreatSettings,
    rounds_before,
)

_MOST_SEEDS, _MOST_SETTINGS = 1000, 100_000
"""What a suite lists of them; of settings, in one entry."""
DECIDES_NO_FIGURE = ("timeout_s", "description")
"""Keys of a suite."""
_SEEDS = 2**63
"""Seeds lie below it, and not below its negative."""


class _Entry(BaseModel):
    """A plugin with its settings, which runs on some of a suite's tasks."""

    model_config = STRICT

    tasks: Listed[int] | None = Field(None, min_length=1)
    name: str
    settings: dict[str, Any] = Field(default_factory=dict)

    def runs_on(self, place: int) -> bool:
        """Return whether it runs on the task at that place in the file."""
        return self.tasks is None or place in self.tasks


class DefenseSettings(_Entry):
    """A defense with its settings.

    Attributes:
        name: Name of the defense, or `a+b`.
        settings: Its settings; a list of values makes one setting per value (grid).
        tasks: The tasks on which it runs, by their places in the file from 0; all by default.
    """

    @field_validator("settings")
    @classmethod
    def _values_are_listed(cls, settings: dict[str, Any]) -> dict[str, Any]:
        for name, value in settings.items():
            if isinstance(value, list) and not value:
                raise UserError(f"setting {name} lists no value, so nothing would run")
        many = math.prod(len(v) for v in settings.values() if isinstance(v, list))
        if many > _MOST_SETTINGS:
            raise UserError(f"{many} combinations are more than {_MOST_SETTINGS}")
        return settings


class AttackSettings(_Entry):
    """An attack with its settings and what it attacks.

    Attributes:
        name: Name of the attack.
        settings: Its settings; here a list is a value.
        threat: Name of the threat under which it runs; the first by default.
        budget: Gradient evaluations per start; the suite's by default.
        checkpoints: The checkpoints that it attacks; all of the suite's by default.
        tasks: The tasks that it attacks, by their places in the file from 0; all by default.
        after: Names of attacks above it; victims that they have rebuilt are spared.
    """

    after: Listed[str] = Field(default_factory=list)
    threat: str | None = None
    budget: int | None = Field(None, ge=1, le=MOST)
    checkpoints: Listed[Checkpoint] | None = Field(None, min_length=1)


class Suite(BaseModel):
    """A suite file.

    Nothing in it is named twice: what is repeated would show the same victims again.

    Attributes:
        name: Its name, and that of its result folder.
        version: A number that counts up when the suite's meaning changes.
        description: One sentence.
        seeds: Every training runs once per seed.
        checkpoints: Where in a training rounds are observed; "training" is added where a threat
            observes its own rounds.
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

    model_config = STRICT

    name: GivenName
    version: int = Field(ge=1, le=MOST)
    description: str = ""
    seeds: Listed[Annotated[int, Field(ge=-_SEEDS, lt=_SEEDS)]] = Field(
        default=[0], min_length=1, max_length=_MOST_SEEDS
    )
    checkpoints: Listed[Checkpoint] = Field(default=["init", "final"], min_length=1)
    course: int = Field(0, ge=0, le=MOST)
    delta: float = Field(1e-5, gt=0, lt=1)
    budget: int = Field(200, ge=1, le=MOST)
    audit: int = Field(2000, ge=0, le=MOST_DRAWS)
    timeout_s: float = Field(3600.0, gt=0, le=MOST)
    protocol: ProtocolSettings
    tasks: Listed[TaskSettings] = Field(min_length=1)
    threats: Listed[ThreatSettings] = Field(min_length=1)
    defenses: Listed[DefenseSettings] = Field(min_length=1)
    attacks: Listed[AttackSettings] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _rounds_of_the_training(cls, value: Any) -> Any:
        """Threats that observe rounds of the training bring that checkpoint, as the first."""
        threats = value.get("threats") if isinstance(value, dict) else None
        works = [t.get("work") for t in threats or () if isinstance(t, dict)]
        given = isinstance(value, dict) and value.get("checkpoints", ["init", "final"])
        if "as_trained" in works and isinstance(given, list) and TRAINING not in given:
            return {**value, "checkpoints": [TRAINING, *given]}
        return value

    @model_validator(mode="after")
    def _all_fits(self, info: ValidationInfo) -> Self:
        sentences = list(self._misfits_of_tasks())
        if not sentences:
            sentences += [*self._misfits(), *self._misfits_of_rounds()]
            sentences += [] if info.context == RECORDED else self._repeats()
        if sentences:
            raise UserError(" ".join(dict.fromkeys(sentences)))
        return self

    def _misfits_of_tasks(self) -> Iterator[str]:
        """Yield what is wrong with the protocols of tasks, which everything else depends on."""
        for place, task in enumerate(self.tasks):
            try:
                self.protocol_of(task)
            except ValidationError as error:
                yield _problems(error, ("tasks", place, "protocol"))

    def _misfits(self) -> Iterator[str]:
        """Names and places that nothing in the suite has."""
        if 0 < self.audit < LEAST_DRAWS:
            yield f"audit must be 0 or >= {LEAST_DRAWS} draws, got {self.audit}."
        threats = [t.name for t in self.threats]
        if len(set(threats)) < len(threats):
            yield f"threat names must differ, got {', '.join(threats)}."
        for attack in self.attacks:
            if attack.threat is not None and attack.threat not in threats:
                yield did_you_mean("threat", attack.threat, threats)
                continue
            observed = self.checkpoints_observed(attack)
            for checkpoint in attack.checkpoints or []:
                if checkpoint not in observed:
                    yield (
                        f"attack {attack.name} is to run at checkpoint {checkpoint}, but threat "
                        f"{attack.threat or threats[0]} observes {', '.join(observed)}."
                    )
        if TRAINING in self.checkpoints and not any(t.recorded for t in self.threats):
            yield f'checkpoint {TRAINING} needs a threat whose work is "as_trained".'
        for entry in (*self.defenses, *self.attacks):
            for place in entry.tasks or []:
                if place not in range(len(self.tasks)):
                    kind = "defense" if isinstance(entry, DefenseSettings) else "attack"
                    yield (
                        f"{kind} {entry.name} is to run on task {place}, but the suite has "
                        f"tasks 0 to {len(self.tasks) - 1}."
                    )
        yield from self._misfits_of_cascades()
        pairs = Counter((a.name, a.threat or threats[0]) for a in self.attacks)
        for (name, threat), number in pairs.items():
            if number > 1:
                yield f"attack {name} is listed twice under threat {threat}."

    def _misfits_of_cascades(self) -> Iterator[str]:
        """Attacks that are to go after ones that do not go before them wherever they run."""
        first, everywhere = self.threats[0].name, range(len(self.tasks))
        for place, attack in enumerate(self.attacks):
            threat = attack.threat or first
            above = {a.name: a for a in self.attacks[:place] if (a.threat or first) == threat}
            for name in attack.after:
                if name not in above:
                    where = f"attacks above {attack.name} under threat {threat}"
                    yield did_you_mean("attack", name, list(above), where=where)
                    continue
                earlier = above[name]
                mine, theirs = self.checkpoints_of(attack), self.checkpoints_of(earlier)
                lacks = [c for c in mine if c not in theirs]
                lacks += [f"task {t}" for t in everywhere
                          if attack.runs_on(t) and not earlier.runs_on(t)]  # fmt: skip
                if lacks:
                    yield (
                        f"attack {attack.name} is to go after {name}, which does not run at "
                        f"{', '.join(lacks)}."
                    )

    def _misfits_of_rounds(self) -> Iterator[str]:
        """Checkpoints and threats that a task's training has not."""
        for place, task in enumerate(self.tasks):
            rounds = self.protocol_of(task).rounds
            for checkpoint in self.checkpoints:
                if rounds_before(checkpoint, rounds) > rounds:
                    yield (
                        f"checkpoint {checkpoint} lies beyond the {rounds} rounds of "
                        f"{task.dataset} with {task.model}."
                    )
            for threat in self.threats_of(place):
                yield from self._misfits_of_threat(task, threat)

    def _misfits_of_threat(self, task: TaskSettings, threat: ThreatSettings) -> Iterator[str]:
        protocol = self.protocol_of(task)
        if threat.victims > protocol.clients and not threat.recorded:
            yield (
                f"threat {threat.name} observes {threat.victims} victims, but "
                f"{task.dataset} has {protocol.clients} clients."
            )
        steps = threat.local_steps * threat.local_epochs
        if protocol.name == "fedsgd" and steps != 1:
            yield (
                f"threat {threat.name} has local_steps {threat.local_steps} and local_epochs "
                f"{threat.local_epochs}; fedsgd takes one step."
            )
        for checkpoint in self.checkpoints:
            played = rounds_before(checkpoint, protocol.rounds)
            if checkpoint != "init" and threat.rounds > played + 1:
                yield (
                    f"threat {threat.name} observes {threat.rounds} rounds, but checkpoint "
                    f"{checkpoint} has {played + 1} states to begin one from."
                )

    def _repeats(self) -> Iterator[str]:
        """Yield a sentence for each name that occurs twice."""
        yield from repeats("seeds", self.seeds)
        yield from repeats("checkpoints", self.checkpoints)
        for attack in self.attacks:
            yield from repeats(f"the checkpoints of attack {attack.name}", attack.checkpoints or ())
            yield from repeats(f"what attack {attack.name} goes after", attack.after)
        for entry in (*self.defenses, *self.attacks):
            yield from repeats(f"the tasks of {entry.name}", entry.tasks or ())
        tasks = [
            task.model_dump(exclude={"protocol"}) | self.protocol_of(task).model_dump()
            for task in self.tasks
        ]
        yield from repeats("tasks", tasks, show=lambda t: f"{t['dataset']} with {t['model']}")
        for place, task in enumerate(self.tasks):
            here = [defense for defense in self.defenses if defense.runs_on(place)]
            pairs = [(d.name, settings) for d in here for settings in grid(d.settings)]
            where = f"the defenses of task {place} ({task.dataset} with {task.model})"
            yield from repeats(where, pairs, show=lambda setting: _setting(*setting))

    def checkpoints_observed(self, attack: AttackSettings) -> list[Checkpoint]:
        """The checkpoints that an attack's threat observes."""
        name = attack.threat or self.threats[0].name
        recorded = any(t.recorded for t in self.threats if t.name == name)
        return [c for c in self.checkpoints if (c == TRAINING) == recorded]

    def checkpoints_of(self, attack: AttackSettings) -> list[Checkpoint]:
        """Return the checkpoints at which an attack runs."""
        own = attack.checkpoints or self.checkpoints
        return [c for c in self.checkpoints_observed(attack) if c in own]

    def threats_of(self, place: int) -> list[ThreatSettings]:
        """Return what the trainings of the task at a place observe: every threat, but none where
        all attacks name other tasks; such a task is trained for its accuracy."""
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


def repeats(
    where: str, values: Iterable[Any], *, show: Callable[[Any], str] = str
) -> Iterator[str]:
    """Yield a sentence for each value that occurs again."""
    times = Counter[Any]()
    for value in values:
        item = _hashable(value)
        times[item] += 1
        if times[item] == 2:
            yield (
                f"{show(value)} is named twice in {where}, which would count the same victims "
                "again."
            )


def check_once(where: str, values: Iterable[Any]) -> None:
    """Raise UserError for the first value that occurs again."""
    for sentence in repeats(where, values):
        raise UserError(sentence)


def _hashable(value: Any) -> Any:
    """Equal for equal values, such as 1 and 1.0."""
    if isinstance(value, Mapping):
        return frozenset((k, _hashable(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return value


def list_shipped() -> list[str]:
    """Names of the suites that come with leakbench."""
    folder = files("bench") / "suites"
    return sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".toml"))


def read_suite(name: str, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite.

    Args:
        name: Name of a shipped suite, or path of a TOML file.
        overrides: Changes of single values, each as `path.to.key=value`.

    Raises:
        UserError: For a file that is missing or no suite, naming the key and what was expected.
    """
    place = name
    if name in list_shipped():
        place = f"{name}.toml"
        file = files("bench") / "suites" / place
    elif Path(name).is_file():
        file = Path(name)
    elif name.endswith(".toml") or "/" in name:
        raise UserError(f"no such suite file: {name}.")
    else:
        raise UserError(did_you_mean("suite", name, [*list_shipped(), "FILE.toml"]))
    try:
        data = _parse(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise UserError(f"{place} is no valid TOML: {reason}.") from error
    for override in overrides:
        _override(data, override)
    return suite_of(data, place)


def changes(suite: Suite) -> list[str]:
    """Return the keys in which a suite differs from the shipped one of its name and version,
    without those that decide no figure; empty where no such suite is shipped."""
    if suite.name not in list_shipped():
        return []
    known, own = read_suite(suite.name).model_dump(), suite.model_dump()
    if known["version"] != own["version"]:
        return []
    return [k for k in known if k not in DECIDES_NO_FIGURE and known[k] != own[k]]


def suite_of(given: Mapping[str, Any], place: str) -> Suite:
    """The suite that a document holds. Raises UserError with all that is wrong with it.

    Args:
        given: Keys and values as in a file.
        place: What an error should call it.
    """
    try:
        return Suite.model_validate(dict(given))
    except ValidationError as error:
        raise UserError(f"{place}: {_problems(error)}") from error


load = read_suite  # scripts that use this module may call it so


def _problems(error: ValidationError, within: tuple[int | str, ...] = ()) -> str:
    """Return all errors of a suite, or of what is `within` it, a sentence each."""
    sentences = [_problem({**p, "loc": (*within, *p["loc"])}) for p in error.errors()[:_TOLD]]
    more = error.error_count() - _TOLD
    return " ".join([*sentences, f"And {more} more."] if more > 0 else sentences)


_TOLD = 20
"""Most problems of a file that are told one by one."""


def _problem(problem: ErrorDetails) -> str:
    if problem["type"] != "extra_forbidden":
        return sentence_of(problem, quote="")
    path = ".".join(str(part)[:MOST_OF_KEY] for part in problem["loc"])
    entries = (DefenseSettings, AttackSettings, TaskSettings, ThreatSettings, ProtocolSettings)
    known = [key for model in (Suite, *entries) for key in model.model_fields]
    near = close_name(str(problem["loc"][-1])[:MOST_OF_KEY], known)
    return f"unknown key '{path}'." + (f" Did you mean '{near}'?" if near else "")


def _parse(text: str) -> dict[str, Any]:
    """Parse a TOML document. Raises ValueError for invalid ones, and for dates and times, which no
    setting takes."""
    document = tomllib.loads(text)
    json.dumps(document, default=_refuse)
    return document


def _refuse(value: object) -> None:
    raise ValueError(f"{value} is a date or a time, which must stand in quotes")


def parse_value(text: str) -> Any:
    """Parse a TOML value (1, 0.5, true, [1, 2], "text"); other text is returned as it is."""
    try:
        document = _parse(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text


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
        if isinstance(place, list) and name.isdecimal() and int(name[:9]) < len(place):
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
