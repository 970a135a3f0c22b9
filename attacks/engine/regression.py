"""Ridge regressions in closed form: from all features, its penalty by exact leave-group-out, and,
where activations lie on a grid over the image (a convolution's map, a transformer's tokens), one
whose weights are the same at every place. That one predicts a cell's pixels from the cells around
it, and has far fewer unknowns than a regression from all cells to all pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LAMBDAS = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e4)
"""Penalties tried, in units of the mean eigenvalue of the features' Gram matrix."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """y = (x - centres[s]) @ weight + offsets[s] for a sample of stratum s.

    Attributes:
        centres: Means of the features by stratum [S, F].
        weight: [F, P].
        offsets: Means of the targets by stratum [S, P].
        left_out: Prediction of every training row by the fit without its whole group, [R, P].
        loss: Of the left-out predictions that were judged.
    """

    centres: Tensor
    weight: Tensor
    offsets: Tensor
    left_out: Tensor
    loss: float

    def __call__(self, x: Tensor, stratum: int | Tensor) -> Tensor:
        return (x.double() - self.centres[stratum]) @ self.weight + self.offsets[stratum]


class Features:
    """Features of R rows, decomposed once for the regressions of any targets on them.

    Args:
        x: Features [R, F].
        group: So many consecutive rows belong together and are left out together.
        strata: 0..S-1, int64 [R]; None: all are of one.
    """

    def __init__(self, x: Tensor, *, group: int, strata: Tensor | None = None) -> None:
        x = x.double()
        strata = x.new_zeros(len(x), dtype=torch.int64) if strata is None else strata
        self.group, self.strata = group, strata
        self.member = torch.nn.functional.one_hot(strata).double()
        self.count = self.member.sum(dim=0).clamp_min(1)
        self.centres = self.member.mT @ x / self.count[:, None]
        self.inner = x - self.centres[strata]
        self.narrow = x.shape[1] <= len(x)
        gram = self.inner.mT @ self.inner if self.narrow else self.inner @ self.inner.mT
        values, self.vectors = torch.linalg.eigh(gram)
        # The intercepts' directions have eigenvalue 0: of rounding, a tiny penalty would make much.
        self.values = torch.where(values > 1e-12 * values.max(), values, 0.0)
        self.z = self.inner @ self.vectors if self.narrow else self.vectors * self.values.sqrt()


def fit(features: Features, y: Tensor, *, judged: Tensor, judge: Callable[[Tensor], Tensor]) -> Fit:
    """Ridge regression with one free intercept per stratum; penalty by exact leave-group-out.

    Solved in float64, in the smaller of F and R dimensions. With the smoother
    H = Z (E + lambda)^-1 Z^T + (intercepts), the residual without group g is (I - H_gg)^-1 r_g:
    the leave-one-out formula for blocks (Hastie, Tibshirani, Friedman, The Elements of
    Statistical Learning, Eq. 7.64, is its case of one row).

    Args:
        features: Of R rows.
        y: Targets [R, P].
        judged: Rows by whose left-out predictions the penalty is chosen, bool [R].
        judge: Their left-out predictions [J, P] -> loss.
    """
    y, f, group = y.double(), features, features.group
    values, z = f.values, f.z
    offsets = f.member.mT @ y / f.count[:, None]
    target = y - offsets[f.strata]
    ztarget, unit = z.mT @ target, values.mean().clamp_min(1e-300)
    blocks = z.view(-1, group, z.shape[1])
    ones = (f.member / f.count.sqrt()).view(-1, group, f.member.shape[1])
    shared, eye = ones @ ones.mT, torch.eye(group, dtype=y.dtype, device=y.device)
    targets = target.view(-1, group, target.shape[1])
    outcomes = y.view(-1, group, y.shape[1])

    def leave_out(factor: float, some: Tensor) -> Tensor:
        inverse = 1 / (values + factor * unit)
        part = blocks[some] * inverse
        rest = targets[some] - part @ ztarget
        # A group that alone holds a stratum or a direction has no equation left: keep it finite.
        alone = eye * (1 + 1e-13) - part @ blocks[some].mT - shared[some]
        return outcomes[some] - torch.linalg.solve(alone, rest)

    some = judged.view(-1, group).any(dim=1).nonzero()[:, 0]
    within = judged.view(-1, group)[some].nonzero(as_tuple=True)
    losses = torch.stack([judge(leave_out(factor, some)[within]) for factor in LAMBDAS]).tolist()
    best = min(range(len(losses)), key=losses.__getitem__)
    inverse = 1 / (values + LAMBDAS[best] * unit)
    if f.narrow:
        weight = f.vectors @ (inverse[:, None] * ztarget)
    else:
        weight = f.inner.mT @ (f.vectors @ (inverse[:, None] * (f.vectors.mT @ target)))
    everyone = torch.arange(len(blocks), device=y.device)
    return Fit(
        centres=f.centres,
        weight=weight,
        offsets=offsets,
        left_out=leave_out(LAMBDAS[best], everyone).flatten(0, 1),
        loss=losses[best],
    )


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
    size = grid_shape(shape)
    if size is None:
        raise ValueError(f"activations of shape {list(shape)} lie on no grid.")
    if len(shape) == 3:
        return flat.reshape(-1, *size)
    tokens = flat.reshape(-1, *shape)[:, shape[0] - size[1] * size[2] :]
    return tokens.mT.reshape(-1, *size)


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
    factors: Sequence[float] = LAMBDAS,
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

    def leave_out(some: Tensor, tried: Sequence[float]) -> Tensor:
        """Blocks [L, J, h * w, P] of the rows `some` (bool [R]), in their order."""
        where = some.nonzero()[:, 0]
        out = torch.empty(len(tried), len(where), *y.shape[1:], device=x.device)
        for fitted, rows in zip(fits, _rows(fold[where]), strict=True):
            if len(rows):
                at = where[rows]
                out[:, rows] = fitted.predict(look, seen.of(at), turn[at], tried)
        return out

    tried = leave_out(judged, factors)
    losses = torch.stack([judge(uncut(guess, size, shape)) for guess in tried]).tolist()
    best = [factors[min(range(len(losses)), key=losses.__getitem__)]]
    upright = torch.zeros(len(victims), dtype=torch.int64, device=x.device)
    everyone = leave_out(torch.ones_like(judged), best)[0]
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
