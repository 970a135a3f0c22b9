"""Activations that lie on a grid over the image: a convolution's map, a transformer's tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Activations of M samples on h x w cells of the image.

    Attributes:
        values: D numbers for each cell [M, D, h, w].
        present: Share of a cell's numbers that were sent [M, 1, h, w] (absent ones are 0 in
            `values`), or None where all always are.
    """

    values: Tensor
    present: Tensor | None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def size(self) -> tuple[int, int]:
        return self.values.shape[2], self.values.shape[3]

    def of(self, rows: Tensor) -> Grid:
        """The samples `rows`, int64."""
        present = None if self.present is None else self.present[rows]
        return Grid(values=self.values[rows], present=present)

    def tiles(self, shape: tuple[int, ...]) -> bool:
        """Whether the cells cut images of this shape into equal blocks."""
        return len(shape) == 3 and not (shape[1] % self.size[0] or shape[2] % self.size[1])


def grid_shape(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(D, h, w) of one sample's activations, or None if they have no places.

    shape: a map's [D, h, w], or [N, D] of tokens that fill a square row by row, N = n^2, or
    N = 1 + n^2 with a class token first. A single cell is no grid.
    """
    if len(shape) == 2:
        side = math.isqrt(shape[0])
        if side * side in (shape[0], shape[0] - 1) and side > 1:
            return shape[1], side, side
    if len(shape) == 3 and shape[1] * shape[2] > 1:
        return shape[0], shape[1], shape[2]
    return None


def on_grid(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Activations [M, prod(shape)] as [M, D, h, w], without a class token.

    Raises ValueError if `shape` has no grid.
    """
    found = grid_shape(shape)
    if found is None:
        raise ValueError(f"activations of shape {list(shape)} lie on no grid.")
    if len(shape) == 3:
        return flat.reshape(-1, *found)
    tokens = flat.reshape(-1, *shape)[:, shape[0] - found[1] * found[2] :]
    return tokens.mT.reshape(-1, *found)


def cells(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Images [M, C, H, W] cut into h x w equal blocks -> [M, h * w, C * H/h * W/w]."""
    count, channels, *sides = images.shape
    p, q = sides[0] // size[0], sides[1] // size[1]
    cut = images.reshape(count, channels, size[0], p, size[1], q)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(count, size[0] * size[1], channels * p * q)


def uncut(blocks: Tensor, size: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Inverse of `cells`: [..., h * w, C * p * q] -> [..., *shape], shape = (C, h * p, w * q)."""
    p, q = shape[1] // size[0], shape[2] // size[1]
    cut = blocks.reshape(-1, *size, shape[0], p, q).permute(0, 3, 1, 4, 2, 5)
    return cut.reshape(*blocks.shape[:-2], *shape)


def surroundings(values: Tensor) -> Tensor:
    """Numbers of the 3 x 3 cells around each one, 0 outside: [M, D, h, w] -> [M, h * w, D, 9]."""
    seen = torch.nn.functional.unfold(values, 3, padding=1)
    return seen.unflatten(1, (values.shape[1], 9)).permute(0, 3, 1, 2)
