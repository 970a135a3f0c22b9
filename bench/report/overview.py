"""Which defense leaks least, and what it costs: the first table that a reader sees.

A defense stands in each table of the leaderboard with one setting: of those that lose at most so
much accuracy the one that leaks least. Nothing here draws; terminal, text, page and site do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.records import FlagCode, Row
from bench.report.columns import epsilon_text, refuted, shade
from bench.report.tables import tables
from bench.report.verdicts import (
    UNDEFENDED,
    at_most,
    has_use,
    lost_accuracy,
    undefended,
    understated,
)

LOSSES = (0.01, 0.05, 0.1)
"""Accuracy, as a share of the test samples, that a setting may lose: what a reader can choose."""
LOSS = 0.05
"""The one that is shown first."""
_NOT_RUN = "not run"
_NOT_APPLICABLE = "n/a"
_UNDONE = {
    FlagCode.TRAINING_FAILED: "failed",
    FlagCode.TRAINING_TIMEOUT: "failed",
    FlagCode.ATTACK_FAILED: "failed",
    FlagCode.ATTACK_TIMEOUT: "failed",
    FlagCode.ATTACK_PENDING: "pending",
}
"""What stands where no attack on any setting is done, by the first flag that says why."""
_DOUBTS = (
    FlagCode.TRAINING_FAILED,
    FlagCode.TRAINING_TIMEOUT,
    FlagCode.ATTACK_FAILED,
    FlagCode.ATTACK_TIMEOUT,
    FlagCode.ATTACK_PENDING,
    FlagCode.CUT_SHORT,
    FlagCode.BELOW_FLOOR,
    FlagCode.WHOSE_UNKNOWN,
    FlagCode.UNDERSTATED,
    FlagCode.FIRST_ROUND,
)


DAGGER = "†"


def disputed(rows: Iterable[Row | None]) -> bool:
    """Whether one of the rows is listed as not the paper's own method."""
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
        lost: Accuracy that it loses against the undefended row, in [-1, 1]: of the common model,
            or where there is none of the clients' own. None without an undefended row.
        bytes: Sent by all per round, as a multiple of the undefended row's; None if not known.
        seconds: Of a client's work per round, likewise.
        matched: Whether it lost that on the seeds of the undefended row.
        first: Whether its rank is the best of several here: defenses that no paired test tells from
            the row of that rank share it.
        why: Why there is no row, in a few words.
        refused: Whether it ran, and no setting has use and loses little enough.
    """

    row: Row | None = None
    place: int = 0
    lost: float | None = None
    bytes: float | None = None
    seconds: float | None = None
    matched: bool = False
    first: bool = False
    why: str = ""
    refused: bool = False

    @property
    def leak(self) -> float | None:
        """From 0 to 1; None without a row. Where flags say that the row understates it, it is what
        they tell, so that no setting stands for its defense because worse answers were chosen or
        attacks got less from all rounds than from one."""
        if self.row is None or self.row.leak is None:
            return None
        return max(self.row.leak, understated(self.row) or 0.0)

    @property
    def doubtful(self) -> bool:
        """Whether the leak may be more: the training failed in some seed, an attack failed, ran out
        of time, was cut short or has not run, the strongest rebuilds less than what looks at
        nothing; or the setting may lose more than was allowed."""
        if self.row is None:
            return False
        return not self.matched or any(f.code in _DOUBTS for f in self.row.flags)

    @property
    def text(self) -> str:
        """0.27, with a star where it is first and a question mark where it may be more; or why
        there is none."""
        if self.leak is None:
            return "–" if self.why == _NOT_RUN else self.why
        return f"{self.leak:.2f}{self.signs}{'*' if self.first else ''}"

    @property
    def signs(self) -> str:
        """A question mark where the leak may be more, a dagger where the row is not the paper's
        method."""
        return f"{'?' if self.doubtful else ''}{DAGGER if disputed([self.row]) else ''}"

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
        lines: The defenses, the least mean leak first (1 where no setting can be used), the
            undefended line last.
    """

    loss: float
    protocol: str
    heads: tuple[Head, ...]
    lines: tuple[DefenseLine, ...]

    @property
    def cells(self) -> list[list[str]]:
        """As text, a list per line: the defense, its leaks by table, what they cost."""
        return [
            [line.defense, *(v.text for v in line.verdicts), *(cost.of(line) for cost in COSTS)]
            for line in self.lines
        ]


