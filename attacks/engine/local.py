"""Ridge regression whose weights are the same at every place: a cell's pixels from the cells
around it. It has far fewer unknowns than a regression from all cells to all pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attacks.engine.grid import Grid, cells, surroundings, uncut

FOLDS = 5
"""Parts of the public images, each predicted by a fit without it."""
TAUGHT = 20_000
"""Cells that a fit learns from, about: more are no better but take their time."""
WIDTH = 1200
"""Features of a cell, about; wider activations are reduced to principal components."""
CHUNK = 8192
"""Cells whose features are in memory at a time."""


def fit_local(
    seen: Grid,
    x: Tensor,
    victims: Grid,
    *,
    group: int,
    turn: Tensor,
    judged: Tensor,
    judge: Callable[[Tensor], Tensor],
    factors: Sequence[float],
) -> tuple[Tensor, Tensor, float]:
    """Images [R, C, H, W] and the victims' by their cells' surroundings.

    Whole folds are left out instead of single images: a regression on top of left-out
    predictions would find in these the trace of the one image that each is without.

    Args:
        seen: Of R pairs; its cells must cut the images into equal blocks.
        x: Their images.
        victims: What is to be inverted.
        group: So many consecutive pairs show the same public image.
        turn: Each turn and place has its own intercept, int64 [R]; victims have turn 0.
        judged: Pairs by whose left-out images [J, ...] the penalty is chosen (`judge`), bool [R].
        judge: Their left-out images -> loss.
        factors: Penalties tried, in units of the mean eigenvalue.

    Returns:
        Each training image by a fit without the fold that it is in [R, *shape], the victims'
        [M, *shape], and the loss of the left-out images that were judged.
    """
    size, shape = seen.size, tuple(x.shape[1:])
    look, y = Surroundings(seen), cells(x, size)
    images = len(x) // group
    few = min(images, max(2 * FOLDS, TAUGHT // (math.prod(size) * group)))
    fold = torch.full((images,), FOLDS)  # images that no fit learns from
    fold[torch.linspace(0, images - 1, few).round().long()] = torch.arange(few) % FOLDS
    fold = fold.repeat_interleave(group).to(x.device)
    parts = [_moments(look, seen.of(r), y[r], turn[r]) for r in _rows(fold)[:FOLDS]]
    total = Moments(*(sum(t[1:], start=t[0]) for t in zip(*parts, strict=True)))
    fits = [PlaceFit(Moments(*(a - b for a, b in zip(total, p, strict=True)))) for p in parts]
    fits.append(PlaceFit(total))

    def left_out(some: Tensor, tried: Sequence[float]) -> Tensor:
        """Blocks [L, J, h * w, P] of the rows `some` (bool [R]), in their order."""
        where = some.nonzero()[:, 0]
        out = torch.empty(len(tried), len(where), *y.shape[1:], device=x.device)
        for fitted, rows in zip(fits, _rows(fold[where]), strict=True):
            if len(rows):
                at = where[rows]
                out[:, rows] = fitted.predict(look, seen.of(at), turn[at], tried)
        return out

    tried = left_out(judged, factors)
    losses = torch.stack([judge(uncut(guess, size, shape)) for guess in tried]).tolist()
    best = [factors[min(range(len(losses)), key=losses.__getitem__)]]
    upright = torch.zeros(len(victims), dtype=torch.int64, device=x.device)
    everyone = left_out(torch.ones_like(judged), best)[0]
    predicted = fits[-1].predict(look, victims, upright, best)[0]
    return uncut(everyone, size, shape), uncut(predicted, size, shape), min(losses)


def _rows(fold: Tensor) -> list[Tensor]:
    return [(fold == k).nonzero()[:, 0] for k in range(FOLDS + 1)]


class Surroundings:
    """What a cell's regression sees: the 3 x 3 cells around it, as departures from their mean.

    An absent or outer cell is 0. Where cells can be absent, so is who is present, and the
    neighbours once more for those cells that are absent themselves, since these need them most.
    """

    def __init__(self, grid: Grid) -> None:
        values = grid.values
        there = torch.ones_like(values[:, :1]) if grid.present is None else grid.present
        self.centre = (values * there).sum(dim=0) / there.sum(dim=0).clamp_min(1e-6)
        inner = ((values - self.centre) * there).transpose(0, 1).flatten(1)
        self.scale = inner.square().mean().sqrt().clamp_min(1e-12)
        width = WIDTH // (9 if grid.present is None else 17)
        self.axes: Tensor | None = None
        if len(inner) > width:
            inner = inner.double()
            self.axes = torch.linalg.eigh(inner @ inner.mT)[1][:, -width:].to(values)

    def __call__(self, grid: Grid) -> Tensor:
        """[M, h * w, F] float32."""
        inner = (grid.values - self.centre) / self.scale
        if grid.present is not None:
            inner = inner * grid.present
        if self.axes is not None:
            inner = torch.einsum("mdhw,de->mehw", inner, self.axes)
        if grid.present is None:
            return surroundings(inner).flatten(2)
        around = surroundings(torch.cat([inner, grid.present], dim=1))
        alone = 1 - grid.present.flatten(2).mT[..., None]
        others = around[..., [0, 1, 2, 3, 5, 6, 7, 8]] * alone
        return torch.cat([around.flatten(2), others.flatten(2)], dim=2)


class Moments(NamedTuple):
    """Sums over samples and places, float64: gram [F, F], cross [F, P]; over samples, by turn:
    x [S, h * w, F], y [S, h * w, P], samples [S]."""

    gram: Tensor
    cross: Tensor
    x: Tensor
    y: Tensor
    samples: Tensor


def _moments(look: Surroundings, grid: Grid, y: Tensor, turn: Tensor) -> Moments:
    turns = torch.nn.functional.one_hot(turn, 4).double()
    out: Moments | None = None
    for some in _chunks(grid):
        x, target, member = look(grid.of(some)).double(), y[some].double(), turns[some]
        flat = x.flatten(0, 1)
        part = Moments(
            gram=flat.mT @ flat,
            cross=flat.mT @ target.flatten(0, 1),
            x=torch.einsum("ms,mjf->sjf", member, x),
            y=torch.einsum("ms,mjp->sjp", member, target),
            samples=member.sum(dim=0),
        )
        out = part if out is None else Moments(*(a + b for a, b in zip(out, part, strict=True)))
    assert out is not None
    return out


def _chunks(grid: Grid) -> tuple[Tensor, ...]:
    rows = torch.arange(len(grid), device=grid.values.device)
    return rows.split(max(1, CHUNK // math.prod(grid.size)))


class PlaceFit:
    """Solution for all penalties, from the moments."""

    def __init__(self, moments: Moments) -> None:
        count = moments.samples.clamp_min(1)[:, None, None]
        self.centres, self.offsets = moments.x / count, moments.y / count
        sums = moments.x.flatten(0, 1).mT
        gram = moments.gram - sums @ self.centres.flatten(0, 1)
        values, self.vectors = torch.linalg.eigh(gram)
        self.values = torch.where(values > 1e-12 * values.max(), values, 0.0)
        self.target = self.vectors.mT @ (moments.cross - sums @ self.offsets.flatten(0, 1))

    def predict(
        self, look: Surroundings, grid: Grid, turn: Tensor, factors: Sequence[float]
    ) -> Tensor:
        """Blocks [L, M, h * w, P] float32, one set per penalty."""
        unit = self.values.mean().clamp_min(1e-300)
        weights = [
            self.vectors @ (self.target / (self.values + f * unit)[:, None]) for f in factors
        ]
        out = []
        for some in _chunks(grid):
            inner = look(grid.of(some)).double() - self.centres[turn[some]]
            offset = self.offsets[turn[some]]
            out.append(torch.stack([(inner @ w + offset).float() for w in weights]))
        return torch.cat(out, dim=1)
