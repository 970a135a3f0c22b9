"""Putting uploads together."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.contract.defense import Server
from bench.contract.messages import UPLOAD_KINDS, Message, State, as_kind


def filled(message: Message, *, base: State) -> Message:
    """An upload with the zeros in place that it did not send: absent updates and gradients of a
    part whose absent coordinates are zero are 0, absent weights those of `base`.

    The server receives every upload so; what a client keeps to itself stays absent, and any other
    message is as it was.
    """
    if message.kind not in UPLOAD_KINDS:
        return message
    parts = {}
    for name, part in message.parts.items():
        if part.absent == "zero" and part.present is not None:
            zero = base[name] if message.kind == "weights" else torch.zeros_like(part.values)
            values = torch.where(part.present, part.values, zero)
            part = replace(part, values=values, present=None)
        parts[name] = part
    return message.with_parts(parts)


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
            if part.present is None:
                total[name] += part.values
                count[name] += 1
            else:
                total[name] += torch.where(part.present, part.values, 0.0)
                count[name] += part.present.to(total[name])
    return {
        n: torch.where(count[n] > 0, total[n] / count[n].clamp_min(1), v)
        for n, v in server.state.items()
    }
