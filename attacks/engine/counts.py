"""Label counts of batches from the gradients of the network's head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bench.toolkit.counts import round_to_total

_PRIOR = 1e-6
"""Weight of |n - K * public class frequency|^2 where the equations leave counts open."""
_SINGULAR = 1e-10
"""Smallest pivot, relative to the largest, of a system that is solved as it stands."""
_SETTLED = 0.1, 1e-3
"""No further refinement if all counts are so near whole ones, and if the chance of it is below."""
_LENGTHS = 1e-3, 1e6
"""Least and largest factor by which a gradient's length is sought."""
_DOUBTFUL = 0.3, 1e-2
"""The same for a result that goes without a warning."""


@dataclass(frozen=True, kw_only=True)
class HeadGradient:
    """Mean gradients of the head of V victims, float64, with what of them was seen.

    Attributes:
        weight: [V, C, F], any finite value where nothing was seen.
        bias: [V, C], likewise.
        weight_seen: What was seen of the weight's, bool.
        bias_seen: The same of the bias's.
    """

    weight: Tensor
    bias: Tensor
    weight_seen: Tensor
    bias_seen: Tensor

    @staticmethod
    def whole(weight: Tensor, bias: Tensor) -> HeadGradient:
        """Gradients of which everything was seen."""
        seen = (torch.ones_like(t, dtype=torch.bool) for t in (weight, bias))
        return HeadGradient(weight=weight, bias=bias, weight_seen=next(seen), bias_seen=next(seen))

    def scale(self, factors: Tensor) -> HeadGradient:
        """Gradients of other lengths, by the factors [V]."""
        return replace(
            self, weight=self.weight * factors[:, None, None], bias=self.bias * factors[:, None]
        )

    def victims(self, chosen: slice | Tensor) -> HeadGradient:
        """The same for some of the victims."""
        return HeadGradient(**{n: v[chosen] for n, v in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class PublicClasses:
    """What public samples say of each class, float64.

    Attributes:
        features: Mean head input [C, F].
        probability: Mean softmax of class j in row j, [C, C].
        share: Class frequencies [C], which decide where the equations leave counts open.
    """

    features: Tensor
    probability: Tensor
    share: Tensor


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Label counts of V batches, with how far to trust them.

    Attributes:
        counts: int64 [V, C].
        plain: What the equations alone solve to, without refinement and rounding, [V, C].
        doubt: Largest distance [V] of a class's solved count from its whole count, near 0 where
            the model of the gradient holds; it is judged without the truth.
        rows: Head rows that gave an equation, int64 [V].
        silent: Whether the gradient is 0 wherever it was seen, bool [V].
    """

    counts: Tensor
    plain: Tensor
    doubt: Tensor
    rows: Tensor
    silent: Tensor

    @staticmethod
    def surest(releases: Sequence[Restored]) -> Restored:
        """Of the same batches in several releases, the least doubtful answer to each; a release
        that shows nothing of a batch is asked last."""
        if len(releases) == 1:
            return releases[0]
        doubt = torch.stack([torch.where(r.silent, torch.inf, r.doubt) for r in releases])
        which, batches = doubt.argmin(dim=0), torch.arange(doubt.shape[1])
        stacks = {n: torch.stack([vars(r)[n] for r in releases]) for n in vars(releases[0])}
        return Restored(**{n: stack[which, batches] for n, stack in stacks.items()})

    def victims(self, chosen: Tensor) -> Restored:
        """The same for some of the batches."""
        return Restored(**{n: v[chosen] for n, v in vars(self).items()})

    @property
    def unsettled(self) -> Tensor:
        """bool [V]: solved counts that are not so near whole ones as to be taken as they are."""
        return ~self.silent & (self.doubt > _near(_SETTLED, self.counts.shape[1]))

    @property
    def doubtful(self) -> Tensor:
        """bool [V]: counts that are not to be trusted."""
        return self.doubt > _near(_DOUBTFUL, self.counts.shape[1])


@dataclass(frozen=True, kw_only=True)
class Counting:
    """What counters of batches know beside the gradients.

    Attributes:
        weight: Of the broadcast head, float64 [C, F].
        bias: Likewise [C].
        total: Samples of a batch, of all its local steps together.
        public: Means of the public samples by class.
        shrink: See `attacks.ilrg.ILRG`.
        refine: Likewise.
    """

    weight: Tensor
    bias: Tensor
    total: int
    public: PublicClasses
    shrink: float
    refine: int

    @property
    def pull(self) -> float:
        """Weight of the public features."""
        return (self.shrink / self.total) ** 2

    @cached_property
    def public_logits(self) -> Tensor:
        """[C, C]: row j, the logits of class j's public feature, without the head's bias."""
        return self.public.features @ self.weight.T

    @cached_property
    def offset(self) -> Tensor:
        """[C, C]: the head's bias, and by how much the log of the public samples' mean softmax
        exceeds the log softmax of their mean."""
        log_mean = self.public.probability.clamp_min(1e-300).log()
        return self.bias + log_mean - torch.log_softmax(self.public_logits + self.bias, dim=-1)


def restore(head: HeadGradient, counting: Counting) -> Restored:
    """iLRG's label counts of V batches.

    A hidden bias gradient is estimated from what was seen of its weight row, by projection on
    the public feature (dW_j = db_j e_j). A row of which nothing was seen gives no equation;
    then, and where the system is singular, the counts n minimise
    |A n - b|^2 + (1'n - K)^2 + 1e-6 |n - K share|^2.
    """
    seen = (head.bias_seen & (head.bias != 0)).any(dim=1)
    silent = ~(seen | (head.weight_seen & (head.weight != 0)).flatten(1).any(dim=1))
    filled, rows = complete(head, counting.public.features)
    logits, product = _quotient_logits(filled, counting)
    share = counting.public.share
    solved = _solve(_softmax(logits), filled.bias, rows, total=counting.total, share=share)
    counts, distance = _whole(solved, total=counting.total)
    unsettled = ~silent & (distance > _near(_SETTLED, len(share)))
    if counting.refine and bool(unsettled.any()):
        counts, distance = _refine(counts, distance, filled, product, rows, unsettled, counting)
    return Restored(
        counts=counts, plain=solved, doubt=distance, rows=rows.sum(dim=1), silent=silent
    )


def fitting_lengths(head: HeadGradient, counting: Counting) -> Tensor:
    """Factors [V] at which gradients of unknown length give counts that are nearest to whole ones
    >= 0.

    With given probabilities the counts are linear in the gradient's length, so that each class
    has every whole count at one length; these lengths are compared.
    """
    public, total = counting.public, counting.total
    filled, rows = complete(head, public.features)
    probability = _softmax(_quotient_logits(filled, counting)[0])
    at_none, at_one = (
        _solve(probability, side, rows, total=total, share=public.share)
        for side in (torch.zeros_like(filled.bias), filled.bias)
    )
    slope = at_one - at_none  # [V, C]
    counts = torch.arange(total + 1, dtype=slope.dtype, device=slope.device)
    lengths = (counts - at_none[..., None]) / slope[..., None]
    lengths = lengths.flatten(1).nan_to_num(1.0, posinf=1.0, neginf=1.0)  # [V, C (K + 1)]
    lengths = torch.cat([torch.ones_like(lengths[:, :1]), lengths.clamp(*_LENGTHS)], dim=1)
    factors = torch.ones_like(lengths[:, 0])
    for v, (start, rise, tried) in enumerate(zip(at_none, slope, lengths, strict=True)):
        solved = start + tried[:, None] * rise
        away = (whole(solved, total=total) - solved).square().sum(dim=1)
        factors[v] = tried[away.argmin()]
    return factors


def public_solution(head: HeadGradient, *, public: PublicClasses, total: int) -> Tensor:
    """Real-valued counts [V, C] by the mean softmax of each class's public samples."""
    filled, rows = complete(head, public.features)
    probability = public.probability[None]
    return _solve(probability, filled.bias, rows, total=total, share=public.share)


def whole(solved: Tensor, *, total: int) -> Tensor:
    """Solved counts [V, C] as whole ones >= 0 of that total, int64."""
    return round_to_total(solved.clamp_min(0.0), total=total)


def _whole(solved: Tensor, *, total: int) -> tuple[Tensor, Tensor]:
    """Counts int64 [V, C], and the largest distance of a class's solved count from it, [V]."""
    counts = whole(solved, total=total)
    return counts, (counts - solved).abs_().amax(dim=1)


def _near(level: tuple[float, float], classes: int) -> float:
    """Distance below which counts pass as whole: at most level[0], and less for few classes,
    so that C - 1 free counts come so near by chance with probability level[1] only."""
    most, chance = level
    return min(most, 0.5 * chance ** (1 / max(1, classes - 1)))


def complete(head: HeadGradient, public: Tensor) -> tuple[HeadGradient, Tensor]:
    """The head's gradient with estimates of what was not seen, and bool [V, C], whether
    anything of a row was seen."""
    if bool(head.weight_seen.all()) and bool(head.bias_seen.all()):
        return head, head.bias_seen
    feature = torch.where(head.weight_seen, public, 0.0)
    length = feature.square().sum(dim=-1)
    projected = (torch.where(head.weight_seen, head.weight, 0.0) * feature).sum(dim=-1)
    bias = torch.where(head.bias_seen, head.bias, projected / length.clamp_min(1e-300))
    # With this gradient, the embedding is the public feature in the hidden coordinates.
    filled = torch.where(head.weight_seen, head.weight, bias[..., None] * public)
    return replace(head, weight=filled, bias=bias), head.bias_seen | (length > 0)


def _quotient_logits(head: HeadGradient, counting: Counting) -> tuple[Tensor, Tensor]:
    """Logits [V, C, C] of every class's embedding, and the head applied to the weight gradient,
    [V, C, C]."""
    # The floor matters for shrink = 0 alone, where a vanishing bias gradient has no quotient.
    square = (head.bias * head.bias).add_(counting.pull).clamp_min_(1e-300)
    own, public = (head.bias / square).unsqueeze(-1), (counting.pull / square).unsqueeze(-1)
    # The head is applied before the quotient: C numbers per class to divide, and not F.
    # Stored with the outputs outermost.
    product = (counting.weight @ head.weight.flatten(0, 1).T).T.view(*head.weight.shape[:2], -1)
    logits = torch.addcmul(product * own, public, counting.public_logits)
    return logits.add_(counting.bias), product


def _softmax(logits: Tensor) -> Tensor:
    """Over the last dimension, which is stored next to last to vectorise over classes. Spends
    its argument."""
    # A class that is absent may have a meaningless, huge embedding: keep the softmax finite.
    logits = logits.nan_to_num_(0.0, posinf=1e30, neginf=-1e30)
    return torch.softmax(logits.mT, dim=-2).mT


def _solve(
    probability: Tensor, bias_grad: Tensor, rows: Tensor, *, total: int, share: Tensor
) -> Tensor:
    """Real-valued counts [V, C] from probabilities [V or 1, C, C] and bias gradients [V, C]."""
    victims, classes = bias_grad.shape
    right = bias_grad * float(total)
    # Row i: sum_j n_j p_j[i] - n_i = right_i. Every column sums to 0 over the rows, so with
    # `right` centred the least-squares solution meets all equations, and adding the row
    # sum(n) = K to each of them leaves a square system.
    square = probability + 1 / classes
    square.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    centred = right - right.sum(dim=1, keepdim=True).sub_(float(total)).div_(float(classes))
    # The transposed matrix is stored by columns, as LAPACK wants it.
    lu, pivots, _ = torch.linalg.lu_factor_ex(square)
    sides = centred.reshape(len(square), -1, classes).mT
    solved = torch.linalg.lu_solve(lu, pivots, sides, adjoint=True).mT.reshape(victims, classes)
    least, most = lu.diagonal(dim1=-2, dim2=-1).abs().aminmax(dim=1)
    undecided = (least <= _SINGULAR * most) | ~rows.all(dim=1)
    if bool(undecided.any()):
        equations = square.expand(victims, -1, -1)[undecided].mT - 1 / classes
        equations = torch.where(rows[undecided][..., None], equations, 0.0)
        known = torch.where(rows[undecided], right[undecided], 0.0)
        normal = equations.mT @ equations + 1.0
        normal.diagonal(dim1=-2, dim2=-1).add_(_PRIOR)
        pulled = (equations.mT @ known[..., None]).squeeze(-1) + total * (1 + _PRIOR * share)
        solved[undecided] = torch.linalg.solve(normal, pulled)
    return solved


def _refine(
    counts: Tensor,
    distance: Tensor,
    head: HeadGradient,
    product: Tensor,
    rows: Tensor,
    unsettled: Tensor,
    counting: Counting,
) -> tuple[Tensor, Tensor]:
    """The counts with their distances, or an iterate that is near whole counts or nearer.

    With counts n and probabilities p, the weight gradient is dW = M E, M_ij = (n_j / K)
    (p_j[i] - [i = j]), exactly if every sample of a class has the embedding E_j; the quotient
    dW / db is its solution only where all E_j are alike. Each step solves for E (shrunk to the
    public features), takes p from E, and n from p. Samples of a class differ, and the mean of
    their softmax is not the softmax of the mean: the public samples' gap is added to the logits.
    """
    solved, counts, distance = counts, counts.clone(), distance.clone()
    at, left = torch.arange(len(distance), device=distance.device), unsettled
    whole_weight = bool(head.weight_seen.all())
    probability = counting.public.probability[None]
    for step in range(counting.refine + 1):
        if not bool(left.all()):
            at, product, solved, rows = at[left], product[left], solved[left], rows[left]
            head = head.victims(left)
            probability = probability if len(probability) == 1 else probability[left]
        if step:
            logits = _embed_logits(
                product, None if whole_weight else head, probability, solved, counting
            )
            probability = _softmax(logits.add_(counting.offset))
        share = counting.public.share
        solved = _solve(probability, head.bias, rows, total=counting.total, share=share)
        (tried, away), best = _whole(solved, total=counting.total), distance[at]
        # Within half an instance the refined model is trusted over a chance agreement.
        better = away <= best.clamp_min(0.5)
        counts[at] = torch.where(better[:, None], tried, counts[at])
        distance[at] = torch.where(better, away, best)
        left = away > _near(_SETTLED, counts.shape[1])
        if not bool(left.any()):
            break
    return counts, distance


def _embed_logits(
    product: Tensor,
    partial: HeadGradient | None,
    probability: Tensor,
    counts: Tensor,
    counting: Counting,
) -> Tensor:
    """E W' [V, C, C] of argmin_E |dW - M E|^2 + pull |E - public|^2; see `_refine`.

    product: dW W' [V, C, C]. partial: dW, if not all of it was seen; then product is not used.
    """
    portion = counts.clamp_min(0.0)
    portion = portion / portion.sum(dim=1, keepdim=True).clamp_min(1e-300)
    mixing = probability * portion[..., None]  # M', of which row j is class j
    mixing.diagonal(dim1=-2, dim2=-1).sub_(portion)
    if partial is not None:
        modelled = mixing.mT @ counting.public.features
        product = torch.where(partial.weight_seen, partial.weight, modelled) @ counting.weight.T
    # M has rank C - 1 at most, so without shrinkage something must choose.
    pull = max(counting.pull, _PRIOR**2)
    normal = mixing @ mixing.mT
    normal.diagonal(dim1=-2, dim2=-1).add_(pull)
    return torch.linalg.solve(normal, mixing @ product + pull * counting.public_logits)
