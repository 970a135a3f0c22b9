"""Whether the values that an upload holds are chosen by the data, which noise on them does not
hide: a proof has to count that choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from bench.contract.defense import Defense
from bench.contract.hooks import overrides
from bench.contract.messages import UPLOAD_KINDS, Message, as_kind
from bench.sandbox.conformance.playground import Ground, play
from bench.sandbox.conformance.watching import Watch, watched
from bench.sandbox.findings import Broken
from bench.sandbox.stage import Uploader, client_alone
from bench.seeding import generator

_SHAPES = {"block1.weight": (16, 24), "block1.bias": (16,), "head.weight": (10, 30)}
_COORDINATION = ("say", "inspect", "third_parties")
"""Hooks without which an upload can be made without a round."""
_UPDATES, _DRAWS = 4, 16
"""Made-up updates, and draws of the client's stream for each."""


def check_patterns(defense: Defense, ground: Ground, epsilon: float) -> str:
    """Compare which values are sent of different updates and data, over several draws.

    Args:
        ground: Of the whole rounds.
        epsilon: The finite proof.

    Raises:
        Broken: If data, without any noise, decides which values are sent.
    """
    groups = _of_rounds(defense, ground)
    if not any(overrides(defense, hook) for hook in _COORDINATION):
        groups.append([_of_update(defense, n) for n in range(_UPDATES)])
    for one, other in (pair for patterns in groups for pair in combinations(patterns, 2)):
        # What is sent in all draws of an input, or in none.
        fixed = (one == one[0]).all(dim=0) & (other == other[0]).all(dim=0)
        chosen = int((fixed & (one[0] != other[0])).sum())
        if chosen:
            raise Broken(
                f"guarantee() proves an epsilon of {epsilon:.4g} for a record, but which "
                f"values are sent follows from the data without noise: {chosen} of "
                f"{len(fixed)} values are always sent for one input and never for another.",
                "Add an Unprotected event for which values are sent to guarantee(), or choose "
                "them without looking at the data.",
                "guarantee",
            )
    return "which values are sent does not follow from the data"


def _of_update(defense: Defense, number: int) -> Tensor:
    """Bool [draws, N] of one made-up update, whose magnitudes cover many powers of ten."""
    rng = generator(number, "conformance patterns")
    broadcast = {n: 0.1 * torch.randn(s, generator=rng) for n, s in _SHAPES.items()}
    uploader = Uploader.of(watched(defense, Watch()), broadcast, 0)
    update = {
        n: torch.randn(v.shape, generator=rng).sign()
        * 10 ** (8 * torch.rand(v.shape, generator=rng) - 6)
        for n, v in uploader.received.items()
    }
    message, local = uploader.training(update)
    rows = []
    for draw in range(_DRAWS):
        client = client_alone(generator(draw, "conformance pattern draws"))
        sent = [
            as_kind(m, "update", base=local.broadcast, lr=local.lr)
            for m in uploader.upload(message, local, client)
            if m.kind in UPLOAD_KINDS
        ]
        rows.append(_sent(sent, update))
    return torch.stack(rows)


def _of_rounds(defense: Defense, ground: Ground) -> list[list[Tensor]]:
    """Bool [draws, N] of a first round with one client's data and with another's, for every client
    where the two differ and no draws change them."""

    def played(draw: int, shift: int) -> dict[str, Tensor]:
        result = play(defense, ground, draws=draw, rounds=1, shift=shift)
        return {
            m.sender: _sent([m], {n: p.values for n, p in m.parts.items()})
            for m in result.seen[0]
            if m.kind in UPLOAD_KINDS and m.sender in result.used
        }

    one, other = played(1, 0), played(1, 1)
    if all(torch.equal(v, other[c]) for c, v in one.items() if c in other):
        return []
    pairs = ((one, played(2, 0)), (other, played(2, 1)))
    return [
        [torch.stack([first[c], again[c]]) for first, again in pairs]
        for c in one
        if all(c in a and c in b and torch.equal(a[c], b[c]) for a, b in pairs)
        and one[c].shape == other[c].shape
    ]


def _sent(messages: Sequence[Message], like: Mapping[str, Tensor]) -> Tensor:
    """Bool [N]: which values were sent. An exact zero among values that hardly repeat was not."""
    parts = {n: p for m in messages for n, p in m.parts.items()}
    present, values = [], []
    for name, value in like.items():
        part = parts.get(name)
        values.append((torch.zeros_like(value) if part is None else part.values).flatten())
        there = torch.zeros_like(value, dtype=torch.bool) if part is None else part.presence()
        present.append(there.flatten())
    sent, nonzero = torch.cat(present), torch.cat(values) != 0
    others = torch.cat(values)[sent & nonzero]
    return sent & nonzero if 2 * len(others.unique()) > len(others) else sent
