"""Putting uploads together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.contract.defense import Server
from bench.contract.messages import UPLOAD_KINDS, Message, State, as_kind


def mean_over_present(server: Server, messages: Sequence[Message]) -> State:
    """The mean of the uploaded weights over the clients that sent them, per coordinate.

    A coordinate that nobody sent keeps the server's value.
    """
    total = {n: torch.zeros_like(v) for n, v in server.state.items()}
    count = {n: torch.zeros_like(v) for n, v in server.state.items()}
    for message in messages:
        if message.kind not in UPLOAD_KINDS:
            continue
        parts = as_kind(message, "weights", base=server.state, lr=server.lr).parts
        for name, part in parts.items():
            present = part.presence()
            total[name] += torch.where(present, part.values, 0.0)
            count[name] += present.to(total[name])
    return {
        n: torch.where(count[n] > 0, total[n] / count[n].clamp_min(1), v)
        for n, v in server.state.items()
    }
