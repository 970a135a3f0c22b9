"""The `leakbench` command; each module holds the commands of one topic.

Exit code 0: all done or not applicable; 1: some failed; 2: bad input.
"""

from __future__ import annotations

import typer

from bench.cli import catalogue, privacy, reports, runs

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="What privacy defenses for federated and split learning really protect.",
)
app.command()(runs.run)
app.command()(runs.plan)
app.command("list")(catalogue.list_)
app.command()(reports.report)
app.command()(privacy.ledger)
app.command()(privacy.audit)


def main() -> None:
    """Entry point of the console script."""
    app()
