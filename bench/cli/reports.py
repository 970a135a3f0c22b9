"""`leakbench report`: a result folder as tables and files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.cli.options import console, plain_errors


def report(
    folder: Annotated[Path, typer.Argument(help="A result folder.")],
    format_: Annotated[
        str, typer.Option("--format", help="Files to write: md,csv,json (any of them).")
    ] = "md,csv,json",
) -> None:
    """Print a result folder's leaderboard and write it as files beside the records."""
    with plain_errors():
        from bench.names import did_you_mean

        formats = [f.strip() for f in format_.split(",") if f.strip()]
        for name in formats:
            if name not in ("md", "csv", "json"):
                raise ValueError(did_you_mean("report format", name, ["md", "csv", "json"]))
        paths = publish(folder, tuple(formats))
        console.print("Written: " + ", ".join(map(str, paths)), soft_wrap=True)


def publish(folder: Path, formats: tuple[str, ...]) -> list[Path]:
    """Print the folder's leaderboard and write it in the given formats."""
    from bench.report import leaderboard, tables
    from bench.store import write_whole

    rows = leaderboard.rows(folder)
    text = {
        "json": lambda: tables.to_leaderboard_json(rows),
        "csv": lambda: tables.to_csv(rows),
        "md": lambda: tables.markdown(rows, leaderboard.read_run(folder)),
    }
    paths = []
    for name in formats:
        path = folder / f"leaderboard.{name}"
        try:
            write_whole(path, text[name]())
        except OSError as error:
            raise ValueError(f"cannot write {path} ({error.strerror or error}).") from error
        paths.append(path)
    for table in tables.terminal(rows):
        console.print()
        console.print(table)
    console.print()
    console.print(tables.terminal_legend(rows), style="dim", highlight=False)
    return paths
