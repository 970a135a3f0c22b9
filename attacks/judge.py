"""How well an answer explains what was seen: one measure for the answers of all attacks."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.engine.encoding import Encoding
from attacks.engine.epochs import linked
from attacks.engine.evidence import Evidence, attach, keeping, releases_of
from attacks.engine.labels import known_labels, read_labels
from attacks.engine.lbfgs import Phase, minimise
from attacks.engine.matching import Matcher
from attacks.engine.observation import NonFiniteError, lawless, nothing_to_match
from attacks.engine.own_values import suit
from attacks.engine.private import own_values, with_private_parts
from attacks.engine.together import best_labels
from bench.api import Context, Judge, Reconstruction, Seen
from bench.toolkit.batches import class_means

_STEPS = 30
"""Evaluations by which pixels recover from being cut."""
_LITTLE = 0.1
"""Share of |observation|^2 from which an answer explains little."""
_BEYOND = 0.03
"""Root of how far beyond they begin, since at 0 there is no slope."""


class Likelihood(Judge):
    """Negative log of the likelihood of what was seen times the public prior of samples, as the
    attacks that match have them (see `Matcher.judged`).

    An answer without images is judged by the public class means of its labels; one without labels
    by the labels that suit it best, of several samples by those that are read off the upload.
    Where a value that was seen is not finite, no answer explains it, and none is judged.
    """

    def losses(self, seen: Seen, ctx: Context, answer: Reconstruction) -> Tensor | None:
        try:
            return self._losses(seen, ctx, answer)
        except NonFiniteError:
            # Attacks that look at it have failed; an answer that looked at nothing stands.
            return None

    def _losses(self, seen: Seen, ctx: Context, answer: Reconstruction) -> Tensor | None:
        seen = linked(seen, ctx)
        own, seen = own_values(seen, ctx), with_private_parts(seen, ctx)
        if nothing_to_match(seen) is not None or lawless(seen) is not None:
            return None
        arranged = known_labels(seen, ctx.device) is not None
        evidence = Evidence(seen, ctx, dtype=torch.float64, arranged=arranged)
        attach(evidence, own)
        encoding = Encoding(
            ctx, samples=evidence.clients.samples, dtype=evidence.dtype, framed=True
        )
        matcher = Matcher(evidence, encoding)
        images = None if answer.images is None else answer.images.to(ctx.device, evidence.dtype)
        labels = self._labels(answer, images, matcher, ctx)
        if images is None:
            means = class_means(ctx.aux_x, ctx.aux_y, classes=encoding.classes)
            images = means.to(ctx.device, evidence.dtype)[labels]
        drawn = evidence.noisy and (evidence.noise is None or evidence.noise.random)
        if not drawn and encoding.image:
            images = _uncut(evidence, images, labels, ctx)
        _ordered(evidence, encoding, images, labels)
        if keeping(evidence):
            suit(matcher, images, labels)
        losses = matcher.judged(images, labels).nan_to_num(torch.inf, posinf=torch.inf).cpu()
        if answer.failed is not None:
            losses = losses.masked_fill(answer.failed.cpu(), torch.inf)
        return losses

    def _labels(
        self, answer: Reconstruction, images: Tensor | None, matcher: Matcher, ctx: Context
    ) -> Tensor:
        """Labels int64 [V, K] to judge the answer with."""
        evidence, samples = matcher.evidence, matcher.encoding.samples
        granted = known_labels(evidence.seen, ctx.device)
        if granted is not None:
            return granted
        if answer.labels is not None:
            return answer.labels.to(ctx.device)
        counts = answer.label_counts
        if counts is not None and bool((counts.sum(dim=1) == samples).all()):
            classes = torch.arange(ctx.network.classes, device=ctx.device)
            return torch.stack([classes.repeat_interleave(row.to(ctx.device)) for row in counts])
        if samples == 1 and images is not None:
            return best_labels(matcher, images)
        read = read_labels(evidence, ctx)
        if read.fixed is not None:
            return read.fixed
        assert read.ranking is not None
        return read.ranking[:, :1]


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


def _uncut(evidence: Evidence, images: Tensor, labels: Tensor, ctx: Context) -> Tensor:
    """Images [V, K, *shape] whose black and white pixels go below 0 and above 1 where that explains
    more.

    Answers are cut to [0, 1], and where nothing that was seen is random, that alone leaves more
    unexplained than the images did that they were cut from. An answer that explains little is left
    as it is: that is not for its being cut.
    """
    encoding = Encoding(ctx, samples=evidence.clients.samples, dtype=evidence.dtype)
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
