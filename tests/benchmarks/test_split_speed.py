"""Cost of a step of split-federated training under PM-SFL, as a ratio to the undefended protocol.

    uv run pytest tests/benchmarks/test_split_speed.py --benchmark-only -s

Printed, not asserted: a machine under load would make any bound a coin toss.
"""

import time
from typing import Any

import pytest

from bench.contract.defense import Defense
from bench.data.dataset import Dataset
from bench.protocols.local_training import LocalWork
from defenses.pm_sfl import PMSFL
from tests.conftest import federation_of, network_for

STEPS, BATCH = 10, 16


@pytest.mark.parametrize("model", ["lenet", "cnn_spm", "cnn_selective_shield"])
def test_masks_against_plain_splitfed(benchmark: Any, digits: Dataset, model: str) -> None:
    network = network_for(digits, model)
    work = LocalWork(protocol="splitfed", batch=BATCH, lr=0.1, local_steps=STEPS)

    def rounds(defense: Defense) -> Any:
        run = federation_of(
            digits, network, defense, clients=8, each=48, protocol="splitfed", cuts=("block1",),
            labels="private",
        )  # fmt: skip
        return lambda: run.play(work, [c.id for c in run.clients])

    plain, masked = rounds(Defense()), rounds(PMSFL(lr_scale=300.0))
    plain()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        plain()
        seconds.append(time.perf_counter() - began)
    benchmark.pedantic(masked, rounds=5, warmup_rounds=1)
    mine, theirs = benchmark.stats.stats.min / STEPS, min(seconds) / STEPS
    print(
        f"\n{model}, 8 clients, batch {BATCH}: {1e3 * mine:.1f} ms a step under pm_sfl, "
        f"{1e3 * theirs:.1f} ms undefended: {mine / theirs:.2f}x"
    )
