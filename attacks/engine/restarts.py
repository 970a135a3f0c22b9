"""Several starts per victim, chosen by the attack's own loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attacks.engine.lbfgs import Minimum, minimise
from attacks.engine.matching import Matcher
from bench.api import Context

Start = Literal["gray", "uniform", "normal"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """evaluations: per start (0: the cell's budget). restarts: further random starts of a
    victim whose first start did not solve it. history: L-BFGS pairs. tolerance: a victim is
    solved at loss <= tolerance * |observation|^2. start: of the first wave; gray (0.5) for one
    image, else uniform noise, since equal images cannot part."""

    evaluations: int
    restarts: int
    history: int
    tolerance: float
    start: Start

    def __post_init__(self) -> None:
        for name, least in (("evaluations", 0), ("restarts", 0), ("history", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}.")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must lie in (0, 1), got {self.tolerance}.")
        if self.start not in ("gray", "uniform", "normal"):
            raise ValueError(f"start must be gray, uniform or normal, got '{self.start}'.")


@dataclass(frozen=True, kw_only=True)
class Solution:
    """z [V, N]: best candidate per victim; loss [V]; failed bool [V]; evaluations in all;
    replaced: diverged starts that were drawn again; solved: victims that met the tolerance."""

    z: Tensor
    loss: Tensor
    failed: Tensor
    evaluations: int
    replaced: int
    solved: int


def solve(
    matcher: Matcher, ctx: Context, settings: Settings, *, labels: Tensor | None
) -> Solution:
    """Match every victim's upload; labels: soft [V, K, C] to hold fixed, or None."""
    victims = torch.arange(
        len(next(iter(matcher.observation.values.values()))), device=matcher.device
    )
    budget = settings.evaluations or ctx.budget
    noisy = matcher.noise is not None
    # Under noise no loss is "solved": the likelihood has no known minimum.
    stop = (
        torch.full_like(matcher.observation.square, -torch.inf)
        if noisy
        else settings.tolerance * matcher.observation.square
    )

    def wave(chosen: Tensor, start: Tensor) -> Minimum:
        fixed = None if labels is None else labels[chosen]
        return minimise(
            matcher.evaluator(chosen, fixed),
            start,
            stop=stop[chosen],
            max_evaluations=budget,
            history=settings.history,
        )

    first = wave(victims, _starts(matcher, ctx, settings.start, len(victims), labels is None))
    ctx.progress(0.3)
    best_z, best_loss = first.x.clone(), first.loss.clone()
    spent, replaced = int(first.evaluations.sum()), 0
    unsolved = victims[~first.reached]
    if len(unsolved) and settings.restarts:
        many = unsolved.repeat_interleave(settings.restarts)
        again = wave(many, _starts(matcher, ctx, "uniform", len(many), labels is None))
        spent += int(again.evaluations.sum())
        lost = again.diverged.nonzero().squeeze(1)
        z, loss = again.x, again.loss
        if len(lost):  # drawn once more, and counted
            replaced = len(lost)
            retry = wave(
                many[lost], _starts(matcher, ctx, "uniform", len(lost), labels is None)
            )
            spent += int(retry.evaluations.sum())
            z, loss = z.clone(), loss.clone()
            z[lost], loss[lost] = retry.x, retry.loss
        grouped = loss.view(len(unsolved), settings.restarts)
        least, which = grouped.min(dim=1)
        rows = torch.arange(len(unsolved), device=z.device)
        candidates = z.view(len(unsolved), settings.restarts, -1)[rows, which]
        better = least < best_loss[unsolved]
        best_z[unsolved[better]] = candidates[better]
        best_loss[unsolved[better]] = least[better]
    ctx.progress(1.0)
    return Solution(
        z=best_z,
        loss=best_loss,
        failed=~torch.isfinite(best_loss),
        evaluations=spent,
        replaced=replaced,
        solved=int((best_loss <= stop).sum()),
    )


def _starts(matcher: Matcher, ctx: Context, start: Start, count: int, with_labels: bool) -> Tensor:
    """[count, N] images (and zero label logits). Tabular features start at 0, their mean."""
    shape = (count, matcher.pixels)
    if len(matcher.shape) != 3:
        images = torch.randn(shape, generator=ctx.rng) if start != "gray" else torch.zeros(shape)
    elif start == "normal":
        images = torch.randn(shape, generator=ctx.rng)
    elif start == "uniform" or matcher.images > 1:
        images = torch.rand(shape, generator=ctx.rng)
    else:
        images = torch.full(shape, 0.5)
    if with_labels:
        logits = torch.zeros(count, matcher.images * matcher.classes)
        if matcher.images > 1:
            logits = 0.1 * torch.randn(logits.shape, generator=ctx.rng)
        images = torch.cat([images, logits], dim=1)
    return images.to(dtype=matcher.dtype, device=matcher.device)
