"""Which modules a module reaches by its imports, and a hash of what those modules do.

Imports are followed in the syntax trees, those inside functions too; nothing is executed. What is
looked up by name at run time, as the registry does with plugins, is not seen and needs a root of
its own.
"""

import ast
import hashlib
import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

Import = tuple[str, str | None]
"""A module, and the name taken from it: None for all that it does, "" for its execution alone,
which a package's module sees when another of the package is imported."""


@dataclass(frozen=True, kw_only=True)
class ParsedModule:
    """A module's code, as far as it decides anything.

    Attributes:
        digest: Hash of the syntax tree without comments, docstrings and places.
        imports: What it imports, but for the type checker alone.
        binds: Name -> where it is taken from, of names that the module imports from others.
        front: Whether the module does nothing but hand on such names.
    """

    digest: str
    imports: tuple[Import, ...]
    binds: Mapping[str, Import]
    front: bool


class Sources:
    """Modules found on the import path, each read once.

    Args:
        packages: Top names of the packages that are followed; all others are libraries.
    """

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = frozenset(packages)
        self._spec, self._source = cache(self._find), cache(self._parse)

    def reach(self, root: str, *, folder: Path | None = None) -> dict[str, str]:
        """Return the root module and all that it reaches, module -> digest, without modules that
        only hand on names. Modules in `folder` are followed as well as those of the packages."""
        digests: dict[str, str] = {}
        visited: set[Import] = set()
        todo: list[Import] = [(root, None)]
        while todo:
            module, name = ask = todo.pop()
            if ask in visited or not (module == root or self._follows(module, folder)):
                continue
            visited.add(ask)
            source = self._source(module)
            if name and self._spec(f"{module}.{name}") is not None:
                todo.append((f"{module}.{name}", None))
                continue
            parent = module.rpartition(".")[0]
            # The top of leakbench is the Python API, which reaches all when it is asked for it.
            if parent and parent != "bench":
                todo.append((parent, ""))
            if source is None:
                continue
            if name and name in source.binds:
                todo.append(source.binds[name])
            if not source.front:
                digests[module] = source.digest
            if not source.front or name is None or name == "*":
                todo.extend(source.imports)
        return digests

    def _follows(self, module: str, folder: Path | None) -> bool:
        top = module.partition(".")[0]
        if top in self._packages or folder is None:
            return top in self._packages
        spec = self._spec(top)
        places = [spec.origin, *(spec.submodule_search_locations or [])] if spec else []
        return any(place and folder in (Path(place), Path(place).parent) for place in places)

    def _find(self, module: str) -> ModuleSpec | None:
        """Return where a module lies, without executing it or its package."""
        if package := module.rpartition(".")[0]:
            parent = self._spec(package)
            places = parent.submodule_search_locations if parent else None
            return PathFinder.find_spec(module, places) if places else None
        try:
            return importlib.util.find_spec(module)
        except ValueError:  # a module that no file was loaded for, as a notebook's own
            return None

    def _parse(self, module: str) -> ParsedModule | None:
        """Its code; None for a folder without code of its own and for what is built in."""
        spec = self._spec(module)
        if not (spec and spec.has_location and spec.origin):
            return None
        inside = spec.submodule_search_locations is not None
        package = module if inside else module.rpartition(".")[0]
        return _read(Path(spec.origin).read_bytes(), package)


@cache
def _read(content: bytes, package: str) -> ParsedModule:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # a compiled module, or one that cannot be imported
        text = hashlib.sha256(content).hexdigest()
        return ParsedModule(digest=text, imports=(), binds={}, front=False)
    imports: list[Import] = []
    binds: dict[str, Import] = {}
    for statement in _statements(tree.body):
        if isinstance(statement, ast.Import):
            imports += [(alias.name, None) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            up = package.split(".")[: 1 - statement.level or None] if statement.level else []
            module = ".".join([*up, *filter(None, [statement.module])])
            for alias in statement.names:
                imports.append((module, alias.name))
                binds[alias.asname or alias.name] = (module, alias.name)
    return ParsedModule(
        digest=hashlib.sha256(_text(tree).encode()).hexdigest(),
        imports=tuple(imports),
        binds=binds,
        front=all(_hands_on(statement) for statement in tree.body),
    )


def _statements(body: Iterable[Any]) -> Iterator[Any]:
    """Yield all statements that can be executed, nested ones too."""
    for statement in body:
        yield statement
        typing = isinstance(statement, ast.If) and "TYPE_CHECKING" in (
            getattr(statement.test, "id", None),
            getattr(statement.test, "attr", None),
        )
        parts = ("orelse",) if typing else ("body", "handlers", "cases", "orelse", "finalbody")
        for part in parts:
            yield from _statements(getattr(statement, part, ()))


def _hands_on(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return all(isinstance(t, ast.Name) and t.id == "__all__" for t in statement.targets)
    return isinstance(statement, ast.ImportFrom) or _is_text(statement)


def _is_text(node: object) -> bool:
    """Return whether a statement is a docstring, of a module, class, function or variable."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _text(node: object) -> str:
    """A syntax tree as text, the same in every version of Python: `ast.dump` has fields that are
    empty in some and absent in others. Whether a name is read or set its place tells already."""
    if isinstance(node, list):
        return f"[{','.join([_text(v) for v in node if not _is_text(v)])}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = [type(node).__name__]
    for name in node._fields:
        value = getattr(node, name, None)
        if value is not None and value != [] and name != "ctx":
            parts.append(f"{name}={_text(value)}")
    return f"({','.join(parts)})"
