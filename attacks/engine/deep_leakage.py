"""Matching by L-BFGS, with labels optimised or held: what DLG and iDLG have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from attacks.engine.encoding import Encoding
from attacks.engine.evidence import Evidence, keeping, releases_of
from attacks.engine.joint import leaves_unexplained, match_together, match_with_own
from attacks.engine.matching import Matcher, build_matcher, judge_answer
from attacks.engine.mixture import not_mixed, unmix_samples
from attacks.engine.observation import Release, parse_view
from attacks.engine.optimisers import Minimum, Phase, column, minimise
from attacks.engine.orders import link
from attacks.engine.posterior import answer_by_posterior, find_noisy_messages
from attacks.engine.private import openly, with_private_parts
from attacks.engine.restarts import Labels, Problems, Solution, Start, Wave, go_on, solve
from attacks.engine.terms import fading_prior, prior
from bench.api import Attack, Context, Reconstruction, Seen
from bench.toolkit.settings import check_number

Preset = Literal["strong", "paper"]
_PRESETS: dict[str, dict[str, Any]] = {
    "strong": {"restarts": 2, "history": 30, "start": "public"},
    "paper": {"restarts": 0, "history": 100, "start": "normal"},
}
_SOLVED = 1e-14
"""Share of |observation|^2 at which a victim is solved."""
_TRAPPED, _UNSOLVED = 1e-6, 1e-9
"""Shares of |observation|^2: above the first, a start is taken to have met a local minimum, so that
others are tried; above the second, the best goes on."""
_TRIED = 10
"""Labels of one sample that are tried under noise, the likeliest ones."""
_LOOKS = (1 / 16, 2), (1 / 4, 1)
"""Shares of the budget after which so many of the tried starts go on, those of least loss. The
last has all evaluations that are left: trained networks take more than a single start's."""
_HEATS = 1.0, 0.75, 0.5, 0.25, 0.0
"""Of the levels of a likelihood that is annealed."""
_FADING = 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0
"""Of the prior that fades."""
_GROWING = (0.6, 1 / 8), (0.85, 1 / 3), (1.0, 1.0)
_WHOLE = ((1.0, 1.0),)
"""Shares of the evaluations up to which so many of the releases count: few of them lead near, so
that many cost a third of what they otherwise would."""
_SEARCHES = 3
"""Of the order of samples, each before a part of the evaluations."""
_ROUGH = 1e-11
"""Share of |observation|^2 down to which float32 resolves a squared distance."""


