"""Runs of one suite that differ in a single value: leakage over that value, as table and figure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.files import no_link
from bench.metrics.intervals import Interval
from bench.records import Row
from bench.records.jobs import setting_text
from bench.report.curves import sweep as draw_sweep
from bench.report.frames import csv_of, figures_of
from bench.report.paper import write
from bench.report.tables import tables

Swept = Mapping[Any, Sequence[Row]]
"""A suite's rows by the value of the key that was varied, in the order in which they were asked
for."""


def to_csv(over: str, swept: Swept) -> str:
    """Return a line for every value and row, with all figures of the row. over: the key."""
    return csv_of(
        [
            {"over": over, "value": value, **figures_of(row)}
            for value, rows in swept.items()
            for row in rows
        ]
    )


def curves(over: str, swept: Swept) -> dict[str, dict[str, list[tuple[Any, Interval]]]]:
    """Return for every table, by its title, and setting the leakage at every value."""
    by_title: dict[str, dict[str, list[tuple[Any, Interval]]]] = {}
    for value, rows in swept.items():
        names = Counter[str]()
        for _, members in tables(rows):
            first = members[0]
            title = " · ".join((first.protocol, first.data, first.model, first.checkpoint))
            names[title] += 1
            if names[title] > 1:  # tables that differ in what their titles leave out
                title = f"{title} · {names[title]}"
            labels = [_setting_without(over, row, value) for row in members]
            for row, label in zip(members, labels, strict=True):
                label = label if labels.count(label) == 1 else row.setting
                if row.leak_interval is not None:
                    points = by_title.setdefault(title, {}).setdefault(label, [])
                    points.append((value, row.leak_interval))
    return by_title


def _setting_without(over: str, row: Row, value: Any) -> str:
    """Return the row's setting without the varied value: its points are one curve."""
    varied = re.fullmatch(r"defenses\.\d+\.settings\.(\w+)", over)
    if varied is None or row.settings.get(varied[1]) != value:
        return row.setting
    kept = {n: v for n, v in row.settings.items() if n != varied[1]}
    return setting_text(row.defense, kept)


def write_figures(over: str, swept: Swept, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write a figure for every table: FOLDER/figures/PROTOCOL-DATASET-MODEL-CHECKPOINT-sweep."""
    place, paths = no_link(folder, "figures"), list[Path]()
    for title, settings in curves(over, swept).items():
        name = "-".join(re.sub(r"[^\w.]+", "_", part) for part in title.split(" · "))
        figure = draw_sweep(over, list(swept), settings)
        paths += write(figure, place / f"{name}-sweep", formats)
    return paths
