"""All victims matched at once, where the server learns a sum over them.

A sum says nothing of a single victim: a candidate of one is judged with those of all others. So
the images of all victims are one problem, and unknown labels are searched together as well.
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.engine.evidence import keeping
from attacks.engine.lbfgs import Phase, minimise
from attacks.engine.matching import Matcher
from attacks.engine.restarts import Solution
from attacks.engine.terms import Candidate

_HEATS = 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.0
"""Of the sum, from a loose to an exact one."""
_PATIENCE = 2
"""Heats in a row that explain nothing better, after which the fit is given up."""
_NEVER = 1e30
"""Stands for an infinite loss, which assignments do not take."""
_LIKELIER = 1.0
"""Nats by which an image must suit another victim better than the one it was found for."""
_SWEEPS = 10
"""Most rounds of the search for labels; it ends where a round changes none."""


def match_together(
    matcher: Matcher, solution: Solution, *, searched: bool, evaluations: int, history: int
) -> None:
    """Improve a solution by what is known of all victims together, if that can be explained.

    The sum is loose at first, since far from the solution it would bend the images out of shape.
    The images of that stage are kept which explain everything best (see `Matcher.judged`), those of
    single victims where none comes near the sum: clients that train from values of their own make
    one that no images make, and what came closer to it is bent, not better.

    Args:
        matcher: In float64.
        solution: Of every victim by itself, which is replaced.
        searched: Whether labels, of one sample each, are unknown.
        evaluations: Of all victims' gradients.
        history: Curvature pairs.
    """
    encoding = matcher.encoding
    everyone = torch.arange(len(solution.loss), device=solution.loss.device)
    images, labels = solution.images.nan_to_num(0.5).to(encoding.dtype), solution.labels
    best, least, missed = (images, labels), matcher.judged(images, labels), 0
    loose = any(s.loosens for s in matcher.evidence.sums)
    heats = _HEATS if loose else (0.0,)
    for heat in heats:
        if searched:
            labels = best_labels(matcher, images, labels)
        minimum = minimise(
            [
                Phase(
                    evaluate=matcher.evaluator(everyone[None], labels[None], heat=heat),
                    stop=torch.full((1,), -torch.inf, device=everyone.device),
                    dtype=encoding.dtype,
                )
            ],
            encoding.vectors_of(images, labels).reshape(1, -1),
            max_evaluations=max(1, evaluations // len(heats)),
            history=history,
            least_gain=1e-6,
        )
        solution.evaluations += int(minimum.evaluations.sum()) * len(everyone)
        images = encoding.images(minimum.x.view(len(everyone), -1), labels)
        images, labels = given_to_their_owners(matcher, images, labels)
        judged = matcher.judged(images, labels)
        if float(judged.sum()) < float(least.sum()):
            best, least, missed = (images, labels), judged, 0
        else:
            missed += 1
        if missed == _PATIENCE:
            break
    solution.images, solution.labels = best[0].to(solution.images), best[1]
    solution.loss = least.to(solution.loss)


def given_to_their_owners(
    matcher: Matcher, images: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Images [V, K, *shape] and labels [V, K] in the order that suits best what each victim sent: a
    sum tells images, and hardly whose they are, so that a fit to it may confuse them."""
    if keeping(matcher.evidence):
        return images, labels  # what a victim kept to itself was found for its own images
    count = len(images)
    victims = torch.arange(count, device=images.device)
    cost = images.new_empty(count, count)
    for shift in range(count):
        whose = (victims + shift) % count
        cost[victims, whose] = matcher.judged(images[whose], labels[whose]).to(cost)
    cost = cost.nan_to_num(_NEVER, posinf=_NEVER)
    cost[victims, victims] -= _LIKELIER
    order = torch.from_numpy(linear_sum_assignment(cost.cpu().numpy())[1]).to(victims)
    return images[order], labels[order]


def best_labels(matcher: Matcher, images: Tensor, labels: Tensor | None = None) -> Tensor:
    """Labels int64 [V, 1] of single samples that suit all that was seen.

    Where something is known of all victims together, one victim's label after another is tried,
    and every exchange between two, which a sum hardly tells from the right order.

    Args:
        matcher: The objective.
        images: [V, 1, *shape], which stay as they are.
        labels: Where the search begins [V, 1]; None: with what suits each victim alone.
    """
    count, classes = len(images), matcher.encoding.classes
    victims = torch.arange(count, device=images.device)
    x = images.repeat(classes, *[1] * (images.ndim - 1))
    y = torch.eye(classes, dtype=x.dtype, device=x.device).repeat_interleave(count, dim=0)[:, None]
    own = matcher.losses(x, y, victims.repeat(classes)).view(classes, count).mT
    chosen = own.argmin(dim=1) if labels is None else labels[:, 0].clone()
    sums = matcher.evidence.sums
    if not sums:
        return chosen[:, None]
    candidate = Candidate(x=x, y=y, vectors=x.flatten(1))
    with torch.no_grad():
        sent = torch.cat([s.sent(candidate) for s in sums], dim=1) / count
        sent = sent.view(classes, count, -1).transpose(0, 1)
    mean = torch.cat([s.mean for s in sums])

    def loss(tried: Tensor) -> Tensor:
        """Of assignments [N, V]: [N]."""
        rest = sent[victims, tried].sum(dim=1) - mean
        square = rest.square().sum(dim=1).clamp_min(1e-300)
        return own[victims, tried].sum(dim=1) + len(mean) / 2 * square.log()

    for _ in range(_SWEEPS):
        before = chosen
        for victim in range(count):
            tried = chosen.repeat(classes + count, 1)
            tried[:classes, victim] = torch.arange(classes, device=victims.device)
            others = classes + victims
            tried[others, victim], tried[others, victims] = chosen, chosen[victim]
            chosen = tried[loss(tried).argmin()]
        if torch.equal(before, chosen):
            break
    return chosen[:, None]
