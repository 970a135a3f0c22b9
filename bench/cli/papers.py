"""`leakbench paper`: a paper's tables beside what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import options

if TYPE_CHECKING:
    from rich.table import Table

    from bench.report.printed import ComparedTable


def paper(
    name: Annotated[
        str | None, typer.Argument(help="A paper; without one, all are listed.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            help="Folder of a run of the paper's suite, such as results/papers/NAME; without one, "
            "what is printed is shown alone.",
        ),
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option("--table", help="Only this table or figure, by its id.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
) -> None:
    """Show what a paper prints beside what was measured, table by table."""
    with options.plain_errors():
        from bench.report import leaderboard, printed

        if name is None:
            for known in printed.papers():
                found = printed.read_paper(known)
                options.say(f"{known}: {found.title} ({found.source})", style="bold")
                for one in found.tables:
                    options.say(f"  {one.id}  {one.title}")
            return
        found = printed.read_paper(name)
        chosen = [found.table(t) for t in table] if table else found.tables
        rows = leaderboard.load(results) if results else []
        registry = options.registry_of(None)
        for one in chosen:
            shown = printed.compared(one, rows, registry)
            if markdown:
                typer.echo("\n".join(printed.markdown(shown)))
                continue
            options.console.print(_drawn(shown))
            for line in printed.findings(shown):
                options.say(f"- {line}")
            options.console.print()


def _drawn(shown: ComparedTable) -> Table:
    """A line of printed figures above one of measured ones."""
    made = options.open_table(f"{shown.table.id}: {shown.table.title} ({shown.table.unit})")
    made.add_column("", overflow="fold")
    for column in shown.table.columns:
        made.add_column(column.title, justify="right", overflow="fold")
    for row, cells in zip(shown.table.rows, shown.cells, strict=True):
        texts = [shown.text(c) for c in cells]
        both = [
            f"{printed}\n{measured}" if row.printed else measured for printed, measured in texts
        ]
        made.add_row(row.title, *both)
    return made
