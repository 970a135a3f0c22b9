"""Work on many problems in pieces that fit the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_CPU_BYTES = 2 * 2**30
_GPU_SHARE = 0.6
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def in_chunks(
    work: Callable[[slice], None], count: int, *, bytes_each: int, device: torch.device
) -> None:
    """Call work(slice) over range(count) in pieces of at most 2 GiB (CPU) or 60 % of the free
    memory (GPU), estimated at `bytes_each` per problem. A piece that runs out of memory is
    halved and done again, so `work` must keep nothing of a call that raised. One problem that
    does not fit raises what the allocator raised."""
    size = max(1, min(count, _limit(device) // max(1, bytes_each)))
    at = 0
    while at < count:
        with _out_of_memory() as exhausted:
            work(slice(at, min(at + size, count)))
        if not exhausted:
            at += size
        elif size == 1:
            raise exhausted[0]
        else:
            size = (size + 1) // 2
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _limit(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    return _CPU_BYTES


@contextmanager
def _out_of_memory() -> Iterator[list[BaseException]]:
    """Collects an allocator's refusal; every other error passes."""
    caught: list[BaseException] = []
    try:
        yield caught
    except (RuntimeError, MemoryError) as error:
        # The CPU allocator raises a plain RuntimeError, told apart by its text alone.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(
            text in str(error) for text in _NO_MEMORY
        ):
            raise
        caught.append(error.with_traceback(None))  # the traceback would keep the tensors alive
