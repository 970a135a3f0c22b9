"""Speed as a ratio to a plain implementation, in the same run.

    uv run pytest tests/benchmarks --benchmark-only -s

Printed, not asserted: a machine under load would make any bound a coin toss.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from skimage.metrics import structural_similarity

from attacks.dlg import DLG
from bench.api import Defense, Seen, State, as_kind
from bench.data.dataset import Dataset
from bench.metrics.images import ssim
from bench.models import Network
from bench.protocols.observe import Truth
from bench.seeding import generator
from tests.conftest import context_for, network_for, seen_under


def one_at_a_time(network: Network, seen: Seen, truth: Truth) -> list[float]:
    """DLG as published: torch.optim.LBFGS per image, gray start, the same stopping rule."""
    scores = []
    for v, client in enumerate(seen.clients):
        sent = as_kind(seen.of(client, "update")[0], "gradient", base=seen.before, lr=0.5)
        observed = {n: p.values.double() for n, p in sent.parts.items()}
        stop = 1e-10 * sum(float(g.square().sum()) for g in observed.values())
        params = {n: w.double().requires_grad_() for n, w in seen.before.items()}
        x = torch.full((1, *network.shape), 0.5, dtype=torch.float64, requires_grad=True)
        y = torch.zeros(1, network.classes, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS([x, y], lr=1.0, history_size=30, max_iter=20)

        def closure(
            params: State = params, x: torch.Tensor = x, y: torch.Tensor = y,
            optimiser: torch.optim.LBFGS = optimiser, observed: State = observed,
        ) -> torch.Tensor:  # fmt: skip
            optimiser.zero_grad()
            logits = network.apply(params, x)
            loss = -(y.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            gap = sum((g - observed[n]).square().sum() for n, g in zip(params, grads, strict=True))
            gap.backward()  # type: ignore[union-attr]
            return gap  # type: ignore[return-value]

        for _ in range(15):
            if float(optimiser.step(closure)) <= stop:  # type: ignore[arg-type]
                break
        guess = x.detach().clamp(0, 1).float()
        scores.append(float(ssim(guess, truth.x[v])[0]))
    return scores


@pytest.mark.parametrize("victims", [8, 32])
def test_dlg_against_one_image_at_a_time(benchmark: Any, digits: Dataset, victims: int) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=victims)
    began = time.perf_counter()
    plain = one_at_a_time(network, seen, truth)
    plain_seconds = time.perf_counter() - began
    attack = DLG(restarts=0)
    answer = benchmark.pedantic(
        lambda: attack.run(seen, context_for(digits, network, Defense())), rounds=3,
        warmup_rounds=1,
    )  # fmt: skip
    ours = ssim(answer.images[:, 0], truth.x[:, 0])
    per_success = plain_seconds / max(1, sum(s > 0.9 for s in plain))
    seconds = benchmark.stats.stats.mean / max(1, int((ours > 0.9).sum()))
    print(
        f"\nDLG, {victims} victims: {int((ours > 0.9).sum())}/{victims} solved at "
        f"{1 / seconds:.1f} images/s, one at a time {sum(s > 0.9 for s in plain)}/{victims} at "
        f"{1 / per_success:.1f} images/s: {per_success / seconds:.1f}x"
    )


def test_ssim_against_scikit_images_loop(benchmark: Any) -> None:
    rng = generator(0, "speed")
    a, b = (torch.rand(1000, 1, 16, 16, generator=rng) for _ in range(2))
    began = time.perf_counter()
    for i in range(len(a)):
        structural_similarity(
            a[i, 0].double().numpy(), b[i, 0].double().numpy(), data_range=1.0,
            gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
        )  # fmt: skip
    loop = time.perf_counter() - began
    benchmark(lambda: ssim(a, b))
    print(f"\nSSIM of 1000 images: {loop / benchmark.stats.stats.mean:.0f}x scikit-image's loop")
