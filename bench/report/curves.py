"""A sweep's table as plots on the site: leak over the value that was varied."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from matplotlib.ticker import NullLocator

from bench.errors import UserError
from bench.files import read_bytes
from bench.metrics.intervals import Interval
from bench.records import data_title
from bench.report.charts import View
from bench.report.figures import draw_line, frame, legend
from bench.report.paper import image_of, styled
from bench.report.plots import far_apart


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
    tables = dict.fromkeys(line.table for line in lines)
    return [
        _view([line for line in lines if line.table == table], f"{name}-{place}")
        for place, table in enumerate(tables)
    ]


def _view(lines: Sequence[SweptRow], name: str) -> View:
    title = f"Leak over {lines[0].over}: {lines[0].table}"
    settings = list(dict.fromkeys(line.setting for line in lines))
    with styled():
        figure, axes, _ = frame("column", settings)
        handles = []
        for number, setting in enumerate(settings):
            mine = sorted((x.value, x.leak) for x in lines if x.setting == setting)
            points = [(x, Interval(mean=leak, lo=leak, hi=leak)) for x, leak in mine]
            handles.append(draw_line(axes, points, colour=number, marker=number))
        values = sorted({line.value for line in lines})
        if far_apart(values):
            axes.set_xscale("log")
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel=lines[0].over, ylabel="leak (safer ↓)", ylim=(-0.05, 1.05))
        legend(figure, handles, settings, "column", ())
        return View(
            name=name,
            choice=title,
            drawing=Markup(image_of(figure, title)),
            notes=("By the attacker's choice: 0 is what needs no leak, 1 a perfect copy.",),
            legend=(),
        )
