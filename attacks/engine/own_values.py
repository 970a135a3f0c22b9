"""Images matched together with what their clients kept to themselves.

A client that never uploads a part of the network trains from values of its own there. Images
matched under the attacker's surrogate alone are bent until they explain the difference, the more so
the less noise there is and the more rounds are added up. So the values are unknowns beside the
images, with a prior around the surrogate, and what both leave open counts as noise, as it does
where nothing was kept and no image explains what was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from attacks.engine.chunks import minimised
from attacks.engine.encoding import Encoding
from attacks.engine.evidence import Evidence, keeping, releases_of
from attacks.engine.lbfgs import Evaluate
from attacks.engine.matching import Matcher
from attacks.engine.restarts import Solution
from attacks.engine.terms import Uploads, prior

_LEVELS = 1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5, 1e-6
"""Of the noise that is supposed beside the known one, in units of what the public mean misses."""
_EXPLAINED = 1.5
"""Standard deviations within which a level's answer must explain what was seen."""
_BESIDE = 0.1
"""Share of the known noise below which more of it makes no difference."""
_FEW = 0.25
"""Share of many releases that all levels but the last count."""
_LEAST_GAIN = 1e-5
_SUITING = 50
"""Evaluations by which own values are found that suit given images."""


def unexplained(matcher: Matcher, solution: Solution) -> bool:
    """Whether a solution leaves more of any victim's upload open than its noise explains."""
    images = solution.images.nan_to_num(0.5).to(matcher.encoding.dtype)
    y = torch.nn.functional.one_hot(solution.labels, matcher.encoding.classes).to(images)
    everyone = torch.arange(len(images), device=images.device)
    with torch.no_grad():
        found = [
            (u.missed(images, y, everyone) > _EXPLAINED**2 * u.known).any()
            for u in _weighing(matcher.evidence)
        ]
    return bool(found) and bool(torch.stack(found).any())


