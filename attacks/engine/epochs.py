"""Local training under a split protocol: activations of the same samples, sent again and again.

A client sends every sample's activations once in an epoch, in one of its steps, each time with
fresh noise, patches or weights that its defense draws, and from stages that its own steps have
moved. The server knows where these began and where they ended.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.func import vmap

from attacks.engine.lined_up import BY_SAMPLE, client_of, lined_up
from attacks.engine.observation import (
    EPOCH,
    IN_ORDER,
    PATCHES,
    SLOPES,
    SMASHED,
    STEPS,
    SplitView,
    mechanisms_of,
    observe,
    smashed_of,
    split_view,
)
from attacks.engine.private import withheld
from attacks.engine.wire_labels import FEATURES_GRADIENT
from bench.api import Context, Message, Part, Seen, SmashedNoise, State

_PUBLIC = 64
"""Samples on which it is measured how far clients' activations are from those of mean stages."""


def whole_epochs(seen: Seen, ctx: Context) -> Seen:
    """`seen` of a split protocol as if every step had sent the activations of its epoch's steps.

    The samples of an epoch's steps stand one step after the other; what each step returned is 0
    for those of the others. How far a step's activations are from those of the epoch's first
    stages, on public samples, counts as noise. Unchanged where an epoch is one step.
    """
    if int(seen.known["batch"]) == int(seen.known["samples"]):
        return seen
    if smashed_of(seen, dtype=torch.float64) is None:
        return seen
    found = tuple(_united(one, ctx) for one in seen.releases)
    return replace(found[-1], earlier=found[:-1])


def _united(seen: Seen, ctx: Context) -> Seen:
    """One release of `whole_epochs`."""
    samples, batch = int(seen.known["samples"]), int(seen.known["batch"])
    steps = samples // batch
    view = split_view(seen, dtype=torch.float64, device=ctx.device)
    assert view is not None
    sent: dict[tuple[str, int], Tensor] = {}  # where, without others' patches, by client and step
    for step in range(int(seen.known["local_steps"])):
        of_step = smashed_of(seen, dtype=torch.float64, step=step)
        assert of_step is not None
        sent |= {(c, step): there for c, there in zip(seen.clients, of_step[1], strict=True)}
    each: dict[tuple[str, str, int], Message] = {}
    for message in seen.messages:
        client = client_of(message, seen.clients)
        if client is not None and message.kind in BY_SAMPLE:
            each[message.kind, client, message.step] = message

    def part_of(kind: str, client: str, step: int, name: str) -> Part:
        part = each[kind, client, step].parts[name]
        if kind == SMASHED:
            return replace(part, present=sent[client, step].cpu())
        if kind == FEATURES_GRADIENT:  # of the mean over as many samples as there are now
            return replace(part, values=part.values * (batch / samples))
        return part

    @cache  # the steps of an epoch share it
    def of_epoch(kind: str, client: str, first: int, name: str) -> Part:
        parts = [part_of(kind, client, s, name) for s in range(first, first + steps)]
        return replace(
            parts[0],
            values=torch.cat([p.values for p in parts]),
            present=torch.cat([p.presence() for p in parts]),
        )

    def slopes(part: Part, place: int) -> Part:
        rows = [torch.zeros_like(part.values)] * steps
        rows[place] = torch.where(part.presence(), part.values, 0.0)
        return replace(part, values=torch.cat(rows), present=None)

    def whole(message: Message) -> Message:
        client = client_of(message, seen.clients)
        if client is None or message.kind not in BY_SAMPLE:
            return message
        place = message.step % steps
        if message.kind == SLOPES:
            return message.with_parts({n: slopes(p, place) for n, p in message.parts.items()})
        first = message.step - place
        return message.with_parts(
            {n: of_epoch(message.kind, client, first, n) for n in message.parts}
        )

    known = {**seen.known, "batch": samples, STEPS: steps}
    known[IN_ORDER] = int(seen.known["local_steps"]) == steps  # one epoch
    moved = _moved_within(seen, view, steps, ctx)
    if moved:
        noise = SmashedNoise(of=SMASHED, std=moved)
        known["mechanisms"] = [*seen.known["mechanisms"], noise.to_dict()]
    messages = tuple(whole(m) for m in seen.messages if m.kind != PATCHES)
    return replace(seen, messages=messages, known=known)


def _moved_within(seen: Seen, view: SplitView, steps: int, ctx: Context) -> float:
    """Root mean square of how far public samples' activations in an epoch's steps are from those in
    its first one."""
    if seen.upload_kind() is None:
        return 0.0
    names = _stages(seen, view, ctx)
    kept = withheld(seen, names)
    ends = _ends(seen, [n for n in names if n not in kept])
    if not ends:
        return 0.0
    start = {n: seen.before[n].double() for n in ends}
    total = int(seen.known["local_steps"])
    squares = [
        _apart(_between(start, ends, step / total), start, view, seen, ctx) ** 2
        for step in range(steps)
    ]
    return math.sqrt(sum(squares) / steps)


