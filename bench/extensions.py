"""What stands outside leakbench and is found by name: entry points of installed packages, and
single Python files."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.errors import UserError

FILE_MODULE = "leakbench_plugin_"
"""How the module of a single file is named, with the file's name after it."""


class BrokenFile(Exception):
    """A file that raised when it was executed; the text says what."""


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, sorted; the first of a name counts."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda p: p.name):
        found.setdefault(point.name, point)
    return found


def origin_of(point: EntryPoint) -> str:
    """The place of an entry point with the package that has it."""
    return f"{point.value} of {point.dist.name if point.dist else 'unknown package'}"


class _FromSource(importlib.machinery.SourceFileLoader):
    """Compiles the file that is there: a cached .pyc beside it may hold other code than its reader
    and its hash see, and none is written."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


def load_file(path: Path) -> ModuleType:
    """Execute a Python file as a module of its own.

    Raises:
        UserError: For a file that does not exist or is no Python file.
        BrokenFile: If it raises anything.
    """
    if not path.is_file():
        raise UserError(f"no such file: {path}.")
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"{FILE_MODULE}{path.stem}_{place}"
    loader = _FromSource(name, str(path)) if path.suffix == ".py" else None
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            raise BrokenFile(in_one_line(error)) from error
        raise
    return module


def in_one_line(error: BaseException) -> str:
    """An exception's kind and text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]
