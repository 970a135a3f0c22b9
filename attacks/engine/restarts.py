"""Several starts per victim, chosen by the attack's own loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from attacks.engine.chunks import in_chunks
from attacks.engine.lbfgs import Minimum, Redraw
from attacks.engine.matching import Matcher
from bench.api import Context, Reconstruction

Start = Literal["public", "gray", "uniform", "normal"]
STARTS: tuple[Start, ...] = ("public", "gray", "uniform", "normal")
_GUESS_LOGIT = 3.0
_CANDIDATES = 32


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Starts that run together: `count` per victim. framed: relative to the public prior, the
    first from its mean, else plain pixels begun as `start` says: `public` takes the public
    samples that explain the victim's upload best, of 32 drawn with its likely labels; after the
    first, a gray start is uniform; several samples of one batch never start equal, since equal
    images cannot part. above: only victims whose loss exceeds this, [V] (None: all).
    noisy_logits: label logits from N(0, 1), as DLG prints it."""

    count: int
    framed: bool = False
    start: Start = "gray"
    above: Tensor | None = None
    noisy_logits: bool = False


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What is known of the labels of V victims.

    fixed: int64 [V, K], held in every start. ranking: int64 [V, C], the classes of a victim's
    single sample from the likeliest down: start k tries the k-th. hold: whether a start keeps
    its guess, or only begins there and optimises a soft label. notes: how they were read.
    """

    fixed: Tensor | None = None
    ranking: Tensor | None = None
    hold: bool = False
    notes: tuple[str, ...] = ()

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


@dataclass(frozen=True, kw_only=True)
class Problems:
    """P starts for an optimiser: whose upload each matches [P], labels held [P, K] or None,
    whether vectors are relative to the prior, starts [P, N], stop loss [P], and other starts for
    those without a finite loss."""

    victims: Tensor
    held: Tensor | None
    framed: bool
    start: Tensor
    stop: Tensor
    redraw: Redraw


class Optimiser(Protocol):
    """Solves problems. bytes_each: memory of one problem of N numbers, for the chunks."""

    def __call__(self, problems: Problems) -> Minimum: ...

    def bytes_each(self, numbers: int) -> int: ...


class Solution:
    """The best start of every victim so far.

    images [V, K, *shape], labels int64 [V, K], loss [V]. evaluations in all; redrawn: starts
    replaced for want of a finite loss; solved: victims at or below their stop value.
    """

    def __init__(self, matcher: Matcher) -> None:
        shape = (matcher.victims, matcher.samples, *matcher.shape)
        self.images = torch.full(shape, torch.nan, dtype=matcher.dtype, device=matcher.device)
        self.labels = torch.zeros(shape[:2], dtype=torch.int64, device=matcher.device)
        self.loss = torch.full_like(matcher.square, torch.inf)
        self.evaluations = self.redrawn = self.solved = 0

    @property
    def failed(self) -> Tensor:
        """Bool [V]: no start had a finite loss, or nothing was sent but zeros."""
        return ~torch.isfinite(self.loss)

    def answer(self, matcher: Matcher, notes: Sequence[str]) -> Reconstruction:
        """The reconstruction of every victim, images clamped to [0, 1]."""
        silent = int(matcher.silent.sum())
        if silent:
            notes = [*notes, f"of {silent} victims nothing was sent but zeros"]
        images = self.images.clamp(0, 1) if len(matcher.shape) == 3 else self.images
        counts = torch.nn.functional.one_hot(self.labels, matcher.classes).sum(dim=1)
        return Reconstruction(
            images=images.float().cpu(),
            labels=self.labels.cpu(),
            label_counts=counts.cpu(),
            loss=self.loss.cpu(),
            failed=self.failed.cpu(),
            evaluations=self.evaluations,
            notes=tuple(notes),
        )

    def take(self, chosen: Tensor, loss: Tensor, images: Tensor, labels: Tensor) -> None:
        """Keep what is better; every victim of a wave has equally many starts, side by side."""
        victims = chosen.unique_consecutive()
        count = len(chosen) // len(victims)
        least, which = loss.to(self.loss).view(-1, count).min(dim=1)
        rows = torch.arange(len(victims), device=chosen.device) * count + which
        better = least < self.loss[victims]
        self.images[victims[better]] = images[rows[better]].to(self.images)
        self.labels[victims[better]] = labels[rows[better]]
        self.loss[victims[better]] = least[better]


def solve(
    matcher: Matcher,
    ctx: Context,
    *,
    waves: Sequence[Wave],
    known: Labels,
    stop: Tensor,
    optimiser: Optimiser,
) -> Solution:
    """Match what was seen of every victim; the start of least loss is the answer.

    stop: [V], loss at which a victim is solved (-inf where none is known, as under noise).
    Every start draws from a generator of its own, so that a problem's numbers do not depend on
    the chunk it ran in.
    """
    solution = Solution(matcher)
    everyone = (~matcher.silent).nonzero().squeeze(1)
    for number, wave in enumerate(waves):
        who = everyone if wave.above is None else everyone[~(solution.loss <= wave.above)[everyone]]
        if len(who):
            _play(matcher, ctx, wave, known, stop, optimiser, who, solution)
        ctx.progress((number + 1) / len(waves))
    solution.solved = int((solution.loss <= stop).sum())
    return solution


def _play(
    matcher: Matcher,
    ctx: Context,
    wave: Wave,
    known: Labels,
    stop: Tensor,
    optimiser: Optimiser,
    who: Tensor,
    solution: Solution,
) -> None:
    chosen = who.repeat_interleave(wave.count)
    turn = torch.arange(wave.count, device=who.device).repeat(len(who))
    held = known.held(chosen, turn)
    guess = known.guessed(chosen, turn)
    same = wave.framed and known.ranking is not None
    # Every start has its own generator: (victim, turn) alone decides what it draws.
    draws = [_Draw(_own(ctx.rng), matcher, wave, first=t == 0, same=same) for t in turn.tolist()]
    if wave.start == "public" and not wave.framed:
        labels = held if held is not None else guess
        start, public = _public_starts(matcher, ctx, chosen, labels, wave.count, solution)
        guess = public if guess is None else guess
    else:
        start = torch.stack([d.images() for d in draws])
    if held is None:
        logits = torch.stack([d.logits() for d in draws])
        if guess is not None:
            logits = logits.unflatten(1, (matcher.samples, -1))
            logits = logits.scatter(2, guess.cpu()[..., None], _GUESS_LOGIT).flatten(1)
        start = torch.cat([start, logits.to(start)], dim=1)
    start = start.to(dtype=matcher.dtype, device=matcher.device)
    found: list[Minimum] = []

    def work(part: slice) -> None:
        def redraw(rows: Tensor) -> Tensor:
            again = torch.stack([draws[part][i].again() for i in rows.tolist()])
            return torch.cat([again.to(start), start[part][rows, matcher.pixels :]], dim=1)

        found.append(
            optimiser(
                Problems(
                    victims=chosen[part], held=None if held is None else held[part],
                    framed=wave.framed, start=start[part], stop=stop[chosen[part]], redraw=redraw,
                )
            )
        )  # fmt: skip

    in_chunks(
        work, len(chosen), bytes_each=optimiser.bytes_each(start.shape[1]), device=matcher.device
    )
    x, loss = torch.cat([f.x for f in found]), torch.cat([f.loss for f in found])
    solution.evaluations += sum(int(f.evaluations.sum()) for f in found)
    solution.redrawn += sum(f.redrawn for f in found)
    labels = matcher.labels_in(x).argmax(dim=-1) if held is None else held
    solution.take(chosen, loss, matcher.images(x, held, framed=wave.framed), labels)


def _public_starts(
    matcher: Matcher,
    ctx: Context,
    chosen: Tensor,
    labels: Tensor | None,
    count: int,
    solution: Solution,
) -> tuple[Tensor, Tensor]:
    """Public samples that explain the uploads best: vectors [P, K * D], their labels [P, K].

    chosen: [P] victims, `count` rows each; labels: [P, K] to draw the samples by, or None.
    """
    aux_x, aux_y = ctx.aux_x.to(matcher.device), ctx.aux_y.cpu()
    candidates = max(_CANDIDATES, count)
    shape = (len(chosen) // count, candidates, matcher.samples)
    rng = _own(ctx.rng)
    if labels is None:
        picks = torch.randint(len(aux_y), shape, generator=rng)
    else:
        # By class where it has public samples: a random place in the class's sorted stretch.
        order, have = aux_y.argsort(stable=True), torch.bincount(aux_y, minlength=matcher.classes)
        wanted = labels[::count].cpu()[:, None].expand(shape)
        size, first = have[wanted], (have.cumsum(0) - have)[wanted]
        place = first + (torch.rand(shape, generator=rng) * size).long()
        anyone = torch.randint(len(aux_y), shape, generator=rng)
        picks = torch.where(size > 0, order[place.clamp_max(len(aux_y) - 1)], anyone)
    given = aux_y[picks] if labels is None else wanted
    losses = torch.empty(shape[:2], dtype=matcher.dtype, device=matcher.device)

    def work(part: slice) -> None:
        rows = picks[part].to(matcher.device)
        victims = chosen[::count][part].repeat_interleave(candidates)
        x = aux_x[rows.flatten(0, 1)].to(matcher.dtype)
        y = torch.nn.functional.one_hot(given[part].flatten(0, 1), matcher.classes).to(x)
        losses[part] = matcher.losses(x, y, victims).unflatten(0, (-1, candidates))

    in_chunks(
        work, shape[0], bytes_each=candidates * 8 * matcher.working_numbers,
        device=matcher.device,
    )  # fmt: skip
    solution.evaluations += losses.numel()
    best = losses.nan_to_num(torch.inf, posinf=torch.inf).argsort(dim=1)[:, :count].cpu()
    rows = torch.arange(shape[0])[:, None]
    images = aux_x[picks[rows, best].flatten(0, 1).to(matcher.device)].flatten(1)
    return matcher.vectors(images.to(matcher.dtype)), given[rows, best].flatten(0, 1)


def _own(rng: torch.Generator) -> torch.Generator:
    """A generator seeded from the next draw of `rng`."""
    return torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=rng)))


class _Draw:
    """Where one start begins, from its own generator."""

    def __init__(
        self, rng: torch.Generator, matcher: Matcher, wave: Wave, *, first: bool, same: bool
    ) -> None:
        self.rng, self.matcher, self.wave, self.first, self.same = rng, matcher, wave, first, same

    def images(self) -> Tensor:
        """[K * D]. Relative to the prior: its mean first, then draws from it, or its mean alone
        where the starts already differ in their guessed label (same). Tabular features start at
        0, their mean."""
        matcher, start = self.matcher, self.wave.start
        shape, several = (matcher.pixels,), matcher.samples > 1
        if self.wave.framed:
            near_mean = self.first or self.same
            return torch.randn(shape, generator=self.rng) * (
                (0.1 if several else 0.0) if near_mean else 1.0
            )
        tabular = len(matcher.shape) != 3
        if start == "normal" or (tabular and (start == "uniform" or several or not self.first)):
            return torch.randn(shape, generator=self.rng)
        if tabular:
            return torch.zeros(shape)
        if start == "uniform" or several or not self.first:
            return matcher.vectors(torch.rand(shape, generator=self.rng))
        return matcher.vectors(torch.full(shape, 0.5))

    def again(self) -> Tensor:
        """A milder start [K * D] in place of one whose loss was not finite."""
        drawn = 0.1 * torch.randn(self.matcher.pixels, generator=self.rng)
        if self.wave.framed or len(self.matcher.shape) != 3:
            return drawn
        return self.matcher.vectors((0.5 + drawn).clamp(0, 1))

    def logits(self) -> Tensor:
        """[K * C] label logits: even for one sample, perturbed for several."""
        shape = (self.matcher.samples * self.matcher.classes,)
        if self.wave.noisy_logits:
            return torch.randn(shape, generator=self.rng)
        if self.matcher.samples > 1:
            return 0.1 * torch.randn(shape, generator=self.rng)
        return torch.zeros(shape)
