"""What plots show; `figures` draws it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bench.errors import UserError
from bench.metrics.intervals import Interval
from bench.metrics.named import FLOOR_SUFFIX, TITLES, leak, sign_of
from bench.records import Row, canonical
from bench.report.overview import LOSSES, OVER, Overview, overview
from bench.report.tables import attack_metrics, idle, tables
from bench.report.verdicts import (
    UNDEFENDED,
    has_use,
    is_reference,
    network,
)

TOLD = "told the labels"
"""Label of the second floor."""
SIDES = {"inf": "inf", "none": "no claim"}
"""Columns beside a logarithmic axis, for epsilons that are infinite or absent: their labels."""
_WIDE = 8.0
"""Ratio of largest to smallest value from which their axis is logarithmic."""
GREY = 7
"""Number of the undefended rows' colour, which is grey in every plot."""
LEAST_SPOTS = 3
"""Settings from which a plot tells more than the table above it."""
MOST_SPOTS = 150
"""Of more settings in all tables, those that an overview chooses are drawn."""
_TURNS = (0.0, 0.3, -0.3, 0.15, -0.15)
"""Where in such a column points stand, so that equal heights do not hide each other."""


def far_apart(values: Sequence[float]) -> bool:
    """Return whether a logarithmic axis fits these values better."""
    return min(values) > 0 and max(values) >= _WIDE * min(values)


def side_of(value: float) -> str:
    """The key of SIDES of what has no place on a logarithmic axis: inf, or nan for an absent
    figure; "" of any other."""
    if math.isnan(value):
        return "none"
    return "inf" if math.isinf(value) else ""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An axis over [lo, hi]. log: a logarithmic one, whose ends are powers of ten. sides: keys of
    SIDES that occur."""

    label: str
    lo: float
    hi: float
    log: bool = False
    sides: tuple[str, ...] = ()

    def ticks(self) -> list[tuple[float, str]]:
        """Return round values inside the axis, with their text."""
        if self.log:
            first, last = round(math.log10(self.lo)), round(math.log10(self.hi))
            decades = max(1, math.ceil((last - first) / 6))
            return [(10.0**k, _power(k)) for k in range(first, last + 1, decades)]
        raw = (self.hi - self.lo) / 5
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * 0.999)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        first = math.ceil(self.lo / step - 1e-9)
        last = math.floor(self.hi / step + 1e-9)
        return [(k * step, f"{k * step:.{digits}f}") for k in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One row as a point.

    Attributes:
        group: Number of its defense, which has a colour.
        aside: How far from the middle of a side column, as a share of its width.
    """

    row: Row
    x: Interval
    y: Interval
    group: int
    aside: float

    @property
    def side(self) -> str:
        """The column beside the x axis where it stands, "" on the axis."""
        return side_of(self.x.mean)

    @property
    def muted(self) -> bool:
        """Whether the row is of no use."""
        return not has_use(self.row)

    @property
    def hollow(self) -> bool:
        """Whether the clients' own accuracy stands for that of a common model."""
        return self.row.accuracy is None


@dataclass(frozen=True, kw_only=True)
class Band:
    """What needs no leak: a line, or where rows differ a band, at x in [lo, hi] (across: at y)."""

    lo: float
    hi: float
    label: str
    across: bool = False


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """A table's rows by two figures.

    Attributes:
        name: Key of KINDS.
        front: Places in `spots` of the Pareto front, the safest first.
        missing: Rows without one of the two figures.
    """

    name: str
    x: Scale
    y: Scale
    spots: tuple[Spot, ...]
    front: tuple[int, ...]
    floors: tuple[Band, ...]
    missing: tuple[Row, ...]

    @property
    def tells(self) -> bool:
        """Whether there is enough to see: a few settings, and where the axis is an epsilon's, a
        finite one."""
        finite = not self.x.log or any(not s.side for s in self.spots)
        return len(self.spots) >= LEAST_SPOTS and finite


