"""The one-way import rule, and how early imports happen."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module may import from its own layer and from those after it.
LAYERS = (
    ("cli",),
    ("submission", "results", "outside", "harness.merge"),
    ("report",),
    ("harness.launch",),
    ("harness.runner",),
    ("harness.executors",),
    ("harness.train", "harness.attack"),
    ("harness.costs", "harness.keys", "harness.environment"),
    ("harness.plan", "harness.store"),
    ("sandbox",),
    ("suite", "registry", "records"),
    ("protocols", "metrics", "privacy.ledger"),
    ("data", "models", "contract.compose"),
    ("toolkit", "seeding", "names"),
    ("api", "privacy.events"),
    ("contract.attack",),
    ("contract.defense",),
    ("contract.network",),
    ("contract.messages", "contract.events", "contract.mechanisms"),
    ("privacy.gaussian", "privacy.entry"),
    ("errors",),
)
ALLOWED_TO_PLUGINS = ("bench.api", "bench.toolkit", "bench.privacy")


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
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


@pytest.mark.parametrize("path", modules("bench"), ids=lambda p: str(p.relative_to(ROOT)))
def test_bench_imports_only_its_own_and_lower_layers(path: Path) -> None:
    own = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
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
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        rooms = ("bench", "bench.privacy", "bench.harness", "bench.contract")
        assert own in rooms or layer(own) is not None, own


def test_the_command_line_starts_without_importing_torch() -> None:
    code = "import sys, bench.cli; assert not {'torch', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
