"""Which reconstructed sample belongs to which private one."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bench.toolkit.images import same_shape


def one_to_one(guess: Tensor, truth: Tensor) -> Tensor:
    """Order of the guesses that minimises the total squared error.

    Every guess is used once: the best match per image would let one good guess count many times.

    Args:
        guess: Guessed samples [V, K, ...].
        truth: Private samples [V, K, ...].

    Returns:
        int64 [V, K]; guess[v, order[v, k]] belongs to truth[v, k].
    """
    same_shape(guess, truth)
    victims, samples = guess.shape[:2]
    if samples == 1:
        return torch.zeros(victims, 1, dtype=torch.int64)
    flat = guess.double().flatten(2), truth.double().flatten(2)
    cost = torch.cdist(flat[1], flat[0]).square().cpu().numpy()
    return torch.stack([torch.from_numpy(linear_sum_assignment(c)[1]) for c in cost])
