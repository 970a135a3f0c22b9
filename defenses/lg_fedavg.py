"""LG-FedAvg: clients keep their first stages to themselves and share the upper ones."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from bench.api import (
    UPLOAD_KINDS,
    Client,
    Defense,
    Event,
    Facts,
    Local,
    Message,
    Unprotected,
    Withheld,
)
from bench.toolkit.settings import check_number
from bench.toolkit.vectors import showing

_HEAD = "head"
"""The last stage of every network; always shared."""


class LGFedAvg(Defense):
    """Local representations, a common top: the first stages are never uploaded.

    Args:
        keep: The stages that stay with a client, by name ("block1,block2"), or as a share in
            (0, 1] by depth of those below the head that it trains and that have parameters,
            rounded up. At 1 that is the whole representation: under a split protocol the
            client's bottom, of which the server trains no copy. LG-FedAvg's experiments keep
            about half of it; PM-SFL's baseline keeps layers of the bottom.

    Departures: both parts are trained together, as in the paper's main algorithm, without its
    auxiliary losses; a new client is not met with an ensemble.
    Source: Liang et al., arXiv:2001.01523, Algorithm 1.
    """

    strength = None  # which stages are kept is no number
    source = "Liang et al., arXiv:2001.01523 (LG-FedAvg)"

    def __init__(self, *, keep: float | str = 1.0) -> None:
        if isinstance(keep, str):
            self.names = tuple(n.strip() for n in keep.split(","))
            if not all(self.names) or _HEAD in self.names:
                raise ValueError(
                    f"keep must name stages below the head, separated by commas, got '{keep}'."
                )
        else:
            check_number("keep", keep, "share of the stages below the head", above=0, most=1)
        self.keep = keep

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        kept = self.kept_stages(local.broadcast, cut=client.cut)
        nothing = torch.tensor(False, device=client.y.device)
        out = []
        for message in messages:
            if message.kind in UPLOAD_KINDS:
                parts = {
                    n: showing(p, nothing) if _stage(n) in kept else p
                    for n, p in message.parts.items()
                }
                message = message.with_parts(parts)
            out.append(message)
        return out

    def kept_stages(self, names: Iterable[str], *, cut: str | None = None) -> list[str]:
        """Which stages stay with a client that trains the parameters `names`.

        Raises ValueError for a stage that it cannot have; one above its cut is the server's.
        """
        stages = list(dict.fromkeys(_stage(n) for n in names))
        below = [s for s in stages if s != _HEAD]
        if not isinstance(self.keep, str):
            return below[: math.ceil(self.keep * len(below) - 1e-9)]
        unknown = [n for n in self.names if n not in below]
        if unknown and (cut is None or len(unknown) == len(self.names)):
            raise ValueError(
                f"keep names the stage '{unknown[0]}', but the client trains {', '.join(stages)}."
            )
        return [s for s in below if s in self.names]

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (
            Withheld(what="the update of the first stages"),
            Unprotected(what="the update of the shared stages", why="it is sent without noise"),
        )


def _stage(name: str) -> str:
    return name.split(".", 1)[0]
