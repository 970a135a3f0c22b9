"""Gradients sample by sample."""

from typing import Any

import torch
from torch import Tensor

from bench.contract.defense import Loss
from bench.contract.messages import State


def per_sample_gradients(loss: Loss, variables: State, x: Any, y: Any) -> State:
    """The loss's gradient on every sample of a batch alone, [B, ...] by name.

    Args:
        loss: A mean over its batch.
        variables: Where the gradient is taken.
        x: Samples [B, ...], or the tuple of such that split protocols have.
        y: Soft labels alike.
    """

    def of_one(x: Any, y: Any) -> State:
        return torch.func.grad(loss)(variables, _as_batch(x), _as_batch(y))

    return torch.func.vmap(of_one)(x, y)


def clipped_to(gradients: State, *, norm: float) -> tuple[State, Tensor]:
    """Scale down each sample's gradient to a norm, and average over samples.

    Args:
        norm: Largest L2 norm of a sample's gradient over all names.

    Returns:
        The mean over samples by name, and the norms [B] before.
    """
    # Norms in one pass: squares of all samples' gradients would be written to memory.
    lengths = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients.values()]
    length = torch.stack(lengths).square().sum(dim=0).sqrt()
    factor = (norm / length.clamp_min(1e-30)).clamp_max(1.0)
    size = len(length)
    return {n: torch.tensordot(factor, g, dims=1) / size for n, g in gradients.items()}, length


def _as_batch(value: Any) -> Any:
    return tuple(v[None] for v in value) if isinstance(value, tuple) else value[None]
