"""Which defense leaks least, and what it costs: the first table that a reader sees.

A defense stands in each table of the leaderboard with one setting: of those that lose at most so
much accuracy the one that leaks least. Nothing here draws; terminal, text, page and site do.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.metrics.intervals import Interval
from bench.records import FlagCode, Marks, Row
from bench.report import explain
from bench.report.columns import audit_text, epsilon_text, format_supported, is_refuted, shade
from bench.report.costs import COSTS, CostColumn
from bench.report.marks import UNDONE, marks
from bench.report.tables import tables
from bench.report.verdicts import UNDEFENDED, at_most, find_undefended, has_use, understated_leakage

LOSSES = (0.01, 0.05, 0.1)
"""Accuracy, as a share of the test samples, that a setting may lose: what a reader can choose."""
LOSS = 0.05
"""The one that is shown first."""
MEANINGFUL = 10.0
"""Largest epsilon of a record that is taken to bound anything: e^10 is 22,000."""
_NOT_RUN = "not run"
_NOT_APPLICABLE = "n/a"
_UNMATCHED = "the undefended row has other seeds"
DAGGER = "†"
OVER = "^"
"""Of a setting whose accuracy drop may be over the limit."""


def is_disputed(rows: Iterable[Row | None]) -> bool:
    """Return whether one of the rows is listed as not the paper's own method."""
    return any(f.code is FlagCode.NOT_AS_PUBLISHED for r in rows if r is not None for f in r.flags)


@dataclass(frozen=True, kw_only=True)
class Head:
    """What a column of the overview is called.

    Attributes:
        title: The table's whole title.
        words: A few for a narrow head, one below the other.
        number: Of the table among all of the leaderboard, from 1.
    """

    title: str
    words: tuple[str, ...]
    number: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A defense in one table.

    Attributes:
        row: The setting that leaks least of those that lose little enough; None without any.
        place: The row's place in its table, from 0.
        drop: Its accuracy drop against the undefended row, a share of the test samples: of the
            common model, or where there is none of the clients' own. None without an undefended
            row.
        over: Whether the interval of that crosses the limit.
        costs: By name in `COSTS`, as multiples of the undefended row's; None if not known.
        matched: Whether it lost that on the seeds of the undefended row.
        marks: By the adjusted test, among the rows of the column.
        why: Why there is no row, in a few words.
        refused: Whether it ran, and no setting has use and loses little enough.
    """

    row: Row | None = None
    place: int = 0
    drop: Interval | None = None
    over: bool = False
    costs: Mapping[str, float | None] = field(default_factory=dict)
    matched: bool = False
    marks: Marks = field(default_factory=Marks)
    why: str = ""
    refused: bool = False

    @property
    def leak(self) -> float | None:
        """From 0 to 1; None without a row. Where flags say that the row understates it, it is what
        they tell, so that no setting stands for its defense because worse answers were chosen or
        attacks got less from all rounds than from one."""
        if self.row is None or self.row.leak is None:
            return None
        return max(self.row.leak, understated_leakage(self.row) or 0.0)

    @property
    def doubts(self) -> list[str]:
        """Why the leakage may be more than it shows."""
        if self.row is None:
            return []
        codes = {f.code for f in self.row.flags}
        doubts = [m.doubt for code, m in explain.FLAGS.items() if code in codes and m.doubt]
        return doubts if self.matched else [*doubts, _UNMATCHED]

    @property
    def leakage(self) -> str:
        """0.5 [0.3, 0.7], in the digits that the interval supports; or why there is none."""
        if self.row is None or self.leak is None or self.row.leak_interval is None:
            return "–" if self.why == _NOT_RUN else self.why
        if self.leak > self.row.leak_interval.mean:
            return f"{self.leak:.1f}"
        return format_supported(self.row.leak_interval, self.row.seeds)

    @property
    def text(self) -> str:
        """The leakage with its signs."""
        return self.leakage + self.signs

    @property
    def signs(self) -> str:
        """Marks, a question mark where the leakage may be more, a dagger where the row is not the
        paper's method, and `^` where the accuracy drop may be over the limit."""
        if self.row is None:
            return ""
        return (
            f"{self.marks.text}{'?' if self.doubts else ''}{OVER if self.over else ''}"
            f"{DAGGER if is_disputed([self.row]) else ''}"
        )

    @property
    def recognised(self) -> str:
        """7/12, see `bench.records.rows.Recognised`."""
        count = self.row and self.row.recognised
        return count.text if count else "–"

    @property
    def drop_text(self) -> str:
        """Points: 2.1 [1.8, 2.4]."""
        if self.row is None or self.drop is None or self.row.defense == UNDEFENDED:
            return "–"
        return format_supported(self.drop, self.row.seeds, 100)

    @property
    def style(self) -> str:
        """Class of the style sheet, h1 to h9 by leak."""
        return "none" if self.leak is None else shade(self.leak)


