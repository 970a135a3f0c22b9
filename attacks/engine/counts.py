"""Label counts of batches from the gradients of the network's head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bench.toolkit.counts import round_to_total

_CHUNK_VALUES = 1 << 23
"""Float64 values of one chunk of victims: 64 MiB, and a few temporaries of that size."""
_PRIOR = 1e-6
"""Weight of |n - K * public class frequency|^2 where the equations leave counts open."""
_SINGULAR = 1e-10
"""Smallest pivot, relative to the largest, of a system that is solved as it stands."""
_SETTLED = 0.1, 1e-3
"""No further refinement if all counts are so near whole ones, and if the chance of it is below."""
_DOUBTFUL = 0.3, 1e-2
"""The same for a result that goes without a warning."""


@dataclass(frozen=True, kw_only=True)
class HeadGradient:
    """Mean gradients of the head of V victims, float64, with what of them was seen.

    weight [V, C, F], bias [V, C]: any finite value where nothing was seen. weight_seen,
    bias_seen: bool of the same shapes, or None if everything was seen.
    """

    weight: Tensor
    bias: Tensor
    weight_seen: Tensor | None = None
    bias_seen: Tensor | None = None

    def victims(self, chosen: slice | Tensor) -> HeadGradient:
        """The same for some of the victims."""
        return HeadGradient(
            weight=self.weight[chosen],
            bias=self.bias[chosen],
            weight_seen=None if self.weight_seen is None else self.weight_seen[chosen],
            bias_seen=None if self.bias_seen is None else self.bias_seen[chosen],
        )


@dataclass(frozen=True, kw_only=True)
class PublicClasses:
    """What public samples say of each class, float64.

    features [C, F]: mean head input. probability [C, C]: row j, mean softmax of class j.
    share [C]: class frequencies, which decide where the equations leave counts open.
    """

    features: Tensor
    probability: Tensor
    share: Tensor


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Label counts of V batches, with how far to trust them.

    counts: int64 [V, C]. doubt: [V], largest distance of a class's solved count from its whole
    count, near 0 where the model of the gradient holds; it is judged without the truth.
    rows: int64 [V], head rows that gave an equation. silent: bool [V], the gradient is 0
    wherever it was seen.
    """

    counts: Tensor
    doubt: Tensor
    rows: Tensor
    silent: Tensor

    @property
    def doubtful(self) -> Tensor:
        """bool [V]: counts that are not to be trusted."""
        return self.doubt > _near(_DOUBTFUL, self.counts.shape[1])


