"""The order in which steps, local epochs and rounds used a client's samples.

A client shuffles its samples before every epoch and tells nobody, but its update depends on the
order. Images are first matched as if the order were noise, as large as it is for public samples.
Given the images, exchanges of two samples are tried, and the images are matched again under a
noise as large as what one exchange changes, until the order is found (`Orders`).

Under a split protocol a client sends every sample's activations once in an epoch, in one of its
steps, each time with fresh noise, patches or weights that its defense draws, and from stages that
its own steps have moved. The server knows where these began and where they ended. The steps of an
epoch are united (`unite`), and the samples of epochs and rounds are lined up (`line_up`,
`link`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.func import vmap

from attacks.engine.clients import Clients
from attacks.engine.observation import (
    FEATURES_GRADIENT,
    SLOPES,
    SMASHED,
    BySample,
    Release,
    SplitView,
    network_weights,
    observe,
    split_view,
    withheld,
)
from attacks.engine.optimisers import in_chunks
from bench.api import Context, SmashedNoise, State

_SEED, _PUBLIC_ORDERS = 0, 4
"""Of the guesses; times that public samples are sent in two orders."""
_EXCHANGES, _SWEEPS = 40, 2
"""Exchanges tried per epoch, and how often one search goes through all epochs."""
_FOUND = 0.15
"""Misfit, in units of what one exchange changes, below which the order is taken to be found."""

Sent = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Samples [P, T, *shape] and soft labels [P, T, C], step after step, of candidates for the victims
int64 [P] -> uploads [P, D], 0 where nothing was seen."""


