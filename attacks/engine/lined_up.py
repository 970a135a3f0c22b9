"""Which sample of one release is which of another, where a split protocol's rounds shuffle them."""

from __future__ import annotations

from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.engine.observation import SLOPES, SMASHED, SplitView, split_view
from attacks.engine.regression import fit
from attacks.engine.wire_labels import FEATURES, FEATURES_GRADIENT, LABELS, network_weights
from bench.api import Context, Message, Part, Seen

_PUBLIC, _SEED = 1000, 0
"""Public samples from which it is learnt how activations tell images, and the seed of their noise,
so that an attack and the judge of its answer line up alike."""
_BY_SAMPLE = (SMASHED, SLOPES, LABELS, FEATURES, FEATURES_GRADIENT)
"""Kinds of messages that have a value for every sample."""


def lined_up(seen: Seen, ctx: Context) -> Seen:
    """`seen` with the samples of every release in the order of the last one's.

    A sample's activations differ from round to round, since the network does, but each round's are
    inverted by a ridge regression on public samples, and what they show is held against what the
    last round's show: the assignment of least squared distance is taken. Rounds whose epochs have
    several steps, the later ones from weights that the server does not have, are left out, but for
    the last; where nothing is to be lined up, all stay as they are.
    """
    if not seen.earlier or seen.known["samples"] == 1:
        return seen
    view = split_view(seen, dtype=torch.float64, device=ctx.device)
    if view is None:
        return seen
    if int(seen.known["batch"]) < int(seen.known["samples"]):
        return replace(seen, earlier=())
    shown = _shown(seen.releases[-1], view, ctx)
    found = []
    for one in seen.earlier:
        theirs = split_view(one, dtype=torch.float64, device=ctx.device)
        assert theirs is not None
        gaps = torch.cdist(shown, _shown(one, theirs, ctx)).square()
        order = [torch.from_numpy(linear_sum_assignment(g.cpu().numpy())[1]) for g in gaps]
        found.append(_reordered(one, dict(zip(seen.clients, order, strict=True))))
    return replace(seen, earlier=tuple(found))


def _shown(seen: Seen, view: SplitView, ctx: Context) -> Tensor:
    """What a release's activations tell of each sample [V, K, P], by a regression of public images
    on theirs, with as much noise."""
    weights = {n: v.double() for n, v in network_weights(seen, ctx).items()}
    buffers = {n: v.double().to(ctx.device) for n, v in seen.buffers.items()}
    x = ctx.aux_x[:_PUBLIC].double().to(ctx.device)
    with torch.no_grad():
        sent = view.sent(ctx.network.run(weights, x, last=view.cut, mode="eval", buffers=buffers))
    rng = torch.Generator().manual_seed(_SEED)
    noise = torch.randn(sent.shape, generator=rng, dtype=torch.float64)
    public = (sent + view.std * noise.to(sent)).flatten(1)
    flat = x.flatten(1)

    def judge(left_out: Tensor) -> Tensor:
        return (left_out - flat).square().mean()

    none = torch.zeros(len(x), dtype=torch.int64, device=ctx.device)
    learnt = fit(public, flat, group=1, strata=none, judged=none == 0, judge=judge)
    told = torch.where(view.present, view.values, public.mean(dim=0).view(sent.shape[1:]))
    return learnt(told.flatten(0, 1).flatten(1), 0).unflatten(0, told.shape[:2])


def _reordered(seen: Seen, order: dict[str, Tensor]) -> Seen:
    """The release with each client's samples in another order, in all that has one value each."""
    count = int(seen.known["samples"])

    def moved(message: Message) -> Message:
        client = message.sender if message.sender in order else message.receiver
        if client not in order or message.kind not in _BY_SAMPLE:
            return message
        return message.with_parts({n: take(p, order[client]) for n, p in message.parts.items()})

    def take(part: Part, places: Tensor) -> Part:
        if part.values.ndim == 0 or len(part.values) != count:
            return part
        present = None if part.present is None else part.present[places]
        return replace(part, values=part.values[places], present=present)

    return replace(seen, messages=tuple(map(moved, seen.messages)))
