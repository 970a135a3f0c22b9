"""`leakbench report`: a result folder as tables, files and an HTML page."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import options
from bench.cli.options import console, plain_errors, say
from bench.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType


def report(
    folder: Annotated[Path, typer.Argument(help="A result folder, or a published one.")],
    format_: Annotated[
        str, typer.Option("--format", help="Files to write: html,md,csv,json (any of them).")
    ] = "html,md,csv,json",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Where the files go: by default into a run's own folder, and for a published "
            "folder into leakbench-runs/NAME-report.",
        ),
    ] = None,
    figures: Annotated[
        str, typer.Option("--figures", help="Figures for a paper, into OUT/figures: pdf,png,svg.")
    ] = "",
    publish_: Annotated[
        Path | None,
        typer.Option("--publish", help="Write what can be published and cited into this folder."),
    ] = None,
    details: options.Details = False,
    loss: options.Loss = 5.0,
) -> None:
    """Print a result folder's leaderboard and write it as files."""
    with plain_errors():
        from bench.names import did_you_mean
        from bench.records.submitted import read_verified, standing
        from bench.report.files import FILES

        formats = list(dict.fromkeys(f.strip() for f in format_.split(",") if f.strip()))
        for name in formats:
            if name not in FILES:
                raise UserError(did_you_mean("report format", name, list(FILES)))
        kinds = [f.strip() for f in figures.split(",") if f.strip()]
        paths = publish(folder, tuple(formats), out=out, figures=kinds, details=details, loss=loss)
        if publish_ is not None:
            from bench.report.publishing import write_published

            try:
                paths += write_published(folder, publish_)
            except OSError as error:
                reason = error.strerror or error
                raise UserError(f"cannot write to {publish_} ({reason}).") from error
        for path in paths:
            say(f"Written: {path}")
        say(standing(read_verified(folder)), style="dim")


def site(
    source: Annotated[Path, typer.Argument(help="A folder that holds result folders.")],
    out: Annotated[Path, typer.Option("--out", help="Where the site goes.")],
) -> None:
    """Write a static site: an overview of all result folders, and of each its report and a page for
    every defense, attack and data set."""
    with plain_errors():
        from bench.report import site as sites

        try:
            pages = sites.write(source, out)
        except OSError as error:
            raise UserError(f"cannot write {out} ({error.strerror or error}).") from error
        say(f"{len(pages) - 1} reports. Open {pages[0]}")


def publish(
    folder: Path,
    formats: tuple[str, ...],
    *,
    out: Path | None = None,
    figures: Sequence[str] = (),
    show: bool = True,
    details: bool = False,
    loss: float = 5.0,
) -> list[Path]:
    """Write the folder's leaderboard in the given formats, and print its overview (`show`), with
    every row (`details`), for settings that lose at most `loss` points of accuracy; their paths, in
    that order, then those of the figures."""
    from bench.records import RUN
    from bench.report import terminal
    from bench.report.files import FILES, Files
    from bench.report.overview import by_protocol, legend

    options.check_loss(loss)
    files = Files(folder)
    if out is None:
        own = (folder / RUN).is_file()
        out = folder if own else Path("leakbench-runs") / f"{folder.resolve().name}-report"
    paths = []
    with _without_collections():
        for name in formats:
            paths.append(out / FILES[name])
            _write(paths[-1], files.text(name))
    rows = files.rows
    if show and rows:
        overviews = by_protocol(rows, loss / 100)
        _print(terminal.overview(overviews), "\n".join(legend(overviews)))
        if details:
            _print(terminal.boards(rows), terminal.legend(rows))
        else:
            hint = f"Every row and attack: leakbench report {folder} --details"
            say(hint, style="dim")
    if show:
        for sentence in files.missing:
            say(sentence, style="yellow")
    if figures:
        from bench.report.figures import write_figures

        paths += write_figures(rows, folder, out, figures)
    return paths


def _print(tables: Sequence[RenderableType], legend: str) -> None:
    for table in tables:
        console.print()
        console.print(table)
    console.print()
    console.print(legend, style="dim", highlight=False)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Thousands of records live until the end, and hardly a cycle: walking through them over and
    over takes a tenth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _write(path: Path, text: str) -> None:
    from bench.harness.store import write_whole

    try:
        write_whole(path, text)  # in place of a link, never through it
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error}).") from error
