"""Closed forms as ratios to the same equations solved whole, one victim at a time.

    uv run pytest tests/benchmarks/test_closed_forms_speed.py --benchmark-only -s

The baselines write every equation of a layer, or of the patches, into one matrix and call LAPACK's
least squares, as a reader of the papers would. Ratios are printed, not asserted.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, unfold

from attacks.analytic import Analytic
from attacks.engine.observation import gradient_estimate, parse_view
from attacks.r_gap import RGAP
from bench.contract.attack import Attack, Seen
from bench.data.dataset import Dataset
from tests.benchmarks.timing import TRIES, best_of, on_threads
from tests.test_position_table import observed as observe_tokens
from tests.test_r_gap import observed as observe_layers


def dense_layers(seen: Seen, network: Any) -> np.ndarray:
    """Images of every victim of `cnn6` by one least squares problem for each layer."""
    sent = gradient_estimate(parse_view(seen)[-1]).values
    weights = {n: v.double() for n, v in seen.before.items()}
    names = [n for n in weights if n not in network.head]
    _, layers = network.trace(weights, torch.zeros(1, *network.shape).double())
    images = []
    for victim in range(len(seen.clients)):
        db, dw = (sent[n][victim] for n in network.head[::-1])
        a, k = db @ dw / (db @ db), db @ weights[network.head[0]]
        for layer, name in zip(layers[-2::-1], names[::-1], strict=True):
            weight, inputs = weights[name], layer.input.shape[1:]
            how = {"stride": layer.module.stride, "padding": layer.module.padding}
            unit = torch.eye(inputs.numel()).double().view(-1, *inputs)
            delta = k * torch.where(a < 0, 0.2, 1.0)
            z = torch.where(a < 0, a / 0.2, a)
            forward = conv2d(unit, weight, **how).flatten(1)
            windows = unfold(unit, weight.shape[2:], **how)  # [C H W, C h w, h' w']
            back = torch.einsum("nkp,op->nok", windows, delta.view(len(weight), -1)).flatten(1)
            left, right = (
                torch.cat([forward, back], dim=1).T,
                torch.cat([z, sent[name][victim].flatten()]),
            )
            a = torch.from_numpy(np.linalg.lstsq(left.numpy(), right.numpy(), rcond=None)[0])
            k = forward @ delta
        images.append(a.numpy())
    return np.stack(images)


def dense_patches(seen: Seen, network: Any) -> np.ndarray:
    """Patches of every victim by numpy's least squares."""
    sent = gradient_estimate(parse_view(seen)[-1]).values
    weight, table = (sent[f"embed.{n}.weight"].numpy() for n in ("patches.proj", "positions"))
    pairs = zip(weight, table, strict=True)
    return np.stack([np.linalg.lstsq(g.T, w.reshape(len(w), -1), rcond=None)[0] for w, g in pairs])


def images_of(attack: Attack, seen: Seen, ctx: Any) -> Tensor:
    images = attack.run(seen, ctx).images
    assert images is not None
    return images


@pytest.mark.parametrize("name", ["r_gap", "analytic"])
def test_closed_forms_against_whole_systems(benchmark: Any, photos: Dataset, name: str) -> None:
    layers = name == "r_gap"
    seen, truth, ctx = (
        observe_layers(photos, seen={"clients": 4})
        if layers
        else observe_tokens(photos, dim=64, clients=4)
    )
    attack, dense = (RGAP(), dense_layers) if layers else (Analytic(), dense_patches)
    with on_threads(1):
        baseline, found = best_of(lambda: dense(seen, ctx.network))
        ours = benchmark.pedantic(
            lambda: images_of(attack, seen, ctx), rounds=TRIES, warmup_rounds=1
        )
    assert torch.allclose(ours, truth.x, atol=1e-3)
    if layers:
        assert np.allclose(found, truth.x.flatten(1).numpy(), atol=1e-2)
    least = benchmark.stats.stats.min
    print(
        f"\n{name}, 16 px, {len(ours)} victims, one thread: {least / len(ours):.3f} s a victim, "
        f"whole systems {baseline / len(ours):.3f} s; ratio {baseline / least:.1f}"
    )
