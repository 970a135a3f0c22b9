"""Regressions from a step's update to the samples behind it, in the order in which they weigh."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attacks.engine.channel import FEATURES, SHADOW_COORDINATES, count_sketch
from attacks.engine.observation import Release, gradient_estimate, parse
from attacks.engine.regression import Features, fit
from bench.api import Context, Reconstruction


def invert_batch(release: Release, ctx: Context, *, rows: int) -> Reconstruction:
    """Answer with the least squares of rehearsed batches of public samples.

    The samples of a batch have no order of their own. Here they stand by their class and by how
    much they pull at its score, which is how much of the update they are, so that one regression
    tells each place's sample and label. Of the features as they are and each at unit variance
    those are taken that err least on left-out batches.
    Source: Wu et al., arXiv:2210.10880 (there, a network without order).

    Args:
        release: One step of several samples.
        ctx: The attack's.
        rows: Batches that are played.
    """
    public, labels, size = ctx.aux_x.cpu(), ctx.aux_y.cpu(), release.samples
    picks = torch.randint(len(public), (rows, size), generator=ctx.rng)
    picks = picks.gather(1, _weigh(release, ctx)[picks].argsort(dim=1))
    own = _read(release)
    share = max(1, SHADOW_COORDINATES // (own.shape[1] * size))
    played = [
        _read(parse(ctx.shadow(public[some], labels[some], release=release.playable)))
        for some in picks.split(share)
    ]
    read = torch.cat([*played, own])
    read = read[:, read[:rows].std(dim=0) > 0]
    # A rare value's regression holds as far as it was seen.
    read = read.clamp(read[:rows].amin(dim=0), read[:rows].amax(dim=0))
    if (width := read.shape[1]) > FEATURES:
        bucket = torch.randint(FEATURES, (width,), generator=ctx.rng)
        sign = torch.randint(2, (width,), generator=ctx.rng) * 2.0 - 1
        read = count_sketch(read, bucket, sign, FEATURES)
    read = read.to(ctx.device)
    x = public[picks].flatten(1).to(read)
    y = one_hot(labels[picks], ctx.network.classes).flatten(1).to(read)
    every, fits = torch.ones(rows, dtype=torch.bool, device=read.device), []
    std = read[:rows].std(dim=0)
    for scale in (std.max(), std.clamp_min(1e-6 * std.max())):
        features = read / scale.clamp_min(1e-30)
        fitted = fit(
            Features(features[:rows], group=1),
            torch.cat([x, y], dim=1),
            judged=every,
            judge=lambda left_out: (left_out[:, : x.shape[1]] - x).square().mean(),
        )
        fits.append((fitted.loss, fitted(features[rows:], 0).cpu()))
    loss, told = min(fits, key=lambda pair: pair[0])
    images = told[:, : x.shape[1]].view(len(told), size, *public.shape[1:]).float()
    return Reconstruction(
        images=images.clamp(public.amin(dim=0), public.amax(dim=0)),  # of samples that there are
        labels=told[:, x.shape[1] :].view(len(told), size, -1).argmax(dim=-1),
        loss=torch.full((len(told),), loss),
    )


def _read(release: Release) -> Tensor:
    """Each client's gradient as far as its upload tells, and what of it was sent [V, F]."""
    told = gradient_estimate(release)
    there = torch.cat([p.flatten(1) for p in told.present.values()], dim=1).cpu()
    values = torch.cat([v.flatten(1) for v in told.values.values()], dim=1).cpu()
    return torch.cat([torch.where(there, values, 0.0), there.to(values)], dim=1)


def _weigh(release: Release, ctx: Context) -> Tensor:
    """Numbers by which public samples are ordered [N]."""
    before, buffers = (
        {n: v.to(ctx.device) for n, v in state.items()}
        for state in (release.before, release.seen.buffers)
    )
    logits = ctx.network.apply(before, ctx.aux_x, mode="eval", buffers=buffers)
    y = ctx.aux_y.to(logits.device)
    pull = 1 - logits.detach().softmax(dim=1).gather(1, y[:, None])[:, 0]
    # Of two classes the weightiest samples stand at both ends, however many each class has.
    return (y + torch.where(y == 0, -pull, pull)).cpu()