@dataclass(frozen=True, kw_only=True)
class DefenseLine:
    """A defense with its verdicts in the order of the overview's tables."""

    defense: str
    verdicts: tuple[Verdict, ...]

    @property
    def rows(self) -> list[Row]:
        return [v.row for v in self.verdicts if v.row is not None]

    @property
    def settings(self) -> list[str]:
        """Its settings that stand in some table, each once."""
        return list(dict.fromkeys(r.setting for r in self.rows))

    @property
    def costs(self) -> list[str]:
        """What stands in the columns of `column_notes`: the worst over its tables."""
        known = ([v.costs[name] for v in self.verdicts if name in v.costs] for name in COSTS)
        worst = (max((f for f in some if f is not None), default=None) for some in known)
        return [_drop(self), *map(times, worst), _proven(self), _describe_audit(self)]

    @property
    def mean_leak(self) -> float:
        """Over the tables in which it stands, and 1 where no setting of it can be used: there, so
        little accuracy is lost without it alone. Infinite if in none."""
        leaks = [1.0 if v.refused else v.leak for v in self.verdicts]
        known = [leak for leak in leaks if leak is not None]
        return sum(known) / len(known) if known else math.inf


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Defenses by tables.

    Attributes:
        loss: Accuracy that a setting may lose.
        protocol: Of all tables; "" where they have several.
        heads: The tables.
        lines: The undefended line, then the defenses, the least mean leak first (1 where no
            setting can be used).
    """

    loss: float
    protocol: str
    heads: tuple[Head, ...]
    lines: tuple[DefenseLine, ...]


def by_protocol(rows: Sequence[Row], loss: float = LOSS) -> list[Overview]:
    """Return an overview of each protocol of a leaderboard, with the defenses that run under it.
    loss: the largest accuracy drop, in [0, 1]."""
    titles = [title for title, _ in tables(rows)]
    return [
        overview([r for r in rows if r.protocol == name], loss, titles)
        for name in dict.fromkeys(r.protocol for r in rows)
    ]


def choices(rows: Sequence[Row]) -> list[list[Overview]]:
    """Return each protocol's overviews, one for every accuracy drop that a reader can choose."""
    by_loss = [by_protocol(rows, loss) for loss in LOSSES]
    return [list(same) for same in zip(*by_loss, strict=True)]


def overview(rows: Sequence[Row], loss: float = LOSS, titles: Sequence[str] = ()) -> Overview:
    """Return one overview of rows of any protocols. titles: of all tables of the leaderboard, by
    default those of these rows."""
    groups = tables(rows)
    names = list(dict.fromkeys(r.defense for r in rows))
    columns = [_column(members, names, loss) for _, members in groups]
    lines = [
        DefenseLine(defense=name, verdicts=tuple(column[i] for column in columns))
        for i, name in enumerate(names)
    ]
    lines.sort(key=lambda line: (line.defense != UNDEFENDED, line.mean_leak))
    first = [members[0] for _, members in groups]
    protocols = {r.protocol for r in first}
    protocol = protocols.pop() if len(protocols) == 1 else ""
    short = [(*(() if protocol else (r.protocol,)), r.data, r.model, r.checkpoint) for r in first]
    own = [title for title, _ in groups]
    heads = (
        Head(title=title, words=_number_words(short, i), number=(titles or own).index(title) + 1)
        for i, title in enumerate(own)
    )
    return Overview(loss=loss, protocol=protocol, heads=tuple(heads), lines=tuple(lines))


