"""CKKS encryption: addition-only against the paper's parameters, two processes against one.

    uv run pytest tests/benchmarks/test_ckks_speed.py --benchmark-only -s

A million values with a public key, rounded, encrypted and serialised. Printed, not asserted: a
machine under load would make any bound a coin toss. Both sides take turns. Of seconds the best
round counts, of one process against two the median over rounds, since one may be lucky. Beside it
stands what two programs reach that encrypt a million values each and exchange nothing: cores
that share memory and caches do not give the double, and no code can give more than they do.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from defenses.ckks import ADDITIVE, STANDARD, Encryptor, KeyServer, Parameters

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
    vectors = [torch.randn(VALUES, generator=torch.Generator().manual_seed(0))]
    encryptors = {n: Encryptor(KeyServer(p).public_context) for n, p in PRESETS.items()}
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


def encrypt_apart(public: bytes, together: Any, seconds: Any) -> None:
    """A program of its own: encrypts beside others that are at `together`, several times."""
    torch.set_num_threads(1)
    vectors = [torch.randn(VALUES, generator=torch.Generator().manual_seed(0))]
    encryptor = Encryptor(public)
    for _ in range(ROUNDS):
        together.wait()
        seconds.put(timed(partial(encryptor.encrypt_all, vectors))[0])


def apart(public: bytes, programs: int) -> float:
    """Median seconds of a round that lasts until the last of several programs is done."""
    start = multiprocessing.get_context("spawn")
    together, seconds = start.Barrier(programs), start.Queue()
    started = [
        start.Process(target=encrypt_apart, args=(public, together, seconds))
        for _ in range(programs)
    ]
    for process in started:
        process.start()
    # A round's times come together: the barrier holds the next one back.
    found = [[seconds.get() for _ in started] for _ in range(ROUNDS)]
    for process in started:
        process.join()
    return statistics.median(max(f) for f in found)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_two_processes_against_one(benchmark: Any, preset: str) -> None:
    parameters: Parameters = PRESETS[preset]
    public = KeyServer(parameters).public_context
    vectors = [torch.randn(VALUES, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    one, ratios = Encryptor(public), []
    start = time.perf_counter()
    with Encryptor(public, processes=2) as two:
        started = time.perf_counter() - start
        for _ in range(ROUNDS):
            alone, _, _ = timed(partial(one.encrypt_all, vectors))
            together, _, _ = timed(partial(two.encrypt_all, vectors))
            ratios.append(alone / together)
        benchmark.pedantic(lambda: two.encrypt_all(vectors), rounds=1)
    ceiling = 2 * apart(public, 1) / apart(public, 2)
    print(
        f"\n{preset}: two processes {statistics.median(ratios):.2f}x one "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {ROUNDS} rounds; {started:.1f} s to start "
        f"them), two programs that exchange nothing {ceiling:.2f}x; {load()}"
    )
