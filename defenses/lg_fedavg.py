"""LG-FedAvg: clients keep their first stages to themselves and share the upper ones."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import torch

from bench.api import Client, Defense, Event, Facts, Local, Message, Unprotected, Withheld
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import change_uploads, showing

_HEAD = "head"
"""The last stage of every network; always shared."""


@dataclass(kw_only=True, eq=False)
class LGFedAvg(Defense):
    """Local representations, a common top: the first stages are never uploaded.

    Args:
        keep: Share in (0, 1] of the stages that stay with a client, by depth of those below the
            head that it trains and that have parameters, rounded up. At 1 that is the whole
            representation: under a split protocol the client's bottom, of which the server trains
            no copy. LG-FedAvg's experiments keep about half of it; PM-SFL's baseline keeps layers
            of the bottom.

    Departures: both parts are trained together, as in the paper's main algorithm, without its
    auxiliary losses; a new client is not met with an ensemble.
    Source: Liang et al., arXiv:2001.01523, Algorithm 1.
    """

    strength = None  # stages are few enough to list
    source = "Liang et al., arXiv:2001.01523 (LG-FedAvg)"
    keep: Annotated[float, Limits("share of the stages below the head", above=0, most=1)] = 1.0

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        kept = self.stages_kept(local.broadcast)
        nothing = torch.tensor(False, device=client.y.device)

        def hide(upload: Message) -> Message:
            hidden = {n: showing(p, nothing) for n, p in upload.parts.items() if _stage(n) in kept}
            return upload.with_parts({**upload.parts, **hidden})

        return change_uploads(messages, None, local, hide)

    def stages_kept(self, names: Iterable[str]) -> list[str]:
        """Which stages stay with a client that trains the parameters `names`."""
        below = [s for s in dict.fromkeys(_stage(n) for n in names) if s != _HEAD]
        return below[: math.ceil(self.keep * len(below) - 1e-9)]

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (
            Withheld(what="the update of the first stages"),
            Unprotected(what="the update of the shared stages", why="it is sent without noise"),
        )


def _stage(name: str) -> str:
    return name.split(".", 1)[0]