def by_protocol(rows: Sequence[Row], loss: float = LOSS) -> list[Overview]:
    """An overview of each protocol of a leaderboard, with the defenses that run under it. loss:
    accuracy that a setting may lose, in [0, 1]."""
    numbers = {title: number for number, (title, _) in enumerate(tables(rows), start=1)}
    found = (
        overview([r for r in rows if r.protocol == name], loss)
        for name in dict.fromkeys(r.protocol for r in rows)
    )
    return [
        replace(one, heads=tuple(replace(h, number=numbers[h.title]) for h in one.heads))
        for one in found
    ]


def choices(rows: Sequence[Row]) -> list[list[Overview]]:
    """Of each protocol its overviews, one for every loss of accuracy that a reader can choose."""
    by_loss = [by_protocol(rows, loss) for loss in LOSSES]
    return [list(same) for same in zip(*by_loss, strict=True)]


def overview(rows: Sequence[Row], loss: float = LOSS) -> Overview:
    """One overview of rows of any protocols."""
    found = tables(rows)
    names = [n for n in dict.fromkeys(r.defense for r in rows) if n != UNDEFENDED]
    if any(r.defense == UNDEFENDED for r in rows):
        names.append(UNDEFENDED)
    columns = [_column(members, names, loss) for _, members in found]
    lines = [
        DefenseLine(defense=name, verdicts=tuple(column[i] for column in columns))
        for i, name in enumerate(names)
    ]
    lines.sort(key=lambda line: (line.defense == UNDEFENDED, line.mean_leak))
    first = [members[0] for _, members in found]
    protocols = {r.protocol for r in first}
    one = protocols.pop() if len(protocols) == 1 else ""
    short = [(*(() if one else (r.protocol,)), r.data, r.model, r.checkpoint) for r in first]
    heads = (
        Head(title=title, words=_apart(short, i), number=i + 1)
        for i, (title, _) in enumerate(found)
    )
    return Overview(loss=loss, protocol=one, heads=tuple(heads), lines=tuple(lines))


def _apart(short: Sequence[tuple[str, ...]], place: int) -> tuple[str, ...]:
    """A head's words, with its number among those of the same words."""
    words = short[place]
    number = short[: place + 1].count(words)
    return words if short.count(words) == 1 else (*words, f"#{number}")


def _column(rows: Sequence[Row], defenses: Sequence[str], loss: float) -> list[Verdict]:
    """Each defense's verdict in one table."""
    bare = undefended(rows)
    found = [_verdict([*_settings(rows, name, bare)], loss) for name in defenses]
    ranks = [
        v.row.rank if v.row and name != UNDEFENDED and not understated(v.row) else None
        for name, v in zip(defenses, found, strict=True)
    ]
    known = {r for r in ranks if r}
    if len(known) < 2:  # one defense, or all of one rank: a star would tell nothing
        return found
    return [replace(v, first=r == min(known)) for v, r in zip(found, ranks, strict=True)]


def _settings(rows: Sequence[Row], defense: str, bare: Row | None) -> Iterator[Verdict]:
    """A defense's settings in one table, each with what it costs."""
    for place, row in enumerate(rows):
        if row.defense == defense:
            yield Verdict(
                row=row,
                place=place,
                lost=None if bare is None else lost_accuracy(row, bare),
                matched=bare is not None and set(row.seeds) == set(bare.seeds),
                bytes=_multiple(row, bare, lambda r: _sum(r.bytes_up, r.bytes_down)),
                seconds=_multiple(row, bare, lambda r: r.client_seconds),
            )


def _verdict(settings: Sequence[Verdict], loss: float) -> Verdict:
    """The setting that leaks least of those that lose at most so much."""
    if not settings:
        return Verdict(why=_NOT_RUN)
    useful = [s for s in settings if s.row and has_use(s.row)]
    dagger = DAGGER if disputed(s.row for s in settings) else ""
    if not useful:
        flags = {f.code for s in settings if s.row for f in s.row.flags}
        if FlagCode.UNDECLARED in flags:
            return Verdict(why=f"flagged{dagger}", refused=True)
        apply = any(s.row and not _not_applicable(s.row) for s in settings)
        return Verdict(why=f"no use{dagger}" if apply else _NOT_APPLICABLE, refused=apply)
    known = [s for s in useful if s.leak is not None]
    if not known:
        flags = {f.code for s in useful if s.row for f in s.row.flags}
        return Verdict(why=next((w for c, w in _UNDONE.items() if c in flags), _NOT_APPLICABLE))
    allowed = [s for s in known if s.lost is None or at_most(s.lost, loss)]
    if not allowed:
        least = min(s.lost for s in known if s.lost is not None)
        return Verdict(why=f"−{_points(least)}pt{dagger}", refused=True)
    return min(allowed, key=lambda s: s.leak or 0.0)


