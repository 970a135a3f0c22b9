"""Updates of single clients that the server's own aggregation reads.

The server can read whatever a defense's `aggregate` can. So `aggregate` runs again on one client's
messages, and on all but one client's, with the third parties' answers of that round. The result
counts as the client's upload if it tells more of its training than the upload does. So does a
linear combination of what was sent beside uploads.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bench.contract.defense import Defense
from bench.contract.messages import FORMER, UPLOAD_KINDS, Message, Part, State, as_kind
from bench.protocols.federation import Aggregation, RoundResult
from bench.protocols.wire import freeze
from bench.toolkit.aggregation import mean_over_present
from bench.toolkit.vectors import cut_like

LEAST, _LEAST_OF_FEW = 0.4, 0.5
"""Least partial correlation of what aggregation gives with what a client trained, given what it
sent and the mean of all clients, from which on the server can read the update. By chance it is
about one over the root of the number of coordinates; sums that shipped defenses open reach .25
among thousands of coordinates and .45 among hundreds, for which the second is."""
_FEW = 2000
"""Coordinates below which they are few."""
_LEAST_OF_PATTERN = 0.5
"""Least correlation of which values were sent with the signs of what was trained, among values of
like size: that large ones are sent is no secret."""
_LIKE = 100
"""Values of like size."""
_LEAST_COMBINED = 0.95
"""The same for a linear combination of what was sent beside uploads: sensitivity maps may tell much
of an update without hiding it."""
_FEWEST = 150
"""Fewest coordinates that are compared: among fewer, chance alone correlates half."""


def read_updates(
    defense: Defense, result: RoundResult, clients: Sequence[str]
) -> dict[str, Message]:
    """Read each client's update by the server's own aggregation.

    Args:
        defense: The defense that the clients ran.
        result: An observed round.
        clients: Ids of the attacked clients.

    Returns:
        The updates by client; empty where aggregation tells no more of the first two clients than
        they sent.
    """
    uploads = [p.values for c in clients for p in result.trained[c].parts.values()]
    if not uploads or not all(bool(v.isfinite().all()) for v in uploads):
        return {}
    total = _aggregate_again(defense, result, result.aggregation.messages)

    def best(client: str) -> tuple[Message, float] | None:
        candidates = _candidates(defense, result, client, total)
        return max(candidates, key=lambda candidate: candidate[1], default=None)

    first = {client: best(client) for client in clients[:2]}
    if not any(estimate and estimate[1] > 1 for estimate in first.values()):
        return {}
    return {c: estimate[0] for c in clients if (estimate := first.get(c) or best(c))}


def _candidates(
    defense: Defense, result: RoundResult, client: str, total: State
) -> Iterator[tuple[Message, float]]:
    """Yield estimates of a client's update, each with its partial correlation over the least one
    that counts.

    total: By how much aggregation of all messages moves the state.
    """
    messages, server = result.aggregation.messages, result.aggregation.server
    assert server is not None
    trained = as_kind(result.trained[client], "update", base=result.received[client], lr=server.lr)
    uploads = [m for m in result.sent[client] if m.kind in UPLOAD_KINDS]
    sent = [as_kind(m, "update", base=result.before, lr=server.lr) for m in uploads]
    alone = _aggregate_again(defense, result, [m for m in messages if _is_from(m, client)])
    remaining = _aggregate_again(defense, result, [m for m in messages if not _is_from(m, client)])
    count = len({m.sender for m in messages if m.kind in UPLOAD_KINDS})
    without = {n: count * total[n] - (count - 1) * remaining[n] for n in total if n in remaining}
    # Other clients' uploads are left out: they resemble this one by nature.
    beside = [m for m in messages if m.kind not in UPLOAD_KINDS]
    combined = _combination(trained, [*sent, *beside])
    for update, least in ((alone, LEAST), (without, LEAST), (combined, _LEAST_COMBINED)):
        names = [n for n in trained.parts if n in update]
        count = sum(update[n].numel() for n in names)
        if count < _FEWEST:
            continue
        least = max(least, _LEAST_OF_FEW) if count < _FEW else least
        known = [_flat(_row((m.parts.get(n) for m in sent), update[n]) for n in names)]
        if all(n in total for n in names):  # where it is finite
            known.append(_flat(total[n] for n in names))
        target = _flat(trained.parts[n].values for n in names)
        correlation = _partial_correlation(_flat(update[n] for n in names), target, known)
        yield trained.with_parts({n: Part(values=update[n]) for n in names}), correlation / least
    for message in sent:
        others = [m for m in messages if m.kind == message.kind and m.sender != client]
        pattern = {
            n: 2.0 * p.presence() - 1
            for n, p in message.parts.items()
            # What all clients leave out tells of none.
            if n in trained.parts and not all(_same_pattern(p, m.parts.get(n)) for m in others)
        }
        if not pattern:
            continue
        signs = _correlate(_flat(pattern.values()), _flat(trained.parts[n].values for n in pattern))
        estimate = trained.with_parts({n: Part(values=v) for n, v in pattern.items()})
        yield estimate, signs / _LEAST_OF_PATTERN


def _same_pattern(a: Part, b: Part | None) -> bool:
    return b is None or torch.equal(a.presence(), b.presence())


def _correlate(pattern: Tensor, trained: Tensor) -> float:
    """Return the correlation of a pattern with the signs of what was trained, among values of like
    size."""
    order = trained.abs().argsort()[int((trained == 0).sum()) :]
    rows = order[: len(order) // _LIKE * _LIKE].view(-1, _LIKE)
    if len(rows) < 2:
        return 0.0
    a, b = (v[rows] - v[rows].mean(dim=1, keepdim=True) for v in (pattern, trained.sign()))
    return float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-300))


def _combination(trained: Message, messages: Sequence[Message]) -> State:
    """Return the linear combination of messages that is nearest to what a client trained."""
    similar = [m for m in messages if _shapes(trained).items() <= _shapes(m).items()]
    if not similar:
        return {}
    like = {n: p.values for n, p in trained.parts.items()}
    rows = torch.stack([_flat(_row([m.parts[n]], v) for n, v in like.items()) for m in similar])
    shares = torch.linalg.lstsq(rows.T, _flat(like.values())[:, None]).solution
    return {n: v.to(like[n]) for n, v in cut_like((rows.T @ shares)[:, 0], like).items()}


def _shapes(message: Message) -> dict[str, torch.Size]:
    return {n: p.values.shape for n, p in message.parts.items()}


def _is_from(message: Message, client: str) -> bool:
    """Return whether a client sent it, or a part of it: a third party's names its parts by
    client."""
    return client == message.sender or client in message.parts


def _aggregate_again(defense: Defense, result: RoundResult, messages: Sequence[Message]) -> State:
    """Return by how much aggregation of these messages moves the state; empty where `aggregate`
    raises, as it may on messages that no run gives it."""
    kept: Aggregation = result.aggregation
    assert kept.server is not None
    server = replace(
        kept.server,
        state={n: v.clone() for n, v in kept.server.state.items()},
        ask=lambda question: [
            m for m in kept.answers.get(question.kind, ()) if m.receiver != FORMER
        ],
    )
    given = [freeze(m) for m in messages]
    try:
        after = copy.deepcopy(defense).aggregate(server, given)
        after = mean_over_present(server, given) if after is None else after
        moved = {n: (v - result.before[n]).detach() for n, v in after.items() if n in result.before}
    except Exception:  # a plugin's code, on messages that no run gives it
        return {}
    return {n: v for n, v in moved.items() if bool(v.isfinite().all())}


def _row(parts: Iterable[Part | None], like: Tensor) -> Tensor:
    """Return the sent values of a tensor, 0 where nothing was sent."""
    values = [torch.where(p.presence(), p.values, 0.0).nan_to_num() for p in parts if p is not None]
    return values[0] if values else torch.zeros_like(like)


def _flat(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([v.detach().flatten().double() for v in values])


def _partial_correlation(estimate: Tensor, trained: Tensor, known: Sequence[Tensor]) -> float:
    """Return the correlation of an estimate with what was trained, given what is known; 0 where
    that explains all of either."""
    basis = torch.linalg.qr(torch.stack([k / k.norm().clamp_min(1e-300) for k in known], dim=1))[0]

    def residual(values: Tensor) -> Tensor:
        left = values - basis @ (basis.T @ values)
        return left if left.norm() > 1e-3 * values.norm() else torch.zeros_like(left)

    a, b = residual(estimate), residual(trained)
    return float((a @ b) / (a.norm() * b.norm()).clamp_min(1e-300))
