"""A table's plots: utility against leakage and epsilon, leakage against epsilon and budget."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from bench.metrics.named import sign_of
from bench.report import svg
from bench.report.boards import Board, bounds, epsilon_cell, figure
from bench.report.svg import Axis, Line, Point, Value
from bench.report.tables import TITLES, Row, setting

_PLACES = (("inf", "inf"), ("none", "no claim"))


@dataclass(frozen=True, kw_only=True)
class View:
    """One plot and what to know to read it. legend: (mark, name). table: header and body of its
    figures, where they stand in no other table."""

    name: str
    choice: str
    drawing: Markup
    notes: tuple[str, ...]
    legend: tuple[tuple[Markup, str], ...]
    table: tuple[tuple[str, ...], ...] = ()


def is_reference(row: Row) -> bool:
    """Whether it is an undefended row: attacks ran at twice their budget there alone."""
    return any(e.get("doubled") for e in row["attacks"].values())


# --- utility, leakage, epsilon ----------------------------------------------------------------


def views(board: Board) -> list[View]:
    """The plots of one table; none where no row has both figures."""
    rows = [r for r in board.rows if r["worst"] and _utility(r)]
    if not rows:
        return []
    metric = rows[0]["worst"]["metric"]
    rows = [r for r in rows if r["worst"]["metric"] == metric]
    safer = "←" if metric == "ssim" else "→"
    leak = f"worst-case {TITLES[metric]} (safer {safer})"
    useful = (_useful, "accuracy")
    return [
        _view(board, rows, "leak", "accuracy against leakage", (_leak, leak), useful),
        _view(board, rows, "proven", "accuracy against ε proven",
              (_epsilon("eps_record"), "ε proven for a record (safer ←)"), useful),
        _view(board, rows, "claimed", "accuracy against ε claimed",
              (_epsilon("eps_claimed"), "ε claimed (safer ←)"), useful),
        _view(board, rows, "promise", "leakage against ε claimed",
              (_epsilon("eps_claimed"), "ε claimed (safer ←)"), (_leak, leak)),
    ]  # fmt: skip


Measure = tuple[Callable[[Row], Value], str]


def _view(
    board: Board, rows: Sequence[Row], name: str, choice: str, x: Measure, y: Measure
) -> View:
    metric = rows[0]["worst"]["metric"]
    found = [(x[0](r), y[0](r)) for r in rows]
    places = {id(r): i for i, r in enumerate(board.rows)}
    groups = {d: i for i, d in enumerate(sorted({r["defense"] for r in board.rows}))}
    front = _front(rows, found, name, metric)
    points = [
        Point(
            x=a, y=b, row=places[id(r)], words=_words(r), group=groups[r["defense"]],
            tag=_tag(r) if i in front or is_reference(r) else "", front=i in front,
            muted=r["rank"] is None, hollow=r["accuracy"] is None,
        )
        for i, (r, (a, b)) in enumerate(zip(rows, found, strict=True))
    ]  # fmt: skip
    lines = _floors(rows, metric, across=name == "promise") if "leakage" in choice else []
    ends = [Value(mean=v, lo=v, hi=v) for line in lines for v in (line.lo, line.hi)]
    across, up = ([], ends) if name == "promise" else (ends, [])
    plot = svg.Plot(
        _axis(x[1], [*(a for a, _ in found), *across], metric),
        _axis(y[1], [*(b for _, b in found), *up], metric),
        name=f"{board.id}-{name}", title=f"{choice}: {board.title}",
        description=f"{len(points)} settings. The table above has the same figures.",
    )  # fmt: skip
    for line in lines:
        plot.line(line)
    plot.front([points[i] for i in front])
    drawn = sorted(svg.spread(points), key=lambda p: plot.at(p)[0])
    return View(
        name=name, choice=choice, drawing=plot.draw(drawn, named=name == "leak"),
        notes=_notes(points, name, front, choice),
        legend=tuple((svg.key(g), d) for d, g in groups.items()
                     if any(r["defense"] == d for r in rows)),
    )  # fmt: skip


def _notes(
    points: Sequence[Point], name: str, front: Sequence[int], choice: str
) -> tuple[str, ...]:
    notes = ["Bars: 95 % intervals."]
    if len(front) > 1:
        notes.append("Dashed: the Pareto front, settings that no other beats in both.")
    if "leakage" in choice:
        notes.append("Grey lines: floors, what needs no leak.")
    if name in ("claimed", "promise"):
        notes.append(
            "Claims may be for different units (point at a mark), so no front is drawn: "
            "the smaller number need not protect more."
        )
    if "ε" in choice and any(not p.x.place and p.x.mean == 0 for p in points):
        notes.append("ε = 0 stands at the left edge.")
    if any(p.hollow for p in points):
        notes.append("Hollow: no common model; the clients' own accuracy stands in.")
    if any(p.muted for p in points):
        notes.append("Pale: without rank, training diverged or accuracy at chance.")
    return tuple(notes)


def _utility(row: Row) -> Mapping[str, float] | None:
    found: Mapping[str, float] | None = row["accuracy"] or row["personal_accuracy"]
    return found


def _useful(row: Row) -> Value:
    return _value(_utility(row) or {})


def _leak(row: Row) -> Value:
    return _value(row["worst"][row["worst"]["metric"]])


def _value(interval: Mapping[str, float]) -> Value:
    return Value(mean=interval["mean"], lo=interval["lo"], hi=interval["hi"])


def _epsilon(key: str) -> Callable[[Row], Value]:
    def read(row: Row) -> Value:
        if row[key] is None:
            return Value(place="none")
        number = float(row[key])
        return (
            Value(place="inf") if math.isinf(number) else Value(mean=number, lo=number, hi=number)
        )

    return read


def _axis(label: str, values: Sequence[Value], metric: str) -> Axis:
    if label.startswith("ε"):
        return svg.logarithmic(label, values, _PLACES)
    if label.startswith("worst") and metric == "mse":
        return svg.logarithmic(label, values, ())
    if label.startswith("worst"):
        return Axis(label=label, lo=min(0.0, *(v.lo for v in values)), hi=1.0)
    return svg.linear(label, values, within=(0.0, 1.0))


def _front(
    rows: Sequence[Row], found: Sequence[tuple[Value, Value]], name: str, metric: str
) -> list[int]:
    """Places of the settings that none other beats in both, the safest first; of ranked rows with
    a common accuracy. Empty where the figures of x cannot be compared."""
    if name in ("claimed", "promise"):
        return []
    sign = sign_of(metric) if name == "leak" else 1.0
    able = [
        (sign * a.mean if not a.place else math.inf, -b.mean, i)
        for i, (r, (a, b)) in enumerate(zip(rows, found, strict=True))
        if r["rank"] is not None and r["accuracy"] is not None
    ]
    front, best = [], math.inf
    for _, alike in itertools.groupby(sorted(able), key=lambda point: point[0]):
        members = list(alike)  # of equal x, by y
        least = members[0][1]
        front += [i for _, y, i in members if y == least < best]
        best = min(best, least)
    return sorted(front, key=lambda i: (bool(found[i][0].place), sign * found[i][0].mean))


def _floors(rows: Sequence[Row], metric: str, *, across: bool) -> list[Line]:
    lines = []
    for key, label in ((metric, "mean image"), (f"{metric}_class_mean", "class mean")):
        label = label if metric == "ssim" else label.replace("image", "record")
        found = [f[key] for r in rows if key in (f := r["attacks"][r["worst"]["attack"]]["floor"])]
        if found:
            lines.append(Line(lo=min(found), hi=max(found), label=label, across=across))
    return lines


def _tag(row: Row) -> str:
    return f"{row['rank']} {row['defense']}" if row["rank"] else str(row["defense"])


def _words(row: Row) -> str:
    """Setting, figures and epsilons of a point; parts are separated by "; "."""
    rank = f"rank {row['rank']}" if row["rank"] else "no rank"
    parts = [setting(row).replace(";", ","), rank]
    for name, value in (
        ("accuracy", row["accuracy"]),
        ("own accuracy", row["personal_accuracy"]),
    ):
        if value and (name == "accuracy" or row.get("personalised")):
            parts.append(f"{name} {figure(value['mean'])} {bounds(value)}")
    worst = row["worst"]
    metric = worst["metric"]
    leak = worst[metric]
    parts.append(
        f"worst {TITLES[metric]} {figure(leak['mean'], metric)} {bounds(leak, metric)} "
        f"by {worst['attack']}"
    )
    claim = epsilon_cell(row["eps_claimed"]).text
    parts.append(f"ε claimed {claim} per {row['unit']}" if row["unit"] else "no ε claimed")
    parts.append(f"ε proven {epsilon_cell(row['eps_record']).text}")
    return "; ".join(parts)


# --- budget -----------------------------------------------------------------------------------


def budget_view(board: Board, rows: Sequence[Row]) -> View | None:
    """SSIM against budget where nothing defends: of this table's network in all suites of the page
    (`rows`), at each one's budget and twice that. None where it was not measured."""
    network = _network(board.first)
    series: dict[str, dict[int, Mapping[str, float]]] = {}
    floors: dict[str, float] = {}
    for row in rows:
        if not is_reference(row) or _network(row) != network:
            continue
        for name, entry in row["attacks"].items():
            again = entry.get("doubled")
            if again and entry["ssim"] and again["ssim"] and entry.get("budget"):
                measured = series.setdefault(name, {})
                measured.setdefault(entry["budget"], entry["ssim"])
                measured.setdefault(again["budget"], again["ssim"])
                floors = floors or entry["floor"]
    if not series:
        return None
    curves = {n: _curve(n, i, s) for i, (n, s) in enumerate(sorted(series.items()))}
    every = [p for curve in curves.values() for p in curve]
    budgets = [p.x.mean for p in every]
    x = Axis(label="gradient evaluations per start", lo=min(budgets) * 0.9, hi=max(budgets) * 1.1)
    y = Axis(label="SSIM, nothing defends", lo=min(0.0, *(p.y.lo for p in every)), hi=1.0)
    plot = svg.Plot(x, y, name=f"{board.id}-budget", title=f"leakage against budget: {board.title}",
                    description="The table below has the same figures.")  # fmt: skip
    for key, label in (("ssim", "mean image"), ("ssim_class_mean", "class mean")):
        if key in floors:
            plot.line(Line(lo=floors[key], hi=floors[key], label=label, across=True))
    for curve in curves.values():
        plot.path(curve)
    body = [
        (n, f"{p.x.mean:.0f}", figure(p.y.mean), bounds({"lo": p.y.lo, "hi": p.y.hi}))
        for n, curve in curves.items()
        for p in curve
    ]
    return View(
        name="budget", choice="leakage against budget", drawing=plot.draw(every, named=True),
        notes=("Each optimising attack on the undefended row, at its budget and at twice that. "
               "A line that still climbs belongs to an attack that was cut short.",),
        legend=tuple((svg.key(c[0].group), n) for n, c in curves.items()),
        table=(("attack", "budget", "SSIM", "95 % interval"), *body),
    )  # fmt: skip


def _network(row: Row) -> str:
    keys = ("dataset", "dataset_settings", "model", "model_settings", "checkpoint")
    return json.dumps([row["protocol_settings"], *(row.get(k) for k in keys)], sort_keys=True)


def _curve(name: str, group: int, found: Mapping[int, Mapping[str, Any]]) -> list[Point]:
    return [
        Point(
            x=Value(mean=budget, lo=budget, hi=budget), y=_value(interval), row=0, group=group,
            words=f"{name}; {budget} gradient evaluations per start; "
            f"SSIM {figure(interval['mean'])} {bounds(interval)}",
        )
        for budget, interval in sorted(found.items())
    ]  # fmt: skip
