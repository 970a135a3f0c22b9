"""Whether a model that is not leakbench's own can be trained and attacked, and where it can be
cut."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from bench import data, models
from bench.contract.messages import State
from bench.errors import UserError
from bench.models import ModuleNetwork
from bench.sandbox.conformance.contract import Case
from bench.sandbox.findings import Broken, NotChecked, require
from bench.seeding import generator

DATASETS = ("digits", "photos", "breast_cancer")
"""Whose samples a model is tried on where no data set is named, in this order."""
_BATCH = 4
_TOLERANCE = 1e-3
"""Of logits, relative to the largest."""


def model_cases(
    name: str, settings: Mapping[str, Any], *, dataset: str | None = None
) -> Iterator[Case]:
    """The checks of a model.

    Args:
        name: As a suite names it: FILE.py:Net, an entry point, torchvision:NAME or timm:NAME.
        settings: Its settings.
        dataset: On whose samples it is tried; None: the first of `DATASETS` that it takes.

    Raises:
        UserError: For an unknown data set.
    """
    refusals = list[Case]()
    for place in DATASETS if dataset is None else (dataset,):
        loaded = data.load_dataset(place, seed=0)
        case = f"it takes samples of {place} {list(loaded.shape)}"
        try:
            network = models.build(
                name, shape=loaded.shape, classes=loaded.classes, settings=settings
            )
            break
        except UserError as error:
            refusals.append((case, partial(require, False, str(error))))
    else:
        yield from refusals
        return
    assert isinstance(network, ModuleNetwork)
    seen = f"{network.n_parameters} parameters, head {network.anatomy.head}"
    yield case, lambda: seen
    params = network.init(generator(0, "init"))
    buffers = network.calibrate(params, loaded.aux_x[:64])
    what = "clients' gradients, taken together, are those of the module by itself"
    yield what, partial(check_together, network)
    cuts = partial(check_cuts, network, params, buffers, loaded.aux_x[:_BATCH])
    yield "cut in two it gives the same logits", cuts


def check_together(network: ModuleNetwork) -> str:
    """Whether the module's operations can be taken over clients at once."""
    try:
        network.check()
    except UserError as error:
        raise Broken(str(error)) from error
    return ""


def check_cuts(network: ModuleNetwork, params: State, buffers: State, x: Tensor) -> str:
    """Each part of a cut network has only its own parameters, and both together give the logits."""
    if not network.cuts:
        raise NotChecked("it cannot be cut: no submodule gives all that the head gets")
    whole = network.apply(params, x, buffers=buffers)
    for number, cut in enumerate(network.cuts, start=1):
        below, above = (
            {n: v for n, v in params.items() if n.startswith(tuple(f"{s}." for s in stages))}
            for stages in (network.stages[:number], network.stages[number:])
        )
        smashed = network.run(below, x, last=cut, buffers=buffers)
        rest = network.run(above, smashed, first=network.stages[number], buffers=buffers)
        require(
            bool((rest - whole).abs().max() <= _TOLERANCE * (1e-6 + whole.abs().max())),
            f"cut after {cut} it gives other logits: something passes beside that tensor",
        )
    return f"after {', '.join(network.cuts)}"
