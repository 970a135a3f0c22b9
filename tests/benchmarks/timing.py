"""How the two sides of a comparison are timed: alike."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits

TRIES = 3
Answer = TypeVar("Answer")


def best_of(
    call: Callable[[], Answer], *, tries: int = TRIES, warm: Callable[[], object] | None = None
) -> tuple[float, Answer]:
    """Fewest seconds of so many tries after a warm-up (by default a try), and the last answer.

    On one thread they are seconds of CPU, which a neighbour's load stretches less than the clock's.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    answer: Answer
    (warm or call)()
    spent = []
    for _ in range(tries):
        began = clock()
        answer = call()
        spent.append(clock() - began)
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
