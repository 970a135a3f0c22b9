"""Whether leakbench's own functions are still those that were imported.

A defense's constructor also runs in the processes that attack it, so it could replace an attack.
This finds such code where it does not hide; see docs/strangers.md for what it does not find.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from types import CodeType, FunctionType, ModuleType
from typing import Any

from bench.names import GROUPS


@cache
def own_packages() -> frozenset[str]:
    """Names of leakbench's packages."""
    points = [p for group in GROUPS.values() for p in entry_points(group=group)]
    own = (p.module for p in points if p.dist is not None and p.dist.name == "leakbench")
    return frozenset({"bench", *(module.partition(".")[0] for module in own)})


class OwnFunctions:
    """The functions of leakbench's loaded modules, as they were when they were added."""

    def __init__(self) -> None:
        self._modules: set[str] = set()
        self._functions: list[tuple[str, Mapping[str, Any], str, CodeType]] = []

    def add_loaded(self) -> None:
        """Add the modules that have been loaded since the last call."""
        for name, module in list(sys.modules.items()):
            if name not in self._modules and name.partition(".")[0] in own_packages():
                self._modules.add(name)
                self._functions += _functions(name, module)

    def find_replaced(self) -> str | None:
        """Return the name of a function that is another one now, None if there is none."""
        for name, namespace, attribute, code in self._functions:
            if _code(namespace.get(attribute)) is not code:
                return f"{name}.{attribute}"
        return None


def _functions(
    name: str, module: ModuleType
) -> Iterator[tuple[str, Mapping[str, Any], str, CodeType]]:
    """Yield owner, namespace, name and code of a module's functions and of its classes' methods."""
    owners: list[tuple[str, Mapping[str, Any]]] = [(name, vars(module))]
    for attribute, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == name:
            owners.append((f"{name}.{attribute}", vars(value)))
    for owner, namespace in owners:
        for attribute, value in namespace.items():
            if (code := _code(value)) is not None:
                yield owner, namespace, attribute, code


def _code(value: Any) -> CodeType | None:
    """Return which code a function runs, None for other values."""
    if isinstance(value, FunctionType) and not hasattr(value, "__wrapped__"):
        return value.__code__
    inner = getattr(value, "__func__", None) or getattr(value, "__wrapped__", None)
    return inner.__code__ if isinstance(inner, FunctionType) else None
