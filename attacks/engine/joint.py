"""Fits of images together with what no single victim's images explain.

A client that never uploads a part of the network trains from values of its own there. Images
matched under the attacker's surrogate alone are bent until they explain the difference, the more so
the less noise there is and the more rounds are added up. So the values are unknowns beside the
images, with a prior around the surrogate, and what both leave open counts as noise, as it does
where nothing was kept and no image explains what was seen (`match_with_own`).

A sum that the server learns says nothing of a single victim: a candidate of one is judged with
those of all others. So the images of all victims are one problem, and unknown labels are searched
together as well (`match_together`).
"""

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.engine.encoding import Encoding
from attacks.engine.evidence import Evidence, keeping, releases_of
from attacks.engine.matching import Matcher, count_own_values, set_own_values
from attacks.engine.optimisers import Phase, column, minimise, minimise_in_chunks
from attacks.engine.restarts import Solution
from attacks.engine.terms import Candidate, Uploads, prior

_LEVELS = 1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5, 1e-6
"""Of the noise that is supposed beside the known one, in units of what the public mean misses."""
_EXPLAINED = 1.5
"""Standard deviations within which a level's answer must explain what was seen."""
_BESIDE = 0.1
"""Share of the known noise below which more of it makes no difference."""
_FEW = 0.25
"""Share of many releases that all levels but the last count."""
_LEAST_GAIN = 1e-5


def leaves_unexplained(matcher: Matcher, solution: Solution) -> bool:
    """Whether a solution leaves more of any victim's upload open than its noise explains."""
    images = solution.images.nan_to_num(0.5).to(matcher.encoding.dtype)
    y = torch.nn.functional.one_hot(solution.labels, matcher.encoding.classes).to(images)
    everyone = torch.arange(len(images), device=images.device)
    with torch.no_grad():
        surprised = [
            (u.misfit(images, y, everyone) > _EXPLAINED**2 * u.known).any()
            for u in _weighing(matcher.evidence)
        ]
    return bool(surprised) and bool(torch.stack(surprised).any())


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
        plain.ctx,
        samples=plain.samples,
        dtype=plain.dtype,
        framed=True,
        own=count_own_values(uploads),
    )
    joint = Matcher(matcher.evidence, encoding, beliefs=[prior])
    images = encoding.vectors_of(solution.images.nan_to_num(0.5).to(plain.dtype), labels)
    vectors = torch.cat([images, images.new_zeros(len(images), encoding.own)], dim=1)
    mean, active = torch.zeros_like(vectors), ~solution.failed
    beyond = [
        (m - u.known).clamp_min(0.0) * len(uploads)
        for m, u in zip(_misfits(joint, uploads, mean, labels), uploads, strict=True)
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
        starts = [vectors, mean] if number == 0 else [vectors]
        victims = who.repeat(len(starts))
        releases = 1.0 if level == levels[-1] or not joint.evidence.costly else _FEW
        new, loss, spent = minimise_in_chunks(
            joint.evaluator(victims, labels[victims], releases=releases),
            torch.cat([s[who] for s in starts]),
            numbers_each=joint.working_numbers,
            evaluations=max(1, evaluations // len(levels)),
            history=history,
            least_gain=_LEAST_GAIN,
        )
        solution.evaluations += spent
        best = loss.nan_to_num(torch.inf).view(len(starts), -1).argmin(dim=0) * len(who)
        rows = best + torch.arange(len(who), device=best.device)
        at = vectors.clone()
        at[who] = new[rows]
        if number and weighs:
            missed = _misfits(joint, uploads, at, labels)
            left = [m * u.sizes for m, u in zip(missed, uploads, strict=True)]
            allowed = [(u.known + b) * u.sizes for u, b in zip(uploads, tried, strict=True)]
            most = _EXPLAINED**2 * torch.stack(allowed).sum(dim=0)
            active = active & (torch.stack(left).sum(dim=0) <= most)
        vectors = torch.where(active[:, None], at, vectors)
        solution.loss[who] = torch.where(
            active[who], loss[rows].to(solution.loss), solution.loss[who]
        )
        supposed = [torch.where(active, t, s) for t, s in zip(tried, supposed, strict=True)]
    for one, variance in zip(uploads, supposed, strict=True):
        one.unexplained = variance.sqrt()
    set_own_values(uploads, vectors[:, encoding.pixels :])
    made = encoding.images(vectors, labels).to(solution.images)
    solution.images = torch.where(column(solution.failed, made), solution.images, made)


def _weighing(evidence: Evidence) -> list[Uploads]:
    uploads = [one.uploads for one in releases_of(evidence)]
    return [u for u in uploads if u is not None and u.weighs]


def _misfits(joint: Matcher, uploads: Sequence[Uploads], z: Tensor, labels: Tensor) -> list[Tensor]:
    """Mean squares [V], one per release, of what vectors z [V, N] leave open."""
    candidate = joint.encoding.candidate(z, labels)
    everyone = torch.arange(len(z), device=z.device)
    with torch.no_grad():
        return [u.misfit(candidate.x, candidate.y, everyone, candidate.own) for u in uploads]


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
    The images of that stage are kept which explain everything best (see `Matcher.judge`), those of
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
    best, least, missed = (images, labels), matcher.judge(images, labels), 0
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
        images, labels = give_to_owners(matcher, images, labels)
        judged = matcher.judge(images, labels)
        if float(judged.sum()) < float(least.sum()):
            best, least, missed = (images, labels), judged, 0
        else:
            missed += 1
        if missed == _PATIENCE:
            break
    solution.images, solution.labels = best[0].to(solution.images), best[1]
    solution.loss = least.to(solution.loss)


def give_to_owners(matcher: Matcher, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Images [V, K, *shape] and labels [V, K] in the order that suits best what each victim sent: a
    sum tells images, and hardly whose they are, so that a fit to it may confuse them."""
    if keeping(matcher.evidence):
        return images, labels  # what a victim kept to itself was found for its own images
    count = len(images)
    victims = torch.arange(count, device=images.device)
    cost = images.new_empty(count, count)
    for shift in range(count):
        whose = (victims + shift) % count
        cost[victims, whose] = matcher.judge(images[whose], labels[whose]).to(cost)
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
        sent = torch.cat([s.simulate(candidate) for s in sums], dim=1) / count
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