def _not_applicable(row: Row) -> bool:
    return any(f.code == FlagCode.TRAINING_NOT_APPLICABLE for f in row.flags)


def _points(share: float) -> str:
    """Points of accuracy: 7.3, 13."""
    return f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"


def _sum(*values: float | None) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


def _multiple(row: Row, bare: Row | None, read: Callable[[Row], float | None]) -> float | None:
    one, other = read(row), None if bare is None else read(bare)
    return one / other if one is not None and other else None


# --- what stands beside the leaks -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Expense:
    """A column of the overview about a whole line, the worst over its tables.

    Attributes:
        name: Its head in text and on the page.
        heading: That in a narrow terminal.
        note: What it means.
        of: Its figure as text.
    """

    name: str
    heading: str
    note: str
    of: Callable[[DefenseLine], str]


def _worst(line: DefenseLine, read: Callable[[Verdict], float | None]) -> float | None:
    return max((v for one in line.verdicts if (v := read(one)) is not None), default=None)


def _lost(line: DefenseLine) -> str:
    worst = _worst(line, lambda v: v.lost)
    return "–" if worst is None else f"{100 * worst + 0.0:.1f}".replace("-", "−")


def _times(read: Callable[[Verdict], float | None]) -> Callable[[DefenseLine], str]:
    def text(line: DefenseLine) -> str:
        worst = _worst(line, read)
        return "–" if worst is None else f"{worst:.2g}×" if worst < 100 else f"{worst:.0f}×"

    return text


def _proven(line: DefenseLine) -> str:
    known = [r.eps_record for r in line.rows if r.eps_record is not None]
    if not known:
        return "–"
    return "none" if max(known) == math.inf else epsilon_text(max(known))


def _audited(line: DefenseLine) -> str:
    made = [(r.audit.eps_audited, r) for r in line.rows if r.audit]
    if not made:
        return "–"
    value, row = max(made, key=lambda pair: pair[0])
    more = "+" if row.audit and row.audit.eps_at_least else ""
    return f"{value:.2g}{more}{'!' if any(map(refuted, line.rows)) else ''}"


COSTS = (
    Expense(
        name="accuracy lost",
        heading="lost\npoints",
        note="Points of accuracy below the undefended row, mean over seeds; of the clients' own "
        "networks where no common model is uploaded.",
        of=_lost,
    ),
    Expense(
        name="bytes",
        heading="bytes",
        note="What is sent in a round, as a multiple of the undefended row's.",
        of=_times(lambda v: v.bytes),
    ),
    Expense(
        name="client time",
        heading="time",
        note="A client's seconds per round, as a multiple of the undefended row's, as measured.",
        of=_times(lambda v: v.seconds),
    ),
    Expense(
        name="ε proven",
        heading="eps\nproven",
        note="For one training record over the whole run; none: nothing is proven.",
        of=_proven,
    ),
    Expense(
        name="ε audited",
        heading="eps\naudit",
        note="What an attack on one release certifies at least (+: limited by its draws; !: more "
        "than claimed or proven).",
        of=_audited,
    ),
)


SIGNS = (
    "*: of the best rank, which defenses that no paired test tells from its row share; no star "
    "where all share it. ?: it may leak more: a training or attack failed, timed out, was cut "
    "short or has not run, all attacks stay below the floor, one attack or the first round alone "
    "leaks .1 more than was chosen, images are rebuilt but not whose they are (such leaks are "
    "shown), or no undefended row is of the same seeds. −7.3pt: its settings lose at least that "
    "much. flagged: messages are not as declared. no use: they do not learn, or attacks fail there "
    "without a defense. n/a: the defense or every attack has nothing to act on. failed, pending: "
    "no attack on it is done. –: not in the suite there. Beside the leaks the worst over the "
    "tables, as multiples of the undefended run. Lines stand by their mean leak, 1 where no "
    "setting can be used."
)
"""What the signs in an overview mean."""


def explain_signs(rows: Iterable[Row]) -> str:
    """What the signs in the overview of these rows mean."""
    return SIGNS + (
        f" {DAGGER}: not the paper's own method (see the row)." if disputed(rows) else ""
    )


def legend(rows: Iterable[Row], loss: float = LOSS) -> str:
    """How to read the overview of these rows' settings that lose at most so much accuracy."""
    return (
        "Leak of the setting that leaks least of those that lose at most "
        f"{100 * loss:g} points of accuracy: 0 what needs no leak, 1 a perfect copy, by the "
        f"attacker's choice among all attacks. {explain_signs(rows)}"
    )
