"""Sparsifiers: of every update only the largest values are sent, and the others are zero."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from bench.api import (
    Client,
    Defense,
    Event,
    Facts,
    Local,
    Mechanism,
    Message,
    Part,
    Round,
    Sparsified,
    Strength,
    Unprotected,
)
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import change_uploads, sparse

_RESIDUAL = "residual"
_NOTHING_PROVEN = (
    Unprotected(what="the values that are sent", why="no noise is added to them"),
    Unprotected(what="which values are sent", why="it follows from the values"),
)


class _Sparsifier(Defense):
    """Sends some values of the whole update, of which a subclass says which."""

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        return change_uploads(messages, "update", local, lambda m: self.sparsify(m, client))

    def sparsify(self, update: Message, client: Client) -> Message:
        """The update with the values that are sent."""
        raise TypeError(f"{type(self).__name__} must define sparsified(update, client).")

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return _NOTHING_PROVEN


@dataclass(kw_only=True, eq=False)
class TopK(_Sparsifier):
    """Sends the values of largest magnitude of the whole update; the others are zero.

    Args:
        keep: Share of the coordinates that is sent, in (0, 1], at least one. A zero is never sent.
        feedback: Whether a client adds to its update what it did not send before (error feedback,
            Stich et al., Algorithm 1), so that nothing is lost for good.

    Departure: momentum correction, clipping and warm-up of DGC are left out.
    Source: Stich, Cordonnier, Jaggi, arXiv:1809.07599; Lin et al., arXiv:1712.01887 (DGC).
    """

    strength = Strength(setting="keep", weak=0.5, strong=0.001)
    zero_strength = MappingProxyType({"keep": 1.0})
    source = "Stich et al., arXiv:1809.07599; Lin et al., arXiv:1712.01887"
    keep: Annotated[float, Limits("share of coordinates sent", above=0, most=1)]
    feedback: bool = True

    def sparsify(self, update: Message, client: Client) -> Message:
        parts = dict(update.parts)
        if self.feedback:
            left = client.memory.get(_RESIDUAL, {})
            parts = {n: _plus(p, left.get(n)) for n, p in parts.items()}
        size = _magnitudes(parts)
        count = max(1, round(self.keep * len(size)))
        chosen = torch.zeros_like(size, dtype=torch.bool)
        chosen[size.topk(min(count, len(size))).indices] = True
        sent = _keep_chosen(parts, chosen & (size > 0))
        if self.feedback:
            client.memory[_RESIDUAL] = {
                n: torch.where(sent[n].presence() | ~p.presence(), 0.0, p.values)
                for n, p in parts.items()
            }
        return update.with_parts(sent)

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (Sparsified(of="update", residual=self.feedback),)

    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        """Before a client's first upload nothing is left over."""
        return (Sparsified(of="update", residual=self.feedback and round.uploads > 0),)


@dataclass(kw_only=True, eq=False)
class Percentile(_Sparsifier):
    """Sends only values whose magnitude reaches a percentile, each cut to +-gamma per local step.

    NVFlare offers it as the privacy filter PercentilePrivacy.

    Args:
        percentile: Of the magnitudes of the whole update, in [0, 100]; smaller values are zero.
        gamma: Largest magnitude of an update's value over its local steps, > 0.

    Source: NVFlare, `PercentilePrivacy`, after Shokri and Shmatikov, CCS 2015, who send the
    largest values of every update, clipped.
    """

    strength = Strength(setting="gamma", weak=1.0, strong=1e-6)
    zero_strength = MappingProxyType({"percentile": 0.0, "gamma": 1e9})
    source = "NVFlare's PercentilePrivacy, after Shokri and Shmatikov, CCS 2015"
    percentile: Annotated[float, Limits(least=0, most=100)] = 10.0
    gamma: Annotated[float, Limits("largest value of an update per step", above=0)] = 0.01

    def sparsify(self, update: Message, client: Client) -> Message:
        limit = self.gamma * update.local_steps
        size = _magnitudes(update.parts)
        if not len(size):
            return update
        cutoff = float(np.percentile(size.cpu().numpy(), self.percentile))
        sent = _keep_chosen(update.parts, (size >= cutoff) & (size > 0))
        return update.with_parts(
            {n: replace(p, values=p.values.clamp(-limit, limit)) for n, p in sent.items()}
        )

    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        return (Sparsified(of="update", clip=self.gamma * round.local_steps),)


def _plus(part: Part, left: Tensor | None) -> Part:
    """The part with what is left over added to what is present."""
    if left is None:
        return part
    values = torch.where(part.presence(), part.values + left, part.values)
    return replace(part, values=values)


def _magnitudes(parts: Mapping[str, Part]) -> Tensor:
    """Of all values that are present, one part after another [N]."""
    return torch.cat([p.values[p.presence()].abs() for p in parts.values()])


def _keep_chosen(parts: Mapping[str, Part], chosen: Tensor) -> dict[str, Part]:
    """The parts with the `chosen` [N] of their present values."""
    sent: dict[str, Part] = {}
    for name, part in parts.items():
        shown = part.presence().clone()
        count = int(shown.sum())
        shown[shown.clone()], chosen = chosen[:count], chosen[count:]
        sent[name] = sparse(part, shown)
    return sent
