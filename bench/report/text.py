"""The leaderboard as Markdown, LaTeX and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pandas import DataFrame

from bench.records import Row, Run, rows_to_json
from bench.report import explain, frames
from bench.report import overview as overviews
from bench.report.columns import has_spared
from bench.report.escaping import latex, markdown_code, markdown_paragraph
from bench.report.escaping import markdown as markdown_text
from bench.report.marks import LEGEND as MARKS
from bench.report.tables import any_errors, any_personalised, tables, work


def legend(rows: Sequence[Row]) -> list[str]:
    """Explain the columns of some rows' tables, a line each."""
    entries = [entry for row in rows for entry in row.attacks.values()]
    occurs = {
        "leakage": any(r.leaks for r in rows),
        **{sign: _has(rows, sign) for sign in MARKS},
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
        "personal": any_personalised(rows),
    }
    words = {**explain.LEGEND, **{sign: f"{sign} {text}" for sign, text in MARKS.items()}}
    intervals = explain.interval_words(rows)
    lines = [words[n].replace("{intervals}", intervals) for n, holds in occurs.items() if holds]
    return [line for line in (*lines, overviews.sureness(rows)) if line]


def _has(rows: Sequence[Row], sign: str) -> bool:
    return any(sign in r.marks.text for r in rows)


# --- Markdown ---------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], run: Run, *, missing: Sequence[str] = ()) -> str:
    """Return one section per table, and how the numbers were made; `missing` says what is not
    there."""
    lines = [
        *_about(run, missing),
        *_markdown_overview(rows),
        "## How to read the tables",
        "",
        *(f"- {markdown_paragraph(line)}" for line in legend(rows)),
        "",
    ]
    for title, members in tables(rows):
        lines += [f"## {markdown_text(title)}", "", f"Threat: {markdown_text(members[0].threat)}  "]
        lines += [f"Work: {markdown_text(work(members))}", ""]
        lines += markdown_table(frames.texts(frames.board(members, whole=True)))
        reasons = _reasons(members)
        lines += ["", *reasons, ""] if reasons else [""]
    return "\n".join(lines).rstrip() + "\n"


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
    lines = [
        *_about(run, missing),
        "`leakbench report` on this folder makes every table, plot and file of it.",
        "",
        *(f"![{name.rpartition('.')[0]}](figures/{name})\n" for name in figures),
        *_markdown_overview(rows),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _about(run: Run, missing: Sequence[str]) -> list[str]:
    """Return the title and description of a suite, and how the run was made."""
    return [
        f"# {markdown_text(run.title)}",
        "",
        markdown_paragraph(run.suite.description),
        "",
        *_commands(run),
        f"Device: {markdown_text(run.device)}, seeds {run.seeds}  ",
        "Versions: " + ", ".join(markdown_text(f"{k} {v}") for k, v in run.versions.items()),
        "",
        *(line for words in missing for line in (f"**Missing**: {markdown_text(words)}", "")),
    ]


def _commands(run: Run) -> list[str]:
    """Return the command, or a list of those of the parts."""
    if not run.commands:
        return [f"Command: {markdown_code(run.command)}  "]
    return [
        "Commands, one for each part:",
        "",
        *(f"- {markdown_code(c)}" for c in run.commands),
        "",
    ]


def _markdown_overview(rows: Sequence[Row]) -> list[str]:
    """Return each protocol's leakage of defenses by tables, costs, and settings, as lines."""
    all_ = overviews.by_protocol(rows)
    lines = ["## Overview", ""] if rows else []
    lines += [f"- {markdown_paragraph(line)}" for line in overviews.legend(all_)] + [""]
    for summary in all_:
        frame = frames.overview_texts(summary).replace({"settings": {"": "–"}})
        lines += [*markdown_table(frame.rename(columns=_title)), ""]
    return lines


def _title(head: Any) -> str:
    return head.title if isinstance(head, overviews.Head) else head


def markdown_table(frame: DataFrame) -> list[str]:
    """Return a frame of texts as lines of Markdown."""
    lines = [[*frame], *frame.to_numpy().tolist()]
    head, *body = ("| " + " | ".join(map(markdown_text, line)) + " |" for line in lines)
    return [head, "|" + " --- |" * len(lines[0]), *body]


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Return why cells have no figure, once per attack and reason."""
    settings_by_reason: dict[str, list[str]] = {}
    for row in rows:
        for name, entry in row.attacks.items():
            if entry.status != "done":
                reason = f"{name} {entry.status.replace('_', ' ')}: {entry.reason}"
                settings_by_reason.setdefault(reason, []).append(row.setting)
    return [
        f"- {markdown_paragraph(reason)} ({markdown_text(', '.join(which))})"
        for reason, which in settings_by_reason.items()
    ]


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
    frame = frames.overview_texts(summary).drop(columns="settings")
    frame.columns = [str(h.number) if isinstance(h, overviews.Head) else h for h in frame]
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
