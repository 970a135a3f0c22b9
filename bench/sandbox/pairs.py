"""Pairs of neighbouring inputs of a defense, and channels that have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from bench.contract.events import Unit
from bench.metrics.distinguish import Array
from bench.sandbox.hooked import WrongAnswer
from bench.sandbox.received import Received, tabulate
from bench.seeding import generator

Channel = Literal["upload", "smashed", "labels", "smashed and labels", "coordination"]
Release = Callable[[bool, int, torch.Generator], list[Received]]


@dataclass(frozen=True, kw_only=True)
class NeighbourPair:
    """Two neighbouring inputs of one channel.

    Attributes:
        name: As findings call it.
        channel: By which the server receives them.
        units: For which the inputs are neighbours; a record or coordinate is replaced, a client
            is added or removed (the update is 0 in its place).
        what: How they differ.
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

    def outputs(self, draws: int, *, seed: int) -> tuple[Array, Array]:
        """Float64 [draws, F] of the first and the second input, in the same columns.

        Raises:
            HookError: For a hook that raised.
            WrongAnswer: For values that are not finite.
        """
        rows = [self.release(w, draws, generator(seed, self.name, int(w))) for w in (False, True)]
        a, b = tabulate(*rows)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise WrongAnswer(self.channel, "sent values that are NaN or infinite")
        return a, b


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A channel that cannot be audited, and why."""

    channel: str
    why: str
