"""Local training under a split protocol: activations of the same samples, sent again and again.

A client sends every sample's activations once in an epoch, in one of its steps, each time with
fresh noise, patches or weights that its defense draws, and from stages that its own steps have
moved. The server knows where these began and where they ended.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import vmap

from attacks.engine.lined_up import lined_up
from attacks.engine.observation import (
    FEATURES_GRADIENT,
    SLOPES,
    SMASHED,
    BySample,
    Release,
    SplitView,
    observe,
    split_view,
    withheld,
)
from bench.api import Context, SmashedNoise, State

_PUBLIC = 64
"""Samples on which it is measured how far clients' activations are from those of mean stages."""


def united(release: Release, ctx: Context) -> Release:
    """The release of a split protocol as if every step had sent the activations of its epoch's
    steps.

    The samples of an epoch's steps stand one step after the other; what each step returned is 0
    for those of the others. How far a step's activations are from those of the epoch's first
    stages, on public samples, counts as noise. Unchanged where an epoch is one step.
    """
    samples, batch = release.samples, release.batch
    view = None if samples == batch else split_view(release, dtype=torch.float64, device=ctx.device)
    if view is None:
        return release
    count = samples // batch
    by_sample: dict[str, BySample] = {}
    for kind, steps in release.by_sample.items():
        if kind == FEATURES_GRADIENT:  # of the mean over as many samples as there are now
            steps = [(values * (batch / samples), there) for values, there in steps]
        elif kind == SLOPES:
            by_sample[kind] = []
            for step, (values, there) in enumerate(steps):
                rows = [torch.zeros_like(values)] * count
                rows[step % count] = torch.where(there, values, 0.0)
                whole = torch.cat(rows, dim=1)
                by_sample[kind].append((whole, torch.ones_like(whole, dtype=torch.bool)))
            continue
        epochs = [steps[first : first + count] for first in range(0, len(steps), count)]
        joined = [
            (torch.cat([v for v, _ in e], 1), torch.cat([p for _, p in e], 1)) for e in epochs
        ]
        by_sample[kind] = [joined[step // count] for step in range(len(steps))]
    mechanisms, moved = release.mechanisms, _moved_within(release, view, count, ctx)
    if moved:
        mechanisms = (*mechanisms, SmashedNoise(of=SMASHED, std=moved))
    return replace(
        release,
        by_sample=by_sample,
        mechanisms=mechanisms,
        batch=samples,
        of_epoch=count,
        in_order=release.steps == count,  # one epoch
    )


def _moved_within(release: Release, view: SplitView, count: int, ctx: Context) -> float:
    """Root mean square of how far public samples' activations in an epoch's steps are from those in
    its first one."""
    if not release.uploads:
        return 0.0
    names = list(view.below(ctx.network, release.before))
    kept = withheld(release, names)
    ends = _ends(release, [n for n in names if n not in kept])
    if not ends:
        return 0.0
    start = {n: release.before[n].double() for n in ends}
    squares = [
        _distance(_between(start, ends, step / release.steps), start, view, release, ctx) ** 2
        for step in range(count)
    ]
    return math.sqrt(sum(squares) / count)


def linked(releases: list[Release], ctx: Context, *, apart: bool = True) -> list[Release]:
    """The releases with the samples of all of them and all steps in one order, and every local
    epoch but the first of each round as an earlier release where it tells more.

    Such a release has the epoch's activations, no upload, and stages on the way from the broadcast
    to the mean of where the victims' own ended. How far their own are from these, on public
    samples, counts as noise. An epoch tells nothing more where the first one's activations are
    exact and whole, and it can't be told what it tells where a client kept stages to itself: then
    only its order of samples is learnt. Of epochs of several steps see `united`.

    apart: Whether later epochs become releases at all; else only their orders are learnt.
    """
    releases = [united(one, ctx) for one in releases]
    last = releases[-1]
    view = split_view(last, dtype=torch.float64, device=ctx.device)
    if view is None or last.steps == 1 or not last.uploads:
        return lined_up(releases, ctx)
    names = list(view.below(ctx.network, last.before))
    noised = bool(view.noises) or "variables" in ctx.defense.owns or not bool(view.present.all())
    tells = apart and noised and not withheld(last, names)
    if not tells and last.samples == 1:
        return releases
    names = names if tells else []
    each = [part for one in releases for part in (*_later_epochs(one, names, ctx), one)]
    return [one for one in lined_up(each, ctx) if tells or not one.epoch]


def _later_epochs(release: Release, names: list[str], ctx: Context) -> list[Release]:
    """The epochs of one round but the first; names: tensors whose way through it is known."""
    ends, found = _ends(release, names), []
    view = split_view(release, dtype=torch.float64, device=ctx.device)
    assert view is not None
    start = {n: release.before[n].double() for n in names}
    for epoch in range(1, release.steps // release.of_epoch):
        first, mechanisms = epoch * release.of_epoch, release.mechanisms
        own = _between(start, ends, first / release.steps)
        mean = {n: v.mean(dim=0) for n, v in own.items()}
        if names:
            away = _distance(own, mean, view, release, ctx)
            away = away or _distance(own, start, view, release, ctx)
            mechanisms = (*mechanisms, SmashedNoise(of=SMASHED, std=away))
        found.append(
            replace(
                release,
                before={**release.before, **{n: v.to(release.before[n]) for n, v in mean.items()}},
                after=None,
                uploads=(),
                by_sample={SMASHED: [release.by_sample[SMASHED][first]]},
                mechanisms=mechanisms,
                steps=1,
                epoch=epoch,
            )
        )
    return found


def _ends(release: Release, names: list[str]) -> dict[str, Tensor]:
    """Where the victims' stages ended [V, ...], by their uploads; where these are random, by the
    state after the round, alike for all."""
    if not names:
        return {}
    if release.acting and release.after is not None:
        return {
            n: release.after[n].double().expand(len(release.clients), *release.after[n].shape)
            for n in names
        }
    values = observe(release, "weights", dtype=torch.float64).values
    return {n: values[n] for n in names}


def _between(start: State, ends: State, share: float) -> dict[str, Tensor]:
    """Stages [V, ...] on the straight way from `start` [...] to `ends` [V, ...]."""
    return {n: torch.lerp(start[n].expand_as(v), v, share) for n, v in ends.items()}


def _distance(own: State, other: State, view: SplitView, release: Release, ctx: Context) -> float:
    """Root mean square of how far public samples' activations under each victim's stages are from
    those under the `other` ones."""
    public = ctx.aux_x[:_PUBLIC].double().to(ctx.device)
    const = {n: v.double().to(ctx.device) for n, v in release.seen.const.items()}
    rest = {n: v.double().to(ctx.device) for n, v in release.before.items() if n not in own}

    def cut(stages: State) -> Tensor:
        received = ctx.defense.receive({**rest, **stages}, const)
        return view.made(ctx.network, ctx.defense.mean_realize(received, const), public)

    def moved(stages: State) -> dict[str, Tensor]:
        return {n: v.to(ctx.device) for n, v in stages.items()}

    with torch.no_grad():
        away = vmap(cut)(moved(own)) - cut(moved(other))
        return float(away.square().mean().sqrt())
