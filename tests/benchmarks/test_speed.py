"""Speed of the optimising attacks as a ratio to one image at a time, in the same run.

    uv run pytest tests/benchmarks/test_speed.py --benchmark-only -s

Printed, not asserted: a machine under load would make any bound a coin toss. Both sides have the
same victims and network, run on equally many threads, and count with the best of equally many tries
after a warm-up. Matching is counted in seconds per success (SSIM > 0.9), since failures that end
early would flatter: of CPU on one thread, by the clock on several.

`test_dlg_against_one_image_at_a_time` compares batches with a plain loop: autograd twice and
`torch.optim.LBFGS` on one image after another, all else as our attack has it, so that the ratio is
what batches and our optimiser give. The gray start, the label read off the head's bias, the
curvature pairs, the tolerance and U(-0.25, 0.25) weights are ours, not those of DLG's authors.

`test_dlg_at_its_papers_own_settings` has theirs instead (arXiv:1906.08935, Sec. 4.1, and the code
that they published): one image of 32x32 in a batch, LeNet with sigmoids and weights from
U(-0.5, 0.5), image and label logits drawn from N(0, 1) and optimised together, `torch.optim.LBFGS`
with lr 1, 100 curvature pairs, 20 iterations a call and no line search, called 300 times, nothing
stopping it before. Ours runs with `preset="paper"` and as it comes, with as many evaluations a
start at most; the latter starts anew up to twice where the first start was trapped.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.dlg import DLG
from attacks.idlg import IDLG
from attacks.inverting_gradients import InvertingGradients
from bench.contract.attack import Reconstruction, Seen
from bench.contract.defense import Defense
from bench.contract.messages import State, as_kind
from bench.data import load_dataset
from bench.data.dataset import Dataset
from bench.models import Network
from bench.protocols.observe import Truth
from bench.seeding import generator
from bench.toolkit.images import ssim
from tests.benchmarks.timing import TRIES, best_of, on_threads
from tests.conftest import context_for, network_for, seen_under

TOLERANCE, EVALUATIONS, HISTORY = 1e-14, 300, 30
STEPS, LR, TOTAL_VARIATION = 20, 0.02, 2e-4
CALLS, ITERATIONS = 300, 20
THREADS = sorted({1, os.cpu_count() or 1})
SOLVED = 0.9


@pytest.fixture(scope="module")
def colour() -> Dataset:
    """32x32 colour images: CIFAR-10 where a data folder has it, else photos."""
    given = os.environ.get("LEAKBENCH_DATA")
    if given:
        return load_dataset("cifar10", seed=0, data_dir=Path(given))
    return load_dataset("photos", seed=0, options={"size": 32})


@pytest.fixture(params=THREADS, ids=lambda n: f"{n}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many for both sides."""
    with on_threads(request.param):
        yield request.param


@contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN costs the plain loop more than it gives: one image is too small for it."""
    was = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    yield
    torch.backends.mkldnn.enabled = was


def observed(seen: Seen, v: int, dtype: torch.dtype) -> dict[str, Tensor]:
    message = as_kind(seen.of(seen.clients[v], "update")[0], "gradient", base=seen.before, lr=0.5)
    return {n: p.values.to(dtype) for n, p in message.parts.items()}


def gradient(network: Network, seen: Seen, params: State, x: Tensor, y: Tensor) -> State:
    buffers = {n: b.to(x) for n, b in seen.buffers.items()}
    logits = network.apply(params, x, buffers=buffers)
    loss = -(y * logits.log_softmax(-1)).sum(-1).mean()
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    return dict(zip(params, grads, strict=True))


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One image after another by torch.optim.LBFGS.

    Attributes:
        labels: Whether they are held at what the head's bias shows (iDLG), else optimised (DLG).
        dtype: Of image and gradients.
        wolfe: Whether steps are searched along a line.
        calls: As many of DLG's authors' calls, with their start, curvature pairs and stop in place
            of ours; 0 for ours.
    """

    labels: bool = False
    dtype: torch.dtype = torch.float64
    wolfe: bool = True
    calls: int = 0

    def __call__(self, network: Network, seen: Seen) -> tuple[Tensor, int]:
        """Images [V, *shape] and evaluations in all."""
        answers = [self.one(network, seen, v) for v in range(len(seen.clients))]
        return torch.cat([image for image, _ in answers]), sum(spent for _, spent in answers)

    def one(self, network: Network, seen: Seen, v: int) -> tuple[Tensor, int]:
        target = observed(seen, v, self.dtype)
        square = sum(float(g.square().sum()) for g in target.values())
        params = {n: w.to(self.dtype).requires_grad_() for n, w in seen.before.items()}
        shape = (1, *network.shape)
        if self.calls:
            rng = generator(v, "plain start")
            x = torch.randn(shape, generator=rng, dtype=self.dtype).requires_grad_()
            start = torch.randn(1, network.classes, generator=rng, dtype=self.dtype)
            optimiser = torch.optim.LBFGS([x, start.requires_grad_()], max_iter=ITERATIONS)
        else:
            x = torch.full(shape, 0.5, dtype=self.dtype, requires_grad=True)
            likely = target["head.bias"].argmin()
            start = 3.0 * torch.nn.functional.one_hot(likely, network.classes)[None].to(self.dtype)
            optimiser = torch.optim.LBFGS(
                [x] if self.labels else [x, start.requires_grad_()],
                history_size=HISTORY,
                max_iter=10,
                max_eval=EVALUATIONS,
                tolerance_grad=0.0,
                tolerance_change=0.0,
                line_search_fn="strong_wolfe" if self.wolfe else None,
            )
        losses: list[float] = []

        def closure() -> Tensor:
            optimiser.zero_grad()
            y = start / start.sum() if self.labels else start.softmax(-1)
            grads = gradient(network, seen, params, x, y)
            gap = torch.stack([(grads[n] - target[n]).square().sum() for n in params]).sum()
            gap.backward()  # type: ignore[no-untyped-call]
            losses.append(float(gap.detach()))
            return gap

        for _ in range(self.calls or EVALUATIONS):
            optimiser.step(closure)  # type: ignore[no-untyped-call]
            if losses[-1] != losses[-1]:
                break  # diverged, for good
            if not self.calls and (len(losses) >= EVALUATIONS or losses[-1] <= TOLERANCE * square):
                break
        return x.detach().clamp(0, 1).nan_to_num(0.5).float(), len(losses)


def solved(images: Tensor, truth: Truth) -> int:
    return int((ssim(images, truth.x[:, 0]) > SOLVED).sum())


def images_of(answer: Reconstruction) -> Tensor:
    """[V, *shape] of an answer of one image each."""
    assert answer.images is not None
    return answer.images[:, 0]


def shown(name: str, seconds: float, count: int, of: int, evaluations: int) -> float:
    """Print a side; its seconds per success, those of all its work if it has none."""
    print(f"  {name}: {count}/{of} solved in {seconds:.2f} s by {evaluations} evaluations")
    return seconds / max(1, count)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victims", [8, 32])
@pytest.mark.parametrize("attack", ["dlg", "idlg"])
def test_dlg_against_one_image_at_a_time(
    benchmark: Any, colour: Dataset, threads: int, attack: str, victims: int
) -> None:
    network = network_for(colour, "lenet", init=0.25)
    seen, truth = seen_under(colour, network, Defense(), clients=victims)
    kind = IDLG if attack == "idlg" else DLG
    ours = kind(restarts=0, start="gray")
    context = context_for(colour, network, Defense(), budget=EVALUATIONS)
    print(f"\n{attack}, {victims} victims, {colour.name}, {threads} thread(s), best of {TRIES}:")
    seconds, answer = best_of(lambda: ours.run(seen, context))
    mine = shown("batches", seconds, solved(images_of(answer), truth), victims, answer.evaluations)
    plain = []
    for dtype, wolfe in ((torch.float64, True), (torch.float32, True), (torch.float64, False)):
        loop = Loop(labels=attack == "idlg", dtype=dtype, wolfe=wolfe)
        with without_onednn():
            seconds, (images, spent) = best_of(partial(loop, network, seen))
        name = f"plain {dtype}, {'a' if wolfe else 'no'} line search"
        plain.append(shown(name, seconds, solved(images, truth), victims, spent))
    print(f"  against the best of them: {min(plain) / mine:.1f}x per success")
    benchmark.pedantic(lambda: ours.run(seen, context), rounds=1)