Points = Sequence[tuple[float, Interval]]
"""Where each figure was measured, in ascending order, and the figure."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Figures at several budgets or after several rounds, a line each.

    Attributes:
        name: budget, or the figure over the rounds: accuracy, leak, eps_record or eps_claimed.
        lines: The name and the points of each.
        colours: Number of each line's colour; none: in their order.
        ticks: Texts by their places along x; none: those of the scale.
        missing: Names without enough points.
    """

    name: str
    x: Scale
    y: Scale
    lines: Sequence[tuple[str, Points]]
    colours: Sequence[int] = ()
    floors: tuple[Band, ...] = ()
    ticks: Mapping[float, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Leaks from 0 to 1 by line and column; None where there is none, with the text that stands
    there.

    Attributes:
        lines: Names from the top down.
        columns: Names from the left.
        leaks: A list per line.
        texts: What stands in each place.
    """

    lines: tuple[str, ...]
    columns: tuple[str, ...]
    leaks: tuple[tuple[float | None, ...], ...]
    texts: tuple[tuple[str, ...], ...]


# --- leaks as a map -----------------------------------------------------------------------------


def attacks_map(rows: Sequence[Row]) -> Heat | None:
    """Return the leakage of one table's settings by attack, the attacker-selected reconstruction
    first. Attacks that apply to no row are left out; None if none is left."""
    unused = idle(rows)
    names = {
        n: m
        for n, m in attack_metrics(rows).items()
        if n not in unused and not any(r.attacks[n].is_floor for r in rows if n in r.attacks)
    }
    if not names:
        return None
    leaks = [[row.leak, *(_leak_of(row, n, m) for n, m in names.items())] for row in rows]
    return Heat(
        lines=tuple(r.setting for r in rows),
        columns=("selected", *(f"{n} {TITLES[m]}" for n, m in names.items())),
        leaks=tuple(map(tuple, leaks)),
        texts=tuple(tuple("–" if v is None else f"{v:.2f}" for v in line) for line in leaks),
    )


def _leak_of(row: Row, name: str, metric: str) -> float | None:
    entry = row.attacks.get(name)
    if entry is None or metric not in entry.scores or metric not in entry.floor:
        return None
    return leak(entry.scores[metric].mean, entry.floor[metric], metric)


def overview_map(summary: Overview) -> Heat:
    """Return the overview's leakage, defenses by tables, with one decimal beside the signs."""
    return Heat(
        lines=tuple(line.defense for line in summary.lines),
        columns=tuple("\n".join(head.words) for head in summary.heads),
        leaks=tuple(tuple(v.leak for v in line.verdicts) for line in summary.lines),
        texts=tuple(
            tuple(
                v.leakage if v.leak is None else f"{v.leak:.1f}{v.signs.replace(OVER, '')}"
                for v in line.verdicts
            )
            for line in summary.lines
        ),
    )


# --- rows by two figures ----------------------------------------------------------------------

KINDS = {"leak": "leak", "proven": "eps_record", "claimed": "eps_claimed"}
"""Plots of accuracy by name: the measure along x."""


def groups(rows: Sequence[Row]) -> dict[str, int]:
    """Number the defenses; colours and shapes follow the numbers, and undefended rows are grey
    everywhere. With all rows of a report a defense looks the same in each of its plots."""
    names = sorted({r.defense for r in rows} - {UNDEFENDED})
    return {**{d: i + i // GREY for i, d in enumerate(names)}, UNDEFENDED: GREY}


def trade(rows: Sequence[Row]) -> Scatter | None:
    """Return leakage against the accuracy drop in points, of the defended settings of all tables;
    None where too few settings are of use. The leakage is the worst of the observed rounds, the
    accuracy that of the last one."""
    final = [r for r in rows if r.checkpoint == "final"] or rows
    worst: dict[str, float] = {}
    for row in rows:
        if row.leak is not None and has_use(row):
            worst[same_training(row)] = max(row.leak, worst.get(same_training(row), 0.0))
    pairs = [pair for _, members in tables(final) for pair in _accuracy_drops(members)]
    if len(pairs) > MOST_SPOTS:
        chosen = {id(row) for line in overview(final, LOSSES[-1]).lines for row in line.rows}
        pairs = [pair for pair in pairs if id(pair[0]) in chosen]
    number = groups(rows)
    spots = tuple(
        Spot(
            row=row,
            x=exact(worst[same_training(row)]),
            y=exact(drop),
            group=number[row.defense],
            aside=0.0,
        )
        for row, drop in pairs
    )
    drops = [s.y.mean for s in spots]
    scatter = Scatter(
        name="trade",
        x=Scale(label="leakage, worst observed round (safer ←)", lo=0.0, hi=1.0),
        y=Scale(
            label="accuracy drop, points (better ↓)",
            lo=min([0.0, *drops]) - 0.5,
            hi=max([2.0, *drops]) + 0.5,
        ),
        spots=spots,
        front=(),
        floors=(),
        missing=(),
    )
    return scatter if scatter.tells else None


def same_training(row: Row) -> str:
    """Return what rows of one setting share that differ only in the checkpoint."""
    data, model = (row.dataset, row.dataset_settings), (row.model, row.model_settings)
    own = (row.suite, row.defense, row.settings)
    return canonical([row.protocol_settings, *data, *model, *own])


def _accuracy_drops(table: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield one table's useful settings that have a leakage, with their accuracy drop in points."""
    for row in table:
        useful = row.defense != UNDEFENDED and has_use(row)
        if useful and row.leak is not None and row.accuracy_drop is not None:
            yield row, 100 * row.accuracy_drop.mean


def scatter(rows: Sequence[Row], name: str, among: Sequence[Row] | None = None) -> Scatter:
    """Return one plot, by its key of KINDS, of all rows of one table. among: those of the whole
    report, for the colours.

    Raises:
        UserError: If no row has both figures.
    """
    keys = (KINDS[name], "accuracy")
    metric = _metric(rows)
    measured = [(r, _figure_of(r, keys[0], metric), utility(r)) for r in rows]
    placed = [(r, x, y) for r, x, y in measured if x is not None and y is not None]
    if not placed:
        raise UserError("no row of this table has both figures: nothing to draw.")
    floors = _floors([r for r, *_ in placed], metric) if name == "leak" else ()
    edges = [exact(v) for f in floors for v in (f.lo, f.hi)]
    number = groups(among or rows)
    asides = _asides([(x, y) for _, x, y in placed])
    return Scatter(
        name=name,
        x=_scale(keys[0], [*(x for _, x, _ in placed), *edges], metric),
        y=_scale(keys[1], [y for *_, y in placed], metric),
        spots=tuple(
            Spot(row=r, x=x, y=y, group=number[r.defense], aside=aside)
            for (r, x, y), aside in zip(placed, asides, strict=True)
        ),
        front=tuple(_front(placed, keys[0], metric)),
        floors=floors,
        missing=tuple(r for r, x, y in measured if x is None or y is None),
    )


def utility(row: Row) -> Interval | None:
    """Return the accuracy of the common model, or where there is none of the clients' own
    networks."""
    return row.accuracy or row.personal_accuracy


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the places of the points (x, y), by x, that no other beats in both; smaller is
    better."""
    leading, best = [], math.inf
    ordered = sorted((x, y, i) for i, (x, y) in enumerate(points))
    for _, group in itertools.groupby(ordered, key=lambda point: point[0]):
        members = list(group)  # of equal x, by y
        least = members[0][1]
        leading += [i for _, y, i in members if y == least < best]
        best = min(best, least)
    return leading


def _front(placed: Sequence[tuple[Row, Interval, Interval]], key: str, metric: str) -> list[int]:
    """The front of the useful settings with a common accuracy: that of clients' own networks, on
    their own labels, is no match for it. None where x holds claims, whose units differ."""
    if key == "eps_claimed":
        return []
    sign = sign_of(metric) if key == "leak" else 1.0
    able = [n for n, (r, *_) in enumerate(placed) if has_use(r) and r.accuracy is not None]
    points = [
        (math.inf if side_of(placed[n][1].mean) else sign * placed[n][1].mean, -placed[n][2].mean)
        for n in able
    ]
    return [able[place] for place in front(points)]


def _metric(rows: Sequence[Row]) -> str:
    """Return ssim where any row has images, else mse."""
    return "mse" if all(r.ranking.metric == "mse" for r in rows if r.ranking) else "ssim"


def _asides(points: Sequence[tuple[Interval, Interval]]) -> list[float]:
    """Set points of each side column side by side."""
    turns: dict[str, itertools.cycle[float]] = {}
    out = [0.0] * len(points)
    for n in sorted(range(len(points)), key=lambda n: points[n][1].mean):
        if side := side_of(points[n][0].mean):
            out[n] = next(turns.setdefault(side, itertools.cycle(_TURNS)))
    return out


def _floors(rows: Sequence[Row], metric: str) -> tuple[Band, ...]:
    """Return the no-information baselines of the attacks that rank the rows."""
    all_ = [r.attacks[r.ranking.attack].floor for r in rows if r.ranking]
    return tuple(
        Band(lo=min(known), hi=max(known), label=label)
        for name, label in ((metric, "reads nothing"), (metric + FLOOR_SUFFIX, TOLD))
        if (known := [f[name] for f in all_ if name in f and math.isfinite(f[name])])
    )


# --- measures and axes ------------------------------------------------------------------------


def _figure_of(row: Row, key: str, metric: str) -> Interval | None:
    """Return a row's figure by a key of KINDS; an absent epsilon is nan."""
    if key == "leak":
        case = row.ranking
        return case.interval if case and case.metric == metric else None
    number: float | None = getattr(row, key)
    return exact(math.nan if number is None else number)


def exact(value: float) -> Interval:
    return Interval(mean=value, lo=value, hi=value)


def _scale(key: str, values: Sequence[Interval], metric: str) -> Scale:
    if key == "accuracy":
        return linear("accuracy", values)
    if key == "eps_record":
        return logarithmic("ε proven for a record (safer ←)", values)
    if key == "eps_claimed":
        return logarithmic("ε claimed (safer ←)", values)
    label = f"worst-case {TITLES[metric]} (safer {'←' if metric == 'ssim' else '→'})"
    if metric == "mse":
        return logarithmic(label, values)
    return Scale(label=label, lo=min(0.0, *(v.lo for v in values)), hi=1.0)


def linear(label: str, values: Sequence[Interval]) -> Scale:
    """Return an axis around all intervals, with a margin, inside of [0, 1]."""
    low, high = min(v.lo for v in values), max(v.hi for v in values)
    margin = max(0.02, 0.06 * (high - low))
    return Scale(label=label, lo=max(0.0, low - margin), hi=min(1.0, high + margin))


def logarithmic(label: str, values: Sequence[Interval]) -> Scale:
    """Return whole decades around all finite values, and a column for each side that occurs."""
    finite = [b for v in values if not side_of(v.mean) for b in (v.mean, v.lo, v.hi) if b > 0]
    low = math.floor(math.log10(min(finite))) if finite else 0
    high = math.ceil(math.log10(max(finite))) if finite else 1
    sides = tuple(s for s in SIDES if any(side_of(v.mean) == s for v in values))
    return Scale(label=label, lo=10.0**low, hi=10.0 ** max(high, low + 1), log=True, sides=sides)


def _power(k: int) -> str:
    return {0: "1", 1: "10", -1: "0.1"}.get(k, f"1e{k}")


# --- budget -----------------------------------------------------------------------------------


def budgets(rows: Sequence[Row], first: Row) -> Lines | None:
    """Return every attack's SSIM without a defense, at each suite's budget and at twice that; None
    where it was not measured. first: a row of the network and round that is shown."""
    wanted_network = network(first)
    series: dict[str, dict[int, Interval]] = {}
    floors: Mapping[str, float] = {}
    for row in rows:
        if not is_reference(row) or network(row) != wanted_network:
            continue
        for name, entry in row.attacks.items():
            again, score = entry.doubled, entry.scores.get("ssim")
            if again and again.ssim and score and entry.budget:
                measured = series.setdefault(name, {})
                measured.setdefault(entry.budget, score)
                measured.setdefault(again.budget, again.ssim)
                floors = floors or entry.floor
    if not series:
        return None
    every = sorted({b for measured in series.values() for b in measured})
    lows = [c.lo for measured in series.values() for c in measured.values()]
    labels = {"ssim": "reads nothing", f"ssim{FLOOR_SUFFIX}": TOLD}
    return Lines(
        name="budget",
        x=Scale(label="gradient evaluations per start", lo=every[0] * 0.9, hi=every[-1] * 1.1),
        y=Scale(label="SSIM, nothing defends", lo=min(0.0, *lows), hi=1.0),
        lines=[(n, sorted(series[n].items(), key=lambda p: p[0])) for n in sorted(series)],
        ticks={budget: str(budget) for budget in every},
        floors=tuple(
            Band(lo=floors[k], hi=floors[k], label=label, across=True)
            for k, label in labels.items()
            if k in floors
        ),
    )
