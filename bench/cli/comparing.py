"""`leakbench compare`: do two rows of a leaderboard differ, by the test that marks it?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import AsJson, console, open_table, plain_errors
from bench.errors import UserError
from bench.metrics.named import TITLES

if TYPE_CHECKING:
    from bench.metrics.intervals import Interval
    from bench.records import Row
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
    attack: Annotated[
        str | None, typer.Option("--attack", help="One attack's scores, not the leakage.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="Of that attack. Default: ssim, mse of records, lnacc."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="init or final; default the suite's last.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Keep key=value: protocol, dataset, model, seed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two rows of a leaderboard, A with B, on the same victims."""
    with plain_errors():
        from rich.text import Text

        from bench.records import to_json
        from bench.report.comparison import compare_rows
        from bench.suite import parse_pairs

        if one is None or two is None:
            raise UserError(
                "compare takes two rows, A and B: leakbench report DIR --details lists them."
            )
        pairs = compare_rows(
            folder,
            one,
            two,
            attack=attack,
            metric=metric,
            checkpoint=checkpoint,
            only=parse_pairs(only or (), "--only"),
        )
    if as_json:
        typer.echo(to_json([pair.to_dict() for pair in pairs]))
        return
    for pair in pairs:
        console.print()
        console.print(Text(pair.title, style="italic"))
        table = open_table(show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in _facts(pair):
            table.add_row(name, Text(text, style=_STYLES.get(text, "")))
        console.print(table, highlight=False)
    console.print()
    console.print(
        "Above 0, the first row leaks more. The p-value is that of a t-test on the seeds' paired "
        "differences, Holm-adjusted over the table against the undefended row, or the one that "
        "leaks less, as the marks of the leaderboard are. Separated: p <= 0.05; it does not say "
        "that the difference matters.",
        style="dim",
        highlight=False,
        markup=False,
    )


def _facts(pair: RowComparison) -> Iterator[tuple[str, str]]:
    metric, difference = pair.metric, pair.difference
    for name, row, mean in zip(
        ("first", "second"), (pair.first, pair.second), pair.means, strict=True
    ):
        yield name, f"{row.setting}: {_figure(pair, row, mean)}"
    seeds, victims = len(difference.seed_means), difference.victims
    each = str(victims[0]) if len(set(victims)) == 1 else "/".join(map(str, victims))
    yield "victims", f"{each}{f' in each of {seeds} seeds' if seeds > 1 else ', one seed'}"
    yield "difference", _signed_interval(difference.interval, metric)
    if seeds > 1:
        yield "per seed", ", ".join(_format_signed(m, metric, 3) for m in difference.seed_means)
    else:
        yield "per seed", "one training of each: others may differ. Run several seeds."
    p, adjusted = _p(difference.p), _p(difference.adjusted)
    yield "p", f"{adjusted} (adjusted for {pair.rows} comparisons; alone {p})"
    if pair.drop is not None:
        yield "accuracy drop", f"{_signed_interval(pair.drop, 'ssim')} of the first against it"
    yield "verdict", pair.verdict


def _figure(pair: RowComparison, row: Row, mean: float) -> str:
    from bench.report.columns import figure, supported

    if not pair.attack:
        assert row.leak_interval is not None  # it is compared
        return f"leakage {supported(row.leak_interval, row.seeds)}"
    return f"{pair.attack} {TITLES.get(pair.metric, pair.metric)} {figure(mean, pair.metric)}"


def _signed_interval(interval: Interval, metric: str) -> str:
    """-0.111 [-0.18, -0.04]; a narrow interval with more digits."""
    if not math.isfinite(interval.hi):
        return f"{_format_signed(interval.mean, metric, 3)}, one victim: no interval"
    width = interval.hi - interval.lo
    digits = min(5, max(2, 1 + math.ceil(-math.log10(width)))) if width > 0 else 2
    ends = (_format_signed(v, metric, digits) for v in (interval.lo, interval.hi))
    return f"{_format_signed(interval.mean, metric, max(3, digits))} [{', '.join(ends)}]"


def _format_signed(value: float, metric: str, digits: int) -> str:
    from bench.report.columns import error_number

    number = error_number(value, digits) if metric in ("mse", "psnr") else f"{value:.{digits}f}"
    return f"{'+' if value > 0 else ''}{number}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.2g}"
