"""Hashes of the source that decides numbers: leakbench's own, and that of plugins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from bench.registry import PluginKind, Registry

TRAINING = ("contract", "seeding.py", "harness/train.py", "harness/environment.py", "toolkit",
            "data", "models", "protocols", "privacy", "sandbox/audit.py", "sandbox/neighbours.py",
            "sandbox/hooked.py", "sandbox/pairs.py", "sandbox/received.py", "sandbox/stage.py",
            "metrics/distinguish.py")  # fmt: skip
SCORING = ("metrics", "harness/attack.py", "sandbox/rehearsal.py", "sandbox/stage.py")


@cache
def own(parts: tuple[str, ...]) -> str:
    """Hash of files and folders of leakbench itself: old results of other code are not taken for
    results of this code."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for part in parts:
        place = root / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def hashes(registry: Registry, plugins: Iterable[tuple[PluginKind, str]]) -> dict[str, str]:
    """Of leakbench and of the plugins (kind, name): what it belongs to -> hash."""
    found = {f"{kind} {name}": registry.sources(kind, name) for kind, name in sorted(plugins)}
    return found | {"leakbench": own(TRAINING + SCORING)}
