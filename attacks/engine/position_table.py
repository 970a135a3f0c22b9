"""Patches of one sample from the gradients of a patch embedding and of its position table.

The table is added to the embedded patches, so its row p has the gradient g_p of token p, and the
embedding's weight has sum_p g_p x_p'. Linear equations for the patches x_p follow, whatever
layers come later (compare APRIL, Lu et al., arXiv:2112.14087, which inverts an attention).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.engine.observation import Release, gradient_estimate
from bench.api import Seen

_RANK, _AGREE = 1e-5, 1e-3
"""Singular values below this share of the largest are rounding of float32 gradients; the largest
relative distance between the sum over the table's gradient and the bias's."""


def find_table(seen: Seen) -> tuple[str, str] | None:
    """Names of the weight [D, C, h, w] that embeds patches side by side and of the table that is
    added to the N tokens, [N, D] or with a class token [1 + N, D]; None if there are none."""
    shape, first = seen.network["shape"], list(seen.before.items())[:4]
    for weight, value in () if seen.const or len(shape) != 3 else first:
        if value.ndim != 4 or shape[1] % value.shape[2] or shape[2] % value.shape[3]:
            continue
        width, tokens = len(value), math.prod(shape[1:]) // value[0, 0].numel()
        for table, other in first:
            rows = other.shape[-2:]
            if rows in ((tokens, width), (tokens + 1, width)) and other.numel() == math.prod(rows):
                return weight, table
    return None


def solve_patches(
    releases: Sequence[Release], weight: str, table: str
) -> tuple[Tensor, Tensor, int]:
    """Least squares for the patches from the equations of all releases.

    Args:
        releases: Of one sample; equations of which a coordinate was not sent are left out.
        weight, table: See `find_table`.

    Returns:
        Embedding's input [V, C * H * W]; rank of the equations int64 [V], the least over the values
        of a patch, 0 where they contradict the gradient of the embedding's bias; patches N.
    """
    width, channels, *patch = releases[0].before[weight].shape
    grid = [n // m for n, m in zip(releases[0].seen.network["shape"][1:], patch, strict=True)]
    tokens, bias = math.prod(grid), weight.removesuffix("weight") + "bias"
    systems, agree = [], []
    for release in releases:
        seen = gradient_estimate(release)
        rows, there = (
            t[table].flatten(1).unflatten(1, (-1, width))[:, -tokens:]
            for t in (seen.values, seen.present)
        )
        known = there.all(dim=1)
        left = torch.where(known[:, None], rows, 0.0).mT  # [V, D, N]
        told = seen.present[weight].flatten(2) & known[..., None]  # [V, D, C h w]
        right = torch.where(told, seen.values[weight].flatten(2), 0.0)
        systems.append((left, right, told))
        total = left.sum(dim=2)
        if bias in seen.values:
            total = torch.where(seen.present[bias] & known, seen.values[bias], total)
        agree.append((left.sum(dim=2) - total).norm(dim=1) <= _AGREE * total.norm(dim=1))
    patches, ranks = [], []
    lefts, rights, tolds = (torch.cat(each, dim=1) for each in zip(*systems, strict=True))
    for left, right, told in zip(lefts, rights, tolds, strict=True):
        kinds, which = told.mT.unique(dim=0, return_inverse=True)
        equations = left * kinds[..., None]
        ranks.append(torch.linalg.matrix_rank(equations, rtol=_RANK).min())
        inverse = torch.linalg.pinv(equations, rtol=_RANK)[which]
        patches.append(torch.einsum("knd,dk->nk", inverse, right))
    placed = torch.stack(patches).view(-1, *grid, channels, *patch).permute(0, 3, 1, 4, 2, 5)
    return placed.flatten(1), torch.stack(ranks) * torch.stack(agree).all(dim=0), tokens
