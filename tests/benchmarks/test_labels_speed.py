"""Label restoration as a ratio to two implementations of its paper, one batch at a time.

    uv run pytest tests/benchmarks/test_labels_speed.py --benchmark-only -s

`element_by_element` is how the attack is commonly published: torch for each class, and a linear
system filled number by number in Python. What a user of such code gains is that ratio.
`vectorised` is the strongest one-at-a-time form we know, numpy without a Python loop over
numbers: that ratio says what is left once the other code's plainness is taken away. Both are
Eq. 8-12 of the paper in float64, without the shrinkage and refinement of ours, and must
give the same counts as each other.

Ratios are printed, not asserted: a machine under load would make any bound a coin toss. All
sides start from the head's gradient and end with rounded counts, on equally many threads; each
batch counts with the best of equally many tries after a warm-up, and the median batch is shown.
"""

import statistics
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks.engine.counts import Counting, restore
from tests.benchmarks.timing import TRIES, best_of, on_threads
from tests.test_ilrg import Head, counts_of

WIDTH = 512


def element_by_element(
    weight_grad: Tensor, bias_grad: Tensor, head: torch.nn.Linear, total: int
) -> np.ndarray:
    """Label counts of one batch, as the attack is commonly published.

    weight_grad [C, F], bias_grad [C]; returns int counts [C], rounded by largest remainder.
    """
    classes = len(bias_grad)
    softmaxes = []
    with torch.no_grad():
        for j in range(classes):
            embedding = weight_grad[j] / bias_grad[j]
            softmaxes.append(torch.softmax(head(embedding), dim=-1))
    probs = torch.stack(softmaxes)
    system = np.ones((classes + 1, classes))
    right = np.full(classes + 1, float(total))
    for i in range(classes):
        for j in range(classes):
            system[i, j] = probs[j][i].item() - (1.0 if i == j else 0.0)
        right[i] = total * bias_grad[i].item()
    solved = np.clip(np.dot(np.linalg.pinv(system), right), 0, None)
    scaled = solved * (total / solved.sum())
    counts = [int(value + 1e-9) for value in scaled]
    remainders = [value - count for value, count in zip(scaled, counts, strict=True)]
    while sum(counts) < total:
        largest = max(range(classes), key=remainders.__getitem__)
        counts[largest] += 1
        remainders[largest] = -1.0
    return np.array(counts)


def vectorised(
    weight_grad: np.ndarray, bias_grad: np.ndarray, weight: np.ndarray, bias: np.ndarray, total: int
) -> np.ndarray:
    """The same in numpy: a matrix product for each class, and whole columns of the system.

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
    linear = torch.nn.Linear(WIDTH, classes, dtype=torch.float64)
    linear.load_state_dict({"weight": head.weight, "bias": head.bias})
    pairs = list(zip(gradient.weight, gradient.bias, strict=True))
    arrays = head.weight.numpy(), head.bias.numpy(), samples
    few = 1 if classes == 1000 else 8  # the element-wise one takes seconds for 1000 classes

    def ours(chosen: slice) -> Tensor:
        counting = Counting(
            weight=head.weight,
            bias=head.bias,
            total=samples,
            public=public,
            shrink=0.1,
            refine=refine,
        )
        return restore(gradient.victims(chosen), counting).counts

    with on_threads(torch.get_num_threads()):
        plain = [best_of(partial(element_by_element, *p, linear, samples)) for p in pairs[:few]]
        hard = [best_of(partial(vectorised, w.numpy(), b.numpy(), *arrays)) for w, b in pairs]
        alone = [best_of(partial(ours, slice(v, v + 1))) for v in range(min(victims, 16))]
        together = benchmark.pedantic(lambda: ours(slice(None)), rounds=TRIES, warmup_rounds=1)
    for (_, counts), (_, same) in zip(plain, hard, strict=False):
        assert np.array_equal(counts, same)
    element, numpy, one = (
        1e3 * statistics.median(seconds for seconds, _ in r) for r in (plain, hard, alone)
    )
    each = 1e3 * benchmark.stats.stats.min / victims
    published = torch.tensor(np.stack([counts for _, counts in hard]))
    print(
        f"\niLRG, {classes} classes, batch {samples}, refine {refine}, "
        f"{torch.get_num_threads()} thread(s): element by element {element:.2f} ms a batch, "
        f"vectorised {numpy:.3f} ms, {all_right(published, truth):.0%} all right; "
        f"one batch {one:.3f} ms ({element / one:.1f}x, {numpy / one:.1f}x); "
        f"of {victims} at once {each:.4f} ms ({element / each:.0f}x, {numpy / each:.1f}x), "
        f"{all_right(together, truth):.0%} all right"
    )