def restore(
    head: HeadGradient,
    *,
    weight: Tensor,
    bias: Tensor,
    total: int,
    public: PublicClasses,
    shrink: float,
    refine: int,
) -> Restored:
    """Label counts of V batches of `total` samples.

    weight [C, F], bias [C]: the broadcast head. shrink, refine: see `attacks.ilrg.ILRG`.
    A hidden bias gradient is estimated from what was seen of its weight row, by projection on
    the public feature (dW_j = db_j e_j). A row of which nothing was seen gives no equation;
    then, and where the system is singular, the counts n minimise
    |A n - b|^2 + (1'n - K)^2 + 1e-6 |n - K share|^2.
    Raises ValueError if total < 1 or a gradient is not finite.
    """
    if total < 1:
        raise ValueError(f"total must be >= 1 (samples of a batch), got {total}.")
    victims, classes, width = head.weight.shape
    at_once = max(1, _CHUNK_VALUES // (classes * max(width, classes)))
    public_logits = public.features @ weight.T
    parts = []
    for start in range(0, victims, at_once):
        part = head.victims(slice(start, start + at_once))
        silent = _silent(part)
        part, rows = _completed(part, public.features)
        probability = _probabilities(
            part, weight=weight, bias=bias, public_logits=public_logits, pull=(shrink / total) ** 2
        )
        found = _whole(
            _solve(probability, part.bias, rows, total=total, share=public.share), total=total
        )
        unsettled = ~silent & (found.distance > _near(_SETTLED, classes))
        if refine and bool(unsettled.any()):
            found = _refined(
                found, part, rows, unsettled, weight=weight, bias=bias, total=total,
                public=public, pull=(shrink / total) ** 2, steps=refine,
            )  # fmt: skip
        parts.append((found.counts, found.distance, rows.sum(dim=1), silent))
    counts, doubt, seen_rows, silent = (torch.cat(p) for p in zip(*parts, strict=True))
    return Restored(counts=counts, doubt=doubt, rows=seen_rows, silent=silent)


class _Whole(NamedTuple):
    """Counts int64 [V, C], and the largest distance of a class's solved count from it, [V]."""

    counts: Tensor
    distance: Tensor


def _whole(solved: Tensor, *, total: int) -> _Whole:
    counts = round_to_total(solved.clamp_min(0), total=total)
    return _Whole(counts, (counts - solved).abs().amax(dim=1))


def _near(level: tuple[float, float], classes: int) -> float:
    """Distance below which counts pass as whole: at most level[0], and less for few classes,
    so that C - 1 free counts come so near by chance with probability level[1] only."""
    most, chance = level
    return min(most, 0.5 * chance ** (1 / max(1, classes - 1)))


def _silent(head: HeadGradient) -> Tensor:
    """bool [V]: no value that was seen differs from 0. Raises ValueError if one is not finite."""
    shown = [
        value if seen is None else torch.where(seen, value, 0.0)
        for value, seen in ((head.weight, head.weight_seen), (head.bias, head.bias_seen))
    ]
    length = sum(torch.linalg.vector_norm(s.flatten(1), ord=1, dim=1) for s in shown)
    if not bool(torch.isfinite(length).all()):
        raise ValueError("the head's gradient holds non-finite values.")
    return length == 0


def _completed(head: HeadGradient, public: Tensor) -> tuple[HeadGradient, Tensor]:
    """The head's gradient with estimates of what was not seen, and bool [V, C], whether
    anything of a row was seen."""
    if head.weight_seen is None and head.bias_seen is None:
        return head, torch.ones_like(head.bias, dtype=torch.bool)
    weight_seen = head.weight_seen
    if weight_seen is None:
        weight_seen = torch.ones_like(head.weight, dtype=torch.bool)
    bias, rows = head.bias, torch.ones_like(head.bias, dtype=torch.bool)
    if head.bias_seen is not None:
        feature = torch.where(weight_seen, public, 0.0)
        length = feature.square().sum(dim=-1)
        projected = (torch.where(weight_seen, head.weight, 0.0) * feature).sum(dim=-1)
        rows = head.bias_seen | (length > 0)
        bias = torch.where(head.bias_seen, bias, projected / length.clamp_min(1e-300))
    # With this gradient, the embedding is the public feature in the hidden coordinates.
    filled = torch.where(weight_seen, head.weight, bias[..., None] * public)
    return HeadGradient(weight=filled, bias=bias, weight_seen=head.weight_seen), rows


def _probabilities(
    head: HeadGradient, *, weight: Tensor, bias: Tensor, public_logits: Tensor, pull: float
) -> Tensor:
    """[V, C, C]: row j, the softmax of class j's embedding."""
    # The floor matters for shrink = 0 alone, where a vanishing bias gradient has no quotient.
    square = (head.bias.square() + pull).clamp_min(1e-300)
    # The head is applied before the quotient: C numbers per class to divide, and not F.
    logits = (head.weight.flatten(0, 1) @ weight.T).view(*head.bias.shape, -1)
    logits = logits.mul_((head.bias / square)[..., None])
    logits = logits.addcmul_((pull / square)[..., None], public_logits).add_(bias)
    return _softmax(logits)


def _softmax(logits: Tensor) -> Tensor:
    # A class that is absent may have a meaningless, huge embedding: keep the softmax finite.
    return torch.softmax(logits.nan_to_num_(0.0, posinf=1e30, neginf=-1e30), dim=-1)


def _solve(
    probability: Tensor, bias_grad: Tensor, rows: Tensor, *, total: int, share: Tensor
) -> Tensor:
    """Real-valued counts [V, C] from probabilities [V, C, C] and bias gradients [V, C]."""
    classes = len(share)
    right = total * bias_grad
    # Row i: sum_j n_j p_j[i] - n_i = right_i. Every column sums to 0 over the rows, so with
    # `right` centred the least-squares solution meets all equations, and adding the row
    # sum(n) = K to each of them leaves a square system.
    square = probability + 1 / classes
    square.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    centred = right - right.mean(dim=1, keepdim=True) + total / classes
    lu, pivots, _ = torch.linalg.lu_factor_ex(square.mT)
    solved = torch.linalg.lu_solve(lu, pivots, centred[..., None]).squeeze(-1)
    pivot_size = lu.diagonal(dim1=-2, dim2=-1).abs()
    regular = pivot_size.amin(dim=1) > _SINGULAR * pivot_size.amax(dim=1)
    undecided = ~(rows.all(dim=1) & regular)
    if bool(undecided.any()):
        rows = rows[undecided]
        equations = torch.where(rows[..., None], square[undecided].mT - 1 / classes, 0.0)
        known = torch.where(rows, right[undecided], 0.0)
        normal = equations.mT @ equations + 1.0
        normal.diagonal(dim1=-2, dim2=-1).add_(_PRIOR)
        pulled = (equations.mT @ known[..., None]).squeeze(-1) + total * (1 + _PRIOR * share)
        solved[undecided] = torch.linalg.solve(normal, pulled)
    return solved


def _refined(
    first: _Whole,
    head: HeadGradient,
    rows: Tensor,
    unsettled: Tensor,
    *,
    weight: Tensor,
    bias: Tensor,
    total: int,
    public: PublicClasses,
    pull: float,
    steps: int,
) -> _Whole:
    """The counts `first`, or an iterate that is near whole counts or nearer.

    With counts n and probabilities p, the weight gradient is dW = M E, M_ij = (n_j / K)
    (p_j[i] - [i = j]), exactly if every sample of a class has the embedding E_j; the quotient
    dW / db is its solution only where all E_j are alike. Each step solves for E (shrunk to the
    public features), takes p from E, and n from p. Samples of a class differ, and the mean of
    their softmax is not the softmax of the mean: the public samples' gap is added to the logits.
    """
    counts, distance = first.counts.clone(), first.distance.clone()
    at = unsettled.nonzero().squeeze(1)
    head, rows = head.victims(at), rows[at]
    gap = public.probability.clamp_min(1e-300).log()
    gap = gap - torch.log_softmax(public.features @ weight.T + bias, dim=-1)
    probability = public.probability.expand(len(at), -1, -1)
    for step in range(steps + 1):
        solved = _solve(probability, head.bias, rows, total=total, share=public.share)
        found = _whole(solved, total=total)
        # Within half an instance the refined model is trusted over a chance agreement.
        better = found.distance <= distance[at].clamp_min(0.5)
        counts[at[better]], distance[at[better]] = found.counts[better], found.distance[better]
        left = (found.distance > _near(_SETTLED, weight.shape[0])).nonzero().squeeze(1)
        if step == steps or len(left) == 0:
            break
        at, head, rows = at[left], head.victims(left), rows[left]
        embedding = _embeddings(head, probability[left], solved[left], public.features, pull)
        probability = _softmax(embedding @ weight.T + (bias + gap))
    return _Whole(counts, distance)


def _embeddings(
    head: HeadGradient, probability: Tensor, counts: Tensor, public: Tensor, pull: float
) -> Tensor:
    """argmin_E |dW - M E|^2 + pull |E - public|^2 -> [V, C, F]; see `_refined`."""
    portion = counts.clamp_min(0)
    portion = portion / portion.sum(dim=1, keepdim=True).clamp_min(1e-300)
    mixing = probability.mT * portion[:, None, :]
    mixing.diagonal(dim1=-2, dim2=-1).sub_(portion)
    observed = head.weight
    if head.weight_seen is not None:
        observed = torch.where(head.weight_seen, observed, mixing @ public)
    # M has rank C - 1 at most, so without shrinkage something must choose.
    pull = max(pull, _PRIOR**2)
    normal = mixing.mT @ mixing
    normal.diagonal(dim1=-2, dim2=-1).add_(pull)
    return torch.linalg.solve(normal, mixing.mT @ observed + pull * public)
