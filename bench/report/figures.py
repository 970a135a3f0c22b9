"""Figures for a paper's column or page: accuracy against leakage and epsilon, leakage against
budget. Every figure is an object of its own; nothing touches pyplot's state."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from bench.errors import UserError
from bench.metrics.intervals import Interval
from bench.metrics.named import sign_of
from bench.report.entries import FLOOR_SUFFIX, leak
from bench.report.tables import Row, setting, tables

WIDTHS: Mapping[str, float] = {"column": 3.3, "page": 6.9}
"""Inches."""
FORMATS = ("pdf", "png")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
"""Seven colours of Okabe and Ito, told apart by colour-blind readers, and eight shapes: 56 pairs
before one comes twice."""
_STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.labelsize": 8, "axes.titlesize": 8, "xtick.labelsize": 8,
    "ytick.labelsize": 8, "legend.fontsize": 8, "axes.linewidth": 0.6, "lines.linewidth": 1.0,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "font.family": "DejaVu Sans", "savefig.dpi": 300,
    "pdf.fonttype": 42, "ps.fonttype": 42, "text.usetex": False, "text.parse_math": False,
}  # fmt: skip
_AXES_HEIGHT = 2.1
_LINE_HEIGHT = 0.155
EPSILONS = {
    "eps_record": "proven epsilon (one record, whole run)",
    "eps_claimed": "claimed epsilon",
}


class Paper(Figure):
    """A figure that keeps its style when saved (TrueType text in PDF) and shows in notebooks."""

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        with styled():
            super().savefig(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()


@contextmanager
def styled() -> Iterator[None]:
    """The figures' style, whatever the user's own settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


@dataclass(frozen=True, kw_only=True)
class Spent:
    """SSIM of one attack by gradient evaluations per start, where nothing defends."""

    attack: str
    points: tuple[tuple[int, Interval], ...]


def pareto(rows: Sequence[Row], *, width: str = "column") -> Figure:
    """Accuracy against worst-case leakage of one table's rows, with 95 % intervals, the floors,
    and the front: settings that no other one beats in both.

    Hollow: no rank (diverged or at chance). Rows without a figure are named below. Raises
    ValueError if no row has one.
    """
    shown, missing = _split(rows, [_accuracy(r) and r["worst"] for r in rows])
    metric = _one_metric(shown)
    shown = [r for r in shown if r["worst"]["metric"] == metric]
    missing += [r for r in rows if r["worst"] and r["worst"]["metric"] != metric]
    entries = [_label(r) for r in shown]
    with styled():
        figure, axes = _frame(width, [*entries, *_not_shown(missing), "x", "x"])
        handles = []
        for i, row in enumerate(shown):
            value, accuracy = row["worst"][metric], _accuracy(row) or {}
            handles.append(_point(axes, i, value, accuracy, hollow=row["rank"] is None))
        handles += _front(axes, shown, metric)
        handles += _floors(axes, shown, metric)
        entries += [str(h.get_label()) for h in handles[len(shown) :]]
        axes.set_ylabel("test accuracy")
        if metric == "ssim":
            axes.set_xlim(-0.02, 1.04)
            axes.set_xlabel("worst-case SSIM (left is safer)")
        else:
            axes.set_xlabel("least MSE of any attack (right is safer)")
        _legend(figure, handles, entries, width, _not_shown(missing))
    return figure


