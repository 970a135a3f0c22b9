"""What `leakbench list` shows, remembered until a file that it was made from changes.

Making it imports every plugin, and with them torch, which takes seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from bench.names import DATASETS, GROUPS, MODELS

Listing = dict[str, list[dict[str, Any]]]
_SOURCES = ("*.py", "*.toml")


def remembered(make: Callable[[], Listing], folder: Path | None = None) -> Listing:
    """What `make` gives, or gave when the same files lay where they lie now.

    A listing with a broken plugin is made anew each time: what mends it may be no file of its own.

    Args:
        make: Imports all plugins.
        folder: Where it is remembered, by default the user's folder for caches. One that cannot be
            read or written remembers nothing.
    """
    file, made_from = (folder or user_cache_path("leakbench")) / "list.json", _fingerprint()
    try:
        known = json.loads(file.read_text())
        if known["made_from"] == made_from:
            found: Listing = known["listing"]
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none, or none of ours
    listing = make()
    if not any(entry["broken"] for entries in listing.values() for entry in entries):
        _keep(file, {"made_from": made_from, "listing": listing})
    return listing


def _keep(file: Path, value: dict[str, Any]) -> None:
    from bench.harness.store import write_whole

    with contextlib.suppress(OSError):  # a user without a home can list all the same
        write_whole(file, json.dumps(value))


def _fingerprint() -> str:
    """Hash of the entry points and of place, time and size of every source file behind them."""
    groups = (*GROUPS.values(), MODELS, DATASETS)
    points = [p for group in groups for p in entry_points(group=group)]
    lines = sorted(f"{p.group} {p.name} {p.value} {p.dist and p.dist.version}" for p in points)
    packages = {"bench", *(p.module.partition(".")[0] for p in points)}
    lines += [line for name in sorted(packages) for line in _files_of(name)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _files_of(package: str) -> Iterator[str]:
    """Lines on a package's source files, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return
    places = [Path(p) for p in spec.submodule_search_locations or ()]
    files = [f for place in places for pattern in _SOURCES for f in place.rglob(pattern)]
    if spec.origin is not None:
        files.append(Path(spec.origin))
    for file in sorted(set(files)):
        found = file.stat()
        yield f"{file} {found.st_mtime_ns} {found.st_size}"
