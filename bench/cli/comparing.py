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

    from bench.report.comparison import Ladder
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
    """Compare rows of a leaderboard on the same victims: A with B, or each row with the next."""
    with plain_errors():
        from bench.records import to_json
        from bench.report import comparison, contenders
        from bench.suite import parse_pairs

        if one is not None and two is None:
            raise UserError(f"compare takes two rows or none, got only '{one}'.")
        found = contenders.read(
            folder, checkpoint=checkpoint, only=parse_pairs(only or (), "--only")
        )
        if one is None or two is None:
            made = comparison.ladders(found, attack=attack, metric=metric)
        else:
            made = comparison.two_rows(found, one, two, attack=attack, metric=metric)
    if as_json:
        typer.echo(to_json([ladder.to_dict() for ladder in made]))
        return
    for ladder in made:
        console.print()
        for block in _rows(ladder) if one is None else _pair(ladder):
            console.print(block, highlight=False)
    found_any = [c for m in made for c in m.comparisons]
    if found_any:
        console.print()
        legend = _legend(found_any, one is None)
        console.print(legend, style="dim", highlight=False, markup=False)


# --- each row against the next ----------------------------------------------------------------


_ROW = 20
"""Width of a row's name, so that a table fits 80 columns."""


def _rows(ladder: Ladder) -> Iterator[RenderableType]:
    from rich.text import Text

    from bench.report.terminal import folded

    made = {id(c.first): c for c in ladder.comparisons}
    before = {id(c.second): c for c in ladder.comparisons}
    title = Text(f"{ladder.table.title}{_what(ladder.comparisons)}")
    shown = open_table(title, padding=(0, 1, 0, 0))
    shown.add_column("#", justify="right")
    shown.add_column("row", no_wrap=True)
    for name in ("score", "minus next [95 %]", "p", "accuracy"):
        shown.add_column(name, justify="right", no_wrap=name in ("score", "p"))
    shown.add_column("verdict", min_width=9)
    for row in (c for c in ladder.table.rows if c.rank is not None):
        found, last = made.get(id(row)), before.get(id(row))
        # Wrapped between settings, not within one.
        words = row.name.removesuffix(")").replace("(", " ", 1).replace(", ", " ")
        cells: list[RenderableType] = [str(row.rank), Text(folded(words, _ROW))]
        if found is None:
            leak = "-" if last is None else _number(last.means[1], last.metric)
            shown.add_row(*cells, leak, *["-"] * 4)
            continue
        cells += [_number(found.means[0], found.metric), Text(_gap(found)), _p(found.p_holm)]
        verdict = Text(found.verdict, style=_STYLES[found.verdict])
        shown.add_row(*cells, _accuracy(found.accuracy), verdict)
    if made:
        yield shown
    else:
        yield Text(f"{ladder.table.title}: no two ranked rows that can be compared.")
    for c in ladder.comparisons:
        yield from (Text(f"{c.first.rank}-{c.second.rank}: {n}", style="dim") for n in c.notes)
    yield from (Text(f"Left out: {reason}", style="dim") for reason in ladder.skipped)


def _what(found: Sequence[RowComparison]) -> str:
    """· upper bound SSIM · 8 victims in each of 3 seeds, where all comparisons agree on it."""
    kinds = {f"{c.attack} {TITLES.get(c.metric, c.metric)} · {_samples(c)}" for c in found}
    return f"\n{kinds.pop()}" if len(kinds) == 1 else ""


def _samples(found: RowComparison) -> str:
    seeds, victims = len(found.seeds), found.difference.victims
    each = str(victims[0]) if len(set(victims)) == 1 else "/".join(map(str, victims))
    return f"{each} victims{f' in each of {seeds} seeds' if seeds > 1 else ''}"


# --- two rows ---------------------------------------------------------------------------------


def _pair(ladder: Ladder) -> Iterator[RenderableType]:
    from rich.text import Text

    for found in ladder.comparisons:
        yield Text(ladder.table.title, style="italic")
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


def _accuracy(found: Accuracy | None) -> str:
    if found is None:
        return "-"
    return f"{found.mean:+.3f}{' own' if found.personal else ''}"


def _signed(value: float, metric: str, digits: int = 3) -> str:
    return f"{'+' if value > 0 else ''}{_number(value, metric, digits)}"


def _number(value: float | None, metric: str, digits: int = 3) -> str:
    from bench.report.columns import error_number

    if value is None:
        return "-"
    return error_number(value, digits) if metric in ("mse", "psnr") else f"{value:.{digits}f}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def _legend(found: Sequence[RowComparison], many: bool) -> str:
    verdicts = {c.verdict for c in found}
    several = any(len(c.seeds) > 1 for c in found)
    over = "seeds and victims" if several else "victims"
    parts = [
        "minus next: leak of the row minus that of the next one, on the same victims, with its "
        f"95 % interval over {over}; p: sign flips, adjusted for all pairs of a table (Holm); "
        "accuracy: minus the next row's. Ranks take each pair alone, so that rows of different "
        "ranks may not be separated among all pairs."
        if many
        else f"A difference above 0: the first row leaks more. Its 95 % interval is over {over}."
    ]
    if any(c.metric == "mse" for c in found):
        parts.append("Of an MSE the smaller leaks more: its difference is turned round.")
    if "separated" in verdicts:
        parts.append("separated: on these victims and, by a t-test, over seeds.")
    if "separated here" in verdicts:
        parts.append("separated here: on the victims of these trainings; others may differ.")
    if verdicts - {"not separated"}:
        parts.append("Neither says that the difference is large enough to matter.")
    return " ".join(parts)
