"""The `leakbench` command; each module holds the commands of one topic.

Exit code 0: all done or not applicable; 1: some failed; 2: bad input.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import bench
from bench.cli import capturing, options, planning, plugins, privacy, reports, runs, verifying

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="What privacy defenses for federated and split learning really protect.",
)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run": (runs.run, runs.sweep, runs.tune, planning.plan, plugins.list_),
    "Read": (reports.report, reports.compare, reports.site, capturing.merge),
    "Epsilon": (privacy.ledger, privacy.audit),
    "Your own defense or attack": (plugins.new, plugins.check, plugins.submit, verifying.verify),
    "Your own run": (capturing.attack,),
    "Outside tools": (capturing.export, capturing.score),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(_command.__name__.rstrip("_"), rich_help_panel=_panel)(_command)


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
