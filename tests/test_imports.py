"""The one-way import rule, and how early imports happen."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module may import from its own layer and from those after it.
LAYERS = (
    ("cli",),
    ("conformance",),
    ("capturing",),
    ("submission", "results", "outside", "tuning", "harness.merge"),
    ("report",),
    ("harness.forecast", "harness.launch", "harness.progress"),
    ("harness.runner",),
    ("harness.executors",),
    ("harness.scoring",),
    ("harness.train", "harness.attack"),
    ("harness.cascade", "harness.work"),
    ("harness.costs", "harness.keys"),
    ("harness.environment", "harness.sources", "harness.shared"),
    ("harness.plan", "harness.store"),
    ("sandbox",),
    ("suite", "registry", "records"),
    ("protocols", "metrics", "privacy.ledger"),
    ("data", "models", "contract.compose"),
    ("toolkit", "seeding", "arguments", "extensions", "arrays"),
    ("foreign",),
    ("names",),
    ("api", "privacy.events"),
    ("contract.attack", "contract.hooks"),
    ("contract.returns",),
    ("contract.defense",),
    ("contract.network",),
    ("contract.messages", "contract.events", "contract.mechanisms"),
    ("privacy.composition",),
    ("privacy.gaussian", "privacy.entry"),
    ("files",),
    ("errors",),
)
ALLOWED_TO_PLUGINS = ("bench.api", "bench.toolkit", "bench.privacy")
# Imports that close a circle: to be removed from here as soon as they are gone.
CIRCULAR: set[tuple[str, str]] = set()


def imported(path: Path, *, executed: bool = False) -> set[str]:
    """Dotted names that a file imports, inside functions too. executed: but for those that the
    type checker alone imports."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if executed and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    names = set()
    for node in ast.walk(tree):
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


@pytest.mark.parametrize("path", modules("bench"), ids=lambda p: str(p.relative_to(ROOT)))
def test_bench_imports_only_its_own_and_lower_layers(path: Path) -> None:
    own = name_of(path)
    here = layer(own)
    for name in imported(path):
        assert not name.startswith(("attacks", "defenses")), f"{own} imports the plugin {name}"
        if name.startswith("bench.") and here is not None:
            there = layer(name)
            assert there is None or there >= here, f"{own} imports {name} from a higher layer"


@pytest.mark.parametrize(
    "path", modules("attacks") + modules("defenses"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_plugins_import_only_the_contracts_and_their_own_package(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        if name.startswith("bench"):
            assert name.startswith(ALLOWED_TO_PLUGINS), f"{path.name} imports {name}"
        assert not name.startswith({"attacks": "defenses", "defenses": "attacks"}[own])


def test_every_bench_module_has_a_layer() -> None:
    for path in modules("bench"):
        own = name_of(path)
        rooms = ("bench", "bench.privacy", "bench.harness", "bench.contract")
        assert own in rooms or layer(own) is not None, own


def test_the_command_line_starts_without_importing_torch() -> None:
    code = "import sys, bench.cli; assert not {'torch', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
