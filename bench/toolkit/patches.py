"""Patches and positions of smashed data."""

import math

from torch import Tensor

from bench.errors import UnfitError, UserError
from bench.toolkit.memory import to_device


def patch_map(mask: Tensor, q: Tensor) -> Tensor:
    """Spread a mask over patches to the shape of smashed data.

    Args:
        mask: Bool [N], one per patch.
        q: Tokens [B, N, D], or a map [B, C, H, W] that is cut into a sqrt(N) x sqrt(N) grid.

    Returns:
        A bool tensor of q's shape, constant within each patch.

    Raises:
        UnfitError: If q has no patches at all.
        UserError: If q has none of that number.
    """
    patches = len(mask)
    mask = to_device(mask, q.device)
    if q.ndim == 3:
        if q.shape[1] != patches:
            raise UserError(
                f"patches must be {q.shape[1]}, the tokens of the smashed data "
                f"{list(q.shape)}, got {patches}."
            )
        return mask[None, :, None].expand(q.shape)
    if q.ndim != 4:
        raise UnfitError(
            "patches need smashed data of tokens [B, N, D] or a map [B, C, H, W], got the shape "
            f"{list(q.shape)} at this cut."
        )
    side, height, width = math.isqrt(patches), q.shape[2], q.shape[3]
    if side * side != patches or height % side or width % side:
        raise UserError(
            f"patches must be a square number whose root divides the height and width of the "
            f"smashed data {list(q.shape)}, got {patches}."
        )
    grid = mask.view(side, side)
    wide = grid.repeat_interleave(height // side, dim=0).repeat_interleave(width // side, dim=1)
    return wide.expand(q.shape)


def count_positions(q: Tensor) -> int:
    """Positions of q's grid: tokens of [B, N, D], or pixels of a square map [B, C, H, H].

    Raises:
        UnfitError: If q has neither.
    """
    if q.ndim == 3:
        return q.shape[1]
    if q.ndim == 4 and q.shape[2] == q.shape[3]:
        return q.shape[2] * q.shape[3]
    raise UnfitError(
        "positions need smashed data of tokens [B, N, D] or a square map [B, C, H, H], got the "
        f"shape {list(q.shape)} at this cut."
    )
