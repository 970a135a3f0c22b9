"""What is known of the mean of several clients' values that a mechanism acted on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.contract.mechanisms.additive import GaussianNoise
from bench.contract.mechanisms.base import Mechanism


@dataclass(frozen=True, kw_only=True)
class NoiseFree(Mechanism):
    """The deterministic part of a mechanism.

    Attributes:
        each: The mechanism as a table (`Mechanism.to_dict`).
    """

    each: dict[str, Any]

    @property
    def random(self) -> bool:
        return False

    def apply(self, values: Tensor) -> Tensor:
        return Mechanism.from_dict(self.each).apply(values)


@dataclass(frozen=True, kw_only=True)
class Averaged(Mechanism):
    """The mean over clients of what a mechanism made of each one's values, whose law is not known.

    Attributes:
        each: The mechanism's name.
    """

    each: str


def averaged(mechanisms: Sequence[Mechanism], count: int) -> list[Mechanism]:
    """What is so of the mean of `count` clients' values that mechanisms acted on independently.

    What scales whole rows still does so with each client's. Noise of mean 0 is nearly normal
    (central limit), where it has no law of its own for a mean, and several noises of one kind of
    upload are one. Of anything else no law is told, so that attacks that need one refuse it.
    """
    means: list[Mechanism] = []
    noises: dict[str, list[Mechanism]] = {}
    for mechanism in mechanisms:
        if mechanism.faithful and mechanism.random and mechanism.spread > 0:
            noises.setdefault(mechanism.of, []).append(mechanism)
            if mechanism.clips and count > 1:
                means.append(NoiseFree(of=mechanism.of, each=mechanism.to_dict()))
        elif count == 1 or mechanism.shrinkage(torch.zeros(1, 1)) is not None:
            means.append(mechanism)
        elif mechanism.random or mechanism.tells_interval:
            means.append(Averaged(of=mechanism.of, each=type(mechanism).__name__))
    for same in noises.values():
        own = same[0] if count == 1 else same[0].of_mean(count)
        if len(same) == 1 and own is not None:
            means.append(own)
            continue
        spread = sum(m.spread for m in same) / count
        means.append(GaussianNoise(of=same[0].of, std=math.sqrt(spread)))
    return means
