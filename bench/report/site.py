"""Several result folders as a static site: the leaderboard of all rows, each folder's report and
files, and a page for every defense, attack and data set."""

import base64
import csv
import gzip
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from bench.errors import UserError
from bench.files import read_bytes
from bench.harness.store import stage_folder, write_whole
from bench.records import RUN_FILES, to_json
from bench.records.run import PACKED_RUN
from bench.records.submitted import SUBMISSION, read_submission
from bench.registry import discover
from bench.report import files as reports
from bench.report import html
from bench.report.boards import board_of
from bench.report.subjects import subjects
from bench.report.tables import tables

FILES = (*(f"{reports.FILES[f]}.gz" for f in ("csv", "json")), PACKED_RUN)
"""Beside the report."""
SWEEP = "sweep.csv"


class Published(reports.Files):
    """One result folder.

    Args:
        folder: The folder.
        source: Where all results lie.

    Attributes:
        name: Its path below the results, which it keeps on the site.
        submission: By whom, where it was submitted; such rows stand apart.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        super().__init__(folder)
        name = folder.relative_to(source).as_posix()
        self.name = folder.name if name == "." else name
        self.submission = read_submission(folder) if (folder / SUBMISSION).is_file() else None

    def contents(self) -> dict[str, str | bytes]:
        """Return the contents of its files by their paths below its own, the large ones zipped."""
        texts = {f"{reports.FILES[f]}.gz": self.text(f) for f in ("csv", "json")}
        texts[PACKED_RUN] = to_json(self.run)
        zipped = {n: gzip.compress(text.encode(), mtime=0) for n, text in texts.items()}
        return {"report.html": self.page("../" * len(Path(self.name).parts)), **zipped}

    @property
    def address(self) -> str:
        return quote(self.name)

    @property
    def failed(self) -> int:
        """Attack cells that failed or ran out of time, over all rows."""
        return sum(a.status in ("failed", "timeout") for r in self.rows for a in r.attacks.values())

    @property
    def listed(self) -> bool:
        """Whether its rows stand in the leaderboard: those of a submission once it is verified."""
        return self.submission is None or bool(self.verified)


def collect(source: Path) -> list[Published]:
    """Return every result folder at or below `source`, the one with the most rows first, without
    the parts of another: `results/reference/parts/1` is below `results/reference`. Submissions come
    last.

    Raises UserError if there is none, or one that cannot be read.
    """
    candidates = {path.parent for name in RUN_FILES for path in source.rglob(name)}
    folders = sorted(f for f in candidates if not candidates & set(f.parents))
    if not folders:
        raise UserError(f"{source} holds no result folder of leakbench (no run.json).")
    entries = [Published(folder, source) for folder in folders]
    return sorted(entries, key=lambda e: (e.submission is not None, -len(e.rows)))


def sweeps(source: Path) -> list[dict[str, Any]]:
    """Return what `leakbench sweep` wrote at or below `source`, by name: the folder, what was
    varied, its figures as image elements, and its table as text.

    Raises UserError for a sweep.csv that is none."""
    curves = []
    for file in sorted(source.rglob(SWEEP)):
        text = read_bytes(file).decode(errors="replace")
        over = next((line.get("over") for line in csv.DictReader(io.StringIO(text))), None)
        if over is None:
            raise UserError(f"{file} has no column 'over': `leakbench sweep` did not write it.")
        name = file.parent.relative_to(source).as_posix()
        name = file.parent.name if name == "." else name
        figures = [_embed_figure(path, over) for path in sorted(file.parent.glob("*-sweep.png"))]
        curves.append({"name": name, "over": over, "figures": figures, "text": text})
    return curves


def _embed_figure(picture: Path, over: str) -> Markup:
    """Return a sweep's figure as an image element, which needs no other file."""
    data = base64.b64encode(read_bytes(picture)).decode()
    title = f"Leakage over {over}: {picture.name.removesuffix('-sweep.png')}"
    image = '<img class="plot" alt="{}" src="data:image/png;base64,{}">'
    return Markup(image).format(title, data)


def pages(entries: Sequence[Published], curves: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
    """Return the site's own pages by their paths: the leaderboard with all runs, a page for every
    subject, and the style and script that they share."""
    shown = [entry for entry in entries if entry.listed]
    listed = {f"{entry.address}/report.html": tables(entry.rows) for entry in shown}
    above = {f"../{address}": groups for address, groups in listed.items()}
    by_kind = subjects([row for entry in shown for row in entry.rows], discover())
    own = {
        "index.html": html.render(
            "site.html", board_of(listed, attacks=lambda name: False), shared="", entries=entries,
            curves=curves, subjects=by_kind, beside=FILES,
        ),
        **html.shared_files(),
    }  # fmt: skip
    for subject in (s for some in by_kind.values() for s in some):
        board = board_of(above, keep=subject.rows_of, attacks=subject.is_column)
        own[subject.file] = html.render("subject.html", board, shared="../", subject=subject)
    return own


def write(source: Path, out: Path) -> list[Path]:
    """Write the site of all results below `source` and return its pages, the overview first.

    out: a new or empty folder, or an earlier site, which is replaced. Raises UserError
    for another folder, and for results that cannot be read; nothing is written then.
    """
    if not source.is_dir():
        raise UserError(f"no such folder of results: {source}.")
    front = out / "index.html"
    text = front.read_text(encoding="utf-8", errors="replace") if front.is_file() else ""
    ours = 'content="leakbench ' in text
    if out.exists() and not ours and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out must be a new folder, an empty one or an earlier site, got {out}.")
    if out.resolve().is_relative_to(source.resolve()):
        raise UserError(f"--out must lie outside of the results {source}, got {out}.")
    entries, curves = collect(source), sweeps(source)
    with stage_folder(out) as stage:
        for entry in entries:
            for name, content in entry.contents().items():
                write_whole(stage / entry.name / name, content)
        for curve in curves:
            write_whole(stage / curve["name"] / SWEEP, curve["text"])
        for name, text in pages(entries, curves).items():
            write_whole(stage / name, text)
    return [front, *(out / entry.name / "report.html" for entry in entries)]