def epsilon(rows: Sequence[Row], *, which: str = "eps_record", width: str = "column") -> Figure:
    """Accuracy against an epsilon on a logarithmic axis; infinite and absent ones in a strip of
    their own at the right. which: eps_record (proven) or eps_claimed, whose unit stands in the
    legend.

    Raises UserError for another `which` and if no row has an accuracy.
    """
    if which not in EPSILONS:
        raise UserError(f"which must be {' or '.join(EPSILONS)}, got '{which}'.")
    shown, missing = _split(rows, [_accuracy(r) for r in rows])
    beside = {r: [i for i, row in enumerate(shown) if _strip(row[which]) == r] for r in (0, 1)}
    with styled():
        # Where nothing leaves the client epsilon is 0, which has no place on a logarithmic axis.
        zero = " (epsilon 0, at the left edge)"
        entries = [
            _label(r, unit=which == "eps_claimed") + (zero if r[which] == 0 else "") for r in shown
        ]
        figure, axes = _frame(width, [*entries, *_not_shown(missing)], strip=True)
        strip = figure.axes[1]
        handles = []
        known = [float(r[which]) for r in shown if _strip(r[which]) is None]
        for i, row in enumerate(shown):
            place, where = axes, max(float(row[which] or 0.0), _decades(known)[0])
            column = _strip(row[which])
            if column is not None:  # side by side, so that equal accuracies do not hide each other
                members = beside[column]
                step = 0.7 / max(1, len(members) - 1) if len(members) > 1 else 0.0
                place, where = strip, column + step * (members.index(i) - (len(members) - 1) / 2)
            handles.append(
                _point(place, i, {"mean": where}, _accuracy(row) or {}, hollow=row["rank"] is None)
            )
        if known:
            axes.set_xscale("log")
            axes.set_xlim(*_decades(known))
            axes.xaxis.set_major_formatter(lambda value, _: _power(value))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_xticks([])
            axes.text(0.5, 0.5, "no finite epsilon", transform=axes.transAxes, ha="center")
        axes.set_xlabel(EPSILONS[which])
        axes.set_ylabel("test accuracy")
        strip.set_xticks([0, 1], ["inf", "none"])
        _legend(figure, handles, entries, width, _not_shown(missing))
    return figure


def budget(spent: Sequence[Spent], *, width: str = "column") -> Figure:
    """Mean SSIM of each attack against its gradient evaluations per start, with 95 % intervals: a
    line that still rises means an attack that was cut short.

    Raises UserError if no attack was run at more than one budget.
    """
    if not spent:
        raise UserError("no attack of this table was run at two budgets: nothing to draw.")
    with styled():
        figure, axes = _frame(width, [s.attack for s in spent])
        handles = []
        for i, found in enumerate(spent):
            colour, marker = _look(i)
            x = [b for b, _ in found.points]
            means = [v.mean for _, v in found.points]
            bars = [
                [v.mean - v.lo for _, v in found.points],
                [v.hi - v.mean for _, v in found.points],
            ]
            drawn = axes.errorbar(
                [b * 1.04**i for b in x], means, yerr=bars, color=colour, marker=marker,
                markersize=4, capsize=2, elinewidth=0.6,
            )  # fmt: skip
            handles.append(drawn[0])
        axes.set_xscale("log", base=2)
        ticks = sorted({b for s in spent for b, _ in s.points})
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
        axes.set_xlabel("gradient evaluations per start")
        axes.set_ylabel("SSIM, nothing defends")
        axes.set_ylim(min(0.0, *(v.lo for s in spent for _, v in s.points)) - 0.02, 1.04)
        _legend(figure, handles, [s.attack for s in spent], width, [])
    return figure


def write(figure: Figure, stem: Path, formats: Sequence[str]) -> list[Path]:
    """Write STEM.pdf, STEM.png; the same figure gives the same bytes. Raises UserError for a
    format that is neither, and if the folder cannot be written."""
    from bench.names import did_you_mean

    metadata: Mapping[str, dict[str, Any]] = {
        "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
        "png": {"Software": None},
    }
    paths = []
    for name in formats:
        if name not in FORMATS:
            raise UserError(did_you_mean("figure format", name, FORMATS))
        path = stem.with_name(f"{stem.name}.{name}")
        try:
            stem.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.part")
            figure.savefig(part, format=name, metadata=metadata[name])
            part.replace(path)
        except OSError as error:
            raise UserError(f"cannot write {path} ({error.strerror or error}).") from error
        paths.append(path)
    return paths


