"""Measure GDBR behind a hidden head, as `results/published/gdbr.toml` says."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from attacks.gdbr import GDBR
from bench.data.dataset import Dataset
from bench.models import build
from bench.models.network import Network
from bench.protocols.settings import ProtocolSettings
from bench.seeding import generator
from defenses.lg_fedavg import LGFedAvg
from tests.conftest import federation_of, observed_round, rehearsing_context


class HiddenHead(LGFedAvg):
    """Sends everything but the network's head."""

    def stages_kept(self, names: Iterable[str]) -> list[str]:
        return ["head"]


def trained(network: Network, data: Dataset, steps: int) -> dict[str, Tensor]:
    """SGD at rate .05 with momentum .9 in batches of 64."""
    rng = generator(0, "figures")
    weights = {n: v.requires_grad_() for n, v in network.init(rng).items()}
    optimiser = torch.optim.SGD(weights.values(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        chosen = torch.randint(len(data.train_y), (64,), generator=rng)
        optimiser.zero_grad()
        logits = network.apply(weights, data.train_x[chosen], mode="train")
        cross_entropy(logits, data.train_y[chosen]).backward()
        optimiser.step()
    return {n: v.detach() for n, v in weights.items()}


def measure(
    data: Dataset, *, model: str, steps: int, batch: int, victims: int = 20,
    settings: dict[str, Any] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Attack so many clients with a random batch each: the share of labels recovered, and seconds
    per victim."""
    data = replace(data, aux_x=data.aux_x[:2000], aux_y=data.aux_y[:2000])
    network = build(model, shape=data.shape, classes=data.classes, settings=settings)
    federation = federation_of(data, network, HiddenHead(), clients=victims, each=2 * batch)
    federation.state = trained(network, data, steps)
    protocol = ProtocolSettings(name="fedavg", clients=victims, local_steps=1, lr=0.1)
    seen, truth = observed_round(federation, data, protocol, batch=batch, mode="train")
    began = time.perf_counter()
    counts = GDBR().run(seen, rehearsing_context(data, network, HiddenHead(), seen)).label_counts
    seconds = time.perf_counter() - began
    assert counts is not None
    shared = torch.minimum(counts, one_hot(truth.y, data.classes).sum(dim=1))
    return {"labels": float(shared.sum() / truth.y.numel()), "seconds": seconds / victims}
