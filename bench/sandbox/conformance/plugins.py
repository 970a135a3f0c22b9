"""`leakbench check`: the cases of a plugin or model, run one after another.

A case is a name and a function that returns what it saw, raises Broken or NotChecked, or returns
cases that stand in its place. No fault of a plugin leaves a case: it becomes a finding.
"""

import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import models
from bench.errors import UserError
from bench.foreign import foreign_code
from bench.names import did_you_mean
from bench.registry import Plugin, PluginKind, Registry, discover
from bench.sandbox.conformance.attacks import attack_cases
from bench.sandbox.conformance.contract import Case
from bench.sandbox.conformance.defenses import defense_cases
from bench.sandbox.conformance.models import model_cases
from bench.sandbox.findings import Broken, Conformance, Finding, NotChecked
from bench.sandbox.hooked import HookError, WrongAnswer, name_errors

_ADVICE: Mapping[str, Sequence[str]] = tomllib.loads(
    Path(__file__).with_name("advice.toml").read_text(encoding="utf-8")
)
"""Hook, "" for the class, and what to change, by how a check's name begins."""
Progress = Iterator[tuple[str, Conformance]]
"""Before each check what it is and the findings so far, at last "" and all findings."""


def run_cases(
    kind: str, name: str, settings: Mapping[str, Any], cases: Iterable[Case], *plugins: object
) -> Progress:
    """Run the cases of a plugin in turn.

    Args:
        cases: They may follow from what earlier ones did.
        plugins: Whose lines are named where their code raises outside of a hook.
    """
    began, findings = time.perf_counter(), list[Finding]()
    blank = Conformance(kind=kind, name=name, settings=dict(settings))

    def so_far() -> Conformance:
        return replace(blank, findings=tuple(findings), seconds=time.perf_counter() - began)

    yield "its constructor", so_far()
    for case in cases:
        waiting = [case]
        while waiting:
            what, check = waiting.pop(0)
            yield f"the check '{what}'", so_far()
            outcome = _outcome(what, check, plugins)
            if isinstance(outcome, Finding):
                findings.append(outcome)
            else:
                waiting = [*outcome, *waiting]
    yield "", so_far()


def _outcome(name: str, check: Any, plugins: tuple[object, ...]) -> Finding | list[Case]:
    try:
        # What hooks print and change is noticed where they are watched.
        with (
            foreign_code(relays=False),
            name_errors("the run", *plugins, lets=(Broken, NotChecked)),
        ):
            seen: str | list[Case] = check()
    except NotChecked as error:
        return Finding(name=name, status="skipped", reason=str(error))
    except Broken as error:
        hook, change = next(v for begins, v in _ADVICE.items() if name.startswith(begins))
        reason, hook = error.reason, hook if error.hook is None else error.hook
    except WrongAnswer as error:
        reason, change, hook = f"{error}.", "Return what bench/api.py says of it.", error.hook
    except HookError as error:
        reason, change, hook = f"{error}.", "Mend the error in this hook.", error.hook
        if hook == "the run":
            change, hook = "Make the plugin work in this run.", ""
    else:
        return Finding(name=name, status="passed", reason=seen) if isinstance(seen, str) else seen
    return Finding(name=name, status="failed", reason=reason, change=change, hook=hook)


def _examine(
    registry: Registry, kind: PluginKind, name: str, settings: Mapping[str, Any], fast: bool
) -> Progress:
    if kind == "defense":
        cases = defense_cases(partial(registry.defense, name), settings, fast=fast)
    else:
        cases = attack_cases(partial(registry.attack, name), settings, fast=fast)
    classes = [registry.get(kind, part).cls for part in name.split("+")]
    return run_cases(kind, name, settings, cases, *classes)


def check(
    registry: Registry,
    kind: PluginKind,
    name: str,
    settings: Mapping[str, Any],
    *,
    fast: bool = False,
) -> Conformance:
    """The conformance of one plugin with one setting.

    fast: see `check_plugins`. Raises UserError for bad settings."""
    *_, (_, conformance) = _examine(registry, kind, name, settings, fast)
    return conformance


def check_plugins(
    target: str, settings: Mapping[str, Any], *, fast: bool = False, dataset: str | None = None
) -> Iterator[Conformance]:
    """The conformance of every plugin that a name or file stands for, or of a model.

    Args:
        target: A name, FILE.py, or a model FILE.py:Net.
        settings: Of the constructor.
        fast: What takes longest is left out.
        dataset: Of a model, on whose samples it is tried.

    Raises:
        UserError: For bad settings, or for those of a file that defines several plugins that do not
            all have them.
    """
    for at, conformance in progress(target, settings, fast=fast, dataset=dataset):
        if not at:
            yield conformance


def progress(
    target: str, settings: Mapping[str, Any], *, fast: bool, dataset: str | None
) -> Progress:
    """As `run_cases`, of all plugins of `check_plugins` in turn."""
    if models.named.is_named(target):
        cases = model_cases(target, settings, dataset=dataset)
        yield from run_cases("model", target, settings, cases)
        return
    if dataset is not None:
        raise UserError(f"--dataset is for models; '{target}' is a defense or an attack.")
    registry = discover((Path(target).resolve(),) if is_file(target) else ())
    for kind, name in plugins_of(registry, target):
        yield from _examine(registry, kind, name, settings, fast)


def is_file(target: str) -> bool:
    """Whether a target is a file, not a name."""
    return target.endswith(".py") or Path(target).is_file()


def plugins_of(registry: Registry, target: str) -> list[tuple[PluginKind, str]]:
    """The plugins of a file, or those of a name (a defense may be a+b). Raises UserError for a
    name that is not one, and for a plugin that is broken."""
    if is_file(target):
        return [(p.kind, p.name) for p in plugins_of_file(registry, Path(target))]
    if plugins := [key for key in registry.usable if key[1] == target]:
        return plugins
    if "+" not in target:
        names = [*registry.names("defense"), *registry.names("attack"), "FILE.py"]
        raise UserError(did_you_mean("plugin", target, names))
    for part in target.split("+"):
        registry.get("defense", part)
    return [("defense", target)]


def plugins_of_file(registry: Registry, path: Path) -> list[Plugin]:
    """The plugins that a file brought. Raises UserError for one that is broken."""
    origin = str(path.resolve())
    for plugin in registry.broken:
        if plugin.origin == origin:
            raise UserError(f"'{plugin.name}' of {path} cannot be used: {plugin.broken}")
    return [p for p in registry.usable.values() if p.origin == origin]