def ranked(summary: Overview, place: int) -> list[tuple[str, Verdict]]:
    """Return the defenses that were run in one table of an overview: the undefended one, then the
    least leaky first, those that may leak more than they show, those without a figure."""
    lines = [(line.defense, line.verdicts[place]) for line in summary.lines]
    ran = [(name, v) for name, v in lines if v.leakage != "–"]

    def order(pair: tuple[str, Verdict]) -> tuple[bool, bool, bool, float]:
        name, verdict = pair
        return name != UNDEFENDED, verdict.leak is None, bool(verdict.doubts), verdict.leak or 0.0

    return sorted(ran, key=order)


def _number_words(short: Sequence[tuple[str, ...]], place: int) -> tuple[str, ...]:
    """Return a head's words, numbered where several heads have the same words."""
    words = short[place]
    number = short[: place + 1].count(words)
    return words if short.count(words) == 1 else (*words, f"#{number}")


def _column(rows: Sequence[Row], defenses: Sequence[str], loss: float) -> list[Verdict]:
    """Return each defense's verdict in one table."""
    measured = measure(rows, loss)
    own = ([v for v in measured if v.row and v.row.defense == name] for name in defenses)
    verdicts = [_verdict(settings, loss) for settings in own]
    marked = marks(rows, [v.place for v in verdicts if v.row is not None])
    return [replace(v, marks=marked.get(v.place, Marks())) if v.row else v for v in verdicts]


def measure(rows: Sequence[Row], loss: float) -> list[Verdict]:
    """Return each row of a table with what it costs and its own marks. loss: as `overview`."""
    bare = find_undefended(rows)

    def verdict(place: int, row: Row) -> Verdict:
        drop = row.accuracy_drop
        return Verdict(
            row=row,
            place=place,
            drop=drop,
            over=drop is not None and row is not bare and not at_most(drop.hi, loss),
            matched=bare is not None and set(row.seeds) == set(bare.seeds),
            costs={name: _multiple(cost, row, bare) for name, cost in COSTS.items()},
            marks=row.marks,
        )

    return [verdict(place, row) for place, row in enumerate(rows)]


def _verdict(settings: Sequence[Verdict], loss: float) -> Verdict:
    """The setting that leaks least of those that lose at most so much."""
    if not settings:
        return Verdict(why=_NOT_RUN)
    useful = [s for s in settings if s.row and has_use(s.row)]
    codes = [{f.code for f in s.row.flags} for s in useful or settings if s.row]
    dagger = DAGGER if is_disputed(s.row for s in settings) else ""
    if not useful:
        if any(FlagCode.UNDECLARED in own for own in codes):
            return Verdict(why=f"flagged{dagger}", refused=True)
        apply = any(FlagCode.TRAINING_NOT_APPLICABLE not in own for own in codes)
        return Verdict(why=f"no use{dagger}" if apply else _NOT_APPLICABLE, refused=apply)
    known = [s for s in useful if s.leak is not None]
    if not known:
        undone = (why for code, why in UNDONE.items() if any(code in own for own in codes))
        return Verdict(why=next(undone, _NOT_APPLICABLE))
    allowed = [s for s in known if s.drop is None or at_most(s.drop.mean, loss)]
    if not allowed:
        least = min(s.drop.mean for s in known if s.drop is not None)
        points = f"{100 * least:.1f}" if least < 0.0995 else f"{100 * least:.0f}"
        return Verdict(why=f"−{points}pt{dagger}", refused=True)
    return min(allowed, key=lambda s: s.leak or 0.0)


