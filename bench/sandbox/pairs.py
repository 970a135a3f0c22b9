"""Pairs of neighbouring inputs of a defense, and what a server receives of them as rows of numbers
that can be told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bench.contract.events import Unit
from bench.contract.messages import Message, Part
from bench.metrics.distinguish import Array
from bench.sandbox.hooked import WrongAnswer
from bench.seeding import generator

Channel = Literal["upload", "smashed", "labels", "smashed and labels", "coordination"]
Received = Mapping[str, Tensor]
"""What the server received in one draw, flat and by name."""
Release = Callable[[bool, int, torch.Generator], list[Received]]
_NOTHING = torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class NeighbourPair:
    """Two neighbouring inputs of one channel.

    Attributes:
        units: For which the inputs are neighbours; a record or coordinate is replaced, a client
            is added or removed (the update is 0 in its place).
        release: (second, draws, rng) -> what the server received of the first or second input,
            one row per draw.
        parameters: Coordinates of the release, a fact of the ledger, as are the next two.
        clients: How many act together.
        split: Whether smashed data is sent.
        covered: Whether the defense acts on the channel.
        share: Of the audit's draws that are affordable here.
    """

    name: str
    channel: Channel
    units: frozenset[Unit]
    what: str
    release: Release
    parameters: int
    clients: int = 1
    split: bool = False
    covered: bool = True
    share: float = 1.0

    def outputs(self, draws: int, *, seed: int, rounds: int = 1) -> tuple[Array, Array]:
        """Float64 [draws, F] of the first and the second input, in the same columns.

        rounds: Releases of one draw, all of the same input. Each column then is a mean over them,
        of the values and once more of their magnitudes.

        Raises:
            HookError: For a hook that raised.
            WrongAnswer: For values that are not finite.
        """
        count = draws * rounds
        rows = [self.release(w, count, generator(seed, self.name, int(w))) for w in (False, True)]
        a, b = tabulate(*rows)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise WrongAnswer(self.channel, "sent values that are NaN or infinite")
        return (a, b) if rounds == 1 else (_over(a, rounds), _over(b, rounds))


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A channel that cannot be audited, and why."""

    channel: str
    why: str


def _over(rows: Array, rounds: int) -> Array:
    """Means of values and magnitudes over `rounds` rows each, [n * rounds, F] -> [n, 2 F]."""
    each = rows.reshape(-1, rounds, rows.shape[1])
    return np.concatenate([each.mean(axis=1), np.abs(each).mean(axis=1)], axis=1)


# --- rows of numbers ------------------------------------------------------------------------------


def row_of(messages: Iterable[Message]) -> dict[str, Tensor]:
    """Values that are present, presence where it is not plain, and sizes, by name."""
    found: dict[str, Tensor] = {}
    for i, message in enumerate(messages):
        at = f"{i} {message.sender} {message.kind}"
        found[f"{at} bytes"] = torch.tensor([message.n_bytes], dtype=torch.float64)
        for name, part in message.parts.items():
            found |= {k: v.flatten() for k, v in columns_of(part, f"{at} {name}").items()}
        for name, sealed in message.sealed.items():
            found[f"{at} {name} sealed"] = sealed.covers.double().flatten()
    return found


def columns_of(part: Part, name: str) -> dict[str, Tensor]:
    """A part's values, 0 where they were not sent, and where that is not plain, which were sent."""
    values = part.values.detach().double()
    if part.present is None:
        return {name: values}
    sent = torch.where(part.present, values, 0.0)
    return {name: sent, f"{name} sent": part.present.double()}


def tabulate(a: Sequence[Received], b: Sequence[Received]) -> tuple[Array, Array]:
    """Rows of two inputs as matrices with the same columns.

    Where rows differ in shape, what one lacks is 0, and a column beside every tensor holds its
    size, -1 where it is missing.
    """
    rows = [*a, *b]
    sizes: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            sizes[name] = max(sizes.get(name, 0), value.numel())
    alike = all(
        len(r) == len(sizes) and all(r[n].numel() == k for n, k in sizes.items()) for r in rows
    )
    if sizes and alike:
        out = torch.stack([torch.cat([row[n] for n in sizes]) for row in rows])
    else:
        padded = ([_NOTHING, *(_padded(row, n, k) for n, k in sizes.items())] for row in rows)
        out = torch.stack([torch.cat(columns) for columns in padded])
    return out[: len(a)].numpy(), out[len(a) :].numpy()


def _padded(row: Received, name: str, size: int) -> Tensor:
    """A tensor of a row filled up with 0 to a size, and its own size after it."""
    out = torch.zeros(size + 1, dtype=torch.float64)
    value = row.get(name, _NOTHING)
    out[: len(value)] = value
    out[size] = len(value) if name in row else -1
    return out
