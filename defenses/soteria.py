"""Soteria: the head's gradient without the columns of features that tell most of the samples."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import torch
from torch import Tensor
from torch.func import jacrev

from bench.api import (
    Client,
    Defense,
    Event,
    Facts,
    Local,
    Loss,
    Message,
    State,
    Strength,
    Unprotected,
)
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import change_uploads, sparse

_AT_ONCE = 64
"""Features that are differentiated together."""
_TINY = 1e-12


@dataclass(kw_only=True, eq=False)
class Soteria(Defense):
    """Leaves out columns of the head's weight gradient; all else is sent as it is.

    They are those of the features r with the least |dr/dx| / |r|, summed over a step's samples,
    which the paper takes for the ones that tell most of x. The server sees which columns are 0, so
    that attacks compare the others alone. Under split protocols nothing is left out.

    Args:
        percentile: Share of the features whose columns are left out, in percent, in [0, 100].

    Departure: a client of several local steps leaves a step's columns out of that step's gradient.
    Source: Sun et al., arXiv:2012.06043 (Soteria), with the scores of its released code; that the
    other layers suffice, Balunovic et al., arXiv:2111.04706.
    """

    owns = frozenset({"gradient"})
    strength = Strength(setting="percentile", weak=1.0, strong=100.0)
    zero_strength = MappingProxyType({"percentile": 0.0})
    source = "Sun et al., arXiv:2012.06043"
    percentile: Annotated[float, Limits("share of columns left out", least=0, most=100)] = 80.0

    def draw(self, variables: State, const: State, rng: torch.Generator) -> State:
        """Nothing is random; an attacker, who plays a step without a draw, leaves nothing out."""
        return {"leave_out": torch.ones(())}

    def gradient(self, loss: Loss, variables: State, x: Tensor, y: Tensor, draw: State) -> State:
        gradient = dict(torch.func.grad(loss)(variables, x, y))
        if draw and isinstance(x, Tensor) and (head := _name_head(loss, variables, x)):
            below, weight = head
            kept = self._keep(lambda x: loss.outputs(variables, x)[below].flatten(1), x)
            gradient[weight] = torch.where(kept, gradient[weight], 0.0)
        return gradient

    def _keep(self, features: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Which features [F] of samples x [B, ...] are sent, bool."""
        slopes = jacrev(lambda x: features(x).sum(dim=0), chunk_size=_AT_ONCE)(x)
        length = slopes.flatten(2).square().sum(dim=2).sqrt().mT  # [B, F]
        scores = (length / features(x).abs().clamp_min(_TINY)).sum(dim=0)
        return scores.argsort().argsort() >= round(self.percentile / 100 * len(scores))

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        """Says which columns are 0."""
        if client.cut is not None or client.loss is None:
            return messages
        head = _name_head(client.loss, local.start, client.x[:1])

        def leave_out(update: Message) -> Message:
            if head is None or head[1] not in update.parts:
                return update
            total = local.grad_sum[head[1]]
            part = sparse(update.parts[head[1]], total.ne(0).any(dim=0).expand_as(total))
            return update.with_parts({**update.parts, head[1]: part})

        return change_uploads(messages, "update", local, leave_out)

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (
            Unprotected(what="every layer's gradient but the head's", why="it is sent as it is"),
        )


def _name_head(loss: Loss, variables: State, x: Tensor) -> tuple[str, str] | None:
    """The stage below the head and the head's weight; None where the client has no head, or has
    nothing below it."""
    *below, head = loss.outputs(variables, x)
    weight = f"{head}.weight"
    return (below[-1], weight) if below and weight in variables else None