class Orders:
    """Guesses for the victims of one release: random orders, with the noise that they are for
    public samples.

    Args:
        victims: Their number.
        clients: The candidates.
        ctx: The attack's.
        first: Whether the samples stand as the first epoch used them.
        sent: What candidates upload.

    Attributes:
        places: Which of its samples the steps of a victim use in turn, int64 [V, T].
        samples: Per victim.
        batch: Of a step.
        std: Noise of an upload's coordinates that stands for wrong guesses, [V].
        rng: Draws what is tried.
    """

    def __init__(
        self, victims: int, clients: Clients, ctx: Context, *, first: bool, sent: Sent
    ) -> None:
        self.samples, self.batch = clients.samples, clients.batch
        self.rng = torch.Generator().manual_seed(_SEED)
        total = self.batch * clients.training.steps

        def places() -> Tensor:
            rows = [_shuffle(self.samples, total, self.rng) for _ in range(victims)]
            return torch.stack(rows).to(ctx.device)

        everyone, square = torch.arange(victims, device=ctx.device), torch.zeros(())
        for _ in range(_PUBLIC_ORDERS):
            chosen = torch.randint(len(ctx.aux_y), (victims, self.samples), generator=self.rng)
            x = ctx.aux_x[chosen].to(device=ctx.device, dtype=clients.dtype)
            y = torch.nn.functional.one_hot(ctx.aux_y[chosen], ctx.network.classes).to(x)
            with torch.no_grad():
                one, other = (
                    sent(_take(x, p), _take(y, p), everyone) for p in (places(), places())
                )
            square = square + (one - other).square().mean() / _PUBLIC_ORDERS
        self.std, self.places = square.sqrt().expand(victims).clone(), places()
        if first:
            self.places[:, : self.samples] = torch.arange(self.samples, device=ctx.device)

    def arrange(self, x: Tensor, victims: Tensor) -> Tensor:
        """Samples or labels [P, K, ...] of candidates for victims int64 [P], step after step."""
        return _take(x, self.places[victims])

    def improve(self, sent: Sent, seen: Tensor, x: Tensor, y: Tensor, *, bytes_each: int) -> int:
        """Exchange samples of different steps where that explains more, and set `std` anew.

        Args:
            sent: What candidates upload.
            seen: What the victims uploaded [V, D].
            x: One candidate for every victim [V, K, *shape].
            y: Soft labels [V, K, C].
            bytes_each: Memory of one candidate.

        Returns:
            How many orders were tried of all victims.
        """
        count, total = self.places.shape
        everyone = torch.arange(count, device=x.device)
        tried, changes = 0, []
        for _ in range(_SWEEPS):
            before = self.places.clone()
            for first in range(0, total, self.samples):
                pairs = _exchanges(first, min(first + self.samples, total), self.batch, self.rng)
                if not len(pairs):
                    continue
                places = self.places[:, None].repeat(1, 1 + len(pairs), 1)  # the present one first
                rows, pairs = torch.arange(1, 1 + len(pairs)), pairs.to(x.device)
                places[:, rows, pairs[:, 0]] = self.places[:, pairs[:, 1]]
                places[:, rows, pairs[:, 1]] = self.places[:, pairs[:, 0]]
                misfit, change = self._try_orders(sent, seen, x, y, places, bytes_each=bytes_each)
                self.places = places[everyone, misfit.argmin(dim=1)]
                tried += places.shape[0] * places.shape[1]
                changes.append(change)
            if torch.equal(before, self.places):
                break
        if changes:
            misfit, _ = self._try_orders(
                sent, seen, x, y, self.places[:, None], bytes_each=bytes_each
            )
            change = torch.stack(changes).mean(dim=0)
            settled = misfit[:, 0] < _FOUND**2 * change
            self.std = torch.where(settled, misfit[:, 0], change.maximum(misfit[:, 0])).sqrt()
        return tried

    def _try_orders(
        self, sent: Sent, seen: Tensor, x: Tensor, y: Tensor, places: Tensor, *, bytes_each: int
    ) -> tuple[Tensor, Tensor]:
        """Mean square [V, O] of what the orders [V, O, T] leave open, and mean [V] of what they
        change beside the first."""
        count, orders, _ = places.shape
        flat = places.flatten(0, 1)
        victims = torch.arange(count, device=x.device).repeat_interleave(orders)
        pieces: dict[int, Tensor] = {}

        def work(part: slice) -> None:
            who = victims[part]
            with torch.no_grad():
                rows = _take(x[who], flat[part]), _take(y[who], flat[part])
                pieces[part.start] = sent(*rows, who)

        in_chunks(work, len(flat), bytes_each=bytes_each, device=x.device)
        made = torch.cat([pieces[k] for k in sorted(pieces)]).unflatten(0, (count, orders))
        misfit = (made - seen[:, None]).square().mean(dim=2)
        return misfit, (made[:, 1:] - made[:, :1]).square().mean(dim=2).mean(dim=1)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Rows [P, T, ...] of x [P, K, ...] at the places int64 [P, T]."""
    return x[torch.arange(len(x), device=x.device)[:, None], places]


def _shuffle(samples: int, total: int, rng: torch.Generator) -> Tensor:
    """So many places int64 [total], epoch after epoch, each in an order of its own."""
    epochs = -(-total // samples)
    return torch.cat([torch.randperm(samples, generator=rng) for _ in range(epochs)])[:total]


def _exchanges(first: int, end: int, batch: int, rng: torch.Generator) -> Tensor:
    """Some pairs of places from `first` to `end` that lie in different steps, int64 [N, 2]."""
    pairs = torch.combinations(torch.arange(first, end), 2)
    pairs = pairs[pairs[:, 0] // batch != pairs[:, 1] // batch]
    return pairs[torch.randperm(len(pairs), generator=rng)[:_EXCHANGES]]


_PUBLIC_IMAGES, _COMPONENTS = 1000, 64
"""Public samples from which it is learnt what activations tell of an image, and of how many of its
principal components."""
_LEAST = 1e-6
"""Share of the activations' mean variance that each is left with as noise."""


def line_up(releases: list[Release], ctx: Context) -> list[Release]:
    """The releases with their samples in the order of the last one's.

    A sample's activations differ from round to round, since the network does. Each round gives
    evidence of the principal components of an image (`ComponentEvidence`). The assignment is taken
    under which the rounds most likely show the same images. A later local epoch that is a release
    itself (see `link`) gives the order of that epoch's steps. Epochs of several steps are united
    before (see `unite`). Where there is nothing to line up, the releases stay as they are.
    """
    if len(releases) == 1 or releases[-1].samples == 1 or SMASHED not in releases[-1].by_sample:
        return releases
    evidence = [_component_evidence(release, ctx) for release in releases]
    places = _places(evidence[-1], evidence[:-1])
    ordered: list[Release] = []
    epochs: dict[int, Tensor] = {}  # orders of the later epochs of the round at hand
    for one, order in zip(releases, [*places, None], strict=True):
        if one.epoch and order is not None:
            epochs[one.epoch] = order
            ordered.append(_reorder(one, {0: order}))
        else:
            ordered.append(_reorder(one, epochs if order is None else {0: order, **epochs}))
            epochs = {}
    return ordered


