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

    A sample's activations differ from round to round, since the network does. Each round gives
    evidence of the principal components of an image (`ComponentEvidence`). The assignment is taken
    under which the rounds most likely show the same images. A later local epoch that is a release
    itself (see `linked`) gives the order of that epoch's steps. Epochs of several steps are united
    before (see `united`). Where there is nothing to line up, the releases stay as they are.
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
            ordered.append(_reordered(one, {0: order}))
        else:
            ordered.append(_reordered(one, epochs if order is None else {0: order, **epochs}))
            epochs = {}
    return ordered


@dataclass(frozen=True, kw_only=True)
class ComponentEvidence:
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
        return ComponentEvidence(
            toward=self.toward[victims, rows], precision=self.precision[victims, rows]
        )

    def plus(self, other: ComponentEvidence, sign: int = 1) -> ComponentEvidence:
        """Both together; sign -1: without the other."""
        return ComponentEvidence(
            toward=self.toward + sign * other.toward,
            precision=self.precision + sign * other.precision,
        )


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
    return ComponentEvidence(
        toward=weighed @ slope.mT, precision=each[kind].unflatten(0, present.shape[:2])
    )


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
