"""Work on many problems in pieces that fit the memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attacks.engine.lbfgs import Evaluate, Phase, minimise
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


def minimised(
    evaluate: Callable[[slice], Evaluate],
    start: Tensor,
    *,
    numbers_each: int,
    evaluations: int,
    history: int = 30,
    least_gain: float = 1e-7,
) -> tuple[Tensor, Tensor, int]:
    """Where functions lead of which no minimum is known, from start [P, N].

    Args:
        evaluate: Of the problems in a slice, which are counted from 0 again.
        start: In the precision to compute in.
        numbers_each: Held for one evaluation of one problem.
        evaluations: Of one problem.
        history: See `minimise`.
        least_gain: See `minimise`.

    Returns:
        Points [P, N], losses [P], and evaluations of all problems.
    """
    found, losses, spent = torch.empty_like(start), start.new_empty(len(start)), [0]

    def work(part: slice) -> None:
        stop = start.new_full((len(start[part]),), -torch.inf)
        minimum = minimise(
            [Phase(evaluate=evaluate(part), stop=stop, dtype=start.dtype)],
            start[part],
            max_evaluations=evaluations,
            history=history,
            least_gain=least_gain,
        )
        found[part], losses[part] = minimum.x, minimum.loss
        spent.append(int(minimum.evaluations.sum()))

    width = torch.finfo(start.dtype).bits // 8
    bytes_each = width * ((2 * history + 8) * start.shape[1] + numbers_each)
    in_chunks(work, len(start), bytes_each=bytes_each, device=start.device)
    return found, losses, sum(spent)
