"""Label restoration as a ratio to the paper's algorithm in numpy, one batch at a time.

    uv run pytest tests/benchmarks/test_labels_speed.py --benchmark-only -s

Printed, not asserted: a machine under load would make any bound a coin toss. Both sides start
from the head's gradient and end with rounded counts, on equally many threads.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from attacks.engine.counts import restore
from tests.test_ilrg import Head, counts_of

WIDTH = 512


def as_published(
    weight_grad: np.ndarray, bias_grad: np.ndarray, weight: np.ndarray, bias: np.ndarray, total: int
) -> np.ndarray:
    """Eq. 8-12 of arXiv:2207.02160 for one batch: a loop over the classes and a pseudo-inverse.

    weight_grad [C, F], bias_grad [C]; returns int counts [C], rounded by largest remainder.
    """
    classes = len(bias)
    probability = np.empty((classes, classes))
    for label in range(classes):
        logits = weight @ (weight_grad[label] / bias_grad[label]) + bias
        exponent = np.exp(logits - logits.max())
        probability[:, label] = exponent / exponent.sum()
    system = np.vstack([probability - np.eye(classes), np.ones((1, classes))])
    solved = np.linalg.pinv(system) @ np.append(total * bias_grad, total)
    share = np.clip(solved, 0, None)
    exact = share / share.sum() * total
    floor = np.floor(exact + 1e-9)
    largest = np.argsort(floor - exact, kind="stable")[: int(total - floor.sum())]
    floor[largest] += 1
    return floor.astype(np.int64)


def all_right(counts: Tensor, truth: Tensor) -> float:
    """Share of batches of which every class's count is right."""
    return float((counts == truth).all(dim=1).double().mean())


@pytest.mark.parametrize("refine", [0, 3])
@pytest.mark.parametrize("samples", [8, 64, 512, 4096])
@pytest.mark.parametrize(("classes", "victims"), [(10, 64), (100, 64), (1000, 8)])
def test_ilrg_against_one_batch_at_a_time(
    benchmark: Any, classes: int, victims: int, samples: int, refine: int
) -> None:
    head = Head(classes=classes, width=WIDTH)
    labels = head.labels(victims, samples)
    gradients = [head.gradient(batch[None]) for batch in labels]
    gradient = type(gradients[0])(
        weight=torch.cat([g.weight for g in gradients]),
        bias=torch.cat([g.bias for g in gradients]),
    )
    truth, public = counts_of(labels, classes), head.public()
    inputs = [
        (w, b, head.weight.numpy(), head.bias.numpy(), samples)
        for w, b in zip(gradient.weight.numpy(), gradient.bias.numpy(), strict=True)
    ]
    seconds, plain = [], []
    with threadpool_limits(torch.get_num_threads()):
        as_published(*inputs[0])
        for batch in inputs:
            began = time.perf_counter()
            plain.append(as_published(*batch))
            seconds.append(time.perf_counter() - began)
    loop = statistics.median(seconds)

    def ours(chosen: slice) -> Tensor:
        return restore(
            gradient.victims(chosen), weight=head.weight, bias=head.bias, total=samples,
            public=public, shrink=0.1, refine=refine,
        ).counts  # fmt: skip

    alone = []
    for v in range(min(victims, 16)):
        began = time.perf_counter()
        ours(slice(v, v + 1))
        alone.append(time.perf_counter() - began)
    one = statistics.median(alone)
    counts = benchmark.pedantic(
        lambda: ours(slice(None)), rounds=3 if classes == 1000 else 20, warmup_rounds=1
    )
    each = benchmark.stats.stats.median / victims
    print(
        f"\niLRG, {classes} classes, batch {samples}, refine {refine}, "
        f"{torch.get_num_threads()} thread(s): as published {1e3 * loop:.3f} ms a batch, "
        f"{all_right(torch.tensor(np.stack(plain)), truth):.0%} all right; one batch "
        f"{1e3 * one:.3f} ms ({loop / one:.1f}x); of {victims} at once {1e3 * each:.4f} ms "
        f"({loop / each:.1f}x), {all_right(counts, truth):.0%} all right"
    )
