"""Decoder training in batches against one image at a time, in the same run.

    uv run pytest tests/benchmarks/test_decoder_speed.py --benchmark-only -s

Printed, not asserted: a machine under load would make any bound a coin toss. Both sides have one
thread, and count with the best of equally many tries after a warm-up.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch.func import functional_call

from attacks.decoder import BATCH, Corrector, Data, Decoder, initial
from attacks.engine.channel import Channel, distance
from attacks.engine.inverter import Inverter
from attacks.engine.observation import parse_view
from bench.data.dataset import Dataset
from bench.seeding import generator
from tests.benchmarks.timing import TRIES, best_of, on_threads
from tests.test_learned_attacks import smashed

STEPS = 200


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


@pytest.mark.timeout(3600)
def test_decoder_training_against_one_image_at_a_time(benchmark: Any, digits: Dataset) -> None:
    seen, _, ctx = smashed(digits, "lenet", "block1", std=0.05)
    channel = Channel(parse_view(seen), ctx)
    data = Data(Inverter(channel, ctx, rows=400), channel, ctx)
    attack = Decoder()
    with on_threads(1):
        seconds, plain = best_of(partial(one_at_a_time, data, digits.shape, STEPS * BATCH))
        _, ours, before = benchmark.pedantic(
            lambda: attack.train(data, ctx, STEPS), rounds=TRIES, warmup_rounds=1
        )
    print(
        f"\ndecoder, {STEPS * BATCH} pairs seen, one thread, best of {TRIES}: "
        f"{seconds / benchmark.stats.stats.min:.1f}x one image at a time; held-out loss "
        f"{before:.3f} of ridge, {ours:.3f} in batches, {plain:.3f} one at a time"
    )
