"""A folder to publish: small, and all that others need to cite, compare and rank anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.errors import UserError
from bench.files import read_bytes
from bench.harness.store import Store, write_whole
from bench.records import ARCHIVE, RUN, SUMS, Kind, NoResult, packed, sums, to_json
from bench.records.archive import Outcome
from bench.report.files import FILES, Files

PICTURES = "pictures.json"
_LEADERBOARD = ("json", "csv", "md")
"""Its forms that are published."""


def write_published(
    folder: Path, out: Path, *, part: bool = False, with_pictures: bool = True
) -> list[Path]:
    """Write the leaderboard of a result folder in every form but HTML, its run, pictures, all
    records in one file, and the hashes of these; their paths.

    Tracebacks, which name files of the machine that ran it, stay behind.

    Args:
        folder: The result folder, or a published one, which is then reported anew from its
            records, in place if `out` is the same.
        out: Where to write.
        part: Whether `leakbench merge` will join it with others: then without leaderboard, which
            follows from the records.
        with_pictures: Whether to write pictures.

    Raises:
        UserError: For a folder without records of all its jobs, or if `out` is that
            folder and it is not published.
    """
    anew = not (folder / "records").is_dir()
    if out.resolve() == folder.resolve() and not anew:
        raise UserError(f"{out} is the result folder itself; publish into another.")
    found = Files(folder, anew=anew)
    store = Store(folder, found.run)
    records: list[tuple[Kind, Outcome]] = []
    for kind, key in found.run.record_names:
        record = store.read(kind, key)
        if record is None:
            raise UserError(
                f"{folder} has no {kind} record {key}: finish the run, then publish it."
            )
        if isinstance(record, NoResult):
            record = replace(record, traceback=None)
        records.append((kind, record))
    texts = {} if part else {FILES[name]: found.text(name) for name in _LEADERBOARD}
    texts[RUN] = read_bytes(folder / RUN).decode()
    if with_pictures:
        texts[PICTURES] = to_json(found.pictures) + "\n"
    contents = {name: text.encode() for name, text in texts.items()} | {ARCHIVE: packed(records)}
    for name, content in contents.items():
        write_whole(out / name, content)
    write_whole(out / SUMS, sums(contents))
    for old in {*(FILES[name] for name in _LEADERBOARD), PICTURES} - contents.keys():
        (out / old).unlink(missing_ok=True)  # of what was published there before
    return [out / name for name in (*contents, SUMS)]
