"""Samples from the values that a network's first layer takes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bench.api import Context, Seen


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