@pytest.mark.timeout(7200)
def test_dlg_at_its_papers_own_settings(benchmark: Any, colour: Dataset, threads: int) -> None:
    """Each side once, after a short warm-up: theirs takes a minute an image."""
    network = network_for(colour, "lenet", init=0.5)
    seen, truth = seen_under(colour, network, Defense(), clients=8)
    victims = len(seen.clients)

    def ours(attack: DLG, budget: int = CALLS * ITERATIONS) -> Reconstruction:
        return attack.run(seen, context_for(colour, network, Defense(), budget=budget))

    print(f"\ndlg as its paper has it, {victims} victims, {colour.name}, {threads} thread(s):")
    loop = Loop(dtype=torch.float32, calls=CALLS)
    with without_onednn():
        seconds, (images, spent) = best_of(
            partial(loop, network, seen),
            tries=1,
            warm=partial(Loop(dtype=torch.float32, calls=2), network, seen),
        )
    theirs = shown("torch.optim.LBFGS", seconds, solved(images, truth), victims, spent)
    for name, attack in (("preset paper", DLG(preset="paper")), ("as it comes", DLG())):
        seconds, answer = best_of(
            partial(ours, attack), tries=1, warm=partial(ours, attack, 2 * ITERATIONS)
        )
        count = solved(images_of(answer), truth)
        mine = shown(f"ours, {name}", seconds, count, victims, answer.evaluations)
        print(f"    {theirs / mine:.1f}x per success")
    benchmark.pedantic(partial(ours, DLG(preset="paper"), 2 * ITERATIONS), rounds=1)


def plain_signed_adam(network: Network, seen: Seen, truth: Truth) -> None:
    """Inverting Gradients on one image after another."""
    for v in range(len(seen.clients)):
        target = observed(seen, v, torch.float32)
        params = {n: w.clone().requires_grad_() for n, w in seen.before.items()}
        x = torch.full((1, *network.shape), 0.5, requires_grad=True)
        y = torch.nn.functional.one_hot(truth.y[v], network.classes).float()
        optimiser = torch.optim.Adam([x], lr=LR)
        square = torch.stack([g.square().sum() for g in target.values()]).sum()
        for _ in range(STEPS):
            grads = gradient(network, seen, params, x, y)
            inner = torch.stack([(grads[n] * target[n]).sum() for n in params]).sum()
            length = torch.stack([grads[n].square().sum() for n in params]).sum()
            rough = (x[..., 1:] - x[..., :-1]).abs().mean()
            rough = rough + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
            loss = 1 - inner / (length * square).sqrt() + TOTAL_VARIATION * rough
            x.grad = torch.autograd.grad(loss, x)[0].sign()
            optimiser.step()
            with torch.no_grad():
                x.clamp_(0, 1)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "victims"), [
    ("cnn_selective_shield", 8), ("cnn_spm", 8), ("resnet18", 8),
])  # fmt: skip
def test_inverting_gradients_against_one_image_at_a_time(
    benchmark: Any, colour: Dataset, threads: int, model: str, victims: int
) -> None:
    """A fixed number of steps from the gray image with the labels granted, so seconds per step."""
    network = network_for(colour, model)
    seen, truth = seen_under(colour, network, Defense(), clients=victims, labels=True)
    ours = InvertingGradients(restarts=0, lr=LR, total_variation=TOTAL_VARIATION, start="gray")
    context = context_for(colour, network, Defense(), budget=STEPS)
    mine = best_of(lambda: ours.run(seen, context))[0] / victims / STEPS
    plain = best_of(partial(plain_signed_adam, network, seen, truth))[0] / victims / STEPS
    print(
        f"\ninverting_gradients, {model}, {victims} victims, {colour.name}, {threads} thread(s), "
        f"best of {TRIES}: {mine * 1e3:.1f} ms per image and step, one at a time "
        f"{plain * 1e3:.1f} ms: {plain / mine:.1f}x"
    )
    benchmark.pedantic(lambda: ours.run(seen, context), rounds=1)
