"""The leaderboard in a terminal of 80 columns."""

from collections.abc import Iterator, Sequence

from rich.console import Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from bench.records import Row, short
from bench.report import explain, frames
from bench.report import overview as overviews
from bench.report.advice import Advice, advise
from bench.report.columns import Column, Shown, columns_of, is_refuted
from bench.report.tables import tables, work
from bench.report.text import legend as whole_legend
from bench.report.verdicts import has_use

_ATTACKS = 5
"""Columns of attacks that fit 80 columns."""
_LEFT_OUT = ("marks", "defense", "recognised", "selected", "upper bound", "eps audited", "flags")
"""Columns of figures that --details leaves to the overview and the files, or places itself."""
_COLOURS = {f"h{i}": colour for i, colour in enumerate(["green"] * 3 + ["yellow"] * 3, start=1)}
_COLOURS |= {f"h{i}": "red" for i in (7, 8, 9)} | {"none": "dim"}
"""Of leaks by their class of the style sheet: a third each."""
_DEFENSE = 14
"""Least width of a row's name, which is folded."""
_NARROW = {"signs": "", "recognised": "recog-\nnised", "accuracy drop": "accuracy\ndrop"}
"""Heads of the overview that 80 columns have no room for; of others there is for the last word."""


def overview(summaries: Sequence[overviews.Overview]) -> list[Group]:
    """Return a rich table of 80 columns for each table of the overviews: what it says, then each
    defense's leakage and costs, the undefended row last; below it the settings."""
    return [
        _overview_table(advice, overviews.ranked(summary, place))
        for summary in summaries
        for place, advice in enumerate(advise(summary))
    ]


def _overview_table(advice: Advice, ran: Sequence[tuple[str, overviews.Verdict]]) -> Group:
    """Return one table of an overview, below what it says. ran: see `overview.ranked`."""
    frame = frames.ranking_texts(ran)
    settings = "; ".join(filter(None, frame.pop("setting")))
    table = _empty(None)
    table.add_column("defense", overflow="fold")
    for head in frame.columns[1:]:
        justify: JustifyMethod = "left" if head in ("leakage", "signs") else "right"
        narrow = _NARROW.get(head, head.rpartition(" ")[2])
        table.add_column(narrow, justify=justify, no_wrap=head != "epsilon")
    styles = [_COLOURS.get(v.style, "") for _, v in ran]
    for style, (name, leakage, *cells) in zip(styles, frame.to_numpy().tolist(), strict=True):
        table.add_row(name, Text(leakage, style=style), *cells)
    below = [Text(settings, style="dim")] if settings else []
    above = (Text(advice.head.title, style="bold"), Text(" ".join(advice.sentences)))
    return Group(*above, table, *below)


def boards(rows: Sequence[Row]) -> list[Table]:
    """Return rich tables with every row and attack of a leaderboard, without intervals; what else
    the overview or files have is left out."""
    return [table for title, members in tables(rows) for table in _board(title, members)]


def _board(title: str, rows: Sequence[Row]) -> Iterator[Table]:
    columns = [c for c in columns_of(rows) if c.name not in _LEFT_OUT]
    attacks = [c for c in columns if c.attack or c.name == "floor"]
    others = [c for c in columns if c not in attacks]
    letters = [explain.letters(row.flags) for row in rows]
    yield _table(f"{title}\n{work(rows)}", rows, others, letters)
    for first in range(0, len(attacks), _ATTACKS):
        yield _table("by attack", rows, attacks[first : first + _ATTACKS], [""] * len(rows))


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column], letters: list[str]) -> Table:
    """Return some columns of a table. letters: the flags of each row, at its end."""
    table = _empty(title)
    table.add_column("", no_wrap=True)
    table.add_column("defense", overflow="fold", min_width=_DEFENSE)
    for column in columns:
        head = column.name.replace(" ", "\n").replace("@", "\n@")
        table.add_column(head, justify="right", no_wrap=True)
    for row, ends in zip(rows, letters, strict=True):
        name = "\n".join([row.defense, *(f" {k}={short(v)}" for k, v in row.settings.items())])
        cells = [_cell(column.name, column.shown(row)) for column in columns]
        table.add_row(row.marks.text, name, *cells, ends, style="" if has_use(row) else "dim")
    return table


def _cell(name: str, shown: Shown) -> str:
    units = {"eps claimed": shown.beside[:3], "membership": f" {shown.beside}"}
    return f"{shown.text}{units.get(name, '')} {shown.mark}".strip()


def _empty(title: str | None) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold dim",
    )


def legend(rows: Sequence[Row]) -> str:
    """Explain the columns, signs and letters that occur, a line each."""
    letters = sorted({letter for row in rows for letter in explain.letters(row.flags)})
    lines = whole_legend(rows)
    if any(map(is_refuted, rows)):
        lines.append("! at a claim: an attack on one release certifies more.")
    if units := sorted({r.unit for r in rows if r.unit}):
        lines.append("Claims are per " + ", ".join(f"{u} (/{u[:2]})" for u in units) + ".")
    return "\n".join([*lines, *(f"{letter}: {explain.LETTERS[letter]}." for letter in letters)])
