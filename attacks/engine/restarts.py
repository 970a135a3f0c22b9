"""Several starts per victim, chosen by the attack's own loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attacks.engine.lbfgs import minimise
from attacks.engine.matching import Matcher
from bench.api import Context

Start = Literal["gray", "uniform", "normal"]
_GUESS_LOGIT = 3.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """evaluations: per start (0: the cell's budget). restarts: further starts per victim.
    history: L-BFGS pairs. tolerance: a victim is solved at loss <= tolerance * |observation|^2.
    start: of the first wave without noise; gray (0.5) for one image, else random, since equal
    images cannot part."""

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
class Labels:
    """What is known of the labels of V victims.

    fixed: int64 [V, K], held in every start. ranking: int64 [V, C], the classes of a victim's
    single sample from the likeliest down: start k tries the k-th. hold: whether a start keeps
    its guess, or only begins there and optimises a soft label.
    """

    fixed: Tensor | None = None
    ranking: Tensor | None = None
    hold: bool = False

    def held(self, chosen: Tensor, turn: Tensor) -> Tensor | None:
        """Labels [P, K] that the starts `turn` [P] of the victims `chosen` [P] hold fixed."""
        if self.fixed is not None:
            return self.fixed[chosen]
        return self.guessed(chosen, turn) if self.hold else None

    def guessed(self, chosen: Tensor, turn: Tensor) -> Tensor | None:
        """Guessed labels [P, 1] of the starts, or None."""
        if self.ranking is None:
            return None
        return self.ranking[chosen, turn % self.ranking.shape[1]][:, None]


class Solution:
    """The best start of every victim so far.

    images [V, K, *shape], labels int64 [V, K], loss [V]. evaluations in all; diverged: starts
    without a finite loss; solved: victims that met the tolerance, None under noise.
    """

    def __init__(self, matcher: Matcher, victims: int) -> None:
        shape = (victims, matcher.samples, *matcher.shape)
        self.images = torch.full(shape, torch.nan, dtype=matcher.dtype, device=matcher.device)
        self.labels = torch.zeros(shape[:2], dtype=torch.int64, device=matcher.device)
        self.loss = torch.full_like(matcher.observation.square, torch.inf)
        self.evaluations = self.diverged = 0
        self.solved: int | None = None

    @property
    def failed(self) -> Tensor:
        """Bool [V]: no start had a finite loss."""
        return ~torch.isfinite(self.loss)

    def take(self, chosen: Tensor, loss: Tensor, images: Tensor, labels: Tensor) -> None:
        """Keep what is better; every victim of a wave has equally many starts, side by side."""
        victims = chosen.unique_consecutive()
        count = len(chosen) // len(victims)
        least, which = loss.view(-1, count).min(dim=1)
        rows = torch.arange(len(victims), device=chosen.device) * count + which
        better = least < self.loss[victims]
        self.images[victims[better]] = images[rows[better]]
        self.labels[victims[better]] = labels[rows[better]]
        self.loss[victims[better]] = least[better]


def solve(matcher: Matcher, ctx: Context, settings: Settings, known: Labels) -> Solution:
    """Match every victim's upload; the start of least loss is the answer.

    Without noise a first wave starts from plain pixels, as in the papers; victims that it does
    not solve get `restarts` more starts relative to the public prior, the first from its mean.
    Under noise all 1 + restarts starts are relative to the prior and run as one wave.
    """
    square = matcher.observation.square
    victims = torch.arange(len(square), device=matcher.device)
    noisy = matcher.noise is not None
    # Under noise no loss is "solved": the likelihood has no known minimum.
    stop = torch.full_like(square, -torch.inf) if noisy else settings.tolerance * square
    solution = Solution(matcher, len(victims))

    def wave(who: Tensor, count: int, *, framed: bool) -> None:
        chosen = who.repeat_interleave(count)
        turn = torch.arange(count, device=who.device).repeat(len(who))
        held = known.held(chosen, turn)
        start = (
            _prior_starts(matcher, ctx, len(who), count, same=known.ranking is not None)
            if framed
            else _plain_starts(matcher, ctx, settings.start, len(who))
        )
        if held is None:
            logits = _logits(matcher, ctx, known.guessed(chosen, turn), len(chosen))
            start = torch.cat([start, logits], dim=1)
        found = minimise(
            matcher.evaluator(chosen, held, framed=framed),
            start.to(dtype=matcher.dtype, device=matcher.device),
            stop=stop[chosen],
            max_evaluations=settings.evaluations or ctx.budget,
            history=settings.history,
            least_gain=1e-5 if noisy else 1e-7,
        )
        solution.evaluations += int(found.evaluations.sum())
        solution.diverged += int(found.diverged.sum())
        labels = matcher.labels_in(found.x).argmax(dim=-1) if held is None else held
        images = matcher.images(found.x, held, framed=framed)
        solution.take(chosen, found.loss, images, labels)

    if noisy:
        wave(victims, 1 + settings.restarts, framed=True)
    else:
        wave(victims, 1, framed=False)
        ctx.progress(0.3)
        unsolved = victims[~(solution.loss <= stop)]
        if len(unsolved) and settings.restarts:
            wave(unsolved, settings.restarts, framed=True)
        solution.solved = int((solution.loss <= stop).sum())
    ctx.progress(1.0)
    return solution


def _plain_starts(matcher: Matcher, ctx: Context, start: Start, count: int) -> Tensor:
    """[count, N] pixels; tabular features start at 0, their mean. Several samples of one batch
    start at random, since equal ones could not part."""
    shape = (count, matcher.pixels)
    tabular = len(matcher.shape) != 3
    if start == "normal" or (tabular and (start == "uniform" or matcher.samples > 1)):
        return torch.randn(shape, generator=ctx.rng)
    if tabular:
        return torch.zeros(shape)
    if start == "uniform" or matcher.samples > 1:
        return torch.rand(shape, generator=ctx.rng)
    return torch.full(shape, 0.5)


def _prior_starts(
    matcher: Matcher, ctx: Context, victims: int, count: int, *, same: bool
) -> Tensor:
    """[victims * count, N] vectors relative to the prior: its mean first, then draws from it;
    same: all from the mean, where the starts already differ in their guessed label."""
    drawn = torch.randn((victims, count, matcher.pixels), generator=ctx.rng)
    around_mean = 0.0 if matcher.samples == 1 else 0.1
    drawn[:, 0] *= around_mean
    if same:
        drawn[:, 1:] *= around_mean
    return drawn.flatten(0, 1)


def _logits(matcher: Matcher, ctx: Context, guess: Tensor | None, count: int) -> Tensor:
    """[count, K * C] label logits: towards the guess, else even (perturbed for several)."""
    logits = torch.zeros(count, matcher.samples * matcher.classes)
    if guess is not None:
        logits.scatter_(1, guess.cpu(), _GUESS_LOGIT)
    elif matcher.samples > 1:
        logits = 0.1 * torch.randn(logits.shape, generator=ctx.rng)
    return logits
