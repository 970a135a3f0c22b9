"""The README of a submission."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from string import Template

from bench.records import AttackEntry, Row
from bench.submission.documents import Submission


def page(submission: Submission, rows: Sequence[Row]) -> str:
    """Markdown: what was submitted, a table of its rows, how to check them."""
    text = (files("bench") / "submission" / "templates" / "readme.md.txt").read_text()
    failed = "\n".join(f"- {plain(c)}" for c in submission.failed_cells)
    return Template(text).substitute(
        name=plain(submission.name),
        kind=submission.kind,
        author=plain(submission.author),
        date=submission.date,
        leakbench=plain(submission.leakbench),
        command=submission.command.replace("\n", " "),
        environment=", ".join(f"{plain(k)} {plain(v)}" for k, v in submission.environment.items()),
        table=table(submission, rows),
        failed=f"\nCells without a result:\n\n{failed}\n" if failed else "",
    )


def plain(text: object) -> str:
    """Text that Markdown and HTML show as it is."""
    out = " ".join(str(text).split())
    for sign in "\\`*_[]<>|#":
        out = out.replace(sign, f"\\{sign}")
    return out


def table(submission: Submission, rows: Sequence[Row]) -> str:
    """One line per row, undefended ones among them: utility, epsilons, the mean of each attack's
    SSIM (or what it has instead)."""
    attacks = list(dict.fromkeys(a for row in rows for a in row.attacks))
    head = ["table", "defense", "accuracy", "eps claimed", "eps proven", *map(plain, attacks)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        settings = " ".join(f"{k}={v}" for k, v in row.settings.items())
        cells = [
            plain(f"{row.protocol} {row.dataset} {row.model} {row.checkpoint}"),
            plain(f"{row.defense} {settings}".strip()),
            "" if row.accuracy is None else f"{row.accuracy.mean:.3f}",
            epsilon(row.eps_claimed, row.unit),
            epsilon(row.eps_record, None),
            *(plain(_figure(row.attacks.get(a))) for a in attacks),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def epsilon(value: float | None, unit: str | None) -> str:
    """inf, 3.9 per coordinate, or - where there is none."""
    if value is None:
        return "-"
    return f"{value:.4g} per {unit}" if unit else f"{value:.4g}"


def _figure(entry: AttackEntry | None) -> str:
    if entry is None:
        return ""
    if entry.status != "done":
        return entry.status.replace("_", " ")
    for metric in ("ssim", "mse", "lnacc", "label_accuracy"):
        if metric in entry.scores:
            return f"{metric} {entry.scores[metric].mean:.3f}"
    return "done"
