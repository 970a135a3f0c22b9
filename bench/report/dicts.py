"""Records and runs as the dictionaries that this folder's modules still take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.harness.store import Store
from bench.records import Kind, Run, to_json


class DictStore:
    """A result folder's records, validated, as dictionaries."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)

    def read(self, kind: Kind, key: str) -> dict[str, Any] | None:
        found = self.store.read(kind, key)
        return None if found is None else json.loads(to_json(found))

    def artifacts(self, key: str) -> Path:
        return self.store.artifacts(key)


def read_run(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(to_json(Run.read(folder)))
    return found
