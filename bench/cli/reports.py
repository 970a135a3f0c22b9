"""`leakbench report`, `compare` and `site`: a result folder as tables, files and pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import options
from bench.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bench.report.comparison import RowComparison

_STYLES = {"separated": "green", "not separated": "dim"}


def compare(
    folder: Annotated[Path, typer.Argument(help="A result folder with its records.")],
    one: Annotated[
        str | None,
        typer.Argument(metavar="A", help="A row: spm, spm:epsilon=1.5 or 'spm(epsilon=1.5)'."),
    ] = None,
    two: Annotated[
        str | None, typer.Argument(metavar="B", help="Another row of the same table.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="init or final; default the suite's last.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare two rows of a leaderboard, A with B, on the same victims."""
    with options.plain_errors():
        from rich.text import Text

        from bench.report import explain
        from bench.report.comparison import compare_rows

        if one is None or two is None:
            raise UserError(
                "compare takes two rows, A and B: leakbench report DIR --details lists them."
            )
        pairs = compare_rows(folder, one, two, checkpoint=checkpoint)
    if as_json:
        options.print_json([pair.to_dict() for pair in pairs])
        return
    for pair in pairs:
        options.console.print()
        options.console.print(Text(pair.title, style="italic"))
        lines = [
            (Text(name, style="bold"), Text(text, style=_STYLES.get(text, "")))
            for name, text in _facts(pair)
        ]
        options.print_table(("", ""), lines, show_header=False)
    options.console.print()
    options.console.print(explain.LEGEND["compared"], style="dim")


def _facts(pair: RowComparison) -> Iterator[tuple[str, str]]:
    from bench.report.columns import format_supported

    difference = pair.difference
    for name, row in (("first", pair.first), ("second", pair.second)):
        assert row.leak_interval is not None  # it is compared
        yield name, f"{row.setting}: leakage {format_supported(row.leak_interval, row.seeds)}"
    seeds, victims = len(difference.seed_means), difference.victims
    each = str(victims[0]) if len(set(victims)) == 1 else "/".join(map(str, victims))
    yield "victims", f"{each}{f' in each of {seeds} seeds' if seeds > 1 else ', one seed'}"
    yield "difference", format_supported(difference.interval, difference.seed_means)
    if seeds > 1:
        yield "per seed", ", ".join(f"{mean:+.2f}" for mean in difference.seed_means)
    else:
        yield "per seed", "one training of each: others may differ. Run several seeds."
    p, adjusted = _p(difference.p), _p(difference.adjusted)
    yield "p", f"{adjusted} (adjusted for {pair.rows} comparisons; alone {p})"
    if pair.drop is not None:
        drop = format_supported(pair.drop, pair.first.seeds, 100)
        yield "accuracy drop", f"{drop} points of the first against it"
    yield "verdict", pair.verdict


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def report(
    folder: Annotated[Path, typer.Argument(help="A result folder, or a published one.")],
    format_: Annotated[
        str, typer.Option("--format", help="Files to write, of html,md,csv,json,tex,bib.")
    ] = "html,md,csv,json",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Where the files go: by default into a run's own folder, and for a published "
            "folder into leakbench-runs/NAME-report.",
        ),
    ] = None,
    columns: Annotated[
        str, typer.Option("--columns", help="Of --format tex, by their heads: defense,leakage,...")
    ] = "",
    figures: Annotated[
        str,
        typer.Option(
            "--figures",
            help="Into OUT/figures, as pdf,png,svg: a map of leakage per protocol, and accuracy "
            "against leakage per table.",
        ),
    ] = "",
    figure: Annotated[
        list[str] | None,
        typer.Option("--figure", help="One more figure of each table: over_accuracy, ..."),
    ] = None,
    bib: Annotated[
        bool, typer.Option("--bib", help="Write references.bib: what a paper with rows cites.")
    ] = False,
    publish_: Annotated[
        Path | None,
        typer.Option("--publish", help="Write what can be published and cited into this folder."),
    ] = None,
    details: options.Details = False,
    loss: options.Loss = 5.0,
) -> None:
    """Print a result folder's leaderboard and write it as files."""
    with options.plain_errors():
        from bench.names import check_known
        from bench.records.submitted import read_verified, standing
        from bench.report.files import FILES, write_published

        named = [*format_.split(","), "bib" if bib else ""]
        formats = list(dict.fromkeys(f.strip() for f in named if f.strip()))
        for name in formats:
            check_known("report format", name, FILES)
        kinds, heads = ([f.strip() for f in t.split(",") if f.strip()] for t in (figures, columns))
        paths = publish(
            folder, tuple(formats), out=out, figures=kinds or ["pdf"] * bool(figure),
            more=figure or (), columns=heads, details=details, loss=loss,
        )  # fmt: skip
        if publish_ is not None:
            paths += write_published(folder, publish_)
        for path in paths:
            options.say(f"Written: {path}")
        options.say(standing(read_verified(folder)), style="dim")


def site(
    source: Annotated[Path, typer.Argument(help="A folder that holds result folders.")],
    out: Annotated[Path, typer.Option("--out", help="Where the site goes.")],
) -> None:
    """Write a static site: an overview of all result folders, and of each its report and a page for
    every defense, attack and data set."""
    with options.plain_errors():
        from bench.report import site as sites

        pages = sites.write(source, out)
        options.say(f"{len(pages) - 1} reports. Open {pages[0]}")


def publish(
    folder: Path,
    formats: tuple[str, ...],
    *,
    out: Path | None = None,
    figures: Sequence[str] = (),
    more: Sequence[str] = (),
    columns: Sequence[str] = (),
    show: bool = True,
    details: bool = False,
    loss: float = 5.0,
) -> list[Path]:
    """Write the folder's leaderboard in the given formats, and print its overview (`show`), with
    every row (`details`), for settings that lose at most `loss` points of accuracy; their paths, in
    that order, then those of the figures. more: see `write_figures`; columns: of LaTeX."""
    from bench.records import RUN
    from bench.report import terminal
    from bench.report.files import Files
    from bench.report.overview import by_protocol, legend

    files = Files(folder)
    if out is None:
        own = (folder / RUN).is_file()
        out = folder if own else Path("leakbench-runs") / f"{folder.resolve().name}-report"
    paths = files.write(out, formats, loss / 100, columns)
    rows = files.rows
    if show and rows:
        overviews = by_protocol(rows, loss / 100)
        _print(terminal.overview(overviews), "\n".join(legend(overviews)))
        if details:
            _print(terminal.boards(rows), terminal.legend(rows))
        else:
            options.say(f"Every row and attack: leakbench report {folder} --details", style="dim")
    if show:
        for sentence in files.missing:
            options.say(sentence, style="yellow")
    if figures:
        from bench.report.figures import write_figures

        paths += write_figures(rows, out, figures, more)
    return paths


def _print(tables: Sequence[RenderableType], legend: str) -> None:
    for table in tables:
        options.console.print()
        options.console.print(table)
    options.console.print()
    options.console.print(legend, style="dim")
