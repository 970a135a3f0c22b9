"""The leaderboard as Markdown, CSV, LaTeX and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from bench.records import Row, Run, rows_to_json
from bench.report import explain
from bench.report import overview as overviews
from bench.report.columns import ENTRY, ROW, SPARED, Shown, board_columns, spared
from bench.report.escaping import csv_cell, latex, latex_row, markdown_code, markdown_paragraph
from bench.report.escaping import markdown as markdown_text
from bench.report.marks import LEGEND as MARKS
from bench.report.tables import any_errors, any_personalised, tables, work


def legend(rows: Sequence[Row]) -> list[str]:
    """Explain the columns of some rows' tables, a line each."""
    entries = [entry for row in rows for entry in row.attacks.values()]
    marks = [(_has(rows, sign), f"{sign} {text}") for sign, text in MARKS.items()]
    lines: list[tuple[object, str]] = [
        (
            any(r.leaks for r in rows),
            "leakage: from no better than guessing (0) to a perfect copy (1), of the selected "
            f"reconstructions, or without them of the upper bound; {explain.interval_words(rows)}.",
        ),
        *marks,
        (
            any(r.choice for r in rows),
            "selected: per victim the reconstruction of least likelihood loss.",
        ),
        (
            any(r.worst for r in rows),
            "upper bound: the best reconstruction by the truth, which no attacker knows.",
        ),
        (
            any(r.accuracy_drop for r in rows),
            "accuracy drop: points below the undefended row.",
        ),
        (
            any({"ssim", "lnacc"} & e.scores.keys() for e in entries),
            "SSIM, LnAcc: what an attack recovered; lower is safer.",
        ),
        (
            any(e.floor for e in entries),
            "baseline: the best answer that reads no message / is told the labels.",
        ),
        (
            any(r.eps_record is not None for r in rows),
            "eps proven: for one training record over the whole run; inf = nothing proven.",
        ),
        (
            any(map(spared, entries)),
            f"{SPARED} not run on victims that earlier attacks reconstructed.",
        ),
        (
            any_errors(rows),
            "MSE: error of reconstructed records; higher is safer, 0 is a perfect copy.",
        ),
        (
            any(r.audit for r in rows),
            "eps audited: empirical lower bound (+: limited by its draws; !: above the claim or "
            "proof).",
        ),
        (
            any_personalised(rows),
            "personal accuracy: of each client's own network on test samples in its label shares; "
            "accuracy '-': there is no common model.",
        ),
        (True, overviews.sureness(rows)),
    ]
    return [text for occurs, text in lines if occurs and text]


def _has(rows: Sequence[Row], sign: str) -> bool:
    return any(sign in r.marks.text for r in rows)


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the header and body of one table, as text."""
    columns = board_columns(rows, whole=True)
    return [c.name for c in columns], [[c.of(row).full for c in columns] for row in rows]


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
        header, body = cells(members)
        lines += [f"## {markdown_text(title)}", "", f"Threat: {markdown_text(members[0].threat)}  "]
        lines += [f"Work: {markdown_text(work(members))}", ""]
        lines += [_markdown_line(header), "|" + " --- |" * len(header)]
        lines += map(_markdown_line, body)
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
        heads = ["defense", *(h.title for h in summary.heads), *(c.name for c in overviews.COSTS)]
        heads.append("settings")
        lines += [_markdown_line(heads), "|" + " --- |" * len(heads)]
        for line, cells in zip(summary.lines, summary.cells, strict=True):
            lines.append(_markdown_line([*cells, ", ".join(line.settings) or "–"]))
        lines.append("")
    return lines


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(markdown_text, cells)) + " |"


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


# --- CSV and JSON -----------------------------------------------------------------------------


def to_csv(rows: Sequence[Row]) -> str:
    """Return a line per row and attack, with every figure, its interval and its baseline."""
    lines = [line for row in rows for line in lines_of(row) or [figures_of(row)]]
    buffer = io.StringIO()
    writer = csv.DictWriter(
        buffer, [*ROW, "attack", *(n for n in ENTRY if n not in ROW)], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in line.items()} for line in lines)
    return buffer.getvalue()


def figures_of(row: Row) -> dict[str, Any]:
    """Return a row's figures by their names in CSV and pandas."""
    return {name: read(row) for name, read in ROW.items()}


