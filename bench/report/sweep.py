"""Runs of one suite that differ in a single value: leakage over that value, as table and figure."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from bench.files import no_link
from bench.metrics.named import TITLES
from bench.records import Row, WorstCase
from bench.records.jobs import setting_text
from bench.report import leaderboard
from bench.report.escaping import csv_cell
from bench.report.figures import draw_line, frame, legend
from bench.report.paper import styled, write
from bench.report.plots import far_apart
from bench.report.tables import tables

COLUMNS = (
    *("over", "value", "protocol", "dataset", "model", "checkpoint", "setting", "observed"),
    *("attack", "metric", "mean", "lo", "hi", "floor", "leak", "accuracy", "eps_record"),
)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A suite's rows for every value.

    Attributes:
        over: The key that was varied, such as threat.batch.
        rows: By value, in the order in which they were asked for.
    """

    over: str
    rows: Mapping[Any, Sequence[Row]]

    @staticmethod
    def read(over: str, folders: Mapping[Any, Path]) -> Sweep:
        """From the result folder of each value."""
        return Sweep(over=over, rows={v: leaderboard.load(f) for v, f in folders.items()})

    def csv(self) -> str:
        """One line for every value and row, with the columns COLUMNS: the attacker's choice, and
        its leak, the part of the way from floor to perfect copy."""
        text = io.StringIO()
        lines = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        lines.writeheader()
        for value, rows in self.rows.items():
            lines.writerows(self._line(value, row) for row in rows)
        return text.getvalue()

    def curves(self) -> Iterator[tuple[str, dict[str, list[tuple[Any, Row, WorstCase]]]]]:
        """For every table its title, and by setting the points (value, row, attacker's choice)."""
        found: dict[str, dict[str, list[tuple[Any, Row, WorstCase]]]] = {}
        for value, rows in self.rows.items():
            names = Counter[str]()
            for _, members in tables(rows):
                title = _title(members[0])
                names[title] += 1
                if names[title] > 1:  # tables that differ in what their titles leave out
                    title = f"{title} · {names[title]}"
                shared = Counter(self._unvaried(row, value) for row in members)
                for row in members:
                    label = self._unvaried(row, value)
                    label = label if shared[label] == 1 else row.setting
                    if row.ranking is not None:
                        points = found.setdefault(title, {}).setdefault(label, [])
                        points.append((value, row, row.ranking))
        yield from found.items()

    def _unvaried(self, row: Row, value: Any) -> str:
        """The row's setting without the value that was varied, so that its points are one curve."""
        varied = re.fullmatch(r"defenses\.\d+\.settings\.(\w+)", self.over)
        if varied is None or row.settings.get(varied[1]) != value:
            return row.setting
        kept = {n: v for n, v in row.settings.items() if n != varied[1]}
        return setting_text(row.defense, kept)

    def write_figures(self, folder: Path, formats: Sequence[str]) -> list[Path]:
        """A figure for every table, FOLDER/figures/PROTOCOL-DATASET-MODEL-CHECKPOINT-sweep."""
        place, paths = no_link(folder, "figures"), []
        for title, curves in self.curves():
            name = "-".join(re.sub(r"[^\w.]+", "_", part) for part in title.split(" · "))
            stem = place / f"{name}-sweep"
            paths += write(self._figure(title, curves), stem, formats)
        return paths

    def _figure(
        self, title: str, curves: Mapping[str, Sequence[tuple[Any, Row, WorstCase]]]
    ) -> Figure:
        values = list(self.rows)
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        metric = next(case.metric for points in curves.values() for _, _, case in points)
        with styled():
            figure, axes, _ = frame("column", list(curves))
            axes.set_title(title)
            handles = []
            for number, points in enumerate(curves.values()):
                drawn = [
                    (v if numeric else values.index(v), case.interval) for v, _, case in points
                ]
                handles.append(draw_line(axes, drawn, colour=number, marker=number))
            if numeric and far_apart(values):
                axes.set_xscale("log")
            axes.set_xticks(values if numeric else range(len(values)), [str(v) for v in values])
            axes.xaxis.set_minor_locator(NullLocator())
            means = [case.interval.mean for points in curves.values() for _, _, case in points]
            room = 0.05 * max(max(means) - min(means), 0.2)  # intervals may go beyond
            axes.set_ylim(min(means) - room, max(means) + room)
            axes.set(xlabel=self.over, ylabel=f"{TITLES[metric]}, attacker's choice")
            legend(figure, handles, list(curves), "column", ())
        return figure

    def _line(self, value: Any, row: Row) -> dict[str, Any]:
        case = row.ranking
        line: dict[str, Any] = {
            "over": self.over,
            "value": value,
            **{n: getattr(row, n) for n in ("protocol", "dataset", "model", "checkpoint")},
            "setting": row.setting,
            "observed": row.observed,
            "accuracy": None if row.accuracy is None else row.accuracy.mean,
            "eps_record": row.eps_record,
        }
        if case is not None:
            floor = row.attacks[case.attack].floor.get(case.metric)
            line |= {"attack": case.attack, "metric": case.metric, **vars(case.interval)}
            line |= {"floor": floor, "leak": row.leak}
        return {name: csv_cell(line.get(name)) for name in COLUMNS}


def _title(row: Row) -> str:
    return " · ".join((row.protocol, row.data, row.model, row.checkpoint))
