"""CKKS encryption: addition-only against the paper's parameters, two processes against one.

    uv run pytest tests/benchmarks/test_ckks_speed.py --benchmark-only -s

A million values with a public key, rounded, encrypted and serialised. Printed, not asserted: a
machine under load would make any bound a coin toss. Both sides take turns, and the best of their
rounds counts. Beside the processes' ratio stands what the CPU time alone would allow on idle
cores: handing values out and ciphertexts back costs the parent process time on one of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from defenses.ckks import ADDITIVE, STANDARD, Encryptor, KeyServer, Parameters

VALUES, ROUNDS = 1_000_000, 3
PRESETS = {"standard": STANDARD, "additive": ADDITIVE}


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall seconds, CPU seconds of this process, and the answer."""
    wall, cpu = time.perf_counter(), time.process_time()
    answer = call()
    return time.perf_counter() - wall, time.process_time() - cpu, answer


def load() -> str:
    return f"{os.getloadavg()[0]:.1f} load on {os.cpu_count()} cores"


def test_additive_against_standard(benchmark: Any) -> None:
    vectors = [torch.randn(VALUES, generator=torch.Generator().manual_seed(0))]
    encryptors = {n: Encryptor(KeyServer(p).public_context()) for n, p in PRESETS.items()}
    times: dict[str, list[tuple[float, float, Any]]] = {name: [] for name in PRESETS}
    for _ in range(ROUNDS):
        for name, encryptor in encryptors.items():
            times[name].append(timed(partial(encryptor.encrypt_all, vectors)))
    benchmark.pedantic(lambda: encryptors["additive"].encrypt_all(vectors), rounds=1)
    best = {name: min(wall for wall, _, _ in rounds) for name, rounds in times.items()}
    cpu = {name: min(spent for _, spent, _ in rounds) for name, rounds in times.items()}
    for name, rounds in times.items():
        sizes = [len(ciphertext) for ciphertext in rounds[0][2][0]]
        print(
            f"\n{name}: {best[name]:.2f} s, {cpu[name]:.2f} s of CPU, for {VALUES:,} values; "
            f"{sum(sizes) / VALUES:.2f} bytes a value in {len(sizes)} ciphertexts",
            end="",
        )
    print(
        f"\nadditive takes {best['additive'] / best['standard']:.2f} of standard's time; {load()}"
    )


@pytest.mark.parametrize("preset", list(PRESETS))
def test_two_processes_against_one(benchmark: Any, preset: str) -> None:
    parameters: Parameters = PRESETS[preset]
    public = KeyServer(parameters).public_context()
    vectors = [torch.randn(VALUES, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    one, alone, together, parent = Encryptor(public), [], [], []
    start = time.perf_counter()
    with Encryptor(public, processes=2) as two:
        started = time.perf_counter() - start
        for _ in range(ROUNDS):
            alone.append(timed(partial(one.encrypt_all, vectors)))
            together.append(timed(partial(two.encrypt_all, vectors)))
            parent.append(together[-1][1])
        benchmark.pedantic(lambda: two.encrypt_all(vectors), rounds=1)
    ratio = min(wall for wall, _, _ in alone) / min(wall for wall, _, _ in together)
    cpu = min(spent for _, spent, _ in alone)
    print(
        f"\n{preset}: two processes {ratio:.2f}x one ({started:.1f} s to start them); "
        f"one: {cpu:.2f} s of CPU, two: {min(parent):.2f} s in the parent, "
        f"which allows {2 * cpu / (cpu + min(parent)):.2f}x on two idle cores; {load()}"
    )
