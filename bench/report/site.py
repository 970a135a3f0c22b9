"""Several result folders as a static site: an overview, and each folder's report and files, with a
page for each of its defenses, attacks and data sets."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

import bench
from bench.errors import UserError
from bench.files import read_bytes
from bench.harness.store import stage_folder, write_whole
from bench.records import RUN, RUN_FILES, to_json
from bench.records.submitted import SUBMISSION, read_submission
from bench.registry import Registry, discover
from bench.report import files as reports
from bench.report import html
from bench.report.overview import LOSS, Overview, choices, column_notes, legend
from bench.report.subjects import KINDS, subjects

_MARK = f'<meta name="generator" content="leakbench {bench.__version__}">'
_FORMATS = ("html", "json", "csv", "md")
FILES = (*(reports.FILES[f] for f in _FORMATS[1:]), RUN)
"""Beside the report."""
SWEEP = "sweep.csv"


class Published(reports.Files):
    """One result folder.

    Args:
        folder: The folder.
        source: Where all results lie.
        registry: The plugins.

    Attributes:
        name: Its path below the results, which it keeps on the site.
        subjects: What has a page of its own.
        submission: By whom, where it was submitted; such rows stand apart.
    """

    def __init__(self, folder: Path, source: Path, registry: Registry) -> None:
        super().__init__(folder)
        name = folder.relative_to(source).as_posix()
        self.name = folder.name if name == "." else name
        self.subjects = subjects(self.rows, registry)
        submitted = (folder / SUBMISSION).is_file()
        self.submission = read_submission(folder) if submitted else None

    def texts(self) -> dict[str, str]:
        """Return the texts of its files and pages by their paths below its own."""
        texts = {reports.FILES[f]: self.text(f) for f in _FORMATS}
        texts |= {s.file: self.page_on(s) for kind in self.subjects.values() for s in kind}
        return {**texts, RUN: to_json(self.run)}

    @property
    def address(self) -> str:
        return quote(self.name)

    @property
    def failed(self) -> int:
        """Attack cells that failed or ran out of time, over all rows."""
        return sum(a.status in ("failed", "timeout") for r in self.rows for a in r.attacks.values())

    @cached_property
    def overviews(self) -> list[list[Overview]]:
        """Those of each protocol, for every loss of accuracy that a reader can choose."""
        return choices(self.rows)


def collect(source: Path) -> list[Published]:
    """Return every result folder at or below `source`, the one with the most rows first, without
    the parts of another: `results/reference/parts/1` is below `results/reference`. Submissions come
    last.

    Raises UserError if there is none, or one that cannot be read.
    """
    candidates = {path.parent for name in RUN_FILES for path in source.rglob(name)}
    own = (f for f in candidates if not candidates & set(f.parents))
    folders = sorted(own)
    if not folders:
        raise UserError(f"{source} holds no result folder of leakbench (no run.json).")
    registry = discover()
    entries = [Published(folder, source, registry) for folder in folders]
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


def index(entries: Sequence[Published], curves: Sequence[Mapping[str, Any]] = ()) -> str:
    """The overview page."""
    style = html.source("report.css") + "\n" + html.source("site.css")
    return (
        html.environment()
        .get_template("site.html")
        .render(
            policy=html.policy(style),
            style=Markup(style),
            mark=Markup(_MARK),
            entries=entries,
            curves=curves,
            kinds=KINDS,
            beside=FILES,
            costs=column_notes(),
            signs=legend([o for e in entries for c in e.overviews for o in c if o.loss == LOSS]),
            loss=LOSS,
            version=bench.__version__,
        )
    )


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
            for name, text in entry.texts().items():
                write_whole(stage / entry.name / name, text)
        for curve in curves:
            write_whole(stage / curve["name"] / SWEEP, curve["text"])
        write_whole(stage / front.name, index(entries, curves))
    return [front, *(out / entry.name / "report.html" for entry in entries)]
