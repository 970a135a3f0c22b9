"""Which sample of one release is which of another, where a split protocol's rounds shuffle them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.engine.observation import SMASHED, Release, split_view
from attacks.engine.wire_labels import network_weights
from bench.api import Context

_PUBLIC, _COMPONENTS = 1000, 64
"""Public samples from which it is learnt what activations tell of an image, and of how many of its
principal components."""
_LEAST = 1e-6
"""Share of the activations' mean variance that each is left with as noise."""


def lined_up(releases: list[Release], ctx: Context) -> list[Release]:
    """The releases with their samples in the order of the last one's.

    A sample's activations differ from round to round, since the network does. What each round's
    tell of an image is put as evidence of its principal components (see `Told`), and the assignment
    is taken under which the rounds are likeliest to show the same images. A local epoch that stands
    as a release of its own (see `linked`) says so how the steps of its round are to be put in
    order. Epochs of several steps are united before (see `united`). Where nothing is to be lined
    up, all stay as they are.
    """
    if len(releases) == 1 or releases[-1].samples == 1 or SMASHED not in releases[-1].by_sample:
        return releases
    told = [_told(one, ctx) for one in releases]
    places = _places(told[-1], told[:-1])
    ordered: list[Release] = []
    epochs: dict[int, Tensor] = {}  # orders of the later epochs of the round at hand
    for one, order in zip(releases, [*places, None], strict=True):
        if one.epoch and order is not None:
            epochs[one.epoch] = order
            ordered.append(_reordered(one, {0: order}))
        else:
            ordered.append(_reordered(one, epochs if order is None else {0: order, **epochs}))
            epochs = {}
    return ordered


@dataclass(frozen=True, kw_only=True)
class Told:
    """What activations tell of the principal components z of each sample's image, a priori of
    variance 1: a likelihood exp(z' `toward` - z' `precision` z / 2).

    Attributes:
        toward: [V, K, L].
        precision: [V, K, L, L].
    """

    toward: Tensor
    precision: Tensor

    def assigned(self, other: Told) -> Tensor:
        """Which sample of `other` is each of these, int64 [V, K]: the assignment of the largest
        likelihood."""
        found = []
        for victim in range(len(self.toward)):
            toward = self.toward[victim, :, None] + other.toward[victim, None]
            precision = self.precision[victim, :, None] + other.precision[victim, None]
            root = torch.linalg.cholesky(precision + torch.eye(toward.shape[-1]).to(toward))
            half = torch.linalg.solve_triangular(root, toward[..., None], upper=False)
            volume = root.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1)
            score = half.square().sum(dim=(-2, -1)) / 2 - volume
            _, places = linear_sum_assignment(score.cpu().numpy(), maximize=True)
            found.append(torch.from_numpy(places))
        return torch.stack(found)

    def at(self, places: Tensor) -> Told:
        """The samples at int64 [V, K]."""
        rows = places.to(self.toward.device)
        victims = torch.arange(len(rows), device=rows.device)[:, None]
        return Told(toward=self.toward[victims, rows], precision=self.precision[victims, rows])

    def plus(self, other: Told, sign: int = 1) -> Told:
        """Both together; sign -1: without the other."""
        return Told(
            toward=self.toward + sign * other.toward,
            precision=self.precision + sign * other.precision,
        )


def _places(last: Told, others: Sequence[Told]) -> list[Tensor]:
    """For each of `others` which of its samples is each of the last one's, int64 [V, K]: one after
    the other beside those before it, and then each once more beside all."""
    total, found = last, []
    for one in others:
        found.append(total.assigned(one))
        total = total.plus(one.at(found[-1]))
    for number, one in enumerate(others):
        rest = total.plus(one.at(found[number]), -1)
        found[number] = rest.assigned(one)
        total = rest.plus(one.at(found[number]))
    return found


def _told(release: Release, ctx: Context) -> Told:
    """By a linear regression of public activations on the components of their images, whose
    residuals are taken for independent noise beside that of the defense."""
    view = split_view(release, dtype=torch.float64, device=ctx.device)
    assert view is not None
    weights = {n: v.double() for n, v in network_weights(release, ctx).items()}
    x = ctx.aux_x[:_PUBLIC].double().to(ctx.device)
    with torch.no_grad():
        sent = view.made(ctx.network, weights, x, mode="eval")
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
    return Told(toward=weighed @ slope.mT, precision=each[kind].unflatten(0, present.shape[:2]))


def _reordered(release: Release, orders: dict[int, Tensor]) -> Release:
    """The release with each client's samples in other orders [V, K], by epoch."""
    victims = torch.arange(len(release.clients))[:, None]
    by_sample = {}
    for kind, steps in release.by_sample.items():
        by_sample[kind] = list(steps)
        for step, pair in enumerate(steps):
            order = orders.get(step // release.of_epoch)
            if order is not None:
                by_sample[kind][step] = (pair[0][victims, order], pair[1][victims, order])
    epochs = range(1, release.steps // release.of_epoch)
    return replace(release, by_sample=by_sample, in_order=all(e in orders for e in epochs))
