"""Which plugins a name or file stands for, and their conformance."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import models
from bench.contract.defense import fresh
from bench.errors import UserError
from bench.names import did_you_mean
from bench.registry import Plugin, PluginKind, Registry, discover
from bench.sandbox.conformance.attacks import check_attack
from bench.sandbox.conformance.defenses import check_defense
from bench.sandbox.conformance.findings import At, Conformance, begin
from bench.sandbox.conformance.models import check_model


def find(target: str) -> tuple[Registry, list[tuple[PluginKind, str]]]:
    """The plugins of a file, or those of a name (a defense may be a+b). Raises UserError for a
    name or file that is not one, and for a plugin that is broken."""
    path = Path(target)
    if target.endswith(".py") or path.is_file():
        registry = discover((path.resolve(),))
        mine = str(path.resolve())
        for plugin in registry.broken:
            if plugin.origin == mine:
                raise UserError(f"'{plugin.name}' of {target} cannot be used: {plugin.broken}")
        return registry, [(p.kind, p.name) for p in _of(registry, mine)]
    registry = discover()
    kinds: list[PluginKind] = ["defense", "attack"]
    found = [(kind, target) for kind in kinds if (kind, target) in registry.usable]
    if not found and "+" in target:
        for part in target.split("+"):
            registry.get("defense", part)
        found = [("defense", target)]
    if not found:
        names = [*registry.names("defense"), *registry.names("attack"), "FILE.py"]
        raise UserError(did_you_mean("plugin", target, names))
    return registry, found


def _of(registry: Registry, origin: str) -> list[Plugin]:
    return [p for p in registry.usable.values() if p.origin == origin]


def check_plugins(
    target: str,
    settings: Mapping[str, Any],
    *,
    fast: bool = False,
    dataset: str | None = None,
    skip: int = 0,
) -> Iterator[Conformance]:
    """The conformance of every plugin that the name or file stands for, or of a model.

    Args:
        target: A name, FILE.py, or a model FILE.py:Net.
        settings: Of the constructor.
        fast: What takes longest is left out.
        dataset: Of a model, on whose samples it is tried.
        skip: So many plugins of a file are left out, the first.

    Raises:
        UserError: For bad settings, or for those of a file that defines several plugins that do not
            all have them.
    """
    if models.is_named(target):
        begin(At(kind="model", name=target, settings=settings))
        yield check_model(target, settings, dataset=dataset)
        return
    if dataset is not None:
        raise UserError(f"--dataset is for models; '{target}' is a defense or an attack.")
    registry, found = find(target)
    for number, (kind, name) in enumerate(found[skip:], start=skip + 1):
        begin(At(kind=kind, name=name, settings=settings, later=len(found) - number))
        yield check(registry, kind, name, settings, fast=fast)


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
    began = time.perf_counter()
    if kind == "defense":
        built = registry.defense(name, settings)
        findings = check_defense(
            fresh(built), settings=settings, rebuild=lambda s: registry.defense(name, s), fast=fast
        )
    else:
        registry.attack(name, settings)
        findings = check_attack(
            lambda: registry.attack(name, settings), settings=settings, fast=fast
        )
    return Conformance(
        kind=kind,
        name=name,
        settings=dict(settings),
        findings=findings,
        seconds=time.perf_counter() - began,
    )
