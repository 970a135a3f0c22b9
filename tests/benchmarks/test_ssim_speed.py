"""SSIM of many images as a ratio to scikit-image's, one image at a time, in the same run.

    uv run pytest tests/benchmarks/test_ssim_speed.py --benchmark-only -s

Printed, not asserted: a machine under load would make any bound a coin toss. Both sides have one
thread, and count with the median of their calls.
"""

import statistics
import time
from typing import Any

import pytest
import torch
from skimage.metrics import structural_similarity

from bench.seeding import generator
from bench.toolkit.images import ssim
from tests.benchmarks.timing import on_threads

IMAGES = 1000


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 32, 32), (1, 28, 28)], ids=str)
def test_ssim_against_scikit_images_loop(benchmark: Any, shape: tuple[int, ...]) -> None:
    rng = generator(0, "speed")
    a, b = (torch.rand(IMAGES, *shape, generator=rng) for _ in range(2))
    pairs = list(zip(a.double().numpy(), b.double().numpy(), strict=True))
    # The median of single calls: a pause of a shared machine is not scikit-image's cost.
    calls = []
    with on_threads(1):
        for one, two in pairs:
            began = time.perf_counter()
            structural_similarity(
                one, two, channel_axis=0, data_range=1.0, gaussian_weights=True, sigma=1.5,
                use_sample_covariance=False,
            )  # fmt: skip
            calls.append(time.perf_counter() - began)
        benchmark(lambda: ssim(a, b))
    loop = statistics.median(calls) * IMAGES
    ours = benchmark.stats.stats.median
    print(
        f"\nSSIM of {IMAGES} images {shape}, one thread: {1e3 * ours:.1f} ms, scikit-image's loop "
        f"{1e3 * loop:.0f} ms: {loop / ours:.0f}x"
    )
