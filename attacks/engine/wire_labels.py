"""Labels that a split protocol's messages show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attacks.engine.observation import NonFiniteError
from bench.api import Context, NetworkView, Seen, State
from bench.toolkit.losses import head_of

LABELS, FEATURES, FEATURES_GRADIENT = "labels", "features", "features_gradient"


def labels_sent(seen: Seen) -> Tensor | None:
    """Soft labels [V, B, C] of the first step as they were sent, or None."""
    if not seen.clients or not seen.of(seen.clients[0], LABELS):
        return None
    return seen.stack(LABELS, seen.clients)[0][LABELS]


def in_the_clear(labels: Tensor) -> bool:
    """Whether soft labels are plain: nothing but 0 and 1."""
    return bool(((labels == 0) | (labels == 1)).all())


def network_weights(seen: Seen, ctx: Context) -> dict[str, Tensor]:
    """The network's weights as broadcast, without the defense's randomness."""
    params = {n: v.to(ctx.device) for n, v in seen.before.items()}
    const = {n: v.to(ctx.device) for n, v in seen.const.items()}
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


def shows_slopes(seen: Seen) -> bool:
    """Whether clients returned their loss's gradient by the server's features."""
    return bool(seen.clients) and bool(seen.of(seen.clients[0], FEATURES_GRADIENT))


def labels_by_slope(seen: Seen, ctx: Context) -> tuple[Tensor, Tensor]:
    """Labels int64 [V, B] of the first step, and how doubtful each is, [V, B] in [0, 1].

    The client returns W'(p - y) / B per sample, p the softmax of its head on the features that
    the server sent it. The server knows features and, up to the defense's randomness, the head
    W, so it takes the class y whose slope is nearest. Doubt: squared distance to it over that to
    the second nearest. Raises NonFiniteError, naming the client.
    """
    weights = network_weights(seen, ctx)
    weight, bias = head_values(weights, ctx.network, seen.buffers)
    slope = seen.stack(FEATURES_GRADIENT, seen.clients)[0][FEATURES_GRADIENT]
    for client, one in zip(seen.clients, slope, strict=True):
        if not bool(torch.isfinite(one).all()):
            raise NonFiniteError(f"the features' gradient of {client} holds non-finite values.")
    features = torch.stack([_features(seen, c) for c in seen.clients])
    f = features.flatten(2).to(weight)
    probability = torch.softmax(f @ weight.T + bias, dim=-1)
    # r = B slope = W'(p - y), so that W'p - r = W'y, the row of W of the label.
    row = probability @ weight - slope.flatten(2).to(weight) * slope.shape[1]
    distance = torch.cdist(row.flatten(0, 1), weight).square().unflatten(0, row.shape[:2])
    nearest = distance.topk(min(2, len(weight)), dim=-1, largest=False)
    doubt = nearest.values[..., 0] / nearest.values[..., -1].clamp_min(1e-300)
    return nearest.indices[..., 0], doubt.clamp(0, 1)


def _features(seen: Seen, client: str) -> Tensor:
    """What the server sent a client's head in the first step, [B, ...]."""
    (message,) = [
        m for m in seen.messages if m.kind == FEATURES and m.receiver == client and m.step == 0
    ]
    return message.parts[FEATURES].values
