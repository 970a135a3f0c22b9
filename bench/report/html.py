"""The leaderboard as one self-contained HTML page: no network, no other file.

`page` takes rows of any number of suites, so that a static site can show several in one table.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

import bench
from bench.records import Row, Run, short
from bench.report import explain, overview, text
from bench.report.advice import advise
from bench.report.boards import ID, Board, board_of, compress, details, filter_values
from bench.report.costs import COSTS
from bench.report.escaping import escape_value, visible
from bench.report.leaderboard import row_id
from bench.report.pictures import Pictures, walls
from bench.report.tables import idle, tables, work

_TEMPLATES = Path(__file__).with_name("templates")
_MOST = 24
"""Settings in a figure of accuracy against leakage: more make its legend longer than a screen."""


def page(
    rows: Sequence[Row],
    run: Run,
    pictures: Pictures,
    *,
    as_json: str | None = None,
    missing: Sequence[str] = (),
    standing: str = "",
    shared: str | None = None,
) -> str:
    """Return the whole page as text.

    Args:
        rows: Of the leaderboard.
        run: Where they come from.
        pictures: Of the run.
        as_json: The rows as leaderboard.json, where that is at hand.
        missing: Sentences that say what is not there.
        standing: Whether anybody made the figures again.
        shared: See `render`.
    """
    as_json = as_json or text.to_leaderboard_json(rows)
    choices = overview.choices(rows)
    said = [advice for c in choices for o in c if o.loss == overview.LOSS for advice in advise(o)]
    groups = tables(rows)
    board = board_of({"": groups})
    shown = [line.row for line in board.lines]
    return render(
        "report.html",
        board,
        shared=shared,
        made_by=run.versions.get("leakbench", bench.__version__),
        run=run,
        missing=missing,
        standing=standing,
        digest=hashlib.sha256(as_json.encode()).hexdigest(),
        most=_MOST,
        tables=[_table_values(rows, *named, pictures) for named in groups],
        said=said,
        walls=walls(rows, pictures),
        overviews=choices,
        costs=overview.column_notes(),
        signs=overview.legend([o for c in choices for o in c if o.loss == overview.LOSS]),
        loss=overview.LOSS,
        pictures=pictures,
        details=compress(details(shown)),
        album=_album(pictures, shown),
    )


def shared_files() -> dict[str, str]:
    """Return the style sheet and script that the pages of a site share, by their names."""
    script = source("dataTables.min.js") + "\n" + source("report.js")
    return {"leaderboard.css": source("report.css"), "leaderboard.js": script}


def render(template: str, board: Board, *, shared: str | None = None, **values: Any) -> str:
    """Fill in a template that has a leaderboard, with its style, scripts and words. shared: the
    path to the folder of `shared_files`, ending in a slash or empty; None: the page holds them."""
    files = shared_files() if shared is None else {}
    style, script = files.get("leaderboard.css"), files.get("leaderboard.js")
    first = source("first.js")
    over = explain.interval_words([line.row for line in board.lines]) or "95 % interval"
    notes = {cost.title: cost.note for cost in COSTS.values()} | dict(explain.COLUMNS)
    texts = {k: t.replace("95 % interval", over) for k, t in notes.items()}
    layout = environment().get_template(template)
    return layout.render(
        policy=policy(style, first, script),
        style=style and Markup(style),
        first=Markup(first),
        script=script and Markup(script),
        shared=shared,
        board=board,
        texts=texts,
        notes=_json({"columns": texts, "reasons": list(board.reasons)}),
        over=over,
        **{"made_by": bench.__version__} | values,
    )


def _table_values(
    rows: Sequence[Row], title: str, members: Sequence[Row], pictures: Pictures
) -> dict[str, Any]:
    """Return a table's title, threats, work, figures and attacks with reconstructions."""
    from bench.report import figures, paper  # which take longer to import than a page takes

    drawn = [
        (explain.FIGURES[name], Markup(paper.image_of(f, f"{explain.FIGURES[name]}: {title}")))
        for name, f in figures.of_table(members, rows, most=_MOST).items()
    ]
    own = {row_id(row) for row in members}
    return {
        "title": title,
        "rows": members,
        "threats": list(dict.fromkeys(t for r in members for t in r.threat.split("; ") if t)),
        "figures": drawn,
        "attacks": list(dict.fromkeys(c["attack"] for c in pictures["cells"] if c["row"] in own)),
    }


def _album(pictures: Pictures, rows: Sequence[Row]) -> Markup | None:
    """Return the reconstructions as JSON, None where there are none; rows are named by their
    places."""
    places = {row_id(row): place for place, row in enumerate(rows)}
    kept = {
        kind: [{**c, "row": places[c["row"]]} for c in pictures[kind] if c["row"] in places]
        for kind in ("cells", "records")
    }
    return _json({"sprites": pictures["sprites"], **kept}) if any(kept.values()) else None


@cache
def environment() -> Environment:
    """Return the templates' environment, which escapes every value not marked as safe."""
    templates = text.TEMPLATES.overlay(autoescape=True, finalize=escape_value)
    named = (short, explain.chip, explain.sentence, work, idle)
    templates.filters = templates.filters | {function.__name__: function for function in named}
    templates.filters |= {"breakable": _breakable, "coded": _mark_code}
    templates.filters |= {"filters": filter_values, "row_id": lambda row: row_id(row)[:ID]}
    return templates


@cache
def source(name: str) -> str:
    """Text of a style sheet or script among the templates."""
    return (_TEMPLATES / name).read_text(encoding="utf-8").strip()


def policy(style: str | None, first: str, script: str | None) -> str:
    """Return a content security policy that allows only this inline style and these scripts; of
    None a file beside the page."""

    def allow(*texts: str | None) -> str:
        digests = (hashlib.sha256(text.encode()).digest() for text in texts if text is not None)
        hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        return " ".join([*hashes, *(["'self'"] if None in texts else [])])

    return (
        f"default-src 'none'; img-src data:; style-src {allow(style)}; script-src "
        f"{allow(first, script)}; base-uri 'none'; form-action 'none'"
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
    return htmlsafe_json_dumps(value, separators=(",", ":"))
