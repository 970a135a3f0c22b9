"""The files of a report: which there are, and the text of each, from one reading of a folder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from bench.report import leaderboard, tables
from bench.report.tables import Row

FILES = {
    "html": "report.html",
    "md": "leaderboard.md",
    "csv": "leaderboard.csv",
    "json": "leaderboard.json",
}
"""Formats and the files that hold them."""


class Files:
    """Texts of a result folder's files, each made once and when it is asked for.

    Raises ValueError if the folder is no result folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = leaderboard.read_run(folder)

    @cached_property
    def loaded(self) -> list[Row]:
        """Rows as the records, or the leaderboard.json of an older version, have them."""
        return leaderboard.load(self.folder)

    @cached_property
    def rows(self) -> list[Row]:
        """Rows with what was added since, as unknown."""
        return leaderboard.complete(self.loaded)

    @cached_property
    def pictures(self) -> dict[str, Any]:
        from bench.report import pictures

        return pictures.load(self.folder)

    @cached_property
    def _json(self) -> str:
        if not (self.folder / "records").is_dir():  # published: the file is what others cite
            return (self.folder / FILES["json"]).read_text()
        return tables.to_leaderboard_json(self.loaded)

    def text(self, format_: str) -> str:
        """The text of the file of a format of `FILES`. Raises ValueError for rows without what
        every version has."""
        if format_ == "json":
            return self._json
        if format_ == "csv":
            return tables.to_csv(self.rows)
        if format_ == "md":
            return tables.markdown(self.rows, self.run)
        from bench.report import html

        return html.page(self.loaded, self.run, self.pictures, as_json=self._json)
