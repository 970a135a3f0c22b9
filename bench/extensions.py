"""What stands outside leakbench and is found by name: entry points of installed packages, and
single Python files."""

import hashlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from bench.errors import UserError
from bench.foreign import Left, foreign_code, in_one_line, place_of

T = TypeVar("T")

FILE_MODULE = "leakbench_plugin_"
"""How the module of a single file is named, with the file's name after it."""


class BrokenImport(Exception):
    """What cannot be used as it raised, or misbehaved, when it was imported; the text says how."""


def list_installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, sorted; the first of a name counts."""
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda p: p.name):
        points.setdefault(point.name, point)
    return points


def origin_of(point: EntryPoint) -> str:
    """The place of an entry point with the package that has it."""
    return f"{point.value} of {point.dist.name if point.dist else 'unknown package'}"


class _FromSource(importlib.machinery.SourceFileLoader):
    """Compiles the file that is there: a cached .pyc beside it may hold other code than its reader
    and its hash see, and none is written."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_foreign(load: Callable[[], T], module: str) -> T:
    """Return what an import of foreign code gives.

    Args:
        load: Imports it.
        module: What it imports, whose lines an error names.

    Raises:
        BrokenImport: If it raises anything, SystemExit too, or changes what decides figures.
    """
    left = Left()
    try:
        with foreign_code(left):
            value = load()
    except Exception as error:  # whatever foreign code raises at import is its own defect
        place, text = place_of(error, {module.partition(".")[0]}), in_one_line(error)
        raise BrokenImport(f"{text} ({place})" if place else text) from error
    if left.reason is not None:
        raise BrokenImport(f"when it is imported it {left.reason}.")
    return value


def load_entry_point(point: EntryPoint, fits: Callable[[Any], bool], expected: str) -> Any:
    """Return what an entry point names.

    Args:
        point: Of an installed package.
        fits: Whether the value is of the kind that its group asks for.
        expected: That kind in words.

    Raises:
        BrokenImport: As `import_foreign`, and for a value that does not fit.
    """
    value = import_foreign(point.load, point.module)
    try:
        if fits(value):
            return value
    except Exception as error:  # whatever looking into a foreign object raises
        raise BrokenImport(in_one_line(error)) from error
    raise BrokenImport(f"it must be {expected}, got {value!r}.")


def load_file(path: Path) -> ModuleType:
    """Execute a Python file as a module of its own. It finds its neighbours as a script does, and
    by relative imports as a module of its package does; no neighbour hides an installed package.

    Raises:
        UserError: For a file that does not exist or is no Python file.
        BrokenImport: As `import_foreign`.
    """
    if not path.is_file():
        raise UserError(f"no such file: {path}.")
    folder = path.resolve().parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    inner = [path.stem]
    while all((f / "__init__.py").is_file() for f in (folder, folder.parent)):
        inner.insert(0, folder.name)
        folder = folder.parent
    package = ModuleType(f"{FILE_MODULE}{path.stem}_{place}")
    spec = importlib.machinery.ModuleSpec(package.__name__, None, is_package=True)
    spec.submodule_search_locations = package.__path__ = [str(folder)]
    package.__spec__ = spec
    sys.modules.setdefault(package.__name__, package)
    name = ".".join([package.__name__, *inner])
    loader = _FromSource(name, str(path)) if path.suffix == ".py" else None
    own = importlib.util.spec_from_file_location(name, path, loader=loader)
    if own is None or own.loader is None:
        raise UserError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(own)
    sys.modules[name] = module
    try:
        import_foreign(partial(own.loader.exec_module, module), name)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
