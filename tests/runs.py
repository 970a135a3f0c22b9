"""Runs of a suite without the command line, and what they left."""

import json
from pathlib import Path
from typing import Any

from bench import suite as suites
from bench.harness import launch, runner
from bench.harness.environment import Environment
from bench.harness.plan import Plan
from bench.harness.store import Store

CLOCK = {"seconds", "client_seconds", "workings", "memory"}
"""What two runs of the same seed may differ in."""


def planned(suite: Path, plugins: tuple[Path, ...] = (), **only: Any) -> tuple[Plan, runner.Keys]:
    return launch.plan_suite(suites.read_suite(str(suite)), only, Environment(plugins=plugins))


def made(plan: Plan, keys: runner.Keys, store: Store, executor: Any) -> runner.Report:
    return runner.run(plan, store, keys, executor=executor)


def contents(store: Store) -> dict[str, Any]:
    """All records without the clock's readings, and the bytes of all artifacts."""
    files: dict[str, Any] = {}
    for path in sorted(store.folder.glob("records/*/*.json")):
        files[str(path.relative_to(store.folder))] = timeless(json.loads(path.read_text()))
    for path in sorted(store.folder.glob("artifacts/*/*")):
        files[str(path.relative_to(store.folder))] = path.read_bytes()
    return files


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in CLOCK}
    return value
