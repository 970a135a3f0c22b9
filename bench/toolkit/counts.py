"""Whole counts with a given total, from real-valued ones."""

import math

import torch
from torch import Tensor


def round_to_total(values: Tensor, *, total: int) -> Tensor:
    """Round rows to whole counts that sum to `total`, by largest remainders.

    Rows that do not sum to `total` are scaled first, and a row of zeros becomes uniform. Ties go to
    the lower class.

    Args:
        values: Float [V, C], finite and >= 0.
        total: What each row shall sum to.

    Returns:
        Counts, int64 [V, C].

    Raises:
        ValueError: For values that are negative or not finite.
    """
    if not bool(((values >= 0.0) & (values < math.inf)).all()):
        raise ValueError("counts to round must be finite and >= 0.")
    values = values.double()
    sums, classes = values.sum(dim=1, keepdim=True), values.shape[1]
    if not bool((sums > 0.0).all()):
        sums = torch.where(sums > 0.0, sums, float(classes))
        values = torch.where(values.any(dim=1, keepdim=True), values, 1.0)
    exact = (values / sums).mul_(float(total))
    floor = (exact + 1e-9).floor_()
    missing = floor.sum(dim=1, keepdim=True).neg_().add_(float(total))
    largest_first = exact.sub_(floor).argsort(dim=1, descending=True, stable=True)
    one_more = torch.arange(classes, dtype=floor.dtype, device=floor.device) < missing
    return floor.scatter_add_(1, largest_first, one_more.double()).long()
