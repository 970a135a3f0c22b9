"""How badly images and labels explain what was seen: one measure for all attacks' answers."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.engine.encoding import Encoding
from attacks.engine.epochs import linked
from attacks.engine.evidence import Evidence, keeping, releases_of
from attacks.engine.matching import Matcher
from attacks.engine.observation import lawless, nothing_to_match, parsed
from attacks.engine.own_values import suit
from attacks.engine.private import with_private_parts
from bench.api import Context, Seen


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
    _arrange(matcher, images, labels)
    if keeping(matcher.evidence):
        suit(matcher, images, labels)
    return matcher.judged(images, labels).nan_to_num(torch.inf, posinf=torch.inf)


def unexplained(matcher: Matcher, images: Tensor, labels: Tensor) -> Tensor | None:
    """Squared distance [V] of what was seen from what the images would give, as a share of the
    square of what was seen; None under noise, and where clients kept values to themselves."""
    evidence = matcher.evidence
    if evidence.noisy or keeping(evidence):
        return None
    _arrange(matcher, images, labels)
    hot = torch.nn.functional.one_hot(labels, matcher.encoding.classes).to(images)
    everyone = torch.arange(len(images), device=images.device)
    with torch.no_grad():
        share = matcher.losses(images, hot, everyone) / evidence.square
    return share.nan_to_num(torch.inf, posinf=torch.inf)


def _arrange(matcher: Matcher, images: Tensor, labels: Tensor) -> None:
    """Let local epochs, where they hide the samples' order, use it as suits the answer best; what
    a wrong order counts as noise is the same for all answers."""
    hidden = [one.orders for one in releases_of(matcher.evidence) if one.orders is not None]
    noises = [orders.std for orders in hidden]
    matcher.reorder(images, labels)
    for orders, std in zip(hidden, noises, strict=True):
        orders.std = std
