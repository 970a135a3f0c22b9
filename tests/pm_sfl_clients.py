"""A client of PM-SFL and its upload, for the tests of the method."""

from __future__ import annotations

import torch

from bench.contract.defense import Client, Local
from bench.contract.messages import Message, Part, State
from bench.seeding import generator
from defenses.pm_sfl import (
    PMSFL,
)


def _upload(
    defense: PMSFL, scores: State, *, const: State | None = None, client: Client | None = None,
    start: State | None = None, kind: str = "update", round: int = 0,
) -> list[Message]:  # fmt: skip
    """The defense's messages for a client whose training ended at `scores`, in one step."""
    start = start or {n: torch.zeros_like(v) for n, v in scores.items()}
    moved = {n: v - start[n] for n, v in scores.items()}
    local = Local(
        broadcast=start, start=start, end=scores, const=scores if const is None else const,
        grad_sum={n: -v / 0.5 for n, v in moved.items()}, lr=0.5, steps=1,
    )  # fmt: skip
    values = {"update": moved, "weights": scores, "gradient": local.grad_sum}[kind]
    sent = Message(
        kind=kind, sender="c", receiver="server", round=round,
        parts={n: Part(values=v) for n, v in values.items()},
    )  # fmt: skip
    client = client or make_client()
    return defense.upload([sent], local, client)


def make_client(*names: str | int) -> Client:
    empty = torch.zeros(1)
    return Client(id="c", x=empty, y=empty, rng={"defense": generator(0, "pm_sfl", *names)})
