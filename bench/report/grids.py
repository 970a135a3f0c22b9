"""Pictures of what attacks rebuilt, from the artifacts, as a figure for a paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bench.errors import UserError
from bench.harness.store import Store
from bench.records import RECONSTRUCTION, Cell, Row, canonical, check_kept
from bench.report.leaderboard import row_id
from bench.report.paper import Paper, inches, styled
from bench.toolkit.images import ssim

MOST_LINES = 24
"""Of pictures in one figure: more fit no page."""
_LABEL = 1.9
"""Inches for a line's name."""


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One line of pictures [N, C, H, W]; similar: SSIM under each, None for the private ones."""

    label: str
    images: Tensor
    similar: Tensor | None


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
    return _grid(_lines(pairs, victims), across)


def strongest(folder: Path, cells: Sequence[tuple[str, Cell]], rows: Sequence[Row]) -> list[Cell]:
    """Return the cell of each row's strongest attack, where it has pictures; of a long table the
    first rows. cells: of `leaderboard.cells_by_row`."""
    out: list[Cell] = []
    for row in rows[:MOST_LINES]:
        target = row_id(row), row.ranking and row.ranking.attack
        members = (c for name, c in cells if (name, c.label) == target)
        cell = next((c for c in members if _pair(folder, c) is not None), None)
        out += [cell] if cell else []
    return out


def _pair(folder: Path, cell: Cell) -> tuple[Tensor, Tensor] | None:
    """Truth and reconstruction [V, K, C, H, W] of a cell, None where it has no pictures."""
    store = Store(folder)
    path = store.artifacts(cell.key) / RECONSTRUCTION
    if not path.is_file():
        return None
    record = store.read("attack", cell.key)
    if record is not None:
        check_kept(path.parent, record, path.name)
    try:
        tensors = load_file(path)
        truth, images = tensors["truth"], tensors["images"]
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(f"{path} is no complete reconstruction ({error}).") from error
    if truth.shape != images.shape:
        raise UserError(f"{path} has images and a truth that do not fit together.")
    return (truth, images) if images.ndim == 5 else None


def _first_seed(cells: Sequence[Cell]) -> list[Cell]:
    first: dict[Any, Cell] = {}
    for cell in cells:
        first.setdefault((cell.name, cell.threat, canonical(cell.job.train.protocol)), cell)
    return list(first.values())


def _lines(pairs: Sequence[tuple[Cell, tuple[Tensor, Tensor]]], victims: int) -> list[_Line]:
    """Return private images before the first line and wherever they change; a line's name says what
    differs between lines."""
    differs = [len({part(c) for c, _ in pairs}) > 1 for part in _PARTS]
    lines: list[_Line] = []
    last: Tensor | None = None
    for cell, (truth, images) in pairs:
        private = truth.flatten(0, 1)[:victims]
        guess = images.flatten(0, 1)[:victims]
        if last is None or last.shape != private.shape or not torch.equal(last, private):
            lines.append(_Line(label="private", images=private, similar=None))
            last = private
        names = [part(cell) for part, d in zip(_PARTS, differs, strict=True) if d]
        label = "\n".join(names) if names else cell.label
        lines.append(_Line(label=label, images=guess, similar=ssim(guess, private)))
    return lines


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


def _grid(lines: Sequence[_Line], inches: float) -> Figure:
    from textwrap import wrap

    name = min(_LABEL, 0.42 * inches)
    columns = max(len(line.images) for line in lines)
    side = (inches - name) / columns
    below = 0.16
    height = sum(side + (0.06 if line.similar is None else below) for line in lines) + 0.05
    with styled():
        figure = Paper(figsize=(inches, height))
        # One pair of axes in inches for all pictures: hundreds of axes take seconds to draw.
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        top = height - 0.02
        for line in lines:
            text = "\n".join(
                piece
                for part in line.label.split("\n")
                for piece in wrap(part, width=int(name / 0.068))
            )
            axes.text(0.0, top - side / 2, text, va="center", ha="left", linespacing=1)
            for i, image in enumerate(line.images):
                left = name + i * side
                pixels = image.movedim(0, -1).clamp(0, 1).numpy()
                axes.imshow(
                    pixels[..., 0] if pixels.shape[-1] == 1 else pixels,
                    cmap="gray",
                    vmin=0,
                    vmax=1,
                    interpolation="nearest",
                    origin="upper",
                    extent=(
                        left + 0.03 * side,
                        left + 0.97 * side,
                        top - 0.97 * side,
                        top - 0.03 * side,
                    ),
                )
                if line.similar is not None:
                    axes.text(
                        left + side / 2,
                        top - side,
                        f"{float(line.similar[i]):.2f}",
                        ha="center",
                        va="top",
                    )
            top -= side + (0.06 if line.similar is None else below)
        axes.set(xlim=(0, inches), ylim=(0, height), aspect="equal")
    return figure


def _some(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - 8
    return ", ".join(distinct[:8]) + (f" and {more} more" if more > 0 else "")
