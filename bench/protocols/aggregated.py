"""What the server's own aggregation tells of one client.

Whatever a defense's `aggregate` can read the server can read. So it is played once more on the
messages of one client alone, and of all but one, where third parties answer what they answered in
the round. What comes out counts as an upload if it tells of the client's training what its own
upload does not, and so does a sum of multiples of what was sent beside the uploads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bench.contract.defense import Defense
from bench.contract.messages import FORMER, UPLOAD_KINDS, Message, Part, State, as_kind
from bench.protocols.federation import Aggregation, RoundResult
from bench.protocols.wire import frozen
from bench.toolkit.aggregation import mean_over_present

TOLD = 0.5
"""Correlation of what aggregation gives with what a client trained, from which on aggregation tells
it, once what it sent and the mean of all clients are taken out of both: by chance it is about one
over the root of the coordinates."""
_COMBINED = 0.95
"""The same of a sum of multiples of what was sent beside uploads: maps of what matters to a client
may tell much of its update without anybody's hiding it there."""
_FEWEST = 150
"""Fewer coordinates are not compared: of so few chance alone makes half of it."""


def told_by_aggregation(
    defense: Defense, result: RoundResult, clients: Sequence[str]
) -> dict[str, Message]:
    """By client the update that the server can read of it; empty where it can read no more of the
    first two clients than they sent.

    Args:
        result: A round in which the clients were watched.
        clients: Those that are attacked.
    """

    def best(client: str) -> tuple[Message, float]:
        return max(_told(defense, result, client), key=lambda told: told[1])

    finite = all(
        bool(p.values.isfinite().all()) for c in clients for p in result.trained[c].parts.values()
    )
    if not finite or not any(best(client)[1] for client in clients[:2]):
        return {}
    return {client: best(client)[0] for client in clients}


def _told(defense: Defense, result: RoundResult, client: str) -> Iterator[tuple[Message, float]]:
    """What may tell of a client's update, and how much each does beside what is known."""
    messages, server = result.aggregation.messages, result.aggregation.server
    assert server is not None
    lr = server.lr
    trained = as_kind(result.trained[client], "update", base=result.received[client], lr=lr)
    yield trained, 0.0
    own = [m for m in result.sent[client] if m.kind in UPLOAD_KINDS]
    sent = [as_kind(m, "update", base=result.before, lr=lr) for m in own]
    both = _moved(defense, result, messages)
    alone = _moved(defense, result, [m for m in messages if _of(m, client)])
    rest = _moved(defense, result, [m for m in messages if not _of(m, client)])
    count = len({m.sender for m in messages if m.kind in UPLOAD_KINDS})
    without = {n: count * both[n] - (count - 1) * rest[n] for n in both if n in rest}
    for update, least in (
        (alone, TOLD),
        (without, TOLD),
        (_combined(trained, messages), _COMBINED),
    ):
        names = [n for n in trained.parts if n in update]
        if sum(update[n].numel() for n in names) < _FEWEST:
            continue
        known = [_flat(_row((m.parts.get(n) for m in sent), update[n]) for n in names)]
        known += [_flat(both[n] for n in names)] if both else []
        own_update = _flat(trained.parts[n].values for n in names)
        how_much = _beside(_flat(update[n] for n in names), own_update, known)
        if how_much > least:
            yield trained.with_parts({n: Part(values=update[n]) for n in names}), how_much


def _combined(trained: Message, messages: Sequence[Message]) -> State:
    """The sum of multiples of its upload, and of all that was sent beside uploads, which is nearest
    to what a client trained. Others' uploads tell of it too, as far as all train alike."""
    alike = [
        m
        for m in messages
        if (m.kind not in UPLOAD_KINDS or m.sender == trained.sender)
        and all(
            n in m.parts and m.parts[n].values.shape == p.values.shape
            for n, p in trained.parts.items()
        )
    ]
    if not alike:
        return {}
    rows = torch.stack(
        [_flat(_row([m.parts[n]], p.values) for n, p in trained.parts.items()) for m in alike]
    )
    goal = _flat(p.values for p in trained.parts.values())
    shares = torch.linalg.lstsq(rows.T, goal[:, None]).solution
    values = (rows.T @ shares)[:, 0].split([p.values.numel() for p in trained.parts.values()])
    return {
        n: v.view_as(p.values).to(p.values)
        for (n, p), v in zip(trained.parts.items(), values, strict=True)
    }


def _of(message: Message, client: str) -> bool:
    """Whether a client sent it, or a part of it: a third party's names its parts by client."""
    return client == message.sender or client in message.parts


def _moved(defense: Defense, result: RoundResult, messages: Sequence[Message]) -> State:
    """By how much aggregation of these messages moves the state; empty where it fails."""
    kept: Aggregation = result.aggregation
    assert kept.server is not None
    server = replace(
        kept.server,
        state={n: v.clone() for n, v in kept.server.state.items()},
        ask=lambda question: [
            m for m in kept.answers.get(question.kind, ()) if m.receiver != FORMER
        ],
    )
    given = [frozen(m) for m in messages]
    try:
        after = copy.deepcopy(defense).aggregate(server, given)
        after = mean_over_present(server, given) if after is None else after
        moved = {n: (v - result.before[n]).detach() for n, v in after.items() if n in result.before}
    except Exception:  # a plugin's code, on messages that no run gives it
        return {}
    return {n: v for n, v in moved.items() if bool(v.isfinite().all())}


def _row(parts: Iterable[Part | None], like: Tensor) -> Tensor:
    """What was sent of a tensor, 0 where nothing was."""
    shown = [torch.where(p.presence(), p.values, 0.0).nan_to_num() for p in parts if p is not None]
    return shown[0] if shown else torch.zeros_like(like)


def _flat(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([v.detach().flatten().double() for v in values])


def _beside(told: Tensor, trained: Tensor, known: Sequence[Tensor]) -> float:
    """Correlation of what is told with what was trained, without what both have of what is known;
    0 where that tells all of either."""
    basis = torch.linalg.qr(torch.stack([k / k.norm().clamp_min(1e-300) for k in known], dim=1))[0]

    def rest(values: Tensor) -> Tensor:
        left = values - basis @ (basis.T @ values)
        return left if left.norm() > 1e-3 * values.norm() else torch.zeros_like(left)

    one, other = rest(told), rest(trained)
    return float((one @ other) / (one.norm() * other.norm()).clamp_min(1e-300))
