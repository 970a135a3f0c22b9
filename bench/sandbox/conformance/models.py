"""Whether a model that is not leakbench's own can be trained and attacked, and where it can be
cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bench import data, models
from bench.contract.messages import State
from bench.errors import UserError
from bench.models import ModuleNetwork
from bench.sandbox.conformance.findings import Conformance, Finding, failed, passed, skipped
from bench.seeding import generator

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
    what = "clients' gradients, taken together, are those of the module by itself"
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
    what = "statistics of batch normalisation stay with each client"
    if not network.normalises:
        return skipped(what, "it has none that is trained by batches")
    return passed(what, f"{len(network.anatomy.norms)} layers, in evaluation by public data")


def _gradients(network: ModuleNetwork, params: State, buffers: State, x: Tensor) -> Finding:
    """Which weight gradients are made of a layer's input and its output's gradient; the network has
    held them against autograd's."""
    what = "fast gradients are the general ones"
    _, layers = network.trace(params, x, buffers=buffers)
    fast = {f"{layer.name}.{n}" for layer in layers for n in ("weight", "bias")} & params.keys()
    if not fast:
        return skipped(what, "none of its layers is of a known kind")
    if len(fast) < len(params):
        other = next(n for n in params if n not in fast)
        return passed(what, f"{len(fast)} of {len(params)}; all by the general way, as {other}")
    return passed(what, f"all {len(fast)}")


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * (1e-6 + other.abs().max()))
