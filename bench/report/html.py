"""The leaderboard as one self-contained HTML page: no network, no other file.

`page` takes rows of any number of suites, so that a static site can show several in one table.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import bench
from bench.records import Row, Run, short
from bench.report import explain, overview, text
from bench.report.advice import advise
from bench.report.boards import AT_ONCE, Board, boards, details
from bench.report.escaping import escape_value, visible
from bench.report.leaderboard import row_id
from bench.report.pictures import Pictures, walls
from bench.report.tables import idle, work
from bench.report.verdicts import has_use

if TYPE_CHECKING:
    from bench.report.subjects import Subject

_TEMPLATES = Path(__file__).with_name("templates")
_FIRST = 'document.documentElement.classList.add("on")'
"""Runs before the tables are laid out: what needs scripts shows, rows beyond the first hide."""


def page(
    rows: Sequence[Row],
    run: Run,
    pictures: Pictures,
    *,
    as_json: str | None = None,
    missing: Sequence[str] = (),
    subject: Subject | None = None,
    standing: str = "",
) -> str:
    """Return the whole page as text.

    Args:
        rows: Of the leaderboard.
        run: Where they come from.
        pictures: Of the run.
        as_json: The rows as leaderboard.json, where that is at hand.
        missing: Sentences that say what is not there.
        subject: What of the run the page is about, and `rows` are; None: all of it.
        standing: Whether anybody made the figures again.
    """
    as_json = as_json or text.to_leaderboard_json(rows)
    digest = hashlib.sha256(as_json.encode()).hexdigest()
    tables = boards(rows)
    overall = subject is None or subject.overall
    # The pages on subjects are many, and a plot takes half a second.
    plots = [_plots(b, rows) if subject is None else [] for b in tables]
    choices = overview.choices(rows) if overall else []
    reasons = _reasons(tables)
    over = explain.interval_words(rows) or "95 % interval"
    texts = {k: t.replace("95 % interval", over) for k, t in explain.COLUMNS.items()}
    style, script = (source(f"report.{kind}") for kind in ("css", "js"))
    return (
        environment()
        .get_template("report.html")
        .render(
            policy=policy(style, _FIRST, script),
            style=Markup(style),
            first=Markup(_FIRST),
            script=Markup(script),
            at_once=AT_ONCE,
            run=run,
            missing=missing,
            standing=standing,
            made_by=run.versions.get("leakbench", bench.__version__),
            digest=digest,
            boards=[_board_values(b, pictures, p) for b, p in zip(tables, plots, strict=True)],
            filters=_filters(rows),
            texts=texts,
            over=over,
            reasons=reasons,
            notes=_json({"columns": texts, "reasons": list(reasons)}),
            subject=subject,
            walls=walls(rows, pictures) if overall else [],
            overviews=choices,
            costs=overview.column_notes(),
            signs=overview.legend([o for c in choices for o in c if o.loss == overview.LOSS]),
            loss=overview.LOSS,
            pictures=pictures,
        )
    )


def _board_values(
    board: Board, pictures: Pictures, plots: Sequence[tuple[str, Markup]]
) -> dict[str, Any]:
    own = _own(pictures, board.rows)
    return {
        "board": board,
        "plots": plots,
        "details": _json(details(board)),
        "pictures": _json(own) if own["cells"] or own["records"] else None,
        "attacks": list(dict.fromkeys(c["attack"] for c in own["cells"])),
    }


def _plots(board: Board, rows: Sequence[Row]) -> list[tuple[str, Markup]]:
    """Return what each figure of a table shows, and the figure as an image element. rows: all of
    the report."""
    from bench.report import figures, paper  # which take longer to import than a page takes

    by_name = figures.of_table(board.rows, rows)
    named = [(figures.CHOICES[name], figure) for name, figure in by_name.items()]
    return [(what, Markup(paper.image_of(f, f"{what}: {board.title}"))) for what, f in named]


def _own(pictures: Pictures, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the pictures of what a table's rows show, on an attack's page of that attack alone;
    rows are named by their place in the table."""
    places = {row_id(r): i for i, r in enumerate(rows)}
    cells, records = (
        [
            {**cell, "row": places[cell["row"]]}
            for cell in pictures[kind]
            if cell["row"] in places and cell["attack"] in rows[places[cell["row"]]].attacks
        ]
        for kind in ("cells", "records")
    )
    shown = sorted({cell[name] for cell in cells for name in ("truth", "images")})
    sprites = {number: pictures["sprites"][number] for number in shown}
    return {"sprites": sprites, "cells": cells, "records": records}


def _filters(rows: Sequence[Row]) -> list[tuple[str, str, list[str]]]:
    """Return (key in the URL, label, values) of each select box."""
    keys = ("protocol", "dataset", "model", "checkpoint", "defense")
    labels = {"checkpoint": "Round"}
    values = {k: list(dict.fromkeys(str(getattr(r, k)) for r in rows)) for k in keys}
    return [(k, labels.get(k, k.capitalize()), options) for k, options in values.items()]


def _reasons(tables: Sequence[Board]) -> dict[str, int]:
    """Number the reasons that cells without a figure show when pressed."""
    reasons = (cell.reason for b in tables for line in b.lines for cell in line if cell.reason)
    return {r: i for i, r in enumerate(dict.fromkeys(reasons))}


@cache
def environment() -> Environment:
    """Return the templates' environment, which escapes every value not marked as safe."""
    templates = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=escape_value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"breakable": _breakable, "coded": _mark_code, "short": short}
    templates.filters |= {"chip": explain.chip, "useful": has_use, "work": work, "idle": idle}
    templates.filters["advise"] = advise
    return templates


@cache
def source(name: str) -> str:
    """Text of a style sheet or script among the templates."""
    return (_TEMPLATES / name).read_text(encoding="utf-8").strip()


def policy(style: str, *scripts: str) -> str:
    """Return a content security policy that allows just this inline style and these scripts."""

    def hashes(*texts: str) -> str:
        digests = (base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts)
        return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"

    return (
        f"default-src 'none'; img-src data:; style-src {hashes(style)}; script-src "
        f"{hashes(*scripts)}; base-uri 'none'; form-action 'none'"
    )


def _mark_code(text: str) -> Markup:
    """Words between backticks as code."""
    parts = enumerate(map(escape_value, re.split(r"`([^`]+)`", text)))
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else p for i, p in parts)


def _breakable(name: str) -> Markup:
    """A name, or setting=value, that may be broken after its underscores and equals signs."""
    parts = (Markup("_<wbr>").join(part.split("_")) for part in visible(name).split("="))
    return Markup("=<wbr>").join(parts)


def _json(value: Any) -> Markup:
    """JSON for a script block: nothing in it can end the block or open a comment."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
