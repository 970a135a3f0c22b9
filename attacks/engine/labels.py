"""Reading or ranking the label of a single sample from the upload of its gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from attacks.engine.matching import Matcher
from bench.api import Context, Seen


def granted_labels(seen: Seen, matcher: Matcher) -> Tensor | None:
    """Labels int64 [V, K] if the threat grants them."""
    granted = seen.known.get("truth_labels")
    return None if granted is None else torch.tensor(granted, device=matcher.device)


def negative_bias(matcher: Matcher, bias: str) -> Tensor:
    """int64 [V], class of the smallest head bias gradient: p_c - 1 < 0 for the label, p_c > 0
    elsewhere, so without noise it is exact."""
    values = matcher.observation.values[bias]
    if matcher.observation.kind == "gradient":
        return values.argmin(dim=1)
    if matcher.observation.kind == "weights":
        values = values - matcher.start[bias]
    return values.argmax(dim=1)


def rank_labels(matcher: Matcher, ctx: Context) -> Tensor:
    """int64 [V, C], classes from the likeliest down.

    A class is as likely as the head tensors that its mean public image would have sent are
    under the defense's public mechanism; classes without public images come last.
    """
    names = [n for n in ctx.network.head if n in matcher.observation.values] or matcher.names
    aux_y = ctx.aux_y.to(matcher.device)
    aux_x = ctx.aux_x.to(dtype=matcher.dtype, device=matcher.device)
    classes = [c for c in range(matcher.classes) if bool((aux_y == c).any())]
    means = torch.stack([aux_x[aux_y == c].mean(dim=0) for c in classes])[:, None]
    targets = torch.eye(matcher.classes, dtype=matcher.dtype, device=matcher.device)
    expected = vmap(matcher.sent)(means, targets[classes][:, None])
    victims = len(matcher.observation.square)
    scores = torch.full((victims, matcher.classes), torch.inf, device=matcher.device)
    for column, label in enumerate(classes):
        total = torch.zeros(victims, dtype=matcher.dtype, device=matcher.device)
        for name in names:
            value = matcher.observation.values[name]
            prepared = matcher.likelihood.prepare(value)
            misfit, _ = matcher.likelihood.misfit(expected[name][column].expand_as(value), prepared)
            visible = matcher.observation.present[name]
            total = total + torch.where(visible, misfit, 0.0).flatten(1).sum(dim=1)
        scores[:, label] = total.to(scores)
    return scores.argsort(dim=1)
