"""Values that reach the server one by one from nobody: split by coordinate, and shuffled.

What the server then knows of a coordinate is which values were sent and how often. Where each is
one of two public points, that is the number of clients that sent the upper one, and the mean of
the values tells just as much. So each upload arrives hidden, and the server notes the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.api import SERVER, SUM, UPLOAD_KINDS, Message, Part, Sealed, Server, State
from bench.toolkit.aggregation import filled, mean_over_present
from bench.toolkit.vectors import showing

_BYTES = 8
"""Of a value that travels by itself: itself and its place, 32 bits each."""


def split_up(upload: Message) -> Message:
    """An upload whose values the server gets without learning that they are this client's."""
    nothing = torch.tensor(False)
    sealed = {
        n: Sealed(n_bytes=_BYTES * int(p.presence().sum()), covers=p.told(), box=p)
        for n, p in upload.parts.items()
    }
    hidden = {n: showing(replace(p, absent="kept"), nothing) for n, p in upload.parts.items()}
    return replace(upload, parts=hidden, sealed=sealed)


def is_split_up(message: Message) -> bool:
    """Whether a message is an upload whose values came one by one."""
    return message.kind in UPLOAD_KINDS and bool(message.sealed)


def mean_of_split_up(server: Server, messages: Sequence[Message]) -> State:
    """The new state, the mean of all uploads, which the server notes of those that were split."""
    opened = [_opened(m) if is_split_up(m) else m for m in messages]
    mean = mean_over_present(server, [filled(m, base=server.state) for m in opened])
    arrived = [m for m in messages if is_split_up(m)]
    if arrived:
        assert server.ask is not None
        parts = {}
        for name in dict.fromkeys(n for m in arrived for n in m.sealed):
            covers = [m.sealed[name].covers for m in arrived if name in m.sealed]
            told = torch.stack(covers).any(dim=0)
            parts[name] = Part(values=mean[name], present=None if bool(told.all()) else told)
        noted = replace(arrived[0], kind="weights", sender=SUM, receiver=SERVER, sealed={})
        server.ask(noted.with_parts(parts))
    trained = server.trained or {}
    sent = {n for m in opened if m.kind in UPLOAD_KINDS for n in m.parts}
    return {n: v if n in sent else trained.get(n, v) for n, v in mean.items()}


def _opened(message: Message) -> Message:
    parts = {n: s.box for n, s in message.sealed.items()}
    return replace(message, parts=parts, sealed={})


def shuffled_epsilon(epsilon: float, *, clients: int, delta: float) -> float:
    """What shuffling proves for one value of one round, at `delta`; `epsilon` itself where it
    proves no more.

    log(1 + (E-1)/(E+1) (8 sqrt(E log(4/delta)) / sqrt(n) + 8 E / n)) for n clients, all but one
    of whom send honestly, while epsilon <= log(n / (16 log(2/delta))); E = e^epsilon.
    Source: Feldman, McMillan, Talwar, FOCS 2021, arXiv:2012.12803, Theorem 3.1.
    """
    if epsilon > math.log(clients / (16 * math.log(2 / delta))):
        return epsilon
    e = math.exp(epsilon)
    spread = 8 * math.sqrt(e * math.log(4 / delta) / clients) + 8 * e / clients
    return min(epsilon, math.log1p(math.tanh(epsilon / 2) * spread))