def write_figures(
    rows: Sequence[Row], folder: Path, formats: Sequence[str], *, width: str = "column"
) -> list[Path]:
    """Every table's figures, written to FOLDER/figures as PROTOCOL-DATASET-MODEL-CHECKPOINT-WHAT:
    pareto, epsilon_proven, epsilon_claimed, budget and pictures (each setting's strongest attack).

    rows: of `leaderboard.rows`. What a table has no figures for (no budget was doubled, records
    instead of images, no artifacts) has no file. Raises UserError for an unknown format or width.
    """
    from bench.report import grids
    from bench.report.cells import cells_of
    from bench.report.leaderboard import read_run

    cells = cells_of(read_run(folder))
    paths: list[Path] = []
    names: dict[str, int] = {}
    for _, members in tables(rows):
        first = members[0]
        same = ("protocol", "dataset", "model", "checkpoint")
        name = "-".join(re.sub(r"[^\w.]+", "_", str(first[k])) for k in same)
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name}-{names[name]}"
        spent = grids.budgets(folder, cells, first)
        strongest = grids.strongest(folder, cells, members)
        drawn: dict[str, Figure] = {}
        if any(_accuracy(r) for r in members):
            drawn |= {"epsilon_proven": epsilon(members, width=width)}
            drawn |= {"epsilon_claimed": epsilon(members, which="eps_claimed", width=width)}
        if any(_accuracy(r) and r["worst"] for r in members):
            drawn["pareto"] = pareto(members, width=width)
        if spent:
            drawn["budget"] = budget(spent, width=width)
        if strongest:
            drawn["pictures"] = grids.pictures(folder, strongest, width="page")
        for what, figure in drawn.items():
            paths += write(figure, folder / "figures" / f"{name}-{what}", formats)
    return paths


# --- pieces -----------------------------------------------------------------------------------


def _frame(width: str, entries: Sequence[str], *, strip: bool = False) -> tuple[Paper, Axes]:
    """An empty figure with room for its legend; strip: a second, narrow pair of axes."""
    if width not in WIDTHS:
        raise UserError(f"width must be {' or '.join(WIDTHS)}, got '{width}'.")
    lines = sum(len(_wrapped(e, width).splitlines()) for e in entries)
    figure = Paper(figsize=(WIDTHS[width], _AXES_HEIGHT + lines * _LINE_HEIGHT + 0.1),
                   layout="constrained")  # fmt: skip
    if not strip:
        return figure, figure.subplots()
    axes, beside = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1.6])
    beside.set_facecolor("#f0f0f0")
    beside.spines["left"].set_visible(False)
    beside.tick_params(axis="y", length=0)
    beside.set_xlim(-0.6, 1.6)
    return figure, axes


def _look(i: int) -> tuple[str, str]:
    return _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]


def _point(
    axes: Axes, i: int, x: Mapping[str, float], y: Mapping[str, float], *, hollow: bool
) -> Line2D:
    colour, marker = _look(i)
    drawn = axes.errorbar(
        [x["mean"]], [y["mean"]], xerr=_bar(x), yerr=_bar(y), color=colour, marker=marker,
        markersize=5, markerfacecolor="white" if hollow else colour, linestyle="none",
        elinewidth=0.6, capsize=0,
    )  # fmt: skip
    line = drawn[0]
    assert isinstance(line, Line2D)
    return line


def _bar(value: Mapping[str, float]) -> list[list[float]] | None:
    """An interval's lengths below and above the mean."""
    if "lo" not in value:
        return None
    return [[value["mean"] - value["lo"]], [value["hi"] - value["mean"]]]


