"""The leaderboard as Markdown, LaTeX and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import StrictUndefined, Template

from bench.records import Row, Run
from bench.records.rows import rows_to_json
from bench.report import explain, frames
from bench.report import overview as overviews
from bench.report.columns import has_spared
from bench.report.escaping import latex, markdown_code, markdown_paragraph
from bench.report.escaping import markdown as markdown_text
from bench.report.marks import LEGEND as MARKS
from bench.report.tables import any_errors, tables, work

if TYPE_CHECKING:
    from pandas import DataFrame


def legend(rows: Sequence[Row]) -> list[str]:
    """Explain the columns of some rows' tables, a line each."""
    entries = [entry for row in rows for entry in row.attacks.values()]
    occurs = {
        "leakage": any(r.leaks for r in rows),
        **{sign: any(sign in r.marks.text for r in rows) for sign in MARKS},
        "selected": any(r.choice for r in rows),
        "bound": any(r.worst for r in rows),
        "drop": any(r.accuracy_drop for r in rows),
        "membership": any(r.membership for r in rows),
        "scores": any({"ssim", "lnacc"} & e.scores.keys() for e in entries),
        "floor": any(e.floor for e in entries),
        "proven": any(r.eps_record is not None for r in rows),
        "spared": any(map(has_spared, entries)),
        "errors": any_errors(rows),
        "audited": any(r.audit for r in rows),
        "personal": any(r.personalised for r in rows),
        "seeds": overviews.any_one_seed(rows),
    }
    words = {**explain.LEGEND, **{sign: f"{sign} {text}" for sign, text in MARKS.items()}}
    intervals = explain.interval_words(rows)
    return [words[n].replace("{intervals}", intervals) for n, holds in occurs.items() if holds]


# --- Markdown ---------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], run: Run, *, missing: Sequence[str] = ()) -> str:
    """Return one section per table, and how the numbers were made; `missing` says what is not
    there."""
    return _fill_template(rows, run, missing, boards=tables(rows))


def readme(
    rows: Sequence[Row], run: Run, figures: Sequence[str], *, missing: Sequence[str] = ()
) -> str:
    """The README of a published folder: how its numbers were made, and their overview.

    Args:
        rows: All of its rows.
        run: The run.
        figures: Names of files in its folder `figures`.
        missing: What is not there, a sentence each.
    """
    return _fill_template(rows, run, missing, figures=figures)


def _fill_template(rows: Sequence[Row], run: Run, missing: Sequence[str], **more: Any) -> str:
    """Return what both Markdown files begin with: how the numbers were made, and each protocol's
    overview. more: the `figures` of a README, or the `boards` of a leaderboard."""
    summaries = overviews.by_protocol(rows)
    filled = _template().render(
        rows=rows,
        run=run,
        missing=missing,
        versions=[markdown_text(f"{k} {v}") for k, v in run.versions.items()],
        signs=overviews.legend(summaries),
        overviews=map(_markdown_overview, summaries),
        md=markdown_text,
        paragraph=markdown_paragraph,
        code=markdown_code,
        legend=legend,
        work=work,
        reasons=_reasons,
        board=lambda rows: markdown_table(frames.texts(frames.board(rows, whole=True))),
        **more,
    )
    return filled.rstrip() + "\n"


@cache
def _template() -> Template:
    source = Path(__file__).with_name("templates") / "run.md"
    text = source.read_text(encoding="utf-8")
    return Template(text, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _markdown_overview(summary: overviews.Overview) -> list[str]:
    frame = frames.overview_texts(summary, lambda head: head.title)
    return markdown_table(frame.replace({"settings": {"": "–"}}))


def markdown_table(frame: DataFrame) -> list[str]:
    """Return a frame of texts as lines of Markdown."""
    lines = [[*frame], *frame.to_numpy().tolist()]
    head, *body = ("| " + " | ".join(map(markdown_text, line)) + " |" for line in lines)
    return [head, "|" + " --- |" * len(lines[0]), *body]


def _reasons(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return why cells have no figure, with the settings, once per attack and reason."""
    settings: dict[str, list[str]] = {}
    for row in rows:
        for name, entry in row.attacks.items():
            if entry.status != "done":
                reason = f"{name} {entry.status.replace('_', ' ')}: {entry.reason}"
                settings.setdefault(reason, []).append(row.setting)
    return settings


# --- JSON --------------------------------------------------------------------------------------


def to_leaderboard_json(rows: Sequence[Row]) -> str:
    """Return leaderboard.json: strict JSON, a row per line."""
    return rows_to_json(rows, explain.sentence)


# --- LaTeX ------------------------------------------------------------------------------------


def overview_to_latex(rows: Sequence[Row], loss: float = overviews.LOSS) -> str:
    """Return one `table` environment per protocol with its overview, with the rules of booktabs.

    Args:
        rows: Of any number of tables.
        loss: Accuracy that a setting may lose, in [0, 1].

    Returns:
        LaTeX that needs `\\usepackage{booktabs}`.
    """
    return "\n".join(map(_latex_overview, overviews.by_protocol(rows, loss)))


def _latex_overview(summary: overviews.Overview) -> str:
    titles = "; ".join(f"{head.number}: {head.title}" for head in summary.heads)
    caption = f"{' '.join(overviews.legend([summary]))} Tables: {titles}"
    frame = frames.overview_texts(summary, lambda head: str(head.number)).drop(columns="settings")
    return (
        frame.map(latex)
        .rename(columns=latex)
        .to_latex(
            index=False,
            escape=False,
            column_format="l" + "r" * (frame.shape[1] - 1),
            caption=f"{latex(caption)}.",
            label=f"tab:leakbench-overview-{summary.protocol}",
        )
    )
