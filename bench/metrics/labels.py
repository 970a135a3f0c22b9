"""Label restoration: counts against counts, int64 [V, C], one figure per victim.

All raise ValueError if the shapes differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.toolkit.images import same_shape


def label_existence_accuracy(guess: Tensor, truth: Tensor) -> Tensor:
    """Share of classes whose presence is right (LeAcc), float64 [V].

    It is over all C classes, so print the chance floor beside it. Source: iLRG.
    """
    same_shape(guess, truth)
    return ((guess > 0) == (truth > 0)).double().mean(dim=-1)


def label_number_accuracy(guess: Tensor, truth: Tensor) -> Tensor:
    """Share of classes whose count is exactly right (LnAcc), float64 [V].

    Classes that are absent from both count as right. Source: iLRG, over all C classes.
    """
    same_shape(guess, truth)
    return (guess == truth).double().mean(dim=-1)


def instance_recall(guess: Tensor, truth: Tensor) -> Tensor:
    """Share of the batch's labels recovered: sum_c min(guess_c, truth_c) / K, float64 [V].

    A guess of more than K labels is divided by their number, so that naming all gains nothing.
    """
    same_shape(guess, truth)
    named = torch.maximum(guess.sum(dim=-1), truth.sum(dim=-1)).clamp_min(1)
    return torch.minimum(guess, truth).sum(dim=-1) / named.double()
