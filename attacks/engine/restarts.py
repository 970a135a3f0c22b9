"""Several starts per victim, chosen by the attack's own loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from attacks.engine.encoding import Encoding
from attacks.engine.matching import Matcher
from attacks.engine.optimisers import Minimum, in_chunks
from bench.api import Context, Reconstruction

Start = Literal["public", "gray", "normal"]
_GUESS_LOGIT = 3.0
_CANDIDATES = 32


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Starts that run together.

    Relative to the public prior, the first begins at its mean. Several samples of one batch never
    start equal, since equal images cannot part.

    Attributes:
        matcher: Their objective and encoding. Losses of all waves are of one kind.
        optimiser: Of those that go on to the end.
        count: Per victim.
        looks: First steps of all of them and, after each, how many go on, those of least loss.
        start: Of plain images: `public` takes the public samples that explain the victim's
            messages best, of 32 drawn with its likely labels; after the first, a gray start is
            uniform; `answer` goes on from the best of the waves before.
        above: Only victims whose loss exceeds this, [V] (None: all).
        noisy_logits: Label logits from N(0, 1), as DLG prints it.
    """

    matcher: Matcher
    optimiser: Optimiser
    count: int
    looks: Sequence[tuple[Optimiser, int]] = ()
    start: Start | Literal["answer"] = "gray"
    above: Tensor | None = None
    noisy_logits: bool = False


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What is known of the labels of V victims.

    Attributes:
        fixed: int64 [V, K], held in every start.
        ranking: int64 [V, C], the classes of a victim's single sample from the likeliest down:
            start k tries the k-th.
        hold: Whether a start keeps its guess, or only begins there and optimises a soft label.
        notes: How they were read.
    """

    fixed: Tensor | None = None
    ranking: Tensor | None = None
    hold: bool = False
    notes: tuple[str, ...] = ()

    def guess(self, chosen: Tensor, turn: Tensor) -> Tensor | None:
        """Guessed labels [P, 1] of the starts `turn` [P] of the victims `chosen` [P], or None."""
        if self.ranking is None:
            return None
        return self.ranking[chosen, turn % self.ranking.shape[1]][:, None]


@dataclass(frozen=True, kw_only=True)
class Problems:
    """P starts for an optimiser, those of a victim side by side.

    Attributes:
        victims: Whose messages each matches, int64 [P].
        turn: Which of its victim's starts each is, int64 [P], from 0.
        held: Labels that are held fixed, int64 [P, K], or None.
        start: Vectors [P, N].
        stop: Loss [P] at which a problem is solved.
        draws: What each draws from.
    """

    victims: Tensor
    turn: Tensor
    held: Tensor | None
    start: Tensor
    stop: Tensor
    draws: list[_Draw]

    def some(self, rows: Tensor) -> Problems:
        """Those in the rows int64."""
        tensors = {n: v[rows] for n, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors, draws=[self.draws[i] for i in rows.tolist()])

    def redraw(self, rows: Tensor) -> Tensor:
        """Other starts for those without a finite loss."""
        again = torch.stack([self.draws[i].again() for i in rows.tolist()]).to(self.start)
        return torch.cat([again, self.start[rows, again.shape[1] :]], dim=1)

    def optimise(self, optimiser: Optimiser, solution: Solution) -> tuple[Tensor, Tensor]:
        """Vectors [P, N] and losses [P]; what it cost is added to the solution."""
        minima: list[Minimum] = []
        everyone = torch.arange(len(self.start), device=self.start.device)
        in_chunks(
            lambda part: minima.append(optimiser(self.some(everyone[part]))),
            len(everyone),
            bytes_each=optimiser.bytes_each(self.start.shape[1]),
            device=everyone.device,
        )
        solution.evaluations += sum(int(f.evaluations.sum()) for f in minima)
        solution.redrawn += sum(f.redrawn for f in minima)
        return torch.cat([f.x for f in minima]), torch.cat([f.loss for f in minima])


class Optimiser(Protocol):
    """Solves problems. bytes_each: memory of one problem of N numbers, for the chunks."""

    def __call__(self, problems: Problems) -> Minimum: ...

    def bytes_each(self, numbers: int) -> int: ...


class Solution:
    """The best start of every victim so far.

    Attributes:
        images: [V, K, *shape].
        labels: int64 [V, K].
        loss: [V].
        evaluations: In all.
        redrawn: Starts replaced for want of a finite loss.
        solved: Victims at or below their stop value.
    """

    def __init__(self, matcher: Matcher) -> None:
        encoding, square = matcher.encoding, matcher.evidence.square
        shape = (len(square), encoding.samples, *encoding.shape)
        self.images = square.new_full(shape, torch.nan)
        self.labels = torch.zeros(shape[:2], dtype=torch.int64, device=square.device)
        self.loss = torch.full_like(square, torch.inf)
        self.evaluations = self.redrawn = self.solved = 0

    @property
    def failed(self) -> Tensor:
        """Bool [V]: no start had a finite loss, or nothing was sent but zeros."""
        return ~torch.isfinite(self.loss)

    def answer(self, matcher: Matcher, notes: Sequence[str]) -> Reconstruction:
        """The reconstruction of every victim, images clamped to [0, 1]."""
        encoding, silent = matcher.encoding, int(matcher.evidence.silent.sum())
        if silent:
            notes = [*notes, f"of {silent} victims nothing was sent but zeros"]
        images = self.images.clamp(0, 1) if encoding.image else self.images
        counts = torch.nn.functional.one_hot(self.labels, encoding.classes).sum(dim=1)
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
    ctx: Context,
    *,
    waves: Sequence[Wave],
    known: Labels,
    stop: Tensor,
    begun: Solution | None = None,
) -> Solution:
    """Match what was seen of every victim; the start of least loss is the answer.

    Every start draws from a generator of its own, so that a problem's numbers do not depend on
    the chunk it ran in.

    stop: Loss [V] at which a victim is solved, -inf where none is known, as under noise.
    begun: What is the answer unless a start is better.
    """
    matcher = waves[0].matcher
    solution = begun or Solution(matcher)
    everyone = (~matcher.evidence.silent).nonzero().squeeze(1)
    for number, wave in enumerate(waves):
        who = everyone if wave.above is None else everyone[~(solution.loss <= wave.above)[everyone]]
        if len(who):
            _play(ctx, wave, known, stop, who, solution)
        ctx.progress((number + 1) / len(waves))
    solution.solved = int((solution.loss <= stop).sum())
    return solution


def go_on(
    ctx: Context, matcher: Matcher, optimiser: Optimiser, known: Labels, solution: Solution
) -> None:
    """Replace a solution by where it leads once the objective has changed, by a wave of one start
    per victim, at the answer."""
    wave = Wave(matcher=matcher, optimiser=optimiser, count=1, start="answer")
    reached = (~solution.failed).nonzero().squeeze(1)
    solution.loss = torch.full_like(solution.loss, torch.inf)
    if len(reached):
        never = torch.full_like(solution.loss, -torch.inf)
        _play(ctx, wave, known, never, reached, solution)


def _play(
    ctx: Context, wave: Wave, known: Labels, stop: Tensor, who: Tensor, solution: Solution
) -> None:
    encoding, device = wave.matcher.encoding, who.device
    chosen = who.repeat_interleave(wave.count)
    turn = torch.arange(wave.count, device=device).repeat(len(who))
    guess = known.guess(chosen, turn)
    held = guess if known.hold else None
    if known.fixed is not None:
        held = known.fixed[chosen]
    if wave.start == "answer":
        held = None if held is None else solution.labels[chosen]
        guess = solution.labels[chosen]
    same = encoding.framed and known.ranking is not None
    # Every start has its own generator: (victim, turn) alone decides what it draws.
    draws = [
        _Draw(rng=_own(ctx.rng), encoding=encoding, wave=wave, first=t == 0, same=same)
        for t in turn.tolist()
    ]
    if wave.start == "answer":
        start = encoding.vectors_of(solution.images[chosen], held)
    elif wave.start == "public" and not encoding.framed:
        labels = held if held is not None else guess
        start, public = _public_starts(wave, ctx, chosen, labels, solution)
        guess = public if guess is None else guess
    else:
        start = torch.stack([d.images() for d in draws])
    if held is None:
        logits = torch.stack([d.logits() for d in draws])
        if guess is not None:
            logits = logits.unflatten(1, (encoding.samples, -1))
            logits = logits.scatter(2, guess.cpu()[..., None], _GUESS_LOGIT).flatten(1)
        start = torch.cat([start, logits.to(start)], dim=1)
    problems = Problems(
        victims=chosen,
        turn=turn,
        held=held,
        start=start.to(dtype=encoding.dtype, device=device),
        stop=stop[chosen],
        draws=draws,
    )
    for look, kept in wave.looks:
        vectors, loss = problems.optimise(look, solution)
        loss = loss.view(len(who), -1)
        best = loss.argsort(dim=1, stable=True)[:, :kept].sort(dim=1)
        first = torch.arange(len(who), device=device)[:, None] * loss.shape[1]
        problems = replace(problems, start=vectors).some((first + best.values).flatten())
    x, loss = problems.optimise(wave.optimiser, solution)
    held = problems.held
    labels = encoding.labels_in(x).argmax(dim=-1) if held is None else held
    solution.take(problems.victims, loss, encoding.images(x, held), labels)


def _public_starts(
    wave: Wave, ctx: Context, chosen: Tensor, labels: Tensor | None, solution: Solution
) -> tuple[Tensor, Tensor]:
    """Public samples that explain the messages best: vectors [P, K * D], their labels [P, K].

    chosen: Victims [P], `count` rows each. labels: To draw the samples by [P, K], or None.
    """
    matcher, count, device = wave.matcher, wave.count, chosen.device
    encoding = matcher.encoding
    aux_x, aux_y = ctx.aux_x.to(device), ctx.aux_y.cpu()
    candidates = max(_CANDIDATES, count)
    shape = (len(chosen) // count, candidates, encoding.samples)
    rng = _own(ctx.rng)
    if labels is None:
        picks = torch.randint(len(aux_y), shape, generator=rng)
    else:
        # By class where it has public samples: a random place in the class's sorted stretch.
        order, have = aux_y.argsort(stable=True), torch.bincount(aux_y, minlength=encoding.classes)
        wanted = labels[::count].cpu()[:, None].expand(shape)
        size, first = have[wanted], (have.cumsum(0) - have)[wanted]
        place = first + (torch.rand(shape, generator=rng) * size).long()
        anyone = torch.randint(len(aux_y), shape, generator=rng)
        picks = torch.where(size > 0, order[place.clamp_max(len(aux_y) - 1)], anyone)
    given = aux_y[picks] if labels is None else wanted
    losses = torch.empty(shape[:2], dtype=encoding.dtype, device=device)

    def work(part: slice) -> None:
        rows = picks[part].to(device)
        victims = chosen[::count][part].repeat_interleave(candidates)
        x = aux_x[rows.flatten(0, 1)].to(encoding.dtype)
        y = torch.nn.functional.one_hot(given[part].flatten(0, 1), encoding.classes).to(x)
        losses[part] = matcher.losses(x, y, victims).unflatten(0, (-1, candidates))

    bytes_each = candidates * 8 * matcher.working_numbers
    in_chunks(work, shape[0], bytes_each=bytes_each, device=device)
    solution.evaluations += losses.numel()
    best = losses.nan_to_num(torch.inf, posinf=torch.inf).argsort(dim=1)[:, :count].cpu()
    rows = torch.arange(shape[0])[:, None]
    images = aux_x[picks[rows, best].flatten(0, 1).to(device)].flatten(1)
    return images.to(encoding.dtype), given[rows, best].flatten(0, 1)


def _own(rng: torch.Generator) -> torch.Generator:
    """A generator seeded from the next draw of `rng`."""
    return torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=rng)))


@dataclass(frozen=True, kw_only=True)
class _Draw:
    """Where one start begins, from its own generator."""

    rng: torch.Generator
    encoding: Encoding
    wave: Wave
    first: bool
    same: bool

    def images(self) -> Tensor:
        """[K * D]. Relative to the prior: its mean first, then draws from it, or its mean alone
        where the starts already differ in their guessed label (same). Tabular features start at
        0, their mean."""
        encoding, start = self.encoding, self.wave.start
        shape, several = (encoding.pixels,), encoding.samples > 1
        if encoding.framed:
            near_mean = self.first or self.same
            return self._normal(shape) * ((0.1 if several else 0.0) if near_mean else 1.0)
        if start == "normal":
            return self._normal(shape)
        plain = self.first and not several
        if not encoding.image:
            return torch.zeros(shape) if plain else self._normal(shape)
        if plain:
            return torch.full(shape, 0.5)
        return torch.rand(shape, generator=self.rng)

    def again(self) -> Tensor:
        """A milder start [K * D] in place of one whose loss was not finite."""
        drawn = 0.1 * self._normal((self.encoding.pixels,))
        if self.encoding.framed or not self.encoding.image:
            return drawn
        return (0.5 + drawn).clamp(0, 1)

    def logits(self) -> Tensor:
        """[K * C] label logits: even for one sample, perturbed for several."""
        shape = (self.encoding.samples * self.encoding.classes,)
        if self.wave.noisy_logits:
            return self._normal(shape)
        return 0.1 * self._normal(shape) if self.encoding.samples > 1 else torch.zeros(shape)

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.rng)
