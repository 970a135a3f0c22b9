"""Speed of the optimising attacks as a ratio to one image at a time, in the same run.

    uv run pytest tests/benchmarks --benchmark-only -s

Printed, not asserted: a machine under load would make any bound a coin toss. The plain side is
written as the papers' code is: `torch.optim.LBFGS` or signed `torch.optim.Adam` on one image,
autograd twice. Both sides have the same victims, network, start and stopping rule, and DLG is
counted in seconds per success (SSIM > 0.9), since failures that end early would flatter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.dlg import DLG
from attacks.idlg import IDLG
from attacks.inverting_gradients import InvertingGradients
from bench.contract.attack import Seen
from bench.contract.defense import Defense
from bench.contract.messages import State, as_kind
from bench.data import load_dataset
from bench.data.dataset import Dataset
from bench.metrics.images import ssim
from bench.models import Network
from bench.protocols.observe import Truth
from tests.conftest import context_for, network_for, seen_under

TOLERANCE, EVALUATIONS, HISTORY = 1e-12, 300, 30
STEPS, LR, TOTAL_VARIATION = 20, 0.02, 2e-4


@pytest.fixture(scope="module")
def colour() -> Dataset:
    """32x32 colour images: CIFAR-10 where a data folder has it, else photos."""
    given = os.environ.get("LEAKBENCH_DATA")
    if given:
        return load_dataset("cifar10", seed=0, data_dir=Path(given))
    return load_dataset("photos", seed=0, options={"size": 32})


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """All cores for both sides."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


def observed(seen: Seen, v: int, dtype: torch.dtype) -> dict[str, Tensor]:
    message = as_kind(seen.of(seen.clients[v], "update")[0], "gradient", base=seen.before, lr=0.5)
    return {n: p.values.to(dtype) for n, p in message.parts.items()}


def gradient(network: Network, seen: Seen, params: State, x: Tensor, y: Tensor) -> State:
    buffers = {n: b.to(x) for n, b in seen.buffers.items()}
    logits = network.apply(params, x, buffers=buffers)
    loss = -(y * logits.log_softmax(-1)).sum(-1).mean()
    found = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    return dict(zip(params, found, strict=True))


def one_image(
    network: Network, seen: Seen, v: int, *, labels: bool, dtype: torch.dtype, wolfe: bool
) -> tuple[Tensor, int]:
    """Image [1, *shape] and evaluations of L-BFGS on one victim; `labels`: held fixed (iDLG),
    else optimised (DLG)."""
    target = observed(seen, v, dtype)
    stop = TOLERANCE * sum(float(g.square().sum()) for g in target.values())
    params = {n: w.to(dtype).requires_grad_() for n, w in seen.before.items()}
    x = torch.full((1, *network.shape), 0.5, dtype=dtype, requires_grad=True)
    label = torch.nn.functional.one_hot(target["head.bias"].argmin(), network.classes)[None]
    logits = (3.0 * label.to(dtype)).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [x] if labels else [x, logits], lr=1.0, history_size=HISTORY, max_iter=10,
        max_eval=EVALUATIONS, tolerance_grad=0.0, tolerance_change=0.0,
        line_search_fn="strong_wolfe" if wolfe else None,
    )  # fmt: skip
    losses: list[float] = []

    def closure() -> Tensor:
        optimiser.zero_grad()
        y = label.to(dtype) if labels else logits.softmax(-1)
        found = gradient(network, seen, params, x, y)
        gap = torch.stack([(found[n] - target[n]).square().sum() for n in params]).sum()
        gap.backward()  # type: ignore[no-untyped-call]
        losses.append(float(gap.detach()))
        return gap

    while len(losses) < EVALUATIONS and not (losses and losses[-1] <= stop):
        optimiser.step(closure)  # type: ignore[no-untyped-call]
        if losses[-1] != losses[-1]:
            break  # diverged
    return x.detach().clamp(0, 1).nan_to_num(0.5).float(), len(losses)


def plain_dlg(
    network: Network, seen: Seen, truth: Truth, *, labels: bool, dtype: torch.dtype, wolfe: bool
) -> tuple[float, int, int]:
    """Seconds, successes and evaluations, one image after another."""
    solved = evaluations = 0
    began = time.perf_counter()
    for v in range(len(seen.clients)):
        guess, spent = one_image(network, seen, v, labels=labels, dtype=dtype, wolfe=wolfe)
        evaluations += spent
        solved += int(ssim(guess, truth.x[v])[0] > 0.9)
    return time.perf_counter() - began, solved, evaluations


