"""Reading or ranking labels from the upload of their gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.engine.matching import Matcher
from attacks.engine.restarts import Labels
from attacks.engine.wire_labels import (
    in_the_clear,
    labels_by_slope,
    labels_sent,
    shows_slopes,
)
from attacks.ilrg import ILRG
from bench.api import Context, Seen
from bench.toolkit.batches import class_means

_LARGEST = 2**26
"""Numbers held at once while classes are compared."""


def known_labels(seen: Seen, matcher: Matcher) -> Tensor | None:
    """Labels int64 [V, K] if the threat grants them or if they were sent in the clear."""
    granted = seen.known.get("truth_labels")
    if granted is not None:
        return torch.tensor(granted, device=matcher.device)
    sent = labels_sent(seen)
    if sent is not None and in_the_clear(sent):
        return sent.argmax(dim=-1).to(matcher.device)
    return None


def labels_by_sample(seen: Seen, ctx: Context) -> Tensor | None:
    """Labels int64 [V, K], sample by sample of the smashed data, where a split protocol's
    messages show them: noised soft labels, else the gradients that private heads returned."""
    sent = labels_sent(seen)
    if sent is not None:
        return sent.argmax(dim=-1)
    return labels_by_slope(seen, ctx)[0] if shows_slopes(seen) else None


def read_labels(matcher: Matcher, ctx: Context) -> Labels:
    """Labels to hold fixed: of one sample by the sign rule (ranked under noise), of several by
    restored counts."""
    by_sample = labels_by_sample(matcher.seen, ctx)
    if by_sample is not None:
        return Labels(fixed=by_sample.to(matcher.device), notes=("labels: read off the wire",))
    observation = matcher.observation
    assert observation is not None
    if matcher.samples > 1:
        restored = ILRG().run(matcher.seen, ctx)
        assert restored.label_counts is not None
        classes = torch.arange(matcher.classes)
        rows = [torch.repeat_interleave(classes, c) for c in restored.label_counts]
        notes = tuple(f"labels: {note}" for note in restored.notes)
        return Labels(fixed=torch.stack(rows).to(matcher.device), notes=notes)
    exact = negative_bias(matcher, ctx)
    if exact is not None:
        return Labels(fixed=exact[:, None])
    return Labels(ranking=rank_labels(matcher, ctx), hold=True)


def likely_labels(matcher: Matcher, ctx: Context) -> Labels:
    """Labels of one sample to begin with: the sign rule's, where it holds, then the ranking."""
    ranking = rank_labels(matcher, ctx)
    by_sample = labels_by_sample(matcher.seen, ctx)
    exact = negative_bias(matcher, ctx) if by_sample is None else by_sample[:, 0]
    if exact is not None:
        later = (ranking != exact[:, None]).long().argsort(dim=1, stable=True)
        ranking = ranking.gather(1, later)
    return Labels(ranking=ranking)


def negative_bias(matcher: Matcher, ctx: Context) -> Tensor | None:
    """int64 [V], class of the smallest head bias gradient: p_c - 1 < 0 for the label, p_c > 0
    elsewhere, so it is exact. None under noise or where the bias is not seen whole."""
    observation, bias = matcher.observation, ctx.network.head[1]
    if matcher.noise is not None or observation is None or bias not in observation.values:
        return None
    if not bool(observation.present[bias].all()):
        return None
    values = observation.values[bias]
    if observation.kind == "gradient":
        return values.argmin(dim=1)
    if observation.kind == "weights":
        values = values - matcher.start[bias]
    return values.argmax(dim=1)


def rank_labels(matcher: Matcher, ctx: Context) -> Tensor:
    """int64 [V, C], classes from the likeliest down.

    A class is as likely as the head tensors that its mean public image would have sent are
    under the defense's public mechanism; classes without public images come last.
    """
    observation = matcher.observation
    assert observation is not None
    names = [n for n in ctx.network.head if n in observation.values] or list(observation.values)
    aux_y = ctx.aux_y.to(matcher.device)
    aux_x = ctx.aux_x.to(dtype=matcher.dtype, device=matcher.device)
    classes = aux_y.unique()
    means = class_means(aux_x, aux_y, classes=matcher.classes)
    targets = torch.eye(matcher.classes, dtype=matcher.dtype, device=matcher.device)
    scores = torch.full((matcher.victims, matcher.classes), torch.inf, device=matcher.device)
    width = sum(v.numel() for v in matcher.start.values()) * matcher.victims
    for some in classes.split(max(1, _LARGEST // width)):
        expected = matcher.uploads(means[some, None], targets[some, None])
        for name in names:
            value = observation.values[name][:, None]
            prepared = matcher.likelihood.prepare(value)
            misfit, _ = matcher.likelihood.misfit(expected[name].detach()[None], prepared)
            misfit = torch.where(observation.present[name][:, None], misfit, 0.0)
            added = misfit.flatten(2).sum(dim=2).to(scores)
            scores[:, some] = torch.where(scores[:, some].isinf(), 0.0, scores[:, some]) + added
    return scores.argsort(dim=1)
