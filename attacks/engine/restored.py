"""Label counts of the victims' batches, read from the head's gradient of their uploads."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from attacks.engine.channel import SHADOW_WEIGHTS
from attacks.engine.counts import (
    Counting,
    HeadGradient,
    PublicClasses,
    Restored,
    fitting_lengths,
    restore,
)
from attacks.engine.observation import Release, gradient_estimate, network_weights, observe, parse
from attacks.engine.optimisers import column
from attacks.engine.weighed import HeadView, PublicSamples, head_gradients, weigh_counts
from bench.api import Context, Kind, Mechanism, NetworkView, State
from bench.toolkit.batches import class_means
from bench.toolkit.losses import head_of

_LENGTHENINGS = 4
"""Times that the length of a clipped gradient is sought."""
_ROUNDING = 1e-4
"""By which a clipped upload may be shorter than its bound, as a part of it."""
SHRINK, REFINE = 0.1, 3
"""The strong values of iLRG's settings."""


def restore_counts(
    releases: Sequence[Release], ctx: Context, *, shrink: float = SHRINK, refine: int = REFINE
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """What iLRG makes of the uploads of all releases.

    shrink, refine: See `attacks.ilrg.ILRG`.

    Returns:
        Label counts int64 [V, C]; bool [V], victims that showed no head gradient but 0; notes: how
        much of the head was visible, and how far the counts are to be trusted.
    """
    views = [_view(one, ctx, shrink=shrink, refine=refine) for one in releases]
    restored = Restored.surest([v.restored for v in views])
    counts, notes = restored.counts, _notes(restored, views[-1].head)
    doubtful = restored.unsettled
    if refine and bool(doubtful.any()):
        weighed = weigh_counts(
            [view.victims(doubtful) for view in views],
            fewest=not all(_head_suffices(one, ctx) for one in releases),
            rng=ctx.rng,
        )
        if weighed is not None:
            counts = counts.clone()
            counts[doubtful] = weighed
            notes += (f"counts of {len(weighed)} of {len(counts)} victims weighed on public data",)
    return counts, restored.silent, notes


def _view(release: Release, ctx: Context, *, shrink: float, refine: int) -> HeadView:
    """What one release shows of the head, and what iLRG makes of it."""
    weights = network_weights(release, ctx)
    weight, bias = (
        v.detach().cpu() for v in head_values(weights, ctx.network, release.seen.buffers)
    )
    head = _head_gradient([release], weight, bias)
    buffers = {n: v.to(ctx.device) for n, v in release.seen.buffers.items()}
    with torch.no_grad():
        features = ctx.network.features(weights, ctx.aux_x.to(ctx.device), buffers=buffers)
    samples = PublicSamples(features=features.double().cpu(), labels=ctx.aux_y.cpu())
    probability = torch.softmax(samples.features @ weight.T + bias, dim=-1)
    labels, classes = samples.labels, len(bias)
    public = PublicClasses(  # means of all samples for a class without any
        features=class_means(samples.features, labels, classes=classes),
        probability=class_means(probability, labels, classes=classes),
        share=torch.bincount(labels, minlength=classes).double() / len(labels),
    )
    counting = Counting(
        weight=weight,
        bias=bias,
        total=release.samples,
        public=public,
        shrink=shrink,
        refine=refine,
    )
    head, restored = _undo_clip(head, counting, release)

    def played(chosen: Tensor, like: HeadGradient) -> HeadGradient:
        if _head_suffices(release, ctx):
            return _compute(chosen, like, samples, counting, release, ctx.rng)
        return _head_gradient(play_public(chosen, release, ctx), weight, bias)

    return HeadView(head=head, restored=restored, counting=counting, samples=samples, played=played)


def head_values(weights: State, network: NetworkView, buffers: State) -> tuple[Tensor, Tensor]:
    """Weight [C, F] and bias [C] of the head, float64. Of a head that is not these two parameters,
    as a frozen or a low-rank one, they are read off its outputs."""
    if all(n in weights for n in network.head):
        return weights[network.head[0]].double(), weights[network.head[1]].double()
    like = next(iter(weights.values()))
    run: dict[str, Any] = {
        "mode": "train",
        "buffers": {n: v.to(like.device) for n, v in buffers.items()},
    }
    with torch.no_grad():
        width = network.features(weights, like.new_zeros(2, *network.shape), **run).shape[1]
        points = torch.eye(width + 1, width, device=like.device, dtype=like.dtype)
        made = network.run(weights, points, first=head_of(network), **run).double()
    return (made[:-1] - made[-1]).mT, made[-1]


def _undo_clip(
    head: HeadGradient, counting: Counting, release: Release
) -> tuple[HeadGradient, Restored]:
    """The head's gradients as long as they were before a clip, as far as that can be told, and what
    iLRG makes of them.

    A clip hides the length alone. Where nothing else acts on a gradient, that length is taken at
    which counts are nearly whole; each one found tells the embeddings better, and so the next.
    """
    restored = restore(head, counting)
    clipped = _was_clipped(release)
    if not bool(clipped.any()):
        return head, restored
    factors = torch.ones_like(restored.doubt)
    for _ in range(_LENGTHENINGS):
        short = clipped & restored.unsettled
        if not bool(short.any()):
            break
        tried = factors.clone()
        tried[short] *= fitting_lengths(head.scale(factors).victims(short), counting)
        tried = tried.clamp_min(1.0)  # a clip never lengthens
        again = restore(head.scale(tried), counting)
        better = short & (again.doubt < restored.doubt)
        factors = torch.where(short, tried, factors)
        later, former = vars(again), vars(restored)
        merged = {n: torch.where(column(better, v), later[n], v) for n, v in former.items()}
        restored = Restored(**merged)
    return head.scale(factors), restored


def _was_clipped(release: Release) -> Tensor:
    """bool [V]: victims whose upload a clip shortened, on which nothing else acted: it is as long
    as the clip lets it be."""
    mechanisms = release.acting
    clipped = torch.zeros(len(release.clients), dtype=torch.bool)
    if any(m.random or m.tells_interval for m in mechanisms):
        return clipped
    for mechanism, order in itertools.product(mechanisms, (1, 2)):
        if (bound := mechanism.bound_of(order)) is not None:
            sent = observe(release, cast(Kind, mechanism.of), dtype=torch.float64, absent=True)
            rows = [torch.where(sent.present[n], v, 0.0) for n, v in sent.values.items()]
            lengths = torch.cat([r.flatten(1) for r in rows], dim=1).norm(p=order, dim=1)
            clipped |= (lengths >= bound * (1 - _ROUNDING)).cpu()
    return clipped


def _head_suffices(release: Release, ctx: Context) -> bool:
    """Whether what a client sends of its head follows from the head's inputs: it takes one step on
    the loss by the weights, and all mechanisms say what they draw."""
    drawn = all(type(m).sample is not Mechanism.sample for m in release.acting if m.random)
    one_step = release.steps == 1
    own = {"variables", "gradient", "direction"} & ctx.defense.owns
    return drawn and one_step and not own


def _compute(
    chosen: Tensor, like: HeadGradient, samples: PublicSamples, counting: Counting,
    release: Release, rng: torch.Generator,
) -> HeadGradient:  # fmt: skip
    """Head gradients of batches of public samples as `gradient_estimate` would show them under the
    public mechanisms, with the same hidden as of the victims, who take turns."""
    gradient = head_gradients(samples, chosen, counting)
    step = release.lr
    shown = [gradient.weight, gradient.bias]
    for mechanism in release.acting:
        if not (mechanism.random or mechanism.tells_interval) or mechanism.reads_absent:
            continue
        for place, name in enumerate(release.seen.network["head"]):
            if not mechanism.covers(name):
                continue
            base = release.before[name].double()
            value = shown[place] if mechanism.of == "gradient" else -step * shown[place]
            value = value + base if mechanism.of == "weights" else value
            drawn = mechanism.sample(value.flatten(1), rng, base=base.flatten())
            shown[place] = mechanism.gradient(drawn.view_as(value), base=base, step=step)
    turn = torch.arange(len(chosen)) % len(like.bias)
    return HeadGradient(
        weight=shown[0],
        bias=shown[1],
        weight_seen=like.weight_seen[turn],
        bias_seen=like.bias_seen[turn],
    )


def play_public(chosen: Tensor, release: Release, ctx: Context) -> Iterator[Release]:
    """The release played by shadow clients with public samples of places int64 [B, total]."""
    held = sum(v.numel() for v in release.before.values())
    some = chosen.to(ctx.aux_x.device).split(max(1, SHADOW_WEIGHTS // held))
    played = (ctx.shadow(ctx.aux_x[s], ctx.aux_y[s], release=release.playable) for s in some)
    return map(parse, played)


def _head_gradient(releases: Iterable[Release], weight: Tensor, bias: Tensor) -> HeadGradient:
    """What the victims of all releases sent of the head; a tensor that was not sent is wholly
    hidden."""
    shown: list[list[Tensor]] = [[], [], [], []]
    for release in releases:
        estimate, names = gradient_estimate(release), release.seen.network["head"]
        for place, (name, like) in enumerate(zip(names, (weight, bias), strict=True)):
            shape = (len(release.clients), *like.shape)
            value = estimate.values.get(name, like.new_zeros(()).expand(shape))
            there = estimate.present.get(name, torch.zeros((), dtype=torch.bool).expand(shape))
            shown[place].append(value.to(like.device))
            shown[place + 2].append(there.to(like.device))
    weights, biases, weight_seen, bias_seen = map(torch.cat, shown)
    return HeadGradient(weight=weights, bias=biases, weight_seen=weight_seen, bias_seen=bias_seen)


def _notes(restored: Restored, head: HeadGradient) -> tuple[str, ...]:
    victims, classes = restored.counts.shape
    notes = []
    if int(restored.rows.min()) < classes:
        notes.append(f"{int(restored.rows.min())} of {classes} head rows visible")
    if not bool(head.weight_seen.all()):
        notes.append(f"{float(head.weight_seen.double().mean()):.0%} of head weights visible")
    if not bool(head.bias_seen.all()):
        notes.append("hidden bias gradients estimated from the weights'")
    if bool(restored.silent.any()):
        notes.append(
            f"{int(restored.silent.sum())} of {victims} victims showed no head gradient but 0"
        )
    doubtful = restored.doubtful
    if bool(doubtful.any()):
        notes.append(
            f"counts uncertain: {int(doubtful.sum())} of {victims} victims solved to "
            f"{float(restored.doubt[doubtful].mean()):.2f} of an instance from whole counts"
        )
    return tuple(notes)
