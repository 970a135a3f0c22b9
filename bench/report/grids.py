"""Pictures of what attacks rebuilt, from the artifacts, as a figure for a paper."""

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from bench.errors import UserError
from bench.harness.store import Store
from bench.records import RECONSTRUCTION, Cell, canonical
from bench.report.paper import Paper, inches, style_figures
from bench.report.pictures import read_pair
from bench.toolkit.images import ssim

MOST_LINES = 24
"""Of pictures in one figure: more fit no page."""
_LABEL = 1.9
"""Inches for a line's name."""


_SCORE = 0.16
"""Inches for the scores below a line."""


def pictures(
    folder: Path, cells: Sequence[Cell], *, victims: int = 8, width: str = "page"
) -> Figure:
    """Draw private images above each cell's reconstructions: the first `victims` of the run's
    order, of each cell's first seed, never chosen by hand. Samples of a larger batch follow each
    other.

    Raises UserError if no cell has pictures, or more than a page holds.
    """
    across = inches(width)
    if isinstance(victims, bool) or not isinstance(victims, int) or victims < 1:
        raise UserError(f"victims must be a whole number >= 1, got {victims!r}.")
    cells = _first_seed(cells)
    pairs = [(c, p) for c in cells if (p := _pair(folder, c)) is not None]
    if not pairs:
        raise UserError(
            f"none of {_some([c.name for c in cells])} has pictures: its attack rebuilds no "
            "images, did not apply, or the folder came without artifacts."
        )
    if len(pairs) > MOST_LINES:
        raise UserError(
            f"{len(pairs)} lines of pictures, but a page holds {MOST_LINES}: give dataset, "
            f"checkpoint, defense, settings or attack, e.g. of {_some([c.name for c, _ in pairs])}."
        )
    return _grid(list(_lines(pairs, victims)), across)


def _pair(folder: Path, cell: Cell) -> tuple[np.ndarray, np.ndarray] | None:
    """Return truth and reconstruction [V, K, C, H, W] of a cell, None where it has no pictures."""
    store = Store(folder)
    path = store.artifacts(cell.key) / RECONSTRUCTION
    if not path.is_file():
        return None
    images, truth = read_pair(path, store.read("attack", cell.key), sys.maxsize, sys.maxsize)
    return (truth, images) if images.ndim == 5 else None


def _first_seed(cells: Sequence[Cell]) -> list[Cell]:
    first: dict[Any, Cell] = {}
    for cell in cells:
        first.setdefault((cell.name, cell.threat, canonical(cell.job.train.protocol)), cell)
    return list(first.values())


def _lines(
    pairs: Sequence[tuple[Cell, tuple[np.ndarray, np.ndarray]]], victims: int
) -> Iterator[tuple[str, np.ndarray, Sequence[float]]]:
    """Yield the name, images [N, C, H, W] and SSIM of each line; private images, which have none,
    before the first and wherever they change. A name says what differs between lines."""
    differs = [len({part(c) for c, _ in pairs}) > 1 for part in _PARTS]
    last = np.empty(0)
    for cell, pair in pairs:
        private, guess = (torch.from_numpy(x).flatten(0, 1)[:victims] for x in pair)
        if not np.array_equal(last, private.numpy()):
            last = private.numpy()
            yield "private", last, ()
        names = [part(cell) for part, d in zip(_PARTS, differs, strict=True) if d]
        yield "\n".join(names) or cell.label, guess.numpy(), ssim(guess, private).tolist()


def _words(cell: Cell) -> str:
    """Return the setting in words that a narrow line can break between."""
    pairs = (f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in cell.settings.items())
    return " ".join([cell.defense, *pairs])


_PARTS: tuple[Callable[[Cell], str], ...] = (
    lambda c: f"{c.protocol} {c.dataset} {c.model}",
    _words,
    lambda c: c.label,
    lambda c: f"{c.checkpoint} round",
)


def _grid(lines: Sequence[tuple[str, np.ndarray, Sequence[float]]], across: float) -> Figure:
    name = min(_LABEL, 0.42 * across)
    most = max(len(images) for _, images, _ in lines)
    height = len(lines) * ((across - name) / most + _SCORE)
    with style_figures():
        figure = Paper(figsize=(across, height), layout="constrained")
        places = figure.subplots(len(lines), squeeze=False)[:, 0]
        for axes, (label, images, scores) in zip(places, lines, strict=True):
            # One picture per line, white between images: hundreds of axes take seconds to draw.
            white = ((0, most - len(images)), (0, 0), (0, 0), (1, 1))
            strip = np.concatenate(np.pad(images.clip(0, 1), white, constant_values=1), axis=-1)
            pixels = np.moveaxis(strip, 0, -1)
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            wrapped = [textwrap.fill(part, int(name / 0.068)) for part in label.split("\n")]
            axes.set_ylabel("\n".join(wrapped), rotation=0, ha="right", va="center")
            middles = (np.arange(len(scores)) + 0.5) * (images.shape[-1] + 2)
            axes.set_xticks(middles, [f"{score:.2f}" for score in scores])
            axes.set(yticks=[])
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
    return figure


def _some(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - 8
    return ", ".join(distinct[:8]) + (f" and {more} more" if more > 0 else "")
