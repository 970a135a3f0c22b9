"""The files of a report and of a published folder, and the text of each, from one reading of a
folder."""

import gzip
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.harness.store import Store, write_whole
from bench.records.files import ARCHIVE, Outcome, pack
from bench.records.outcomes import Kind, NoResult
from bench.records.rows import LEADERBOARD, Row
from bench.records.run import PACKED_RUN, RUN, Run
from bench.records.submitted import Verified, read_verified, standing
from bench.records.text import to_json
from bench.report import frames, leaderboard, text
from bench.report.errata import with_errata
from bench.report.overview import LOSS

README = "README.md"


def write_published(folder: Path, out: Path) -> list[Path]:
    """Write a result folder's run and records, packed, and a README with the command and overview.

    Tracebacks, which name files of the machine that ran it, stay behind.

    Args:
        folder: The result folder, or a published one.
        out: Where to write. Its own errata.toml and figures stay, and the README shows them.

    Returns:
        The paths of the files.

    Raises:
        UserError: For a folder without records of all its jobs, or if `out` is a run's own folder.
    """
    if (out / "records").is_dir():
        raise UserError(f"{out} is a run's own folder; publish into another.")
    run = Run.read(folder)
    store = Store(folder, run)
    records: list[tuple[Kind, Outcome]] = []
    for kind, key in run.record_names:
        record = store.read(kind, key)
        if record is None:
            raise UserError(
                f"{folder} has no {kind} record {key}: finish the run, then publish it."
            )
        if isinstance(record, NoResult):
            record = replace(record, traceback=None)
        records.append((kind, record))
    write_whole(out / PACKED_RUN, gzip.compress(to_json(run).encode(), mtime=0))
    write_whole(out / ARCHIVE, pack(records))
    (out / RUN).unlink(missing_ok=True)  # of an earlier version, and read before the packed one
    write_whole(out / README, readme(out))
    return [out / name for name in (PACKED_RUN, ARCHIVE, README)]


def readme(folder: Path) -> str:
    """Return the README of a published folder, as it follows from its records and errata."""
    files = Files(folder)
    place = folder / "figures"
    figures = sorted(p.name for p in place.iterdir()) if place.is_dir() else []
    return text.fill_template(files.rows, files.run, files.missing, figures=figures)


FILES = {
    "html": "report.html",
    "md": "leaderboard.md",
    "csv": "leaderboard.csv",
    "json": LEADERBOARD,
    "tex": "overview.tex",
    "bib": "references.bib",
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
        self.store = Store(folder, self.run)

    @cached_property
    def rows(self) -> list[Row]:
        """Rows as the records have them, with the folder's errata."""
        rows = leaderboard.rows_of(self.run, self.store)
        return with_errata(rows, self.folder)

    @cached_property
    def missing(self) -> list[str]:
        """See `leaderboard.missing_words`."""
        return leaderboard.missing_words(self.store, self.run)

    @cached_property
    def verified(self) -> Verified | None:
        """See `read_verified`."""
        return read_verified(self.folder)

    @property
    def standing(self) -> str:
        """Whether anybody made these figures again by a rerun."""
        return standing(self.verified)

    @cached_property
    def pictures(self) -> dict[str, Any]:
        from bench.report import pictures

        return pictures.collect(self.folder)

    @cached_property
    def _json(self) -> str:
        return text.to_leaderboard_json(self.rows)

    def text(self, format_: str, loss: float = LOSS, columns: Sequence[str] = ()) -> str:
        """The text of the file of a format of `FILES`. loss, columns: of the LaTeX tables, see
        `text.overview_to_latex`."""
        if format_ == "json":
            return self._json
        if format_ == "tex":
            return text.overview_to_latex(self.rows, loss, columns)
        if format_ == "bib":
            from bench.report.papers import to_bibtex

            return to_bibtex(self.rows, self.run)
        if format_ == "csv":
            return frames.to_csv(self.rows)
        if format_ == "md":
            return text.markdown(self.rows, self.run, missing=self.missing)
        return self.page()

    def page(self, shared: str | None = None) -> str:
        """The page. shared: See `html.render`."""
        from bench.report import html

        return html.page(
            self.rows, self.run, self.pictures,
            as_json=self._json, missing=self.missing, standing=self.standing, shared=shared,
        )  # fmt: skip

    def write(
        self, out: Path, formats: Sequence[str], loss: float = LOSS, columns: Sequence[str] = ()
    ) -> list[Path]:
        """Write the files of some formats of `FILES` and return their paths. loss, columns: see
        `text`."""
        for name in formats:
            # In place of a link, never through it.
            write_whole(out / FILES[name], self.text(name, loss, columns))
        return [out / FILES[name] for name in formats]
