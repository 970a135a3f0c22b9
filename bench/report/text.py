"""The leaderboard as Markdown, LaTeX and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.errors import UserError
from bench.names import did_you_mean
from bench.records import Row, Run
from bench.records.rows import rows_to_json
from bench.report import explain, frames
from bench.report import overview as overviews
from bench.report.columns import has_spared
from bench.report.escaping import latex, markdown_code, markdown_paragraph
from bench.report.escaping import markdown as markdown_text
from bench.report.tables import attack_metrics, tables, work

if TYPE_CHECKING:
    from pandas import DataFrame

    from bench.report.papers import Publication

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""The templates of Markdown files; `html.environment` adds the escaping of pages."""


def legend(rows: Sequence[Row]) -> list[str]:
    """Explain the columns of some rows' tables, a line each."""
    entries = [entry for row in rows for entry in row.attacks.values()]
    occurs = {
        "leakage": any(r.leaks for r in rows),
        **{sign: any(sign in r.marks.text for r in rows) for sign in explain.MARKS},
        "selected": any(r.choice for r in rows),
        "bound": any(r.worst for r in rows),
        "drop": any(r.accuracy_drop for r in rows),
        "membership": any(r.membership for r in rows),
        "scores": any({"ssim", "lnacc"} & e.scores.keys() for e in entries),
        "floor": any(e.floor for e in entries),
        "proven": any(r.eps_record is not None for r in rows),
        "spared": any(map(has_spared, entries)),
        "errors": any("mse" in attack_metrics(table).values() for _, table in tables(rows)),
        "audited": any(r.audit for r in rows),
        "personal": any(r.personalised for r in rows),
        "seeds": overviews.any_one_seed(rows),
    }
    words = {**explain.LEGEND, **{sign: f"{sign} {text}" for sign, text in explain.MARKS.items()}}
    intervals = explain.interval_words(rows)
    return [words[n].replace("{intervals}", intervals) for n, holds in occurs.items() if holds]


# --- Markdown ---------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], run: Run, *, missing: Sequence[str] = ()) -> str:
    """Return one section per table, and how the numbers were made; `missing` says what is not
    there."""
    return fill_template(rows, run, missing, boards=tables(rows))


def fill_template(rows: Sequence[Row], run: Run, missing: Sequence[str], **more: Any) -> str:
    """Return a Markdown file: how the numbers were made, and each protocol's overview.

    Args:
        rows: All of a folder's rows.
        run: The run.
        missing: What is not there, a sentence each.
        more: The `boards` of a leaderboard, or the `figures` of a published folder's README: names
            of files in its folder `figures`.
    """
    summaries = overviews.by_protocol(rows)
    return fill(
        "run.md",
        rows=rows,
        run=run,
        missing=missing,
        versions=[markdown_text(f"{k} {v}") for k, v in run.versions.items()],
        signs=overviews.legend(summaries),
        overviews=map(_markdown_overview, summaries),
        legend=legend,
        work=work,
        reasons=_reasons,
        board=lambda rows: markdown_table(frames.texts(frames.board(rows, whole=True))),
        **more,
    )


def fill(name: str, **values: Any) -> str:
    """Fill in a Markdown file among the templates, which escapes by `md`, `paragraph`, `code`."""
    escapes = {"md": markdown_text, "paragraph": markdown_paragraph, "code": markdown_code}
    return TEMPLATES.get_template(name).render(**escapes, **values).rstrip() + "\n"


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


LATEX_COLUMNS = ("defense", "leakage", "recognised", "accuracy drop", "epsilon", "bytes")
"""Of a table in a paper, unless others are asked for."""


def overview_to_latex(
    rows: Sequence[Row], loss: float = overviews.LOSS, columns: Sequence[str] = ()
) -> str:
    """Return one `table` environment for each table of the overview, with the rules of booktabs.

    Args:
        rows: Of any number of tables.
        loss: Accuracy that a setting may lose, in [0, 1].
        columns: Their heads; by default those of `LATEX_COLUMNS` that hold something.

    Returns:
        LaTeX that needs `\\usepackage{booktabs}`.

    Raises:
        UserError: For a column that there is not, or a bad papers.toml.
    """
    from bench.report.papers import papers_of

    papers = papers_of("defense", (n for r in rows for n in r.defense.split("+")))
    return "\n".join(
        _latex_table(summary, place, columns, papers)
        for summary in overviews.by_protocol(rows, loss)
        for place in range(len(summary.heads))
    )


def _latex_table(
    summary: overviews.Overview,
    place: int,
    columns: Sequence[str],
    papers: Mapping[str, Publication],
) -> str:
    ran, head = overviews.ranked(summary, place), summary.heads[place]
    frame = frames.ranking_texts(ran)
    members = [[(n, papers.get(n)) for n in name.split("+")] for name in frame["defense"]]
    frame["defense"] = ["+".join(p.short if p else n for n, p in some) for some in members]
    status = [dict.fromkeys(p.status for _, p in some if p and p.status) for some in members]
    frame["status"] = ["; ".join(some) for some in status]
    frame["leakage"] += frame.pop("signs")
    for name in columns:
        if name not in frame and name not in frames.OPTIONAL:
            raise UserError(did_you_mean("column", name, [*frame.columns]))
    frame = frame[[name for name in columns or LATEX_COLUMNS if name in frame]]
    loss = f"{100 * summary.loss:g} points"
    level = explain.interval_words([v.row for _, v in ran if v.row])
    caption = explain.OVERVIEW["caption"].format(title=head.title, loss=loss, level=level)
    below = overviews.explain_signs([v for _, v in ran], loss, {*frames.OPTIONAL} - {*frame})
    whole = frame.map(latex).rename(columns=latex).to_latex(
        index=False, escape=False, column_format="l" + "r" * (frame.shape[1] - 1),
        caption=latex(caption),
        label=f"tab:leakbench-{summary.protocol}-{head.number}",
    )  # fmt: skip
    legend = "".join(f"\\par\\footnotesize {latex(line)}\n" for line in below)
    return whole.replace("\\end{tabular}\n", f"\\end{{tabular}}\n{legend}")
