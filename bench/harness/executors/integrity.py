"""Whether leakbench's own functions are still those that were imported.

A plugin can replace any function of the process that it runs in, and so what measures it. This
finds it where it does so without hiding; see docs/strangers.md for what it does not find.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import entry_points
from types import FunctionType
from typing import Any

from bench.names import GROUPS


@cache
def own_packages() -> frozenset[str]:
    """Names of leakbench's packages."""
    points = [p for group in GROUPS.values() for p in entry_points(group=group)]
    own = (p.module for p in points if p.dist is not None and p.dist.name == "leakbench")
    return frozenset({"bench", *(module.partition(".")[0] for module in own)})


def own_functions() -> dict[str, int]:
    """Return the code of every loaded function and method of leakbench, by name."""
    functions: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in own_packages():
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                methods = {f"{name}.{attribute}.{n}": _code(v) for n, v in vars(value).items()}
                functions |= {method: code for method, code in methods.items() if code}
            elif _code(value):
                functions[f"{name}.{attribute}"] = _code(value)
    return functions


def _code(value: Any) -> int:
    """Return which code a function runs, 0 for other values."""
    inner = getattr(value, "__func__", None) or getattr(value, "__wrapped__", None) or value
    return id(inner.__code__) if isinstance(inner, FunctionType) else 0


def replaced(before: dict[str, int]) -> str | None:
    """The name of a function that is no longer what it was, None if there is none."""
    now = own_functions()
    return next((name for name, code in before.items() if now.get(name) != code), None)
