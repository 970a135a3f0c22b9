"""A paper's figure: its size and style, and how it is written. Nothing touches pyplot's state."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bench.errors import UserError
from bench.harness.store import write_whole
from bench.names import did_you_mean

WIDTHS: Mapping[str, float] = {"column": 3.3, "page": 6.9}
"""Inches."""
FORMATS = ("pdf", "png", "svg")
_SIZES = (
    "font.size",
    "axes.labelsize",
    "axes.titlesize",
    "xtick.labelsize",
    "ytick.labelsize",
    "legend.fontsize",
)
_STYLE: dict[Any, Any] = dict.fromkeys(_SIZES, 8) | {
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.0,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "DejaVu Sans",
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.hashsalt": "leakbench",
    "text.usetex": False,
    "text.parse_math": False,
}


class Paper(Figure):
    """A figure that keeps its style when saved (TrueType text in PDF) and shows in notebooks."""

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """As matplotlib's, in the figures' style."""
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


def inches(width: str) -> float:
    """Return the width of a column or page. Raises UserError for anything else."""
    if width not in WIDTHS:
        raise UserError(f"width must be {' or '.join(WIDTHS)}, got '{width}'.")
    return WIDTHS[width]


def check_format(name: str) -> None:
    """Raise UserError for a format that figures are not written in."""
    if name not in FORMATS:
        raise UserError(did_you_mean("figure format", name, FORMATS))


def write(figure: Figure, stem: Path, formats: Sequence[str]) -> list[Path]:
    """Write STEM.pdf, STEM.png, STEM.svg; the same figure gives the same bytes.

    Raises:
        UserError: For another format, and if the folder cannot be written.
    """
    metadata: Mapping[str, dict[str, Any]] = {
        "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
    }
    paths = []
    for name in formats:
        check_format(name)
        path = stem.with_name(f"{stem.name}.{name}")
        try:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=name, metadata=metadata[name])
            write_whole(path, buffer.getvalue())
        except OSError as error:
            raise UserError(f"cannot write {path} ({error.strerror or error}).") from error
        paths.append(path)
    return paths


def image_of(figure: Figure, title: str) -> str:
    """Return the figure as an image element; the title is its alternative text."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img class="plot" alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'
