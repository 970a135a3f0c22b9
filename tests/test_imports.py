"""The one-way import rule, and how early imports happen."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from bench import registry
from bench.errors import UserError

ROOT = Path(__file__).parents[1]

# A module may import from its own layer and from those after it.
LAYERS = (
    ("cli",),
    ("capturing",),
    ("submission", "results", "outside", "tuning", "harness.merge"),
    ("report",),
    ("harness.forecast", "harness.launch", "harness.progress"),
    ("harness.runner",),
    ("harness.executors",),
    ("harness.scoring",),
    ("harness.train", "harness.attack"),
    ("harness.cascade", "harness.membership", "harness.work"),
    ("harness.keys",),
    ("harness.environment", "harness.sources", "harness.shared"),
    ("harness.plan", "harness.store"),
    ("sandbox",),
    ("suite", "registry", "records"),
    ("protocols", "metrics", "privacy.ledger"),
    ("data", "models", "contract.compose"),
    ("toolkit", "seeding", "arguments", "extensions", "arrays"),
    ("foreign",),
    ("names",),
    ("api",),
    ("contract.attack", "contract.hooks"),
    ("contract.returns",),
    ("contract.defense",),
    ("contract.network", "contract.settings"),
    ("contract.messages", "contract.events", "contract.mechanisms"),
    ("privacy.composition",),
    ("privacy.gaussian", "privacy.entry"),
    ("files",),
    ("errors",),
)
ALLOWED_TO_PLUGINS = ("bench.api", "bench.toolkit", "bench.privacy")
# Imports that close a circle: to be removed from here as soon as they are gone.
CIRCULAR: set[tuple[str, str]] = set()


def _names_no_encoding(call: ast.Call) -> bool:
    """Whether text is read or written in the encoding that the machine happens to have."""
    func, given = call.func, {k.arg for k in call.keywords}
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    words = [a.value for a in call.args if isinstance(a, ast.Constant)]
    binary = any(isinstance(w, str) and "b" in w and len(w) <= 3 for w in words)
    other = ("Image", "archive", "gzip", "os")
    opens = name == "fdopen" or (
        name == "open" and getattr(getattr(func, "value", None), "id", "") not in other
    )
    return not given & {"encoding", None} and (
        name == "read_text"
        or (name == "write_text" and len(call.args) < 2)
        or (opens and not binary)
        or (name in ("run", "Popen") and "text" in given)
    )


def test_texts_are_utf_8_on_every_machine() -> None:
    places = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for package in ("bench", "attacks", "defenses", "docs")
        for path in modules(package)
        for call in nodes(path)
        if isinstance(call, ast.Call) and _names_no_encoding(call)
    ]
    assert not places


@pytest.mark.parametrize("place", ["attacks/__init__.py", "defenses.py"])
def test_what_hides_a_package_of_ours_is_named(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("")
    name = place.partition("/")[0].partition(".")[0]
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    registry._check_hidden.cache_clear()
    with pytest.raises(UserError, match=f"hides leakbench's package '{name}'"):
        registry.discover()


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file, outermost first."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imported(path: Path, *, executed: bool = False) -> set[str]:
    """Dotted names that a file imports, inside functions too. executed: but for those that the
    type checker alone imports."""
    names: set[str] = set()
    unexecuted: set[ast.AST] = set()
    for node in nodes(path):
        if executed and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            unexecuted.update(node.body)
        if node in unexecuted:
            continue
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{a.name}" for a in node.names}
    return names


def layer(module: str) -> int | None:
    """Layer of a dotted bench module, longest prefix first; None for the bare package."""
    inner = module.removeprefix("bench").lstrip(".")
    for position, names in enumerate(LAYERS):
        if any(inner == n or inner.startswith(f"{n}.") for n in names):
            return position
    return None


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_two_classes_share_a_name() -> None:
    """A word has one meaning."""
    counts = Counter(
        node.name
        for package in ("bench", "attacks", "defenses")
        for path in modules(package)
        for node in nodes(path)[0].body  # type: ignore[attr-defined]
        if isinstance(node, ast.ClassDef)
    )
    shared = {name for name, count in counts.items() if count > 1}
    assert not shared, "give the newer class a name of its own"


def test_no_import_closes_a_circle() -> None:
    files = {name_of(p): p for top in ("bench", "attacks", "defenses") for p in modules(top)}
    # The top of leakbench gives the Python API when it is asked for it, and its version at once.
    del files["bench"]
    graph: dict[str, set[str]] = {}
    for own, path in files.items():
        names = imported(path, executed=True)
        graph[own] = {n if n in files else n.rpartition(".")[0] for n in names} & files.keys()
    for importer, module in CIRCULAR:
        graph[importer].remove(module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(reversed(error.args[1]))}")


def test_bench_imports_only_its_own_and_lower_layers() -> None:
    wrong, rooms = [], ("bench", "bench.privacy", "bench.harness", "bench.contract")
    for path in modules("bench"):
        own, here = name_of(path), layer(name_of(path))
        if here is None and own not in rooms:
            wrong.append(f"{own} has no layer")
        for name in imported(path):
            if name.startswith(("attacks", "defenses")):
                wrong.append(f"{own} imports the plugin {name}")
            there = layer(name) if name.startswith("bench.") else None
            if here is not None and there is not None and there < here:
                wrong.append(f"{own} imports {name} from a higher layer")
    assert not wrong


def test_plugins_import_only_the_contracts_and_their_own_package() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for own, other in (("attacks", "defenses"), ("defenses", "attacks"))
        for path in modules(own)
        for name in imported(path)
        if name.startswith(other)
        or (name.startswith("bench") and not name.startswith(ALLOWED_TO_PLUGINS))
    ]
    assert not wrong
