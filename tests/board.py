"""A result folder's leaderboard as plain values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.report import leaderboard
from bench.report.text import to_leaderboard_json

SCHEMA_FILE = Path(leaderboard.__file__).with_name("schema.json")


def written(folder: Path) -> list[dict[str, Any]]:
    """Rows as leaderboard.json has them."""
    rows: list[dict[str, Any]] = json.loads(to_leaderboard_json(leaderboard.rows(folder)))
    return rows


def board(folder: Path) -> list[dict[str, Any]]:
    """The same with flags as sentences."""
    return [row | {"flags": [f["text"] for f in row["flags"]]} for row in written(folder)]
