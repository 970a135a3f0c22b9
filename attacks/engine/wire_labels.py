"""Labels that a split protocol's messages show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attacks.engine.observation import FEATURES, FEATURES_GRADIENT, NonFiniteError, Release
from bench.api import Context, NetworkView, State
from bench.toolkit.losses import head_of


def network_weights(release: Release, ctx: Context) -> dict[str, Tensor]:
    """The network's weights as broadcast, without the defense's randomness."""
    params = {n: v.to(ctx.device) for n, v in release.before.items()}
    const = {n: v.to(ctx.device) for n, v in release.seen.const.items()}
    return dict(ctx.defense.mean_realize(ctx.defense.receive(params, const), const))


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


def labels_by_slope(release: Release, ctx: Context) -> tuple[Tensor, Tensor]:
    """Labels int64 [V, B] of the first step, and how doubtful each is, [V, B] in [0, 1].

    The client returns W'(p - y) / B per sample, p the softmax of its head on the features that
    the server sent it. The server knows features and, up to the defense's randomness, the head
    W, so it takes the class y whose slope is nearest. Doubt: squared distance to it over that to
    the second nearest. Raises NonFiniteError, naming the client.
    """
    weights = network_weights(release, ctx)
    weight, bias = head_values(weights, ctx.network, release.seen.buffers)
    slope = release.by_sample[FEATURES_GRADIENT][0][0]
    for client, one in zip(release.clients, slope, strict=True):
        if not bool(torch.isfinite(one).all()):
            raise NonFiniteError(f"the features' gradient of {client} holds non-finite values.")
    features = release.by_sample[FEATURES][0][0]
    f = features.flatten(2).to(weight)
    probability = torch.softmax(f @ weight.T + bias, dim=-1)
    # r = B slope = W'(p - y), so that W'p - r = W'y, the row of W of the label.
    row = probability @ weight - slope.flatten(2).to(weight) * slope.shape[1]
    distance = torch.cdist(row.flatten(0, 1), weight).square().unflatten(0, row.shape[:2])
    nearest = distance.topk(min(2, len(weight)), dim=-1, largest=False)
    doubt = nearest.values[..., 0] / nearest.values[..., -1].clamp_min(1e-300)
    return nearest.indices[..., 0], doubt.clamp(0, 1)
