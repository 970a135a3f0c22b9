"""Label counts of batches, weighed by what counters get right on batches of public samples.

Published counters of a trained network's batches err in different places. The attacker draws
batches of its public samples, whose counts it knows (virtual clients: Ma et al.,
arXiv:2504.21436), gives their head gradients to every counter, and learns by regression what the
answers tell of a class's count (stacked generalisation: Wolpert 1992). How sure that is, it takes
from batches left out of the regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.engine import regression
from attacks.engine.counts import (
    Counting,
    HeadGradient,
    Restored,
    complete,
    public_solution,
    restore,
    whole,
)

_ROWS = 1500
"""Rows of the regression, one for each class of each public batch, unless the batches get few."""
_LEAST = 60
"""Public batches at least."""
_WORK = 10**9
"""Multiplications that solving for all classes of the public batches may cost."""
_VALUES = 1 << 21
"""Numbers held at once while public batches are drawn, and while counts are searched."""
_KNOTS = 4
"""Places at which the answer of a counter may change its weight."""
_NEAREST = 60
"""Left-out rows that tell how the counts of a score are spread."""
_EXACT = 4.0
"""Worth of LnAcc in units of IRec's: LnAcc is then hardly lower than where nothing else counts, and
IRec hardly lower than where both count alike."""
_WITHIN = 0.1
"""Variance that is added to all directions within a class, in units of their mean variance."""

Played = Callable[[Tensor, HeadGradient], HeadGradient]


@dataclass(frozen=True, kw_only=True)
class PublicSamples:
    """Public samples as the head sees them.

    Attributes:
        features: The head's input, float64 [N, F].
        labels: int64 [N].
    """

    features: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class HeadView:
    """What one release shows of V batches, and how public batches would look in it.

    Attributes:
        head: The batches' head gradients.
        restored: What iLRG makes of them.
        counting: What else is known.
        samples: Public samples, in the same order for every release.
        played: What would be seen of batches of public samples, given their places int64
            [B, total] and the victims' head gradients, of which the same is hidden. It is called
            for some batches after others.
    """

    head: HeadGradient
    restored: Restored
    counting: Counting
    samples: PublicSamples
    played: Played

    def victims(self, chosen: Tensor) -> HeadView:
        """The same for some of the batches."""
        return replace(self, head=self.head.victims(chosen), restored=self.restored.victims(chosen))


def weigh_counts(views: Sequence[HeadView], *, fewest: bool, rng: torch.Generator) -> Tensor | None:
    """Counts of V batches whose LnAcc, and IRec with less weight, is as high as can be expected.

    The counters' answers of all releases enter one regression.

    Args:
        views: One for every release.
        fewest: Whether playing is slow, so that as few batches as may be are played.
        rng: Draws the public batches.

    Returns:
        int64 [V, C], or None where there are too many classes for it.
    """
    samples, counting = views[-1].samples, views[-1].counting
    classes, total = len(counting.bias), counting.total
    batches = _LEAST if fewest else max(_LEAST, _ROWS // classes)
    if batches * classes**3 > _WORK:
        return None
    chosen = public_batches(samples, batches, total=total, rng=rng)
    truth = torch.nn.functional.one_hot(samples.labels[chosen], classes).sum(dim=1)
    answers, of_public, of_victims = [], [], []
    for view in views:
        counters = _Counters(view.counting, view.samples)
        scores, restored = _answers(view, counters, chosen)
        answers.append(scores)
        of_public.append(restored)
        of_victims.append(counters(view.head, view.restored))
    weighing = _Weighing(torch.cat(answers, dim=-1), truth, total=total)
    public, own = Restored.surest(of_public), Restored.surest([v.restored for v in views])
    # Judged on batches as doubtful as the victims'.
    alike = public.unsettled.nonzero()[:_LEAST, 0]
    alike = alike if len(alike) > 0 else torch.arange(_LEAST)
    guesses = (
        public.counts[alike],
        whole(public.plain[alike], total=total),
        weighing.best(weighing.left_out[alike]),
    )
    best = _surely_best(torch.stack([_merit(g, weighing.truth[alike]) for g in guesses]))
    if best == 2:
        return weighing.best(weighing(torch.cat(of_victims, dim=-1)))
    return whole(own.plain, total=total) if best == 1 else own.counts


def _answers(view: HeadView, counters: _Counters, chosen: Tensor) -> tuple[Tensor, Restored]:
    """The counters' answers for public batches [B, C, A], and what iLRG makes of these."""
    answers, restored = [], []
    at_once = max(1, _VALUES // (view.counting.total * view.samples.features.shape[1]))
    for some in chosen.split(at_once):
        gradient = view.played(some, view.head)
        restored.append(restore(gradient, view.counting))
        answers.append(counters(gradient, restored[-1]))
    joined = {n: torch.cat([vars(r)[n] for r in restored]) for n in vars(restored[0])}
    return torch.cat(answers), Restored(**joined)


def _merit(guess: Tensor, truth: Tensor) -> Tensor:
    """What counts [B, C] are worth in LnAcc and IRec, but for a constant, [B].

    Where guess and truth have one total, IRec is 1 - sum |guess - truth| / (2 total).
    """
    right = (guess == truth).double().mean(dim=1)
    away = (guess - truth).abs().sum(dim=1) / (2 * truth.sum(dim=1))
    return _EXACT * right - away


def _surely_best(merits: Tensor) -> int:
    """Which of the rows [R, B] exceeds the first by most, in the mean less its standard error; the
    first if none does."""
    more = merits - merits[0]
    error = more.std(dim=1, correction=0) / max(1, merits.shape[1] - 1) ** 0.5
    return int((more.mean(dim=1) - error).argmax())


def public_batches(
    samples: PublicSamples, batches: int, *, total: int, rng: torch.Generator
) -> Tensor:
    """Places of the samples of batches, int64 [batches, total], with replacement.

    Class shares are uniform over all shares of the classes that have public samples, since a
    client's data is often of few classes.
    """
    sizes = torch.bincount(samples.labels)
    shares = -torch.rand(batches, len(sizes), dtype=torch.float64, generator=rng).log()
    shares = torch.where(sizes > 0, shares + 1e-12, 0.0)
    labels = torch.multinomial(shares, total, replacement=True, generator=rng)
    place = torch.rand(labels.shape, dtype=torch.float64, generator=rng) * sizes[labels]
    first = sizes.cumsum(0) - sizes
    return samples.labels.argsort()[first[labels] + place.long()]


def head_gradients(samples: PublicSamples, chosen: Tensor, counting: Counting) -> HeadGradient:
    """Mean gradients of batches of public samples with places int64 [B, total], in one step."""
    features = samples.features[chosen]
    slope = torch.softmax(features @ counting.weight.T + counting.bias, dim=-1)
    slope = slope - torch.nn.functional.one_hot(samples.labels[chosen], len(counting.bias))
    return HeadGradient.whole(slope.mT @ features / counting.total, slope.mean(dim=1))


class _Counters:
    """What several counters say of each class of a batch, [V, C, answers].

    The slope of a sample of class c is 1 - p_c, by which it lowers the gradient of c's bias. Other
    classes raise it, so the slope that a class's samples have in sum is read off the weight
    gradient, by linear discriminants of the public features.

    Counts: iLRG's as its paper solves them and refined; its equations with the mean softmax of a
    class's public samples (as RLU: Chen and Vikalo, arXiv:2405.00955); the slope over that of a
    public sample (the impact of LLG: Wainakh et al., arXiv:2105.09369, there of a weight row's
    sum) and over that of the class's own embedding. Beside them: slope, slope of the embedding,
    the bias gradient, the weight row's smallest value (which tells which classes there are: Yin
    et al., arXiv:2104.07586), and the share of all classes' slope.
    """

    def __init__(self, counting: Counting, samples: PublicSamples) -> None:
        self.counting = counting
        self.discriminants = _discriminants(counting.public.features, samples)
        self.public_slope = 1 - counting.public.probability.diagonal()

    def __call__(self, head: HeadGradient, restored: Restored) -> Tensor:
        counting = self.counting
        public, total = counting.public, counting.total
        filled, _ = complete(head, public.features)
        by_class = total * (filled.weight @ self.discriminants)  # column c: of class c's samples
        slope = -by_class.diagonal(dim1=1, dim2=2)
        own = self._own_slope(by_class, filled)
        everyones = slope.clamp_min(0.0).sum(dim=1, keepdim=True).clamp_min(1e-9)
        as_counts = (
            restored.plain,
            restored.counts.double(),
            public_solution(head, public=public, total=total),
            slope / self.public_slope.clamp_min(1e-6),
            slope / own.clamp_min(1e-6),
        )
        as_slopes = (slope, own, -total * filled.bias, total * filled.weight.amin(dim=-1))
        return torch.stack(
            [
                *(answer.clamp(-2.0, total + 2.0) for answer in as_counts),
                *(answer.sign() * torch.log1p(100 * answer.abs()) for answer in as_slopes),
                slope / everyones,
            ],
            dim=-1,
        )

    def _own_slope(self, by_class: Tensor, filled: HeadGradient) -> Tensor:
        """1 - p_c [V, C] of the embeddings of least squares that the slopes `by_class` show."""
        counting = self.counting
        public = counting.public.features @ counting.weight.T
        product = counting.total * (filled.weight @ counting.weight.T)
        pull = 1e-3 * by_class.square().sum(dim=(1, 2)) / by_class.shape[1]
        pull = pull.clamp_min(1e-30)[:, None, None]
        normal = by_class.mT @ by_class
        normal.diagonal(dim1=1, dim2=2).add_(pull[:, 0])
        logits = torch.linalg.solve(normal, by_class.mT @ product + pull * public)
        probability = torch.softmax(logits + counting.bias, dim=-1)
        return 1 - probability.diagonal(dim1=1, dim2=2)


def _discriminants(means: Tensor, samples: PublicSamples) -> Tensor:
    """[F, C]: column c is 1 on the mean of class c, 0 on the other means, and as small as can be
    on how samples differ within classes (Fisher's, for several classes)."""
    inner = samples.features - means[samples.labels]
    count, width = inner.shape
    narrow = width <= count
    scatter = (inner.mT @ inner if narrow else inner @ inner.mT) / count
    ridge = _WITHIN * float(scatter.diagonal().sum()) / width + 1e-12
    scatter.diagonal().add_(ridge)
    if narrow:
        whitened = torch.linalg.solve(scatter, means.T)
    else:  # the same by the matrix inversion lemma, in the smaller dimension
        along = torch.linalg.solve(scatter, inner @ means.T)
        whitened = (means.T - inner.T @ along / count) / ridge
    between = means @ whitened
    between.diagonal().add_(1e-6 * float(between.diagonal().mean()) + 1e-12)
    return torch.linalg.solve(between, whitened, left=False)


class _Weighing:
    """Chances of every count, learnt from the counters' answers for public batches.

    Args:
        answers: Of the counters for B public batches [B, C, A].
        truth: Their counts, int64 [B, C].
        total: Samples of a batch.

    Attributes:
        truth: As given.
        left_out: Chances of counts 0 to `total` for the public batches, each by a regression
            without it, [B, C, total + 1].
    """

    def __init__(self, answers: Tensor, truth: Tensor, *, total: int) -> None:
        self.truth, self.total = truth, total
        flat, counts = answers.flatten(0, 1), truth.flatten()
        levels = torch.linspace(0, 1, _KNOTS + 2, dtype=torch.float64)[1:-1]
        self.knots = torch.quantile(flat, levels, dim=0)
        self.scale = self._bent(flat).std(dim=0).clamp_min(1e-9)
        self.fitted = regression.fit(
            regression.Features(self._bent(flat) / self.scale, group=truth.shape[1]),
            counts[:, None].double(),
            judged=torch.ones_like(counts, dtype=torch.bool),
            judge=lambda left_out: (left_out[:, 0] - counts).square().mean(),
        )
        scores = self.fitted.left_out[:, 0]
        self.known, order = scores.sort()
        self.counts = counts[order]
        self.left_out = self._chances(scores).view(*truth.shape, -1)

    def __call__(self, answers: Tensor) -> Tensor:
        """The same for V other batches, [V, C, A] -> [V, C, total + 1]."""
        scores = self.fitted(self._bent(answers.flatten(0, 1)) / self.scale, 0)[:, 0]
        return self._chances(scores).unflatten(0, answers.shape[:2])

    def best(self, chances: Tensor) -> Tensor:
        """Counts [V, C] that can be expected to be worth most; see `_merit`.

        Args:
            chances: Of every count [V, C, total + 1].
        """
        counts = torch.arange(self.total + 1, dtype=chances.dtype)
        away = (counts[:, None] - counts).abs() / (2 * self.total)
        worth = _EXACT / chances.shape[1] * chances - chances @ away
        at_once = max(1, _VALUES // (self.total + 1) ** 2)
        return torch.cat([best_counts(some, total=self.total) for some in worth.split(at_once)])

    def _bent(self, answers: Tensor) -> Tensor:
        """Piecewise linear functions of each answer, bent where public batches' answers lie."""
        bent = (answers[:, None] - self.knots).clamp_min(0.0).flatten(1)
        return torch.cat([answers, bent], dim=1)

    def _chances(self, scores: Tensor) -> Tensor:
        """Shares of the counts [M, total + 1] of the left-out scores nearest to scores [M]."""
        nearest = min(_NEAREST, len(self.known))
        first = torch.searchsorted(self.known, scores) - nearest // 2
        first = first.clamp(0, len(self.known) - nearest)
        seen = self.counts[first[:, None] + torch.arange(nearest)]
        chance = torch.zeros(len(scores), self.total + 1, dtype=torch.float64)
        return chance.scatter_add_(1, seen, torch.full(seen.shape, 1 / nearest).double())


def best_counts(worth: Tensor, *, total: int) -> Tensor:
    """Counts int64 [V, C] of that total whose worth [V, C, total + 1] is largest in sum, by
    dynamic programming over the classes."""
    victims, classes, _ = worth.shape
    best = worth.new_full((victims, total + 1), -math.inf)
    best[:, 0] = 0.0
    taken = []
    for label in range(classes):
        # Row k, column n: n of this class after k - n of those before.
        before = torch.nn.functional.pad(best, (total, 0), value=-math.inf)
        earlier = before.unfold(1, total + 1, 1).flip(-1)
        best, chosen = (earlier + worth[:, None, label]).max(dim=-1)
        taken.append(chosen)
    left = torch.full((victims, 1), total)
    counts = []
    for chosen in reversed(taken):
        counts.append(chosen.gather(1, left))
        left = left - counts[-1]
    return torch.cat(counts[::-1], dim=1)
