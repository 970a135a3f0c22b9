"""Real-valued counts -> whole counts with a given total."""

from __future__ import annotations

import torch
from torch import Tensor


def round_to_total(values: Tensor, *, total: int) -> Tensor:
    """Largest-remainder rounding: int64 [V, C] >= 0 whose rows sum to `total`.

    values: float [V, C], >= 0 and finite; rows that do not sum to `total` are scaled first, and
    a row of zeros becomes uniform. Ties go to the lower class. Raises ValueError otherwise.
    """
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise ValueError("counts to round must be finite and >= 0.")
    values = values.double()
    sums = values.sum(dim=1, keepdim=True)
    share = torch.where(sums > 0, values / torch.where(sums > 0, sums, 1), 1 / values.shape[1])
    exact = share * total
    floor = (exact + 1e-9).floor()
    missing = (total - floor.sum(dim=1)).long()
    order = (exact - floor).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    return floor.long() + (rank < missing[:, None]).long()