class DeepLeakage(Attack):
    """Settings and run of `dlg` and `idlg`, which differ in the labels that they begin with.

    Args:
        preset: `paper` (normal start and logits, 100 curvature pairs, float32, no restart) or
            `strong`; the other settings replace its values.
        restarts: Further starts of a victim that the first left far from solved: without noise
            around the public mean, with a prior that fades. The best of all then goes on.
        start: public (the public sample that explains the messages best), gray or normal;
            under noise `strong` starts around the public mean instead.
        history: Curvature pairs. Batches of several samples gain by 100.
    """

    recovers = frozenset({"images", "labels", "counts"})
    reads = "all"
    counts_labels = False
    """Whether it only knows how many samples have a label, not which step used them."""

    def __init__(
        self,
        *,
        preset: Preset = "strong",
        restarts: int | None = None,
        start: Start | None = None,
        history: int | None = None,
    ) -> None:
        given = {"restarts": restarts, "start": start, "history": history}
        chosen = _PRESETS[preset] | {k: v for k, v in given.items() if v is not None}
        self.preset, self.history = preset, chosen["history"]
        self.restarts, self.start = chosen["restarts"], chosen["start"]
        check_number("restarts", self.restarts, least=0)
        check_number("history", self.history, "curvature pairs", least=1)

    def labels(self, evidence: Evidence, ctx: Context) -> Labels:
        """What is known of labels that the threat does not grant."""
        raise NotImplementedError

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        each = parse_view(seen)
        answer = self._match(each, ctx)
        known = [] if self.preset == "paper" else openly(each, ctx)
        return _better(answer, self._match(known, ctx), seen, ctx) if known else answer

    def _match(self, each: list[Release], ctx: Context) -> Reconstruction:
        """The answer by all releases together."""
        matcher, solution, notes = self.solve(each, ctx)
        if matcher.evidence.noisy and self.preset != "paper":
            answer_by_posterior(matcher, solution, ctx)
        return solution.answer(matcher, notes)

    def solve(self, each: list[Release], ctx: Context) -> tuple[Matcher, Solution, list[str]]:
        """The likeliest samples by all releases together, of a noised record its mean over the
        labels, with their objective and what a reader must know."""
        releases = with_private_parts(link(each, ctx), ctx)
        granted = releases[-1].granted
        arranged = not self.counts_labels or granted is not None
        evidence = cache(lambda dtype: Evidence(releases, ctx, dtype=dtype, arranged=arranged))
        first = evidence(torch.float32)
        noisy, square = first.noisy, first.square
        # float64 goes on where float32 gets no further; noise is not resolved so finely.
        short = noisy or self.preset == "paper"
        framed = noisy and self.preset != "paper"
        matcher = cache(lambda dtype: self._matcher(evidence(dtype), ctx, framed=framed))
        optimiser = QuasiNewton(
            matcher=matcher,
            dtypes=(torch.float32,) if short else (torch.float32, torch.float64),
            evaluations=ctx.budget,
            history=self.history,
            least_gain=1e-5 if noisy else 1e-7,
            heats=_HEATS if first.anneals else (0.0,),
        )
        around_mean = replace(
            optimiser,
            matcher=cache(lambda dtype: self._matcher(evidence(dtype), ctx, framed=True)),
            dtypes=optimiser.dtypes[-1:],
            heats=_FADING,
        )
        given = None if granted is None else Labels(fixed=granted.to(ctx.device))
        known = given or self.labels(first, ctx)
        # Under noise no loss is "solved": the likelihood has no known minimum.
        stop = torch.full_like(square, -torch.inf) if noisy else _SOLVED * square
        waves = self._waves(optimiser, around_mean, known)
        begun = None
        mixed = len(each) == 1 and each[0].samples > 1 and not_mixed(each[0].seen) is None
        if mixed and not short:
            begun = self._lead_on(unmix_samples(each[0].seen, ctx), ctx, optimiser, known)
            waves[0] = replace(waves[0], above=_UNSOLVED * square)
        solution = solve(ctx, waves=waves, known=known, stop=stop, begun=begun)
        if first.clients.summed > 1 and known.fixed is None and known.ranking is None:
            # Clients weigh unlike in a sum, so that counting fails: found labels are held.
            held, spent = Labels(fixed=solution.labels), solution.evaluations
            solution = solve(ctx, waves=waves, known=held, stop=stop)
            solution.evaluations += spent
        if self.preset != "paper":
            if len(each) > 1 and not noisy and not keeping(first):
                self._from_one(each, ctx, optimiser, known, solution)
                solution.solved = int((solution.loss <= stop).sum())
            self._reorder(ctx, optimiser, known, solution)
            self._with_what_is_hidden(optimiser, known, solution)
            if noisy:
                self._average_labels(ctx, optimiser, known, solution)
        notes = [*known.notes]
        if not noisy:
            notes.append(f"{solution.solved} of {len(square)} victims solved to tolerance")
        if solution.redrawn:
            notes.append(f"{solution.redrawn} starts diverged and were replaced")
        return matcher(first.dtype), solution, notes

    def _with_what_is_hidden(
        self, optimiser: QuasiNewton, known: Labels, solution: Solution
    ) -> None:
        """Match again together with what clients kept, or what nothing explains, and then all
        victims together by sums that the server learns."""
        evaluations = (1 + self.restarts) * optimiser.evaluations
        plain = optimiser.matcher(optimiser.dtypes[0])
        evidence = plain.evidence
        if keeping(evidence) or (evidence.noisy and leaves_unexplained(plain, solution)):
            match_with_own(plain, solution, evaluations=evaluations, history=self.history)
        if evidence.sums:
            exact = optimiser.matcher(torch.float64)
            for one, other in zip(releases_of(evidence), releases_of(exact.evidence), strict=True):
                if one.uploads is not None and other.uploads is not None:
                    other.uploads.unexplained = one.uploads.unexplained
            match_together(
                exact,
                solution,
                searched=known.fixed is None and evidence.clients.samples == 1,
                evaluations=evaluations,
                history=self.history,
            )

    def _from_one(
        self,
        releases: Sequence[Release],
        ctx: Context,
        optimiser: QuasiNewton,
        known: Labels,
        solution: Solution,
    ) -> None:
        """While a victim is trapped, begin again where each release leads by itself: all together
        have local minima that one may be without."""
        matcher = optimiser.matcher(optimiser.dtypes[0])
        everyone = torch.arange(len(solution.loss), device=solution.loss.device)
        for release in releases:
            if not bool((solution.loss > _TRAPPED * matcher.evidence.square).any()):
                return
            alone = self._match([release], ctx)
            other = self._lead_on(alone, ctx, optimiser, known)
            solution.take(everyone, other.loss, other.images, other.labels)
            solution.evaluations += other.evaluations + alone.evaluations

    def _lead_on(
        self, answer: Reconstruction, ctx: Context, optimiser: QuasiNewton, known: Labels
    ) -> Solution:
        """Where the descent leads from an answer."""
        matcher = optimiser.matcher(optimiser.dtypes[0])
        solution = Solution(matcher)
        images, labels = _images_and_labels(answer)
        solution.images, solution.labels = images.to(solution.images), labels.to(solution.labels)
        if answer.failed is not None:
            solution.loss = solution.loss.where(answer.failed.to(solution.loss.device), 0.0)
        go_on(ctx, matcher, optimiser, known, solution)
        return solution

    def _reorder(
        self, ctx: Context, optimiser: QuasiNewton, known: Labels, solution: Solution
    ) -> None:
        """Search the order of the samples and the images in turn, where local epochs hide it."""
        matcher = optimiser.matcher(optimiser.dtypes[0])
        shuffled = any(one.orders is not None for one in releases_of(matcher.evidence))
        optimiser = optimiser.shorten(1 / _SEARCHES)
        for _ in range(_SEARCHES if shuffled else 0):
            images = solution.images.nan_to_num(0.5).to(matcher.encoding.dtype)
            solution.evaluations += matcher.reorder(images, solution.labels)
            go_on(ctx, matcher, optimiser, known, solution)

    def _average_labels(
        self, ctx: Context, optimiser: QuasiNewton, known: Labels, solution: Solution
    ) -> None:
        """Replace each record by its mean over the likeliest labels, which has the least expected
        squared error. A label weighs by the likelihood of its best record and by its frequency."""
        matcher = optimiser.matcher(optimiser.dtypes[0])
        ranking = known.ranking if known.hold and not matcher.encoding.image else None
        if ranking is None or find_noisy_messages(matcher.evidence) is None:
            return
        others = ranking[ranking != solution.labels].view(len(ranking), -1)[:, : _TRIED - 1]
        wave = Wave(matcher=matcher, optimiser=optimiser, count=1)
        never = torch.full_like(solution.loss, -torch.inf)
        each = [solution]
        for label in others.T[..., None]:
            each.append(solve(ctx, waves=[wave], known=Labels(fixed=label), stop=never))
        counts = torch.bincount(ctx.aux_y, minlength=matcher.encoding.classes).to(ranking.device)
        loss = torch.stack([s.loss - (counts + 1).log()[s.labels[:, 0]] for s in each])
        images = torch.stack([s.images for s in each]).nan_to_num()
        solution.images = torch.einsum("lv,lv...->v...", (-loss).softmax(dim=0).to(images), images)
        solution.evaluations = sum(s.evaluations for s in each)

    def _matcher(self, evidence: Evidence, ctx: Context, *, framed: bool) -> Matcher:
        """framed: Whether to look around the public mean, with a prior that weighs in; without
        noise it fades."""
        encoding = Encoding(
            ctx, samples=evidence.clients.samples, dtype=evidence.dtype, framed=framed
        )
        weighing = prior if evidence.noisy else fading_prior(evidence.square)
        return Matcher(evidence, encoding, beliefs=[weighing] if framed else [])

    def _waves(self, optimiser: QuasiNewton, around_mean: QuasiNewton, known: Labels) -> list[Wave]:
        matcher = optimiser.matcher(optimiser.dtypes[0])
        noisy, square = matcher.evidence.noisy, matcher.evidence.square
        first = Wave(
            matcher=matcher,
            optimiser=optimiser,
            count=1 if not noisy and self.preset != "paper" else 1 + self.restarts,
            start=self.start,
            noisy_logits=self.preset == "paper",
        )
        if self.preset == "paper":
            return [first]
        if noisy:
            return [self._halve(first, optimiser, known) if known.ranking is not None else first]
        if not self.restarts:
            return [first]
        framed = replace(
            first,
            matcher=around_mean.matcher(around_mean.dtypes[0]),
            optimiser=around_mean,
            count=self.restarts,
            above=_TRAPPED * square,
        )
        further = replace(first, count=1, start="answer", above=_UNSOLVED * square)
        uploads = matcher.evidence.uploads
        lowest = next(iter(matcher.evidence.clients.start))
        shown = None if uploads is None else uploads.observation.present.get(lowest)
        if shown is None or not bool(shown.any()):
            # Images are seen through layers alone: smashed data, or an upload without anything of
            # the network's first tensor. Layers of fewer numbers than pixels make the same of many
            # images: the likeliest of them is wanted, not the nearest to where a descent begins.
            likeliest = replace(framed, count=1, above=None)
            return [likeliest, further, replace(first, above=framed.above), framed, further]
        return [first, framed, further]

    def _halve(self, wave: Wave, optimiser: QuasiNewton, known: Labels) -> Wave:
        """Noise hides which label is right; a few steps of images tell it, and the start that
        goes on in the end has all the evaluations that the others leave."""
        assert known.ranking is not None
        going = max(wave.count, min(_TRIED, known.ranking.shape[1]))
        tried, left = going, float(wave.count)
        looks = []
        for share, kept in _LOOKS:
            looks.append((optimiser.look(share), kept))
            left, going = left - share * going, kept
        return replace(
            wave, count=tried, looks=looks, optimiser=optimiser.shorten(max(1.0, left / going))
        )


