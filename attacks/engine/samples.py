"""Samples from the values that a network's first layer takes."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attacks.engine.observation import Release
from bench.api import Context, Seen

Play = Callable[[Tensor], Tensor]


def first_layer(seen: Seen) -> tuple[str, str | None]:
    """Return the names of weight and bias where the first trained tensors are a linear layer on the
    flattened sample: None for a bias that it lacks, "" for a weight where they are not."""
    if seen.const:  # what is trained is not the network's weights
        return "", None
    names = list(seen.before)
    width = math.prod(seen.network["shape"])
    for name in names[:2]:
        bias = name.removesuffix("weight") + "bias"
        value = seen.before[name]
        if value.ndim == 2 and value.shape[1] == width and bias != name:
            biased = bias in names[:2] and seen.before[bias].shape == value.shape[:1]
            return name, bias if biased else None
    return "", None


def is_sent_whole(release: Release, *names: str | None) -> bool:
    """Return whether every upload has all values of these tensors; None stands for none."""
    parts = [u.parts.get(n) for u in release.uploads for n in names if n]
    return all(p is not None and bool(p.presence().all()) for p in parts)


def samples_of(x: Tensor, ctx: Context) -> Tensor:
    """Samples [V, 1, *shape] of values [V, F], images within [0, 1]."""
    samples = x.view(len(x), 1, *ctx.network.shape).float().cpu()
    return samples.clamp(0, 1) if len(ctx.network.shape) == 3 else samples


def standardise(seen: Seen, ctx: Context, weight: str) -> tuple[Tensor, Tensor]:
    """Scale and shift [F] of each pixel on its way to the layer of this weight, for networks that
    standardise samples before it; 1 and 0 for all others."""
    rng = torch.Generator().manual_seed(0)
    width = math.prod(ctx.network.shape)
    probes = torch.stack([torch.zeros(width), torch.ones(width), torch.rand(width, generator=rng)])
    _, layers = ctx.network.trace(
        seen.before, probes.view(3, *ctx.network.shape), buffers=seen.buffers
    )
    first = weight.removesuffix(".weight")
    inputs = next((layer.input for layer in layers if layer.name == first), probes)
    zero, one, other = inputs.detach().flatten(1).double()
    scale = one - zero
    affine = torch.allclose(zero + scale * probes[2], other, atol=1e-5) and bool((scale != 0).all())
    return (scale, zero) if affine else (torch.ones_like(zero), torch.zeros_like(zero))


def build_player(release: Release, ctx: Context, scale: Tensor, shift: Tensor) -> Play:
    """Return what plays inputs of the first layer [N, F] with each class, in float64: gradients by
    the layer's outputs [N, C, O]."""
    name = first_layer(release.seen)[0].removesuffix(".weight")
    state = {n: v.to(scale) for n, v in release.before.items()}
    buffers = {n: v.to(scale) for n, v in release.seen.buffers.items()}

    def play(inputs: Tensor) -> Tensor:
        x = ((inputs - shift) / scale).view(-1, *ctx.network.shape).requires_grad_()
        logits, layers = ctx.network.trace(state, x, buffers=buffers)
        output = next(layer.output for layer in layers if layer.name == name)
        loss = -logits.log_softmax(dim=1).sum(dim=0)
        return torch.stack([torch.autograd.grad(k, output, retain_graph=True)[0] for k in loss], 1)

    return play
