"""Small computations on labelled batches that protocols, metrics and attacks share."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits [B, C] against soft labels [B, C]."""
    return -(targets * torch.log_softmax(logits, dim=-1)).sum(dim=-1).mean()


def class_means(x: Tensor, y: Tensor, *, classes: int) -> Tensor:
    """Mean of x [N, ...] over each class of y int64 [N] -> [C, ...]; the mean of all samples
    stands for a class without any."""
    everything = x.mean(dim=0)
    return torch.stack(
        [
            x[y == label].mean(dim=0) if bool((y == label).any()) else everything
            for label in range(classes)
        ]
    )