class ComponentEvidence(NamedTuple):
    """The likelihood exp(z' `toward` - z' `precision` z / 2) of the principal components z of each
    sample's image, which have variance 1 a priori, given its activations.

    Attributes:
        toward: [V, K, L].
        precision: [V, K, L, L].
    """

    toward: Tensor
    precision: Tensor

    def assign(self, other: ComponentEvidence) -> Tensor:
        """Return which sample of `other` each of these is, int64 [V, K], by largest likelihood."""
        orders = []
        for victim in range(len(self.toward)):
            toward = self.toward[victim, :, None] + other.toward[victim, None]
            precision = self.precision[victim, :, None] + other.precision[victim, None]
            root = torch.linalg.cholesky(precision + torch.eye(toward.shape[-1]).to(toward))
            half = torch.linalg.solve_triangular(root, toward[..., None], upper=False)
            volume = root.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1)
            score = half.square().sum(dim=(-2, -1)) / 2 - volume
            _, places = linear_sum_assignment(score.cpu().numpy(), maximize=True)
            orders.append(torch.from_numpy(places))
        return torch.stack(orders)

    def at(self, places: Tensor) -> ComponentEvidence:
        """The samples at int64 [V, K]."""
        rows = places.to(self.toward.device)
        victims = torch.arange(len(rows), device=rows.device)[:, None]
        return ComponentEvidence(*(t[victims, rows] for t in self))

    def plus(self, other: ComponentEvidence, sign: int = 1) -> ComponentEvidence:
        """Both together; sign -1: without the other."""
        return ComponentEvidence(*(a + sign * b for a, b in zip(self, other, strict=True)))


def _places(last: ComponentEvidence, others: Sequence[ComponentEvidence]) -> list[Tensor]:
    """Return for each of `others` which of its samples each of the last one's is, int64 [V, K]:
    each is assigned beside those before it, and then once more beside all."""
    total, places = last, []
    for other in others:
        places.append(total.assign(other))
        total = total.plus(other.at(places[-1]))
    for number, other in enumerate(others):
        rest = total.plus(other.at(places[number]), -1)
        places[number] = rest.assign(other)
        total = rest.plus(other.at(places[number]))
    return places


