"""Rounds of defenses with an encrypted zone, for their tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.protocols.federation import Federation
from bench.protocols.local_training import LocalWork

WORK = LocalWork(protocol="fedavg", batch=8, lr=0.3, local_steps=2)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def play(run: Federation, work: LocalWork = WORK, rounds: int = 1) -> Any:
    for _ in range(rounds):
        result = run.play(work, [c.id for c in run.clients], observed=True)
    return result