def lines_of(row: Row) -> list[dict[str, Any]]:
    """Return the same for each attack, with its own figures."""
    return [
        {**figures_of(row), "attack": name, **{key: read(entry) for key, read in ENTRY.items()}}
        for name, entry in row.attacks.items()
    ]


def to_leaderboard_json(rows: Sequence[Row]) -> str:
    """Return leaderboard.json: strict JSON, a row per line."""
    return rows_to_json(rows, explain.sentence)


# --- LaTeX ------------------------------------------------------------------------------------


def to_latex(rows: Sequence[Row], *, intervals: bool = False) -> str:
    """Return one `table` environment per table of the leaderboard, with the rules of booktabs.

    Args:
        rows: Of any number of tables.
        intervals: Whether means have their 95 % intervals beside them.

    Returns:
        LaTeX that needs `\\usepackage{booktabs}`.
    """
    numbered = enumerate(tables(rows), start=1)
    return "\n".join(_latex(title, members, n, intervals) for n, (title, members) in numbered)


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
    numbers = [str(head.number) for head in summary.heads]
    heads = ["defense", *numbers, *(cost.name for cost in overviews.COSTS)]
    return _environment(
        f"{' '.join(overviews.legend([summary]))} Tables: {titles}",
        f"overview-{summary.protocol}",
        "l" + "r" * (len(heads) - 1),
        [list(map(latex, line)) for line in (heads, *summary.cells)],
    )


def _latex(title: str, rows: Sequence[Row], number: int, intervals: bool) -> str:
    columns = [c for c in board_columns(rows) if c.name != "flags"]
    letters = sorted({letter for row in rows for letter in explain.letters(row.flags)})
    first = ["Leakage: " + title, work(rows).capitalize()]
    caption = ". ".join(dict.fromkeys([*first, *_threats(rows)]))
    caption += f". Intervals: {explain.interval_words(rows)}"
    caption += "".join(f". {sign} {text}" for sign, text in MARKS.items() if _has(rows, sign))
    caption += "".join(f". {letter}: {explain.LETTERS[letter]}" for letter in letters)
    heads = [latex(c.title) + (f" {latex(c.detail)}" if c.detail else "") for c in columns]
    body = [
        [*(_latex_cell(c.name, c.of(row), intervals) for c in columns), explain.letters(row.flags)]
        for row in rows
    ]
    kinds = "".join("r" if c.numeric else "l" for c in columns) + "l"
    return _environment(caption, str(number), kinds, [[*heads, ""], *body])


def _environment(caption: str, name: str, kinds: str, lines: Sequence[Sequence[str]]) -> str:
    """A `table` with the label tab:leakbench-NAME. caption: plain text. kinds: a letter per column.
    lines: cells as LaTeX, the heads first."""
    heads, *body = map(latex_row, lines)
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex(caption)}.}}",
            rf"\label{{tab:leakbench-{name}}}",
            rf"\begin{{tabular}}{{{kinds}}}",
            r"\toprule",
            heads,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _threats(rows: Sequence[Row]) -> list[str]:
    return [t for row in rows for t in row.threat.split("; ") if t]


def _latex_cell(name: str, figure: Shown, intervals: bool) -> str:
    """Return the figure, with its unit or attack, and its interval if `intervals`."""
    if name == "defense":
        return latex(figure.full)
    text = r"$\infty$" if figure.text == "inf" else latex(figure.text)
    always = intervals or name in ("leakage", "accuracy drop")
    parts = (figure.interval if always else "", figure.beside, figure.mark)
    return text + "".join(rf" {{\footnotesize {latex(part)}}}" for part in parts if part)