def _component_evidence(release: Release, ctx: Context) -> ComponentEvidence:
    """By a linear regression of public activations on the components of their images, whose
    residuals are taken for independent noise beside that of the defense."""
    view = split_view(release, ctx, dtype=torch.float64)
    assert view is not None
    weights = {n: v.double() for n, v in network_weights(release, ctx).items()}
    x = ctx.aux_x[:_PUBLIC_IMAGES].double().to(ctx.device)
    with torch.no_grad():
        sent = view.make(ctx.network, weights, x, mode="eval")
    public, flat = sent.flatten(1), x.flatten(1)
    count = min(_COMPONENTS, len(x) // 4, flat.shape[1])
    left, _, _ = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    z = left[:, :count] * math.sqrt(len(x))
    centre = public.mean(dim=0)
    slope = z.mT @ (public - centre) / len(x)  # [L, D]; columns of z are orthogonal
    rest = public - centre - z @ slope
    variance = rest.square().mean(dim=0) + view.std**2
    variance = variance.clamp_min(_LEAST * float(public.var(dim=0).mean()) + 1e-30)
    values, present = view.values.flatten(2), view.present.flatten(2)
    weighed = torch.where(present, (values - centre) / variance, 0.0)
    kinds, kind = present.flatten(0, 1).unique(dim=0, return_inverse=True)
    each = torch.stack([(slope * (there / variance)) @ slope.mT for there in kinds])
    return ComponentEvidence(
        toward=weighed @ slope.mT, precision=each[kind].unflatten(0, present.shape[:2])
    )


def _reorder(release: Release, orders: dict[int, Tensor]) -> Release:
    """The release with each client's samples in other orders [V, K], by epoch."""
    victims = torch.arange(len(release.clients))[:, None]
    by_sample = {}
    for kind, steps in release.by_sample.items():
        by_sample[kind] = list(steps)
        for step, pair in enumerate(steps):
            if (order := orders.get(step // release.of_epoch)) is not None:
                by_sample[kind][step] = (pair[0][victims, order], pair[1][victims, order])
    epochs = range(1, release.steps // release.of_epoch)
    return replace(release, by_sample=by_sample, in_order=all(e in orders for e in epochs))


_PUBLIC_ACTIVATIONS = 64
"""Samples on which it is measured how far clients' activations are from those of mean stages."""


def unite(release: Release, ctx: Context) -> Release:
    """The release of a split protocol as if every step had sent the activations of its epoch's
    steps.

    The samples of an epoch's steps stand one step after the other; what each step returned is 0
    for those of the others. How far a step's activations are from those of the epoch's first
    stages, on public samples, counts as noise. Unchanged where an epoch is one step.
    """
    samples, batch = release.samples, release.batch
    view = None if samples == batch else split_view(release, ctx, dtype=torch.float64)
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
    mechanisms, moved = release.mechanisms, _measure_movement(release, view, count, ctx)
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


def _measure_movement(release: Release, view: SplitView, count: int, ctx: Context) -> float:
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


def link(releases: list[Release], ctx: Context, *, apart: bool = True) -> list[Release]:
    """The releases with the samples of all of them and all steps in one order, and every local
    epoch but the first of each round as an earlier release where it tells more.

    Such a release has the epoch's activations, no upload, and stages on the way from the broadcast
    to the mean of where the victims' own ended. How far their own are from these, on public
    samples, counts as noise. An epoch tells nothing more where the first one's activations are
    exact and whole, and it can't be told what it tells where a client kept stages to itself: then
    only its order of samples is learnt. Of epochs of several steps see `unite`.

    apart: Whether later epochs become releases at all; else only their orders are learnt.
    """
    releases = [unite(one, ctx) for one in releases]
    last = releases[-1]
    view = split_view(last, ctx, dtype=torch.float64)
    if view is None or last.steps == 1 or not last.uploads:
        return line_up(releases, ctx)
    names = list(view.below(ctx.network, last.before))
    noised = bool(view.noises) or "variables" in ctx.defense.owns or not bool(view.present.all())
    tells = apart and noised and not withheld(last, names)
    if not tells and last.samples == 1:
        return releases
    names = names if tells else []
    each = [part for one in releases for part in (*_later_epochs(one, names, ctx), one)]
    return [one for one in line_up(each, ctx) if tells or not one.epoch]


def _later_epochs(release: Release, names: list[str], ctx: Context) -> list[Release]:
    """The epochs of one round but the first; names: tensors whose way through it is known."""
    ends, later = _ends(release, names), []
    view = split_view(release, ctx, dtype=torch.float64)
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
        part = replace(
            release,
            before={**release.before, **{n: v.to(release.before[n]) for n, v in mean.items()}},
            after=None,
            uploads=(),
            by_sample={SMASHED: [release.by_sample[SMASHED][first]]},
            mechanisms=mechanisms,
            steps=1,
            epoch=epoch,
        )
        later.append(part)
    return later


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
    public = ctx.aux_x[:_PUBLIC_ACTIVATIONS].double().to(ctx.device)
    const = {n: v.double().to(ctx.device) for n, v in release.seen.const.items()}
    rest = {n: v.double().to(ctx.device) for n, v in release.before.items() if n not in own}

    def cut(stages: State) -> Tensor:
        received = ctx.defense.receive({**rest, **stages}, const)
        return view.make(ctx.network, ctx.defense.mean_realize(received, const), public)

    def move(stages: State) -> dict[str, Tensor]:
        return {n: v.to(ctx.device) for n, v in stages.items()}

    with torch.no_grad():
        away = vmap(cut)(move(own)) - cut(move(other))
        return float(away.square().mean().sqrt())