@pytest.mark.parametrize("victims", [8, 32])
@pytest.mark.parametrize("attack", ["dlg", "idlg"])
def test_dlg_against_one_image_at_a_time(
    benchmark: Any, colour: Dataset, attack: str, victims: int
) -> None:
    network = network_for(colour, "lenet", init=0.25)
    seen, truth = seen_under(colour, network, Defense(), clients=victims)
    kind = IDLG if attack == "idlg" else DLG
    ours = kind(restarts=0, history=HISTORY, start="gray", tolerance=TOLERANCE)
    context = context_for(colour, network, Defense(), budget=EVALUATIONS)
    answer = benchmark.pedantic(lambda: ours.run(seen, context), rounds=3, warmup_rounds=1)
    assert answer.images is not None
    solved = int((ssim(answer.images[:, 0], truth.x[:, 0]) > 0.9).sum())
    seconds = benchmark.stats.stats.min / max(1, solved)
    print(
        f"\n{attack}, {victims} victims, {colour.name}: {solved}/{victims} solved, "
        f"{1 / seconds:.2f} per second, {answer.evaluations} evaluations"
    )
    best = float("inf")
    was = torch.backends.mkldnn.enabled
    for dtype, wolfe in ((torch.float64, True), (torch.float32, True), (torch.float64, False)):
        # One image is too small for threads or oneDNN: without them the plain side is fastest.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        torch.set_num_threads(1)
        took, plain, spent = plain_dlg(
            network, seen, truth, labels=attack == "idlg", dtype=dtype, wolfe=wolfe
        )
        best = min(best, took / max(1, plain))
        print(
            f"  plain {dtype}, line search {wolfe}: {plain}/{victims} solved, "
            f"{plain / took:.2f} per second, {spent} evaluations: "
            f"{took / max(1, plain) / seconds:.1f}x"
        )
    torch.backends.mkldnn.enabled = was
    print(f"  against the best of them: {best / seconds:.1f}x per success")


def plain_signed_adam(network: Network, seen: Seen, truth: Truth) -> float:
    """Seconds per image and step of Inverting Gradients on one image after another."""
    began = time.perf_counter()
    for v in range(len(seen.clients)):
        target = observed(seen, v, torch.float32)
        params = {n: w.clone().requires_grad_() for n, w in seen.before.items()}
        x = torch.full((1, *network.shape), 0.5, requires_grad=True)
        y = torch.nn.functional.one_hot(truth.y[v], network.classes).float()
        optimiser = torch.optim.Adam([x], lr=LR)
        square = torch.stack([g.square().sum() for g in target.values()]).sum()
        for _ in range(STEPS):
            found = gradient(network, seen, params, x, y)
            inner = torch.stack([(found[n] * target[n]).sum() for n in params]).sum()
            length = torch.stack([found[n].square().sum() for n in params]).sum()
            rough = (x[..., 1:] - x[..., :-1]).abs().mean()
            rough = rough + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
            loss = 1 - inner / (length * square).sqrt() + TOTAL_VARIATION * rough
            x.grad = torch.autograd.grad(loss, x)[0].sign()
            optimiser.step()
            with torch.no_grad():
                x.clamp_(0, 1)
    return (time.perf_counter() - began) / len(seen.clients) / STEPS


@pytest.mark.parametrize(("model", "victims"), [
    ("cnn_selective_shield", 8), ("cnn_spm", 8), ("resnet18", 8),
])  # fmt: skip
def test_inverting_gradients_against_one_image_at_a_time(
    benchmark: Any, colour: Dataset, model: str, victims: int
) -> None:
    network = network_for(colour, model)
    seen, truth = seen_under(colour, network, Defense(), clients=victims, labels=True)
    ours = InvertingGradients(restarts=0, lr=LR, total_variation=TOTAL_VARIATION, start="gray")
    context = context_for(colour, network, Defense(), budget=STEPS)
    benchmark.pedantic(lambda: ours.run(seen, context), rounds=3, warmup_rounds=1)
    seconds = benchmark.stats.stats.min / victims / STEPS
    plain = float("inf")
    for count in (1, os.cpu_count() or 1):
        torch.set_num_threads(count)
        plain = min(plain, plain_signed_adam(network, seen, truth))
    print(
        f"\ninverting_gradients, {model}, {victims} victims, {colour.name}: "
        f"{seconds * 1e3:.1f} ms per image and step, one at a time {plain * 1e3:.1f} ms: "
        f"{plain / seconds:.1f}x"
    )
