"""Small computations on labelled batches that protocols, metrics and attacks share."""

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
    by_class = (x[y == label] for label in range(classes))
    return torch.stack([some.mean(dim=0) if len(some) else everything for some in by_class])