def match_with_own(matcher: Matcher, solution: Solution, *, evaluations: int, history: int) -> None:
    """Replace a solution by images matched together with own values, which all releases share.

    The fit begins at the solution and at the public mean, of which the better goes on, under as
    much noise as the mean misses, and goes down from level to level. A victim stays at the last one
    whose answer explains what was seen; there the rest counts as noise. Under a likelihood that is
    not Gaussian there is one level, without more noise.

    Args:
        matcher: Of a likelihood or a squared distance.
        solution: Of images alone, whose labels are kept.
        evaluations: Of one victim's gradients.
        history: Curvature pairs.
    """
    plain, labels = matcher.encoding, solution.labels
    uploads = keeping(matcher.evidence) or _weighing(matcher.evidence)
    encoding = Encoding(
        plain.ctx, samples=plain.samples, dtype=plain.dtype, framed=True, own=_numbers(uploads)
    )
    joint = Matcher(matcher.evidence, encoding, beliefs=[prior])
    images = encoding.vectors_of(solution.images.nan_to_num(0.5).to(plain.dtype), labels)
    found = torch.cat([images, images.new_zeros(len(images), encoding.own)], dim=1)
    mean, active = torch.zeros_like(found), ~solution.failed
    beyond = [
        (m - u.known).clamp_min(0.0) * len(uploads)
        for m, u in zip(_missed(joint, uploads, mean, labels), uploads, strict=True)
    ]
    weighs = all(u.weighs for u in uploads)
    levels = [  # of which any victim's noise is more than a small share of the known one
        level
        for level in _LEVELS
        if weighs
        and any(
            bool((level * b > _BESIDE * u.known).any())
            for u, b in zip(uploads, beyond, strict=True)
        )
    ]
    if not levels or any(bool((u.known > 0).any()) for u in uploads):
        levels.append(0.0)
    supposed = [torch.zeros_like(b) for b in beyond]
    for number, level in enumerate(levels):
        who = active.nonzero().squeeze(1)
        if not len(who):
            break
        tried = [torch.where(active, level * b, s) for b, s in zip(beyond, supposed, strict=True)]
        for one, variance in zip(uploads, tried, strict=True):
            one.unexplained = variance.sqrt()
        starts = [found, mean] if number == 0 else [found]
        victims = who.repeat(len(starts))
        releases = 1.0 if level == levels[-1] or not joint.evidence.costly else _FEW
        new, loss, spent = minimised(
            partial(_objective, joint, victims, labels[victims], releases),
            torch.cat([s[who] for s in starts]),
            numbers_each=joint.working_numbers,
            evaluations=max(1, evaluations // len(levels)),
            history=history,
            least_gain=_LEAST_GAIN,
        )
        solution.evaluations += spent
        best = loss.nan_to_num(torch.inf).view(len(starts), -1).argmin(dim=0) * len(who)
        rows = best + torch.arange(len(who), device=best.device)
        at = found.clone()
        at[who] = new[rows]
        if number and weighs:
            missed = _missed(joint, uploads, at, labels)
            left = [m * u.sizes for m, u in zip(missed, uploads, strict=True)]
            allowed = [(u.known + b) * u.sizes for u, b in zip(uploads, tried, strict=True)]
            most = _EXPLAINED**2 * torch.stack(allowed).sum(dim=0)
            active = active & (torch.stack(left).sum(dim=0) <= most)
        found = torch.where(active[:, None], at, found)
        solution.loss[who] = torch.where(
            active[who], loss[rows].to(solution.loss), solution.loss[who]
        )
        supposed = [torch.where(active, t, s) for t, s in zip(tried, supposed, strict=True)]
    for one, variance in zip(uploads, supposed, strict=True):
        one.unexplained = variance.sqrt()
    _tell(uploads, found[:, encoding.pixels :])
    made = encoding.images(found, labels).to(solution.images)
    solution.images = torch.where(
        solution.failed.view(-1, *[1] * (made.ndim - 1)), solution.images, made
    )


def _objective(
    joint: Matcher, victims: Tensor, labels: Tensor, releases: float, part: slice
) -> Evaluate:
    return joint.evaluator(victims[part], labels[part], releases=releases)


def suit(matcher: Matcher, images: Tensor, labels: Tensor) -> None:
    """Find the own values that suit given images [V, K, *shape] and labels [V, K] best, under the
    noise that suits both (see `Uploads.surprise`)."""
    uploads, encoding = keeping(matcher.evidence), matcher.encoding
    y = torch.nn.functional.one_hot(labels, encoding.classes).to(images)
    start = images.new_zeros(len(images), _numbers(uploads))

    def evaluate(z: Tensor, victims: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            x, hot = images[victims], y[victims]
            losses = [u.surprise(x, hot, victims, z) for u in uploads]
            loss = torch.stack(losses).sum(dim=0) + z.square().sum(dim=1) / 2
            return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]

    found, _, _ = minimised(
        lambda part: lambda z, problems: evaluate(z, problems + (part.start or 0)),
        start,
        numbers_each=matcher.working_numbers,
        evaluations=_SUITING,
    )
    _tell(uploads, found)


def _weighing(evidence: Evidence) -> list[Uploads]:
    found = [one.uploads for one in releases_of(evidence)]
    return [u for u in found if u is not None and u.weighs]


def _numbers(uploads: Sequence[Uploads]) -> int:
    """Of own values of a victim."""
    return next((sum(u.own.sizes.values()) for u in uploads if u.own is not None), 0)


def _tell(uploads: Sequence[Uploads], found: Tensor) -> None:
    for one in uploads:
        if one.own is not None:
            one.own.found = found


def _missed(joint: Matcher, uploads: Sequence[Uploads], z: Tensor, labels: Tensor) -> list[Tensor]:
    """Mean squares [V], one per release, of what vectors z [V, N] leave open."""
    candidate = joint.encoding.candidate(z, labels)
    everyone = torch.arange(len(z), device=z.device)
    with torch.no_grad():
        return [u.missed(candidate.x, candidate.y, everyone, candidate.own) for u in uploads]
