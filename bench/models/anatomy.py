"""What any torch module looks like inside: after which submodules it can be cut, which parameters
come before each cut, and where the head is.

A pass of a few samples tells it. Autograd's graph, walked back from the logits, shows which samples
and parameters they are computed from; walked back no farther than the output of a submodule, it
shows which of them come in beside or after that. Nothing of the module's code is parsed.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.batchnorm import _BatchNorm

from bench.errors import UserError
from bench.foreign import in_one_line
from bench.models.network import Shape

SAMPLES = 3
"""Of the pass that everything is read off."""
HEAD, HEAD_INPUT = "head", "head_input"
"""Stages that every module has: its last layer, and what leads up to that if no submodule does."""
_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor through which all that the samples decide goes to the output.

    Attributes:
        stage: Name of what leads up to it.
        module: The submodule whose output it is; of the head's input, the head.
        shape: Of one sample.
        before: Whether it is that module's input.
    """

    stage: str
    module: str
    shape: Shape
    before: bool = False


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """What a module looks like inside.

    Attributes:
        places: In the order in which they are passed; the last one is the output.
        head: The linear layer at the end, or a module of another class that is as linear.
        parameters: `STAGE.REST` -> what the module calls it, of all that are trained.
        norms: The same of batch normalisations in training mode.
    """

    places: tuple[Place, ...]
    head: str
    parameters: Mapping[str, str]
    norms: Mapping[str, str]


Edge = tuple[Any, int]
"""A tensor in autograd's graph: the operation that gave it, and which of its outputs it is."""


@dataclass(kw_only=True, eq=False)
class _Output:
    """An output of a submodule.

    Attributes:
        modules: Those whose output it is: a layer, and the blocks that end with it.
        edge: Its place in autograd's graph.
        value: A copy.
        given: What the first of the modules was given, None if that is no tensor.
    """

    modules: list[str]
    edge: Edge
    value: Tensor
    given: Tensor | None


@dataclass(kw_only=True)
class _Pass:
    """A pass of the samples.

    Attributes:
        outputs: In the order of computation.
        calls: How many outputs there were at the end of each submodule's calls.
        logits: The result.
        x: The samples.
    """

    outputs: list[_Output] = field(default_factory=list)
    calls: dict[str, list[int]] = field(default_factory=dict)
    logits: Tensor
    x: Tensor


def dissect(
    module: nn.Module, x: Tensor, classes: int, *, norms: Collection[str], what: str
) -> Anatomy:
    """Read a module's anatomy off a pass of a few samples.

    Args:
        module: With parameters that hold numbers, in the modes in which it is trained, but for
            `norms`, which are in evaluation.
        x: Some `SAMPLES` samples.
        norms: Batch normalisations that normalise by the batch in training.
        what: What errors call it, as "model net.py:Net".

    Raises:
        UserError: For a module that gives no logits [B, classes], to which no gradient leads from
            the samples, or without a linear head.
    """
    trained = {id(p): n for n, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise UserError(f"{what} has no parameter that is trained, so it sends nothing to attack.")
    played = _play(module, x, classes, what)
    places = _places(played, _head(module, played, what), what)
    owner = {i: place for place, _, sources in reversed(places) for i in sources}
    first, last = places[0][0], places[-1][0]
    return Anatomy(
        places=tuple(place for place, *_ in places),
        head=last.module,
        parameters={_expose_name(owner.get(i, first), n): n for i, n in trained.items()},
        norms={_norm(n, places, played): n for n in norms if n in played.calls},
    )


def _play(module: nn.Module, x: Tensor, classes: int, what: str) -> _Pass:
    """Pass the samples, and record what submodules give."""
    played = _Pass(x=x.detach().requires_grad_(), logits=x)
    outputs = played.outputs

    def record(name: str) -> Any:
        def hook(_: nn.Module, args: Any, named: Any, output: Any) -> None:
            given = [v for v in (*args, *named.values()) if isinstance(v, Tensor)]
            if isinstance(output, Tensor) and output.grad_fn is not None:
                if outputs and outputs[-1].edge == _edge_of(output):
                    outputs[-1].modules.append(name)
                elif not any(output is v for v in given):
                    outputs.append(
                        _Output(
                            modules=[name],
                            edge=_edge_of(output),
                            value=output.detach().clone(),  # an operation in place may follow
                            given=given[0] if given else None,
                        )
                    )
            played.calls.setdefault(name, []).append(len(outputs))

        return hook

    with ExitStack() as stack:
        for name, part in module.named_modules():
            if name:
                stack.enter_context(part.register_forward_hook(record(name), with_kwargs=True))
        stack.enter_context(torch.enable_grad())
        try:
            logits = module(played.x.clone())
        except Exception as error:  # whatever a foreign module raises
            shape = list(x.shape[1:])
            text = in_one_line(error, 300)
            raise UserError(f"{what} cannot take samples of shape {shape} ({text}).") from error
    got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if got != [SAMPLES, classes]:
        raise UserError(
            f"{what} must give {SAMPLES} samples of shape {list(x.shape[1:])} logits of shape "
            f"[{SAMPLES}, {classes}], got {got}."
        )
    played.logits = logits
    try:
        if logits.requires_grad:
            torch.autograd.grad(logits.sum(), played.x, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        raise UserError(f"{what} cannot be differentiated: {in_one_line(error, 300)}") from error
    if not logits.requires_grad or id(played.x) not in _reach(_edge_of(logits)):
        raise UserError(
            f"{what} passes no gradient from its samples to its logits (token ids, rounding, a "
            "body under no_grad or detached), so no attack can look for samples; freeze a body by "
            "requires_grad_(False) instead."
        )
    return played


def _edge_of(tensor: Tensor) -> Edge:
    return tensor.grad_fn, tensor.output_nr


def _reach(end: Edge, begin: Edge | None = None) -> set[int]:
    """Return the ids of all samples and parameters that a tensor is computed from, without those
    that it is computed from by way of another one."""
    leaves, passed, left = set[int](), set[Any](), [end]
    while left:
        edge = left.pop()
        operation = edge[0]
        if edge == begin or operation is None or operation in passed:
            continue
        passed.add(operation)
        if hasattr(operation, "variable"):
            leaves.add(id(operation.variable))
        left += operation.next_functions
    return leaves


def _head(module: nn.Module, played: _Pass, what: str) -> int:
    """The number of the output that gives the logits, or what the result is the log-softmax of,
    which has the same cross entropy."""
    end = _edge_of(played.logits)
    for number, output in reversed(list(enumerate(played.outputs))):
        if _reach(end, output.edge):
            continue
        given, logits, name = output.value, played.logits, output.modules[0]
        same = given.shape == logits.shape and (
            _same(given, logits) or _same(given.log_softmax(-1), logits)
        )
        once = len(played.calls[name]) == 1
        if same and once and _is_linear(module.get_submodule(name), output):
            return number
        break
    raise UserError(
        f"{what} has no linear head: its logits must be the output of a torch.nn.Linear, or of a "
        "module that is as linear, used once (a log-softmax after it is fine), since attacks on "
        "labels read its gradient."
    )


def _is_linear(part: nn.Module, output: _Output) -> bool:
    """Return whether a submodule maps [B, F] linearly, with or without a bias."""
    given = output.given
    if given is None or given.ndim != 2 or any(isinstance(m, _BatchNorm) for m in part.modules()):
        return False
    with torch.no_grad():
        if isinstance(part, nn.Linear):
            return _same(linear(given, part.weight, part.bias), output.value)
        x, y = given, given.flip(0) + 1.0
        return _same(part(x) + part(y), part(x + y) + part(torch.zeros_like(x)))


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE))


