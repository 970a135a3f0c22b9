"""A result folder's leaderboard as plain values."""

import json
from pathlib import Path
from typing import Any

import jsonschema

from bench.report import leaderboard
from bench.report.text import to_leaderboard_json

SCHEMA = json.loads(Path(leaderboard.__file__).with_name("schema.json").read_text())


def written(folder: Path) -> list[dict[str, Any]]:
    """Rows as leaderboard.json has them, which follow the schema."""
    rows: list[dict[str, Any]] = json.loads(to_leaderboard_json(leaderboard.rows(folder)))
    jsonschema.validate(rows, SCHEMA)
    return rows


def board(folder: Path) -> list[dict[str, Any]]:
    """The same with flags as sentences."""
    return [row | {"flags": [f["text"] for f in row["flags"]]} for row in written(folder)]
