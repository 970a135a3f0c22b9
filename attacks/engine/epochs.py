"""Local epochs of a split protocol: activations of the same samples, sent again and again.

A client that trains for several epochs sends its samples' activations in every one, each time with
fresh noise, patches or weights that its defense draws, and from stages that its own steps have
moved. The server knows where these began and where they ended.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.func import vmap

from attacks.engine.observation import (
    EPOCH,
    PATCHES,
    SMASHED,
    SplitView,
    mechanisms_of,
    observe,
    split_view,
)
from attacks.engine.private import withheld
from bench.api import Context, Seen, SmashedNoise, State

_PUBLIC = 64
"""Samples on which it is measured how far clients' activations are from those of mean stages."""


def every_epoch(seen: Seen, ctx: Context) -> Seen:
    """`seen` with every local epoch but the first of each round as an earlier release of its own.

    It has the epoch's activations, no upload, and stages on the way from the broadcast to the mean
    of where the victims' own ended. How far their own are from these, on public samples, counts as
    noise. Unchanged where that tells nothing: the first epoch's activations are exact and whole;
    and where it can't be told: an epoch has several steps, or a client kept stages to itself.
    """
    several = int(seen.known["batch"]) < int(seen.known["samples"])  # steps in an epoch
    if several or int(seen.known["local_steps"]) == 1 or seen.upload_kind() is None:
        return seen
    if any(EPOCH in one.known for one in seen.earlier):
        return seen
    view = split_view(seen, dtype=torch.float64, device=ctx.device)
    if view is None or not _fresh(view, ctx):
        return seen
    stages = ctx.network.cuts[: ctx.network.cuts.index(view.cut) + 1]
    names = [n for n in seen.before if n.startswith(tuple(f"{s}." for s in stages))]
    if withheld(seen, names):
        return seen
    found = [part for one in seen.releases for part in (*_epochs(one, view, names, ctx), one)]
    return replace(found[-1], earlier=tuple(found[:-1]))


def _fresh(view: SplitView, ctx: Context) -> bool:
    """Whether another epoch tells more."""
    whole = bool(view.present.all())
    return not whole or bool(view.noises) or "variables" in ctx.defense.owns


def _epochs(seen: Seen, view: SplitView, names: list[str], ctx: Context) -> list[Seen]:
    """The epochs of one round but the first."""
    epochs = int(seen.known["local_steps"])
    ends = _ends(seen, names)
    start = {n: seen.before[n].double() for n in names}
    found = []
    for epoch in range(1, epochs):
        share = epoch / epochs
        own = {n: torch.lerp(start[n].expand_as(v), v, share) for n, v in ends.items()}
        mean = {n: v.mean(dim=0) for n, v in own.items()}
        noise = SmashedNoise(of=SMASHED, std=_apart(own, mean, view, seen, ctx))
        known = {**seen.known, "local_steps": 1, EPOCH: epoch}
        known["mechanisms"] = [*seen.known["mechanisms"], noise.to_dict()]
        messages = tuple(
            replace(m, step=0)
            for m in seen.messages
            if m.step == epoch and m.kind in (SMASHED, PATCHES)
        )
        before = {**seen.before, **{n: v.to(seen.before[n]) for n, v in mean.items()}}
        found.append(
            replace(
                seen,
                before=before,
                after=None,
                messages=messages,
                known=known,
                server=(),
                earlier=(),
            )
        )
    return found


def _ends(seen: Seen, names: list[str]) -> dict[str, Tensor]:
    """Where the victims' stages ended [V, ...], by their uploads; where these are random, by the
    state after the round, alike for all."""
    if mechanisms_of(seen) and seen.after is not None:
        return {
            n: seen.after[n].double().expand(len(seen.clients), *seen.after[n].shape) for n in names
        }
    values = observe(seen, "weights", dtype=torch.float64).values
    return {n: values[n] for n in names}


def _apart(own: State, mean: State, view: SplitView, seen: Seen, ctx: Context) -> float:
    """Root mean square of how far public samples' activations under each victim's stages are from
    those under the mean ones; of stages that are the same for all, from those that were broadcast.
    """
    public = ctx.aux_x[:_PUBLIC].double().to(ctx.device)
    const = {n: v.double().to(ctx.device) for n, v in seen.const.items()}
    buffers = {n: v.double().to(ctx.device) for n, v in seen.buffers.items()}
    rest = {n: v.double().to(ctx.device) for n, v in seen.before.items() if n not in mean}

    def cut(stages: State) -> Tensor:
        received = ctx.defense.receive({**rest, **stages}, const)
        weights = ctx.defense.mean_realize(received, const)
        mode = str(seen.known["mode"])
        return view.sent(
            ctx.network.run(weights, public, last=view.cut, mode=mode, buffers=buffers)
        )

    moved = {n: v.to(ctx.device) for n, v in own.items()}
    with torch.no_grad():
        each = vmap(cut)(moved)
        away = each - cut({n: v.to(ctx.device) for n, v in mean.items()})
        if bool((away == 0).all()):
            away = each - cut({n: seen.before[n].double().to(ctx.device) for n in mean})
        return float(away.square().mean().sqrt())
