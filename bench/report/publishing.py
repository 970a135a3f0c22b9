"""A folder to publish: small, and all that others need to cite, compare and rank again."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

from bench.errors import UserError
from bench.harness.store import Store, write_whole
from bench.records import ARCHIVE, PACKED_RUN, RUN, Kind, NoResult, Run, pack, to_json
from bench.records.archive import Outcome
from bench.report import text
from bench.report.files import Files

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
    return text.readme(files.rows, files.run, figures, missing=files.missing)