def _multiple(cost: CostColumn, row: Row, bare: Row | None) -> float | None:
    own, reference = cost.of(row), None if bare is None else cost.of(bare)
    return own / reference if own is not None and reference else None


# --- what stands beside the leaks -------------------------------------------------------------


def column_notes() -> dict[str, str]:
    """Return what the overview's columns about a whole line mean, by their heads."""
    drop, *epsilons = explain.COSTS.items()
    return dict([drop, *((cost.title, cost.note) for cost in COSTS.values()), *epsilons])


def _drop(line: DefenseLine) -> str:
    known = [v for v in line.verdicts if v.drop is not None]
    return max(known, key=lambda v: v.drop.mean).drop_text if known else "–"  # type: ignore[union-attr]


def times(value: float | None) -> str:
    """Format a multiple: 1.3×."""
    return "–" if value is None else f"{value:.2g}×" if value < 100 else f"{value:.0f}×"


def epsilon_words(value: float | None) -> str:
    """Format a proven epsilon with what it is worth: none, vacuous 1e4, meaningful 3.2."""
    if value is None:
        return "–"
    if value == math.inf:
        return "none"
    if value <= MEANINGFUL:
        return f"meaningful {value:.2g}"
    return f"vacuous {value:.0e}".replace("e+0", "e").replace("e+", "e")


def _proven(line: DefenseLine) -> str:
    most = max((r.eps_record for r in line.rows if r.eps_record is not None), default=None)
    return "none" if most == math.inf else epsilon_text(most)


def _describe_audit(line: DefenseLine) -> str:
    audits = (row.audit for row in line.rows if row.audit)
    most = max(audits, key=lambda audit: audit.eps_audited, default=None)
    mark = "!" if any(map(is_refuted, line.rows)) else ""
    return "–" if most is None else audit_text(most) + mark


def legend(summaries: Sequence[Overview]) -> list[str]:
    """Explain each sign that occurs in some overviews, a line each."""
    verdicts = [v for summary in summaries for line in summary.lines for v in line.verdicts]
    if not verdicts:
        return []
    loss = f"{100 * summaries[0].loss:g} points"
    return [explain.OVERVIEW["leakage"].format(loss=loss), *explain_signs(verdicts, loss)]


def explain_signs(verdicts: Sequence[Verdict], loss: str, hidden: Container[str] = ()) -> list[str]:
    """Explain each sign and word that occurs in some verdicts, a line each.

    Args:
        verdicts: As they are shown.
        loss: The limit of the accuracy drop, in words.
        hidden: Columns that are not shown, of recognised and membership.
    """
    signs = {sign for v in verdicts for sign in v.signs}
    doubts = list(dict.fromkeys(why for v in verdicts for why in v.doubts))
    words = {v.leakage.removesuffix(DAGGER) for v in verdicts if v.row is None}
    rows = [v.row for v in verdicts if v.row]
    occurs = {
        explain.OVERVIEW["recognised"]: "recognised" not in hidden
        and any(v.recognised != "–" for v in verdicts),
        explain.LEGEND["membership"]: "membership" not in hidden
        and any(row.membership for row in rows),
        **{f"{sign} {text}": sign in signs for sign, text in explain.MARKS.items()},
        f"? may leak more: {'; '.join(doubts)}.": bool(doubts),
        f"{OVER} the interval of its accuracy drop crosses {loss}.": OVER in signs,
        f"{DAGGER} not the paper's own method (see the row).": is_disputed(rows),
        **{f"{word}: {text}": word in words for word, text in explain.NO_LEAKAGE.items()},
        explain.OVERVIEW["points"]: any(word.startswith("−") for word in words),
        explain.LEGEND["seeds"]: any_one_seed(rows),
    }
    return [line for line, holds in occurs.items() if holds]


def any_one_seed(rows: Iterable[Row | None]) -> bool:
    """Return whether one of the rows is of a single training, which is no figure to quote."""
    return any(row is not None and len(row.seeds) == 1 for row in rows)
