"""The files of a report: which there are, and the text of each, from one reading of a folder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.store import Store
from bench.records import LEADERBOARD, Row, Run
from bench.records.submitted import Verified, read_verified, standing
from bench.report import frames, leaderboard, text
from bench.report.errata import with_errata

if TYPE_CHECKING:
    from bench.report.subjects import Subject

FILES = {
    "html": "report.html",
    "md": "leaderboard.md",
    "csv": "leaderboard.csv",
    "json": LEADERBOARD,
}
"""Formats and the files that hold them."""


class Files:
    """Texts of a result folder's files, each made once and when it is asked for.

    Args:
        folder: The result folder.

    Raises:
        UserError: If the folder is no result folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = Run.read(folder)
        self._store = Store(folder, self.run)

    @cached_property
    def rows(self) -> list[Row]:
        """Rows as the records have them, with the folder's errata."""
        rows = leaderboard.rows_of(self.run, self.run.trainings, self._store)
        return with_errata(rows, self.folder)

    @cached_property
    def missing(self) -> list[str]:
        """See `leaderboard.missing_words`."""
        return leaderboard.missing_words(self._store, self.run)

    @cached_property
    def verified(self) -> Verified | None:
        """See `read_verified`."""
        return read_verified(self.folder)

    @cached_property
    def pictures(self) -> dict[str, Any]:
        from bench.report import pictures

        return pictures.collect(self.folder)

    @cached_property
    def _json(self) -> str:
        return text.to_leaderboard_json(self.rows)

    def text(self, format_: str) -> str:
        """The text of the file of a format of `FILES`."""
        if format_ == "json":
            return self._json
        if format_ == "csv":
            return frames.to_csv(self.rows)
        if format_ == "md":
            return text.markdown(self.rows, self.run, missing=self.missing)
        return self.page_on(None)

    def page_on(self, subject: Subject | None) -> str:
        """The page on one subject, None for the whole report."""
        from bench.report import html

        rows = self.rows if subject is None else subject.rows_of(self.rows)
        return html.page(
            rows, self.run, self.pictures,
            as_json=self._json, missing=self.missing, subject=subject,
            standing=standing(self.verified),
        )  # fmt: skip