def _front(axes: Axes, rows: Sequence[Row], metric: str) -> list[Line2D]:
    """A line through the ranked settings that no other one beats in accuracy and leakage."""
    # Accuracy of clients' own networks, on their own labels, is no match for a common one.
    ranked = [r for r in rows if r["rank"] is not None and r["accuracy"] is not None]
    points = [(leak(r["worst"]), r["accuracy"]["mean"]) for r in ranked]
    front = sorted(
        p for p in points if not any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)
    )
    if not front:
        return []
    sign = sign_of(metric)
    end = max(x for x, _ in points)
    x, y = [*(x for x, _ in front), end], [*(y for _, y in front), front[-1][1]]
    return axes.plot([sign * v for v in x], y, color="#888888", linewidth=0.8, zorder=0,
                     drawstyle="steps-post", label="front")  # fmt: skip


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Powers of ten around the positive values, so that an axis has labels at both ends."""
    logs = [math.log10(v) for v in values if v > 0] or [0.0]
    low, high = math.floor(min(logs) - 0.1), math.ceil(max(logs) + 0.1)
    return 10.0**low, 10.0**high


def _power(value: float) -> str:
    """0.1, 1, 10, 1000, 1e4."""
    return f"{value:g}" if 1e-3 <= value < 9999 else f"1e{round(math.log10(value))}"


def _floors(axes: Axes, rows: Sequence[Row], metric: str) -> list[Line2D]:
    """Lines at what needs no leak."""
    floors = [r["attacks"][r["worst"]["attack"]]["floor"] for r in rows]
    names = {metric: ("floor: mean public sample", "dotted"),
             metric + FLOOR_SUFFIX: ("floor: class mean, label given", "dashed")}  # fmt: skip
    out = []
    for name, (label, style) in names.items():
        found = [f[name] for f in floors if name in f]
        if found:
            out.append(axes.axvline(sum(found) / len(found), color="#888888", linewidth=0.8,
                                    linestyle=style, zorder=0, label=label))  # fmt: skip
    return out


def _legend(
    figure: Figure, handles: Sequence[Line2D], entries: Sequence[str], width: str,
    notes: Sequence[str],
) -> None:  # fmt: skip
    """Below the axes, where it hides no point."""
    blank = Line2D([], [], linestyle="none")
    figure.legend(
        [*handles, *(blank for _ in notes)],
        [_wrapped(e, width) for e in [*entries, *notes]],
        loc="outside lower left", frameon=False, handlelength=1.6, labelspacing=0.25,
        borderpad=0.0, borderaxespad=0.2,
    )  # fmt: skip


def _wrapped(text: str, width: str) -> str:
    return "\n".join(textwrap.wrap(text, width=50 if width == "column" else 110)) or text


def _label(row: Row, *, unit: bool = False) -> str:
    personal = " (own networks)" if row["accuracy"] is None else ""
    claim = f" per {row['unit']}" if unit and row["unit"] else ""
    return setting(row) + claim + personal + (" (no rank)" if row["rank"] is None else "")


def _accuracy(row: Row) -> dict[str, float] | None:
    found: dict[str, float] | None = row["accuracy"] or row["personal_accuracy"]
    return found


def _strip(value: float | str | None) -> Literal[0, 1] | None:
    """Column of the side strip: 0 infinite, 1 absent; None for a number."""
    if value is None:
        return 1
    return 0 if math.isinf(float(value)) else None


def _split(rows: Sequence[Row], has: Sequence[Any]) -> tuple[list[Row], list[Row]]:
    shown = [r for r, h in zip(rows, has, strict=True) if h]
    if not shown:
        raise UserError("no row of this table has both figures: nothing to draw.")
    return shown, [r for r, h in zip(rows, has, strict=True) if not h]


def _one_metric(rows: Sequence[Row]) -> str:
    """ssim where any row has images, else mse."""
    return "ssim" if any(r["worst"]["metric"] == "ssim" for r in rows) else "mse"


def _not_shown(rows: Sequence[Row]) -> list[str]:
    return [f"not shown, without a figure: {setting(r)}" for r in rows]