def linked(seen: Seen, ctx: Context, *, apart: bool = True) -> Seen:
    """`seen` with the samples of all releases and steps in one order, and every local epoch but the
    first of each round as an earlier release of its own where it tells more.

    Such a release has the epoch's activations, no upload, and stages on the way from the broadcast
    to the mean of where the victims' own ended. How far their own are from these, on public
    samples, counts as noise. An epoch tells nothing more where the first one's activations are
    exact and whole, and it can't be told what it tells where a client kept stages to itself: then
    only its order of samples is learnt. Of epochs of several steps see `whole_epochs`.

    apart: Whether later epochs become releases at all; else only their orders are learnt.
    """
    seen = whole_epochs(seen, ctx)
    view = split_view(seen, dtype=torch.float64, device=ctx.device)
    if view is None or int(seen.known["local_steps"]) == 1 or seen.upload_kind() is None:
        return lined_up(seen, ctx)
    names = _stages(seen, view, ctx)
    tells = apart and _fresh(view, ctx) and not withheld(seen, names)
    if not tells and seen.known["samples"] == 1:
        return seen
    moved = names if tells else []
    found = [part for one in seen.releases for part in (*_epochs(one, view, moved, ctx), one)]
    ordered = lined_up(replace(found[-1], earlier=tuple(found[:-1])), ctx)
    if tells:
        return ordered
    return replace(ordered, earlier=tuple(e for e in ordered.earlier if EPOCH not in e.known))


def _fresh(view: SplitView, ctx: Context) -> bool:
    """Whether another epoch tells more."""
    whole = bool(view.present.all())
    return not whole or bool(view.noises) or "variables" in ctx.defense.owns


def _epochs(seen: Seen, view: SplitView, names: list[str], ctx: Context) -> list[Seen]:
    """The epochs of one round but the first; names: tensors whose way through it is known."""
    total, steps = int(seen.known["local_steps"]), int(seen.known.get(STEPS, 1))
    ends = _ends(seen, names)
    start = {n: seen.before[n].double() for n in names}
    found = []
    for epoch in range(1, total // steps):
        own = _between(start, ends, epoch * steps / total)
        mean = {n: v.mean(dim=0) for n, v in own.items()}
        known = {**seen.known, "local_steps": 1, EPOCH: epoch}
        if names:
            apart = _apart(own, mean, view, seen, ctx) or _apart(own, start, view, seen, ctx)
            noise = SmashedNoise(of=SMASHED, std=apart)
            known["mechanisms"] = [*seen.known["mechanisms"], noise.to_dict()]
        messages = tuple(
            replace(m, step=0)
            for m in seen.messages
            if m.step == epoch * steps and m.kind in (SMASHED, PATCHES)
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


def _stages(seen: Seen, view: SplitView, ctx: Context) -> list[str]:
    """Names of the clients' tensors up to the cut."""
    stages = ctx.network.cuts[: ctx.network.cuts.index(view.cut) + 1]
    return [n for n in seen.before if n.startswith(tuple(f"{s}." for s in stages))]


def _ends(seen: Seen, names: list[str]) -> dict[str, Tensor]:
    """Where the victims' stages ended [V, ...], by their uploads; where these are random, by the
    state after the round, alike for all."""
    if not names:
        return {}
    if mechanisms_of(seen) and seen.after is not None:
        return {
            n: seen.after[n].double().expand(len(seen.clients), *seen.after[n].shape) for n in names
        }
    values = observe(seen, "weights", dtype=torch.float64).values
    return {n: values[n] for n in names}


def _between(start: State, ends: State, share: float) -> dict[str, Tensor]:
    """Stages [V, ...] on the straight way from `start` [...] to `ends` [V, ...]."""
    return {n: torch.lerp(start[n].expand_as(v), v, share) for n, v in ends.items()}


def _apart(own: State, other: State, view: SplitView, seen: Seen, ctx: Context) -> float:
    """Root mean square of how far public samples' activations under each victim's stages are from
    those under the `other` ones."""
    public = ctx.aux_x[:_PUBLIC].double().to(ctx.device)
    const = {n: v.double().to(ctx.device) for n, v in seen.const.items()}
    buffers = {n: v.double().to(ctx.device) for n, v in seen.buffers.items()}
    rest = {n: v.double().to(ctx.device) for n, v in seen.before.items() if n not in own}

    def cut(stages: State) -> Tensor:
        received = ctx.defense.receive({**rest, **stages}, const)
        weights = ctx.defense.mean_realize(received, const)
        mode = str(seen.known["mode"])
        return view.sent(
            ctx.network.run(weights, public, last=view.cut, mode=mode, buffers=buffers)
        )

    def moved(stages: State) -> dict[str, Tensor]:
        return {n: v.to(ctx.device) for n, v in stages.items()}

    with torch.no_grad():
        away = vmap(cut)(moved(own)) - cut(moved(other))
        return float(away.square().mean().sqrt())
