"""The `leakbench` command; each module holds the commands of one topic.

Exit code 0: all done or not applicable; 1: some failed; 2: bad input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import bench
from bench.cli import capturing, options, planning, plugins, privacy, reports, runs, verifying

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="What privacy defenses for federated and split learning really protect.",
)
_PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Run": {
        "run": runs.run,
        "sweep": runs.sweep,
        "tune": runs.tune,
        "plan": planning.plan,
        "list": plugins.list_,
    },
    "Read": {
        "report": reports.report,
        "compare": reports.compare,
        "site": reports.site,
        "merge": capturing.merge,
    },
    "Epsilon": {"ledger": privacy.ledger, "audit": privacy.audit},
    "Your own defense or attack": {
        "new": plugins.new,
        "check": plugins.check,
        "submit": plugins.submit,
        "verify": verifying.verify,
    },
    "Your own run": {"attack": capturing.attack},
    "Outside tools": {"export": capturing.export, "score": capturing.score},
}
for _panel, _commands in _PANELS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"leakbench {bench.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script. A full disk, or a full device as its output, is told."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in options.NO_SPACE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left to write would fail again
        typer.echo(f"leakbench: cannot write ({error.strerror}).", err=True)
        sys.exit(2)
