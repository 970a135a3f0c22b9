"""A sweep's table as plots on the site: leak over the value that was varied."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import UserError
from bench.files import read_bytes
from bench.metrics.intervals import Interval
from bench.records import data_title
from bench.report import svg
from bench.report.charts import View
from bench.report.plots import Scale, far_apart, numbers_of


@dataclass(frozen=True, kw_only=True)
class SweptRow:
    """A line of sweep.csv. value: what the varied key was."""

    over: str
    table: str
    setting: str
    value: float
    leak: float


def read(file: Path) -> list[SweptRow]:
    """The lines of a sweep over numbers that have a leak; none of a sweep over texts.

    Raises UserError for a file that `leakbench sweep` did not write.
    """
    text = read_bytes(file).decode(errors="replace")
    try:
        return [_line(found) for found in csv.DictReader(text.splitlines()) if found["leak"]]
    except KeyError as error:
        raise UserError(
            f"{file} has no column {error}: `leakbench sweep` did not write it."
        ) from error
    except ValueError:
        return []


def _line(found: dict[str, str]) -> SweptRow:
    value, leak = float(found["value"]), float(found["leak"])
    if not (math.isfinite(value) and 0 <= leak <= 1):
        raise ValueError("no number that can be drawn")
    data = data_title(found["dataset"])
    table = " · ".join((found["protocol"], data, found["model"], found["checkpoint"]))
    return SweptRow(
        over=found["over"], table=table, setting=found["setting"], value=value, leak=leak
    )


def views(lines: Sequence[SweptRow], *, name: str) -> list[View]:
    """A plot per table. name: of the sweep, for the plots' own."""
    number = numbers_of(_defense(line.setting) for line in lines)
    tables = dict.fromkeys(line.table for line in lines)
    return [
        _view([line for line in lines if line.table == table], number, f"{name}-{place}")
        for place, table in enumerate(tables)
    ]


def _defense(setting: str) -> str:
    return setting.partition("(")[0]


def _view(lines: Sequence[SweptRow], number: dict[str, int], name: str) -> View:
    first = lines[0]
    plot = svg.Plot(
        _axis(first.over, [line.value for line in lines]),
        Scale(label="leak (safer ↓)", lo=0.0, hi=1.0),
        name=name,
        title=f"Leak over {first.over}: {first.table}",
        description="The sweep's table, sweep.csv, has the same figures.",
    )
    drawn: list[svg.Mark] = []
    for setting in dict.fromkeys(line.setting for line in lines):
        mine = sorted((x for x in lines if x.setting == setting), key=lambda line: line.value)
        marks = [_mark(line, number, last=line is mine[-1]) for line in mine]
        plot.path(marks)
        drawn += marks
    names = {number[d]: d for d in dict.fromkeys(_defense(line.setting) for line in lines)}
    return View(
        name=name,
        choice=f"Leak over {first.over}: {first.table}",
        drawing=plot.draw(drawn),
        notes=("By the attacker's choice: 0 is what needs no leak, 1 a perfect copy.",),
        legend=tuple((svg.key(g), d) for g, d in sorted(names.items())),
    )


def _mark(line: SweptRow, number: dict[str, int], *, last: bool) -> svg.Mark:
    defense = _defense(line.setting)
    return svg.Mark(
        x=Interval(mean=line.value, lo=line.value, hi=line.value),
        y=Interval(mean=line.leak, lo=line.leak, hi=line.leak),
        row=0,
        group=number[defense],
        words=f"{line.setting}; {line.over} {line.value:g}; leak {line.leak:.2f}",
        tag=defense if last else "",
    )


def _axis(label: str, values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    if far_apart(values):
        ends = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return Scale(label=label, lo=10.0 ** ends[0], hi=10.0 ** ends[1], log=True)
    room = 0.05 * (high - low) or 0.5
    return Scale(label=label, lo=low - room, hi=high + room)
