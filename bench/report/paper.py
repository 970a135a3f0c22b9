"""A paper's figure: its size, style, colours and legend, and how it is written. Nothing touches
pyplot's state."""

import base64
import io
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.container import Container
from matplotlib.figure import Figure

from bench.errors import UserError
from bench.harness.store import write_whole
from bench.metrics.intervals import Interval
from bench.names import check_known
from bench.records import Row
from bench.report.verdicts import UNDEFENDED

WIDTHS: Mapping[str, float] = {"column": 3.3, "page": 6.9}
"""Inches."""
FORMATS = {
    "pdf": ("CreationDate", "Producer", "Creator"),
    "png": ("Software",),
    "svg": ("Date", "Creator"),
}
"""With what matplotlib would write into each that differs from one time to the next."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Of Okabe and Ito: colour-blind readers can tell them apart."""
GREY = "#777777"
"""Of undefended rows in every plot."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*", "h")
LINE_HEIGHT = 0.155
_AXES_HEIGHT = 2.1
"""Inches, of a line of text and of the axes."""
_STYLE = Path(__file__).with_name("figures.mplstyle")


class Paper(Figure):
    """A figure that keeps its style when saved (TrueType text in PDF) and shows in notebooks."""

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """As matplotlib's, in the figures' style."""
        with style_figures():
            super().savefig(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()


def style_figures() -> AbstractContextManager[None]:
    """The figures' style, whatever the user's own settings are."""
    return style.context(_STYLE, after_reset=True)


def inches(width: str) -> float:
    """Return the width of a column or page. Raises UserError for anything else."""
    if width not in WIDTHS:
        raise UserError(f"width must be {' or '.join(WIDTHS)}, got '{width}'.")
    return WIDTHS[width]


def looks(rows: Sequence[Row], among: Sequence[Row]) -> list[tuple[str, str]]:
    """Return a colour per defense, and a marker that no other row of this colour has.

    Args:
        rows: Those that are drawn.
        among: All of a report: a defense has one colour in each of its plots.
    """
    names = sorted({r.defense for r in among} - {UNDEFENDED})
    colours = {UNDEFENDED: GREY, **dict(zip(names, cycle(COLOURS), strict=False))}
    markers = defaultdict[str, Iterator[str]](lambda: cycle(MARKERS))
    return [(c, next(markers[c])) for c in (colours[row.defense] for row in rows)]


def bars(values: Sequence[Interval]) -> list[list[float]]:
    """Return the lengths of intervals below and above their means."""
    return [[v.mean - v.lo for v in values], [v.hi - v.mean for v in values]]


def set_log(axes: Axes, which: str) -> None:
    """Make the x or y axis logarithmic, with plain numbers as ticks."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


@contextmanager
def plot(width: str, missing: Sequence[str] = ()) -> Iterator[tuple[Figure, Axes]]:
    """Open a figure with axes for labelled points and lines. At the end a legend is added below
    them, where it hides no point, and the figure gets its size.

    Args:
        width: column or page.
        missing: Names of what has no figure.
    """
    with style_figures():
        figure = Paper(layout="constrained")
        axes = figure.subplots()
        yield figure, axes
        for name in missing:
            axes.plot([], [], linestyle="none", label=f"not shown, without a figure: {name}")
        pairs = list(zip(*axes.get_legend_handles_labels(), strict=True))
        pairs.sort(key=lambda pair: not isinstance(pair[0], Container))  # points before lines
        across = 50 if width == "column" else 110
        labels = [textwrap.fill(label, across) for _, label in pairs]
        lines = sum(len(label.splitlines()) for label in labels)
        figure.set_size_inches(inches(width), _AXES_HEIGHT + lines * LINE_HEIGHT + 0.1)
        figure.legend([handle for handle, _ in pairs], labels, loc="outside lower left")


def write(figure: Figure, stem: Path, formats: Sequence[str]) -> list[Path]:
    """Write STEM.pdf, STEM.png, STEM.svg; the same figure gives the same bytes.

    Raises:
        UserError: For another format.
    """
    paths = []
    for name in formats:
        check_known("figure format", name, FORMATS)
        path = stem.with_name(f"{stem.name}.{name}")
        buffer = io.BytesIO()
        # Without the time and program that drew it.
        figure.savefig(buffer, format=name, metadata=dict.fromkeys(FORMATS[name]))
        write_whole(path, buffer.getvalue())
        paths.append(path)
    return paths


def image_of(figure: Figure, title: str) -> str:
    """Return the figure as an image element; the title is its alternative text."""
    buffer = io.BytesIO()
    # Letters as letters: as outlines they would be most of a page.
    with style.context([_STYLE, {"svg.fonttype": "none"}], after_reset=True):
        Figure.savefig(figure, buffer, format="svg", metadata=dict.fromkeys(FORMATS["svg"]))
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img class="plot" alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'
