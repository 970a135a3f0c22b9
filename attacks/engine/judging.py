"""How badly images and labels explain what was seen: one measure for all attacks' answers."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.engine.encoding import Encoding
from attacks.engine.epochs import linked
from attacks.engine.evidence import Evidence, keeping, releases_of
from attacks.engine.lbfgs import Phase, minimise
from attacks.engine.matching import Matcher
from attacks.engine.observation import lawless, nothing_to_match, parsed
from attacks.engine.own_values import suit
from attacks.engine.private import with_private_parts
from bench.api import Context, Seen

_STEPS = 30
"""Evaluations by which pixels recover from being cut."""
_LITTLE = 0.1
"""Share of |observation|^2 from which an answer explains little."""
_BEYOND = 0.03
"""Root of how far beyond they begin, since at 0 there is no slope."""


def judging(seen: Seen, ctx: Context) -> Matcher | None:
    """What `judged` needs to know of what was seen; None where no answer can be judged.

    Raises NonFiniteError for a value that is not finite.
    """
    releases = with_private_parts(linked(parsed(seen), ctx), ctx)
    last = releases[-1]
    if nothing_to_match(last) is not None or lawless(last) is not None:
        return None
    arranged = last.granted is not None
    evidence = Evidence(releases, ctx, dtype=torch.float64, arranged=arranged)
    encoding = Encoding(ctx, samples=evidence.clients.samples, dtype=evidence.dtype, framed=True)
    return Matcher(evidence, encoding)


def judged(matcher: Matcher, images: Tensor, labels: Tensor) -> Tensor:
    """Judged losses [V] of images [V, K, *shape] of the matcher's precision with labels int64
    [V, K], infinite where none is finite; see `Matcher.judged`."""
    images = _arranged(matcher, images, labels)
    if keeping(matcher.evidence):
        suit(matcher, images, labels)
    return matcher.judged(images, labels).nan_to_num(torch.inf, posinf=torch.inf)


def unexplained(matcher: Matcher, images: Tensor, labels: Tensor) -> Tensor | None:
    """Squared distance [V] of what was seen from what the images would give, as a share of the
    square of what was seen; None under noise, and where clients kept values to themselves."""
    evidence = matcher.evidence
    if evidence.noisy or keeping(evidence):
        return None
    images = _arranged(matcher, images, labels)
    hot = torch.nn.functional.one_hot(labels, matcher.encoding.classes).to(images)
    everyone = torch.arange(len(images), device=images.device)
    with torch.no_grad():
        share = matcher.losses(images, hot, everyone) / evidence.square
    return share.nan_to_num(torch.inf, posinf=torch.inf)


def _arranged(matcher: Matcher, images: Tensor, labels: Tensor) -> Tensor:
    """The images as they explain most: see `_uncut` and `_ordered`."""
    evidence, encoding = matcher.evidence, matcher.encoding
    drawn = evidence.noisy and (evidence.noise is None or evidence.noise.random)
    if not drawn and encoding.image:
        images = _uncut(evidence, images, labels)
    _ordered(evidence, encoding, images, labels)
    return images


def _ordered(evidence: Evidence, encoding: Encoding, images: Tensor, labels: Tensor) -> None:
    """Let local epochs, where they hide the samples' order, use it as suits the answer best; what
    a wrong order counts as noise is the same for all answers."""
    y = torch.nn.functional.one_hot(labels, encoding.classes).to(images)
    for one in releases_of(evidence):
        if one.uploads is not None and one.orders is not None:
            std = one.orders.std
            bytes_each = 8 * Matcher(one, encoding).working_numbers
            one.uploads.reorder(images, y, bytes_each=bytes_each)
            one.orders.std = std


def _uncut(evidence: Evidence, images: Tensor, labels: Tensor) -> Tensor:
    """Images [V, K, *shape] whose black and white pixels go below 0 and above 1 where that explains
    more.

    Answers are cut to [0, 1], and where nothing that was seen is random, that alone leaves more
    unexplained than the images did that they were cut from. An answer that explains little is left
    as it is: that is not for its being cut.
    """
    encoding = Encoding(evidence.ctx, samples=evidence.clients.samples, dtype=evidence.dtype)
    matcher = Matcher(evidence, encoding)
    everyone = torch.arange(len(images), device=images.device)
    hot = torch.nn.functional.one_hot(labels, encoding.classes).to(images)
    with torch.no_grad():
        losses = matcher.distances(images, hot, everyone)
    explained = (losses < _LITTLE * evidence.square).nonzero().squeeze(1)
    if not len(explained):
        return images
    uncut = images.clone()
    uncut[explained] = _beyond(matcher, images[explained], labels[explained], explained)
    return uncut


def _beyond(matcher: Matcher, images: Tensor, labels: Tensor, victims: Tensor) -> Tensor:
    """What `_uncut` does, of candidates for the victims int64 [P]."""
    encoding = matcher.encoding
    evaluate = matcher.evaluator(victims, labels)
    plain = encoding.vectors_of(images, labels)
    beyond = (plain >= 1).to(plain) - (plain <= 0).to(plain)  # which way a pixel was cut

    def evaluate_cut(z: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        way = beyond[problems]
        loss, gradient = evaluate(plain[problems] + way * z.square(), problems)
        return loss, gradient * 2 * way * z

    stop = torch.zeros_like(plain[:, 0])
    phase = Phase(evaluate=evaluate_cut, stop=stop, dtype=encoding.dtype)
    start = torch.full_like(plain, _BEYOND)
    found = minimise([phase], start, max_evaluations=_STEPS)
    moved = plain + beyond * found.x.square()
    better = found.loss < evaluate(plain, torch.arange(len(plain), device=plain.device))[0]
    return encoding.images(torch.where(better[:, None], moved, plain), labels)
