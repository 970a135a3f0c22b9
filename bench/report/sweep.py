"""Runs of one suite that differ in a single value: leakage over that value, as table and figure."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from bench.files import no_link
from bench.records import Row
from bench.records.jobs import setting_text
from bench.report.frames import figures_of
from bench.report.paper import write
from bench.report.plots import sweep as draw_sweep
from bench.report.tables import tables


def frame_of(over: str, swept: Mapping[Any, Sequence[Row]]) -> DataFrame:
    """Return a line for every value and row: the row's figures, its table, and its curve there.

    Args:
        over: The key that was varied.
        swept: A suite's rows by its values, in the order in which they were asked for.
    """
    lines = []
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
                curve = label if labels.count(label) == 1 else row.setting
                place = {"over": over, "value": value, "table": title, "curve": curve}
                lines.append(place | figures_of(row))
    return DataFrame(lines, dtype=object)


def _setting_without(over: str, row: Row, value: Any) -> str:
    """Return the row's setting without the varied value: its points are one curve."""
    varied = re.fullmatch(r"defenses\.\d+\.settings\.(\w+)", over)
    if varied is None or row.settings.get(varied[1]) != value:
        return row.setting
    kept = {n: v for n, v in row.settings.items() if n != varied[1]}
    return setting_text(row.defense, kept)


def write_figures(frame: DataFrame, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write a figure for every table: FOLDER/figures/PROTOCOL-DATASET-MODEL-CHECKPOINT-sweep."""
    place, paths = no_link(folder, "figures"), list[Path]()
    for title, table in frame.groupby("table", sort=False):
        name = "-".join(re.sub(r"[^\w.]+", "_", part) for part in str(title).split(" · "))
        paths += write(draw_sweep(table), place / f"{name}-sweep", formats)
    return paths
