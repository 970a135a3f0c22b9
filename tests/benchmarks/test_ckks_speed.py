"""CKKS encryption: addition-only against the paper's parameters.

    uv run pytest tests/benchmarks/test_ckks_speed.py --benchmark-only -s

A million values with a public key, rounded, encrypted and serialised. Printed, not asserted: a
machine under load would make any bound a coin toss. Both sides take turns, and the best round
counts.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from defenses.ckks import ADDITIVE, STANDARD, KeyServer, encrypt

VALUES, ROUNDS = 1_000_000, 5
PRESETS = {"standard": STANDARD, "additive": ADDITIVE}


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall seconds, CPU seconds of this process, and the answer."""
    wall, cpu = time.perf_counter(), time.process_time()
    answer = call()
    return time.perf_counter() - wall, time.process_time() - cpu, answer


def load() -> str:
    return f"{os.getloadavg()[0]:.1f} load on {os.cpu_count()} cores"


def test_additive_against_standard(benchmark: Any) -> None:
    values = torch.randn(VALUES, generator=torch.Generator().manual_seed(0))
    keys = {n: KeyServer(p).public_context for n, p in PRESETS.items()}
    times: dict[str, list[tuple[float, float, Any]]] = {name: [] for name in PRESETS}
    for _ in range(ROUNDS):
        for name, key in keys.items():
            times[name].append(timed(partial(encrypt, values, key)))
    benchmark.pedantic(lambda: encrypt(values, keys["additive"]), rounds=1)
    best = {name: min(wall for wall, _, _ in rounds) for name, rounds in times.items()}
    cpu = {name: min(spent for _, spent, _ in rounds) for name, rounds in times.items()}
    for name, rounds in times.items():
        sizes = [len(ciphertext) for ciphertext in rounds[0][2]]
        print(
            f"\n{name}: {best[name]:.2f} s, {cpu[name]:.2f} s of CPU, for {VALUES:,} values; "
            f"{sum(sizes) / VALUES:.2f} bytes a value in {len(sizes)} ciphertexts",
            end="",
        )
    print(
        f"\nadditive takes {best['additive'] / best['standard']:.2f} of standard's time; {load()}"
    )