Passed = tuple[Place, int, set[int]]
"""A place, the number of its output, and the samples and parameters that it is computed from."""


def _places(played: _Pass, head: int, what: str) -> list[Passed]:
    """Places in the order of passing, the head's input and output last: outputs that nothing passes
    by which they are computed from, neither samples nor a parameter that is used on both sides."""
    end, source = _edge_of(played.logits), id(played.x)
    places: list[Passed] = []
    begin: Edge | None = None
    for number, output in enumerate(played.outputs[:head]):
        name = min(output.modules, key=lambda n: n.count("."))
        sources = _reach(output.edge)
        if (
            len(played.calls[name]) == 1
            and len(output.value) == SAMPLES
            and _reach(end, output.edge).isdisjoint({source, *sources})
        ):
            stage = name.replace(".", "/")
            stage = f"own_{stage}" if stage in (HEAD, HEAD_INPUT) else stage
            shape = tuple(output.value.shape[1:])
            places.append((Place(stage=stage, module=name, shape=shape), number, sources))
            begin = output.edge
    last = played.outputs[head]
    assert last.given is not None
    sources, module = _reach(_edge_of(last.given)), last.modules[0]
    if not _reach(end, _edge_of(last.given)).isdisjoint(sources):
        raise UserError(
            f"{what} uses parameters of its head elsewhere too; a head has its own, since "
            "attacks on labels read their gradient."
        )
    if begin != _edge_of(last.given):
        shape = tuple(last.given.shape[1:])
        place = Place(stage=HEAD_INPUT, module=module, shape=shape, before=True)
        places.append((place, head - 1, sources))
    place = Place(stage=HEAD, module=module, shape=tuple(last.value.shape[1:]))
    return [*places, (place, head, _reach(end))]


def _expose_name(place: Place, name: str) -> str:
    """`STAGE.REST`, where what does not lie in the stage's module has its path from the top."""
    path, _, leaf = name.rpartition(".")
    if path == place.module or path.startswith(f"{place.module}."):
        return f"{place.stage}{name.removeprefix(place.module)}"
    return f"{place.stage}./{path.replace('.', '/')}{'.' if path else ''}{leaf}"


def _norm(path: str, places: Sequence[Passed], played: _Pass) -> str:
    """The prefix of a batch normalisation's names, in the stage during which it is called first."""
    first = played.calls[path][0] - 1
    place = next(place for place, number, _ in places if number >= first)
    return _expose_name(place, f"{path}.mean").removesuffix(".mean")
