"""What a defense's own hooks make of one tensor's update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bench.contract.defense import Client, Defense, Local
from bench.contract.messages import Kind, Message, Part, State, as_kind


def upload_of(
    defense: Defense, update: Tensor, rng: torch.Generator, *, base: Tensor | None = None,
    kind: Kind = "update", lr: float = 1.0, steps: int = 1, const: State | None = None,
    plan: Mapping[str, Any] | None = None,
) -> Message:  # fmt: skip
    """The upload of a client that trained by `update` from `base` (zeros) and sends it as `kind`;
    its one tensor is named p."""
    start = {"p": torch.zeros_like(update) if base is None else base}
    local = Local(
        broadcast=start, start=start, end={"p": start["p"] + update}, const=const or {},
        grad_sum={"p": -update / lr}, lr=lr, steps=steps,
    )  # fmt: skip
    client = Client(id="c", x=update, y=update, rng={"defense": rng}, plan=dict(plan or {}))
    sent = Message(
        kind="update", sender="c", receiver="server", round=0, local_steps=steps,
        parts={"p": Part(values=update)},
    )  # fmt: skip
    (upload,) = defense.upload([as_kind(sent, kind, base=start, lr=lr)], local, client)
    return upload
