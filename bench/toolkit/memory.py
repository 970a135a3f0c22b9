"""How much memory a process may take, and work done in pieces that fit it."""

import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from bench.errors import UserError
from bench.toolkit.processes import GPU_SHARE

Answer = TypeVar("Answer")
_CPU_BYTES = 2 * 2**30
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


def gpu_share() -> float:
    """This process's part of a GPU's memory, from the environment.

    Raises:
        UserError: For a value outside (0, 1].
    """
    text = os.environ.get(GPU_SHARE, "1")
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"{GPU_SHARE} must be a number in (0, 1] (part of the GPU), got '{text}'.")
    return share


def usable_bytes(device: torch.device) -> int:
    """Bytes that new tensors on a device may take.

    On a CPU these are 2 GiB, whatever the machine has, so that results do not change with it. On a
    GPU it is what is free on the card, but no more than is left of this process's share
    (`gpu_share`). Blocks that torch keeps for reuse count as free, since new tensors get them.
    """
    if device.type != "cuda":
        return _CPU_BYTES
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - used
    return max(0, min(free + cached, int(gpu_share() * total) - used))


def halving(
    call: Callable[[int], Answer], *, at_once: int, device: torch.device
) -> tuple[Answer, int]:
    """Call with `at_once`, or with half as many as long as memory runs out.

    Args:
        call: Takes the number of items; it must keep nothing when it raises. What it raises for
            one item that does not fit is passed on.
        at_once: Items to begin with.
        device: Where it computes.

    Returns:
        The answer, and how many went at once.

    Raises:
        ValueError: If `at_once` is below 1.
    """
    if at_once < 1:
        raise ValueError(f"at_once must be >= 1 (items of a piece), got {at_once}.")
    while True:
        try:
            return call(at_once), at_once
        except (RuntimeError, MemoryError) as error:
            if at_once == 1 or not _is_out_of_memory(error):
                raise
        at_once = (at_once + 1) // 2
        if device.type == "cuda":
            torch.cuda.empty_cache()


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device.

    To a GPU it is copied from memory that is not paged out, so that the host does not wait until
    all that was asked for before is done.
    """
    if device.type == "cpu" or value.device == device:
        return value.to(device)
    if device.type == "cuda":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error is an allocator's refusal: neither the CPU's allocator nor the GPU's
    libraries have a type of their own for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(text in str(error).lower() for text in _NO_MEMORY)
