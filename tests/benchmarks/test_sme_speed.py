"""SME's cost as a ratio to simulating all local steps, at as many evaluations of one round.

    uv run pytest tests/benchmarks/test_sme_speed.py --benchmark-only -s

The ratio is printed, not asserted.
"""

from typing import Any

import pytest

from attacks.inverting_gradients import SME, InvertingGradients
from bench.contract.defense import Defense
from bench.data import load_dataset
from tests.benchmarks.timing import TRIES, best_of
from tests.conftest import context_for, network_for, seen_under


@pytest.mark.parametrize("steps", [1, 3])
def test_sme_against_all_local_steps(benchmark: Any, steps: int) -> None:
    data = load_dataset("digits", seed=0)
    network = network_for(data)
    work = {"batch": 4, "local_steps": 2, "local_epochs": 10, "lr": 0.01, "labels": True}
    seen, _ = seen_under(data, network, Defense(), clients=2, **work)  # type: ignore[arg-type]
    context = context_for(data, network, Defense(), budget=20)
    simulated, _ = best_of(lambda: InvertingGradients(restarts=0).run(seen, context))
    attack = SME(steps=steps, restarts=0)
    benchmark.pedantic(lambda: attack.run(seen, context), rounds=TRIES, warmup_rounds=1)
    seconds = benchmark.stats.stats.min
    print(
        f"\n{steps} steps in {seconds:.2f} s, all 20 local ones in {simulated:.2f} s "
        f"({simulated / seconds:.1f}x)"
    )
