"""`leakbench compare`: do two rows of a leaderboard differ, on the victims that they share?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import AsJson, console, open_table, plain_errors
from bench.errors import UserError
from bench.metrics.named import TITLES

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bench.report.pairs import Accuracy, RowComparison

_STYLES = {"separated": "green", "separated here": "yellow", "not separated": "dim"}


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
        str | None, typer.Option("--attack", help="One attack, not what ranks the rows.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="Default: ssim, mse of records, lnacc of labels.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="init or final; default the suite's last.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Keep key=value: protocol, dataset, model, defense, seed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two rows of a leaderboard, A with B, on the same victims."""
    with plain_errors():
        from bench.records import to_json
        from bench.report import comparison, contenders
        from bench.suite import parse_pairs

        if one is None or two is None:
            raise UserError(
                "compare takes two rows, A and B: leakbench report DIR --details lists them."
            )
        tables = contenders.read(
            folder, checkpoint=checkpoint, only=parse_pairs(only or (), "--only")
        )
        pairs = comparison.two_rows(tables, one, two, attack=attack, metric=metric)
    if as_json:
        typer.echo(to_json([{"table": table.title} | pair.to_dict() for table, pair in pairs]))
        return
    for table, pair in pairs:
        console.print()
        for block in _pair(table.title, pair):
            console.print(block, highlight=False)
    console.print()
    legend = _legend([pair for _, pair in pairs])
    console.print(legend, style="dim", highlight=False, markup=False)


# --- two rows ---------------------------------------------------------------------------------


def _pair(title: str, found: RowComparison) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text(title, style="italic")
    shown = open_table(show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, text in _facts(found):
        shown.add_row(name, Text(text, style=_STYLES.get(text, "")))
    yield shown
    yield from (Text(note, style="dim") for note in found.notes)


def _facts(found: RowComparison) -> Iterator[tuple[str, str]]:
    metric, paired = found.metric, found.difference
    for name, row, mean in zip(
        ("first", "second"), (found.first, found.second), found.means, strict=True
    ):
        rank = "no rank" if row.rank is None else f"rank {row.rank}"
        figure = f"{found.attack} {TITLES.get(metric, metric)} {_number(mean, metric)}"
        yield name, f"{row.name}: {figure} ({rank})"
    yield "victims", f"{_samples(found)} ({_seeds(found)}), threat {found.threat}"
    interval = paired.interval
    more = "first" if interval.mean > 0 else "second"
    yield "difference", _gap(found) + (f": the {more} leaks more" if interval.mean else "")
    yield "p", f"{_p(paired.p)} (sign flips over the victims of these trainings)"
    if paired.p_seeds is not None:
        yield "p over seeds", f"{_p(paired.p_seeds)} (t-test on {len(found.seeds)} seeds' means)"
    if len(found.seeds) > 1:
        means = ", ".join(_signed(m, metric) for m in paired.seed_means)
        share = None if paired.variances is None else paired.variances.seed_share
        between = "" if share is None else f"; {share:.0%} of the variance is between seeds"
        yield (
            "per seed",
            f"{means} (standard deviation {_number(paired.seed_std, metric)}{between})",
        )
    yield "accuracy", _accuracy_sentence(found.accuracy)
    yield "verdict", found.verdict


def _samples(found: RowComparison) -> str:
    seeds, victims = len(found.seeds), found.difference.victims
    each = str(victims[0]) if len(set(victims)) == 1 else "/".join(map(str, victims))
    return f"{each} victims{f' in each of {seeds} seeds' if seeds > 1 else ''}"


def _seeds(found: RowComparison) -> str:
    return f"{'' if len(found.seeds) > 1 else 'seed '}{', '.join(map(str, found.seeds))}"


def _accuracy_sentence(found: Accuracy | None) -> str:
    if found is None:
        return "no common figure"
    whose = "clients' own networks, " if found.personal else ""
    if len(found.differences) == 1:
        return (
            f"{found.mean:+.3f} ({whose}one training each, {found.test_samples} test samples: "
            "another seed may turn it)"
        )
    lo, hi = min(found.differences), max(found.differences)
    return f"{found.mean:+.3f} ({whose}over seeds from {lo:+.3f} to {hi:+.3f})"


# --- numbers ----------------------------------------------------------------------------------


def _gap(found: RowComparison) -> str:
    """-0.111 [-0.18, -0.04]; a narrow interval with more digits."""
    interval, metric = found.difference.interval, found.metric
    width = interval.hi - interval.lo
    digits = min(5, max(2, 1 + math.ceil(-math.log10(width)))) if width > 0 else 2
    ends = (_signed(v, metric, digits) for v in (interval.lo, interval.hi))
    return f"{_signed(interval.mean, metric, max(3, digits))} [{', '.join(ends)}]"


def _signed(value: float, metric: str, digits: int = 3) -> str:
    return f"{'+' if value > 0 else ''}{_number(value, metric, digits)}"


def _number(value: float | None, metric: str, digits: int = 3) -> str:
    from bench.report.columns import error_number

    if value is None:
        return "-"
    return error_number(value, digits) if metric in ("mse", "psnr") else f"{value:.{digits}f}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def _legend(found: Sequence[RowComparison]) -> str:
    verdicts = {c.verdict for c in found}
    over = "seeds and victims" if any(len(c.seeds) > 1 for c in found) else "victims"
    parts = [f"A difference above 0: the first row leaks more. Its 95 % interval is over {over}."]
    if any(c.metric == "mse" for c in found):
        parts.append("Of an MSE the smaller leaks more: its difference is turned round.")
    if "separated" in verdicts:
        parts.append("separated: on these victims and, by a t-test, over seeds.")
    if "separated here" in verdicts:
        parts.append("separated here: on the victims of these trainings; others may differ.")
    if verdicts - {"not separated"}:
        parts.append("Neither says that the difference is large enough to matter.")
    return " ".join(parts)
