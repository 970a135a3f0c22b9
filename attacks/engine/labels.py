"""Labels as a split protocol's messages show them, or as the upload of their gradient does."""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from attacks.engine import observation
from attacks.engine.encoding import shrunk_means
from attacks.engine.evidence import Evidence, releases_of
from attacks.engine.restarts import Labels
from attacks.engine.restored import head_values, restore_counts
from bench.api import Context, Kind

_LARGEST = 2**26
"""Numbers held at once while classes are compared."""


def labels_by_sample(release: observation.Release, ctx: Context) -> Tensor | None:
    """Labels int64 [V, K], sample by sample of the smashed data, where a split protocol's
    messages show them: noised soft labels, else the gradients that private heads returned."""
    if (sent := release.soft_labels) is not None:
        return sent.argmax(dim=-1)
    slopes = observation.FEATURES_GRADIENT in release.by_sample
    return labels_by_slope(release, ctx)[0] if slopes else None


def labels_by_slope(release: observation.Release, ctx: Context) -> tuple[Tensor, Tensor]:
    """Labels int64 [V, B] of the first step, and how doubtful each is, [V, B] in [0, 1].

    The client returns W'(p - y) / B per sample, p the softmax of its head on the features that
    the server sent it. The server knows features and, up to the defense's randomness, the head
    W, so it takes the class y whose slope is nearest. Doubt: squared distance to it over that to
    the second nearest. Raises NonFiniteError, naming the client.
    """
    weights = observation.network_weights(release, ctx)
    weight, bias = head_values(weights, ctx.network, release.seen.buffers)
    slope, there = release.by_sample[observation.FEATURES_GRADIENT][0]
    observation.require_finite("the features' gradient", release, slope, there)
    features = release.by_sample[observation.FEATURES][0][0]
    f = features.flatten(2).to(weight)
    probability = torch.softmax(f @ weight.T + bias, dim=-1)
    # r = B slope = W'(p - y), so that W'p - r = W'y, the row of W of the label.
    row = probability @ weight - slope.flatten(2).to(weight) * slope.shape[1]
    distance = torch.cdist(row.flatten(0, 1), weight).square().unflatten(0, row.shape[:2])
    nearest = distance.topk(min(2, len(weight)), dim=-1, largest=False)
    doubt = nearest.values[..., 0] / nearest.values[..., -1].clamp_min(1e-300)
    return nearest.indices[..., 0], doubt.clamp(0, 1)


def read_labels(evidence: Evidence, ctx: Context) -> Labels:
    """Labels to hold fixed: granted ones; of one sample by the sign rule (ranked under noise), of
    several by restored counts."""
    if (granted := evidence.release.granted) is not None:
        return Labels(fixed=granted.to(ctx.device))
    if (by_sample := labels_by_sample(evidence.release, ctx)) is not None:
        return Labels(fixed=by_sample.to(ctx.device), notes=("labels: read off the wire",))
    if evidence.clients.samples > 1:
        counts, _, said = restore_counts([evidence.release], ctx)
        classes = torch.arange(ctx.network.classes)
        rows = [torch.repeat_interleave(classes, c) for c in counts]
        notes = tuple(f"labels: {note}" for note in said)
        return Labels(fixed=torch.stack(rows).to(ctx.device), notes=notes)
    if (exact := negative_bias(evidence, ctx)) is not None:
        return Labels(fixed=exact[:, None])
    return Labels(ranking=rank_labels(evidence, ctx), hold=True)


def negative_bias(evidence: Evidence, ctx: Context) -> Tensor | None:
    """int64 [V], class of the smallest head bias gradient: p_c - 1 < 0 for the label, p_c > 0
    elsewhere, so it is exact. None where every release is noised or hides a part of the bias."""
    bias = ctx.network.head[1]
    for one in releases_of(evidence):
        noise, uploads = one.noise, one.uploads
        hidden = noise is not None and (noise.random or not noise.vague)
        if uploads is None or hidden or bias not in uploads.observation.values:
            continue
        values, present = uploads.observation.values[bias], uploads.observation.present[bias]
        if uploads.observation.kind == "gradient":
            values = -values
        elif uploads.observation.kind == "weights":
            values = values - one.clients.start[bias]
        # Of intervals the sign is right, but the one entry that rises may not have been sent.
        exact = noise is None and one.bounds is None
        rise, label = values.where(present, -torch.inf).max(dim=1)
        if bool(present.all()) if exact else bool((rise > 0).all()):
            return label
    return None


def rank_labels(evidence: Evidence, ctx: Context) -> Tensor:
    """int64 [V, C], classes from the likeliest down.

    A class is as likely as the head tensors that its mean public image would have sent are
    under the defense's public mechanism, in all releases; the mean of all stands for that of a
    class without public images.
    """
    scores = torch.stack([_label_scores(one, ctx) for one in releases_of(evidence)])
    return scores.sum(dim=0).argsort(dim=1)


def _label_scores(evidence: Evidence, ctx: Context) -> Tensor:
    """[V, C], the less the likelier, of one release."""
    uploads, clients, classes = evidence.uploads, evidence.clients, ctx.network.classes
    assert uploads is not None
    seen, law = uploads.observation, uploads.law
    # Estimated gradients are compared as the kind of upload that the law speaks of. An estimate
    # that took broadcast weights for what was hidden is no upload any more, and stays a gradient.
    if law is not None and seen.kind == "gradient" and (law.faithful or law.of != "weights"):
        kind = cast(Kind, law.of)
        seen = replace(seen, kind=kind, values=clients.as_sent(seen.values, kind))
    names = [n for n in ctx.network.head if n in seen.values] or list(seen.values)
    aux_y = ctx.aux_y.to(ctx.device)
    aux_x = ctx.aux_x.to(dtype=clients.dtype, device=ctx.device)
    means = shrunk_means(aux_x.flatten(1), aux_y, classes)[0].view(-1, *aux_x.shape[1:])
    targets = torch.eye(classes, dtype=clients.dtype, device=ctx.device)
    victims = len(evidence.release.clients)
    scores = torch.zeros((victims, classes), device=ctx.device)
    prepared = {n: uploads.prepare(seen.values[n][:, None], [n]) for n in names}
    width = sum(v.numel() for v in clients.start.values()) * victims
    for some in torch.arange(classes, device=ctx.device).split(max(1, _LARGEST // width)):
        expected = uploads.simulate(means[some, None], targets[some, None])
        if seen.kind != uploads.observation.kind:
            expected = clients.as_sent(expected, seen.kind)
        for name in names:
            misfit, _ = prepared[name].misfit(expected[name].detach()[None])
            misfit = torch.where(seen.present[name][:, None], misfit, 0.0)
            scores[:, some] += misfit.flatten(2).sum(dim=2).to(scores)
    return scores
