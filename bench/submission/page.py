"""The README of a submission."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from string import Template

from bench.records import Row
from bench.records.submitted import Submission
from bench.report.columns import board_columns
from bench.report.escaping import markdown, one_line


def page(submission: Submission, rows: Sequence[Row], marks: Sequence[str]) -> str:
    """Markdown: what was submitted, its marks, a table of its rows, how to check them."""
    template = files("bench") / "submission" / "templates" / "readme.md.txt"
    text = template.read_text(encoding="utf-8")
    failed = "\n".join(f"- {markdown(c)}" for c in submission.failed_cells)
    return Template(text).substitute(
        name=markdown(submission.name),
        kind=submission.kind,
        author=markdown(submission.author),
        date=submission.date,
        leakbench=markdown(submission.leakbench),
        command=one_line(submission.command).strip(),
        environment=", ".join(
            f"{markdown(k)} {markdown(v)}" for k, v in submission.environment.items()
        ),
        marks="".join(f"- **Mark**: {markdown(m)}\n" for m in marks)
        or "No marks: enough seeds and victims, and rows that are of use.\n",
        table=table(rows),
        failed=f"\nCells without a result:\n\n{failed}\n" if failed else "",
    )


def table(rows: Sequence[Row]) -> str:
    """One line per row, undefended ones among them: utility, epsilons, and what each attack
    recovered, as the leaderboard has them; and its flags."""
    wanted = ("accuracy", "leakage", "eps claimed", "eps proven", "flags")
    columns = [c for c in board_columns(rows, whole=True) if c.name in wanted or c.attack]
    head = ["table", "defense", *(markdown(c.name) for c in columns)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row.where, row.setting]
        cells += [c.shown(row).full for c in columns]
        lines.append("| " + " | ".join(map(markdown, cells)) + " |")
    return "\n".join(lines)
