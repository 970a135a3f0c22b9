"""Work on many problems in pieces that fit the memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.toolkit.memory import in_pieces, usable_bytes

_GPU_SHARE = 0.6
"""Part of the usable memory that is filled on purpose: `bytes_each` is an estimate."""


def in_chunks(
    work: Callable[[slice], None], count: int, *, bytes_each: int, device: torch.device
) -> None:
    """Call work(slice) over range(count) in pieces of at most 2 GiB (CPU) or 60 % of the usable
    memory (GPU), estimated at `bytes_each` per problem. A piece that runs out of memory is
    halved and done again, so `work` must keep nothing of a call that raised. One problem that
    does not fit raises what the allocator raised."""
    limit = usable_bytes(device)
    if device.type == "cuda":
        limit = int(limit * _GPU_SHARE)
    size = max(1, min(count, limit // max(1, bytes_each)))
    in_pieces(work, count, at_once=size, device=device)
