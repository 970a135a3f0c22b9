"""Whether a model that is not leakbench's own can be trained and attacked, and where it can be
cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bench import data, models
from bench.contract.messages import State
from bench.contract.network import Layer
from bench.errors import UserError
from bench.models import ModuleNetwork
from bench.sandbox.conformance.findings import Conformance, Finding, failed, passed, skipped
from bench.seeding import generator
from bench.toolkit.batches import soft_cross_entropy

DATASETS = ("digits", "photos", "breast_cancer")
"""Whose samples a model is tried on where no data set is named, in this order."""
_BATCH = 4
_TOLERANCE = 1e-3
"""Of logits and gradients, relative to the largest."""


def check_model(
    name: str, settings: Mapping[str, Any], *, dataset: str | None = None
) -> Conformance:
    """The conformance of a model.

    Args:
        name: As a suite names it: FILE.py:Net, an entry point, torchvision:NAME or timm:NAME.
        settings: Its settings.
        dataset: On whose samples it is tried; None: the first of `DATASETS` that it takes.

    Raises:
        UserError: For an unknown data set.
    """
    began, findings = time.perf_counter(), list[Finding]()
    network, samples = None, torch.empty(0)
    for place in DATASETS if dataset is None else (dataset,):
        loaded = data.load_dataset(place, seed=0)
        samples = loaded.aux_x
        what = f"it takes samples of {place} {list(loaded.shape)}"
        try:
            found = models.build(
                name, shape=loaded.shape, classes=loaded.classes, settings=settings
            )
        except UserError as error:
            findings.append(failed(what, str(error), "see docs/models.md"))
            continue
        assert isinstance(found, ModuleNetwork)
        network = found
        told = f"{network.n_parameters} parameters, head {network.anatomy.head}"
        findings = [passed(what, told)]
        break
    if network is not None:
        params = network.init(generator(0, "init"))
        buffers = network.calibrate(params, samples[:64])
        checks: tuple[Callable[[ModuleNetwork, State, State, Tensor], Finding], ...] = (
            *(_together, _cuts, _normalisation, _gradients),
        )
        findings += [check(network, params, buffers, samples[:_BATCH]) for check in checks]
    return Conformance(
        kind="model",
        name=name,
        settings=dict(settings),
        findings=findings,
        seconds=time.perf_counter() - began,
    )


def _together(network: ModuleNetwork, params: State, buffers: State, x: Tensor) -> Finding:
    what = "clients' gradients are taken together and differentiated"
    try:
        network.check()
    except UserError as error:
        return failed(what, str(error), "replace the operation")
    return passed(what)


def _cuts(network: ModuleNetwork, params: State, buffers: State, x: Tensor) -> Finding:
    """Each part of a cut network has only its own parameters, and both together give the logits."""
    what = "cut in two it gives the same logits"
    if not network.cuts:
        return skipped(what, "it cannot be cut: no submodule gives all that the head gets")
    whole = network.apply(params, x, buffers=buffers)
    for number, cut in enumerate(network.cuts, start=1):
        below, above = network.stages[:number], network.stages[number:]
        parts = [
            {n: v for n, v in params.items() if n.startswith(tuple(f"{s}." for s in stages))}
            for stages in (below, above)
        ]
        smashed = network.run(parts[0], x, last=cut, buffers=buffers)
        rest = network.run(parts[1], smashed, first=above[0], buffers=buffers)
        if not _near(rest, whole):
            return failed(
                what,
                f"cut after {cut} it gives other logits: something passes beside that tensor",
                "let the submodule's output be all that the layers after it get",
            )
    return passed(what, f"after {', '.join(network.cuts)}")


def _normalisation(network: ModuleNetwork, params: State, buffers: State, x: Tensor) -> Finding:
    what = "batch normalisation is static"
    if not network.normalises:
        return skipped(what, "it has none")
    return passed(what, f"{len(network.anatomy.norms)} layers, without running estimates")


def _gradients(network: ModuleNetwork, params: State, buffers: State, x: Tensor) -> Finding:
    """Weight gradients made of a layer's input and its output's gradient are those of autograd."""
    what = "fast gradients are the general ones"
    leaves = {n: v.clone().requires_grad_() for n, v in params.items()}
    logits, layers = network.trace(leaves, x, buffers=buffers)
    if not layers:
        return skipped(what, "none of its layers is of a known kind")
    targets = torch.eye(network.classes)[torch.arange(len(x)) % network.classes]
    loss = soft_cross_entropy(logits, targets)
    deltas = torch.autograd.grad(loss, [layer.output for layer in layers], retain_graph=True)
    found: dict[str, Tensor] = {}
    for layer, delta in zip(layers, deltas, strict=True):
        for name, value in _products(layer, delta).items():
            found[name] = found[name] + value if name in found else value
    exact = torch.autograd.grad(
        loss, [leaves[n] for n in found], allow_unused=True, materialize_grads=True
    )
    for (name, value), right in zip(found.items(), exact, strict=True):
        if not _near(value, right):
            return failed(what, f"that of {name} is another", "report this as a bug of leakbench")
    if len(found) < len(params):
        other = next(n for n in params if n not in found)
        return passed(what, f"{len(found)} of {len(params)}; all by the general way, as {other}")
    return passed(what, f"all {len(found)}")


def _products(layer: Layer, delta: Tensor) -> dict[str, Tensor]:
    """A layer's gradients by its parameters, from its input and its output's gradient."""
    names = [n for n, _ in layer.module.named_parameters(recurse=False)]
    a, channel = layer.input, layer.output.ndim - 1 if layer.kind == "linear" else 1
    over = [d for d in range(delta.ndim) if d != channel]
    if layer.kind == "linear":
        weight = delta.reshape(-1, delta.shape[-1]).mT @ a.reshape(-1, a.shape[-1])
    elif isinstance(layer.module, nn.Conv2d):
        shape, conv = layer.module.weight.shape, layer.module
        like = torch.zeros(shape, requires_grad=True)
        bias = None if conv.bias is None else torch.zeros(shape[0])
        again = conv._conv_forward(a.detach(), like, bias)
        (weight,) = torch.autograd.grad(again, like, delta)
    else:
        weight = (delta * a).sum(dim=over)
    found = {"weight": weight, "bias": delta.sum(dim=over)}
    return {f"{layer.name}.{n}": found[n].detach() for n in names}


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * (1e-6 + other.abs().max()))
