"""Small computations on labelled batches that protocols, metrics and attacks share."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits [B, C] against soft labels [B, C]."""
    return -(targets * torch.log_softmax(logits, dim=-1)).sum(dim=-1).mean()


def class_means(x: Tensor, y: Tensor, *, classes: int) -> Tensor:
    """Mean of the samples of each class; the mean of all stands for a class without any.

    Args:
        x: Samples [N, ...].
        y: Their labels, int64 [N].
        classes: Number of classes C.

    Returns:
        Means [C, ...].
    """
    everything = x.mean(dim=0)
    return torch.stack(
        [
            x[y == label].mean(dim=0) if bool((y == label).any()) else everything
            for label in range(classes)
        ]
    )
