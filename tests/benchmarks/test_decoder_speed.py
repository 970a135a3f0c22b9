"""Decoder training in batches against one image at a time, in the same run.

    uv run pytest tests/benchmarks/test_decoder_speed.py --benchmark-only -s

Printed, not asserted: a machine under load would make any bound a coin toss.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.func import functional_call

from attacks.decoder import Corrector, Data, Decoder, initial
from attacks.engine.channel import Channel, distance
from attacks.engine.inverter import Inverter
from bench.data.dataset import Dataset
from bench.seeding import generator
from tests.test_learned_attacks import smashed

STEPS, BATCH = 200, 32


def one_at_a_time(data: Data, shape: tuple[int, ...], samples: int) -> float:
    """Plain loop: one pair per AdamW step, the same network, loss, schedule and number of pairs
    seen; the learning rate divided by the root of the batch. Returns its held-out loss."""
    rng = generator(0, "speed")
    with torch.device("meta"):
        module = Corrector(shape, data.feature_shape, 32, level=data.level)
    params = initial(module, rng, torch.device("cpu"))
    optimiser = torch.optim.AdamW(params.values(), lr=3e-3 / BATCH**0.5, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, samples)
    for _ in range(samples):
        rows = data.train[torch.randint(len(data.train), (1,), generator=rng)]
        guess = functional_call(module, params, data.of(rows))
        optimiser.zero_grad()
        distance(guess, data.x[rows], variance=data.variance).mean().backward()
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        guess = functional_call(module, params, data.of(data.held))
    return float(distance(guess, data.x[data.held], variance=data.variance).mean())


def test_decoder_training_against_one_image_at_a_time(benchmark: Any, digits: Dataset) -> None:
    seen, _, ctx = smashed(digits, "lenet", "block1", std=0.05)
    channel = Channel(seen, ctx, max_features=4096)
    data = Data(Inverter(channel, ctx, rows=400), channel, ctx)
    began = time.perf_counter()
    plain = one_at_a_time(data, digits.shape, STEPS * BATCH)
    plain_seconds = time.perf_counter() - began
    attack = Decoder(batch=BATCH)
    _, ours, before = benchmark.pedantic(
        lambda: attack.train(data, ctx, STEPS), rounds=3, warmup_rounds=1
    )
    print(
        f"\ndecoder, {STEPS * BATCH} pairs seen: {plain_seconds / benchmark.stats.stats.mean:.1f}x "
        f"one image at a time; held-out loss {before:.3f} of ridge, {ours:.3f} in batches, "
        f"{plain:.3f} one at a time"
    )
