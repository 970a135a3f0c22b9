"""How the two sides of a comparison are timed: alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits

TRIES = 3
Answer = TypeVar("Answer")


def best_of(call: Callable[[], Answer], *, tries: int = TRIES) -> tuple[float, Answer]:
    """Shortest wall time in seconds of so many tries after a warm-up, and the last answer."""
    answer = call()
    spent = []
    for _ in range(tries):
        began = time.perf_counter()
        answer = call()
        spent.append(time.perf_counter() - began)
    return min(spent), answer


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """So many threads for torch, numpy and what they call."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(count):
            yield
    finally:
        torch.set_num_threads(before)