def _better(one: Reconstruction, other: Reconstruction, seen: Seen, ctx: Context) -> Reconstruction:
    """Of two answers, for every victim the one that explains what was seen better."""
    matcher = build_matcher(seen, ctx)
    if matcher is None:
        return one
    losses = []
    for answer in (one, other):
        images, labels = _images_and_labels(answer)
        images = images.to(ctx.device, matcher.encoding.dtype)
        losses.append(judge_answer(matcher, images, labels.to(ctx.device)))
    takes = (losses[1] < losses[0]).cpu()

    merged: dict[str, Any] = {}
    for name in ("images", "labels", "label_counts", "loss", "failed"):
        a, b = getattr(one, name), getattr(other, name)
        merged[name] = torch.where(column(takes, a), b, a)
    return replace(one, **merged, evaluations=one.evaluations + other.evaluations)


def _images_and_labels(answer: Reconstruction) -> tuple[Tensor, Tensor]:
    """Of an answer that has both, as all of this module's have."""
    if answer.images is None or answer.labels is None:
        raise TypeError("matching answers with images and labels.")
    return answer.images, answer.labels


@dataclass(frozen=True, kw_only=True)
class QuasiNewton:
    """L-BFGS on a matcher's problems, in one precision or two.

    Attributes:
        matcher: The objective in a precision.
        dtypes: One, or float32 and float64 to change over where float32 gets no further.
        evaluations: Per problem.
        history: Curvature pairs.
        least_gain: See `minimise`.
        heats: Of the terms, from the softest to 0, an equal share of the evaluations each.
    """

    matcher: Callable[[torch.dtype], Matcher]
    dtypes: Sequence[torch.dtype]
    evaluations: int
    history: int
    least_gain: float
    heats: Sequence[float] = (0.0,)

    def shorten(self, share: float) -> QuasiNewton:
        """With this share of its evaluations."""
        return replace(self, evaluations=max(1, int(share * self.evaluations)))

    def look(self, share: float) -> QuasiNewton:
        """The first steps alone."""
        return replace(self.shorten(share), dtypes=self.dtypes[:1], heats=self.heats[:1])

    def __call__(self, problems: Problems) -> Minimum:
        phases = []
        for dtype in self.dtypes:
            matcher, stop = self.matcher(dtype), problems.stop
            if len(self.dtypes) > 1 and dtype == torch.float32:
                square = matcher.evidence.square[problems.victims]
                stop = stop.maximum(_ROUGH * square.to(stop))
            for turn, heat in enumerate(self.heats, start=1):
                parts = _GROWING if matcher.evidence.costly else _WHOLE
                for until, releases in parts if turn == len(self.heats) else [(1.0, parts[0][1])]:
                    evaluate = matcher.evaluator(
                        problems.victims, problems.held, heat=heat, releases=releases
                    )
                    share = (turn - 1 + until) / len(self.heats)
                    phases.append(Phase(evaluate=evaluate, stop=stop, dtype=dtype, share=share))
        minimum = minimise(
            phases,
            problems.start,
            max_evaluations=self.evaluations,
            history=self.history,
            least_gain=self.least_gain,
            redraw=problems.redraw,
        )
        if self.heats[-1] == 0:
            return minimum
        # With losses of the likelihood where a descent ends: a softer one may hide which of a
        # victim's labels is right.
        matcher = self.matcher(self.dtypes[-1])
        everyone = torch.arange(len(minimum.x), device=minimum.x.device)
        loss, _ = matcher.evaluator(problems.victims, problems.held)(minimum.x, everyone)
        return replace(minimum, loss=loss.to(minimum.loss), evaluations=minimum.evaluations + 1)

    def bytes_each(self, numbers: int) -> int:
        matcher = self.matcher(self.dtypes[-1])
        width = torch.finfo(self.dtypes[-1]).bits // 8
        return width * (2 * self.history * numbers + matcher.working_numbers)
