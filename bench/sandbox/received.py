"""What a server received, as rows of numbers that can be told apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bench.contract.messages import Message, Part
from bench.metrics.distinguish import Array

Received = Mapping[str, Tensor]
"""What the server received in one draw, flat and by name."""


NOTHING = torch.zeros(0, dtype=torch.float64)


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
        padded = ([NOTHING, *(_padded(row, n, k) for n, k in sizes.items())] for row in rows)
        out = torch.stack([torch.cat(columns) for columns in padded])
    return out[: len(a)].numpy(), out[len(a) :].numpy()


def _padded(row: Received, name: str, size: int) -> Tensor:
    """A tensor of a row filled up with 0 to a size, and its own size after it."""
    out = torch.zeros(size + 1, dtype=torch.float64)
    value = row.get(name, NOTHING)
    out[: len(value)] = value
    out[size] = len(value) if name in row else -1
    return out
