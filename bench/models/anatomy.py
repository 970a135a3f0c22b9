"""What any torch module looks like inside: where all information passes one tensor, which
parameters come before it, and where the head is.

It is read off one forward pass: hooks tell which module gave which tensor, and the graph that
autograd keeps tells through which tensors every path from the samples to the output goes. So a
module may be written in any way; nothing of its code is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bench.errors import UserError
from bench.models.network import KINDS, Shape, StaticBatchNorm

SAMPLES = 3
"""Of the pass that everything is read off."""
HEAD, HEAD_INPUT = "head", "head_input"
"""Stages that every module has: its last layer, and what leads up to that if no submodule does."""
_TOLERANCE = 1e-4
_Edge = tuple[Any, int]
"""A node of autograd's graph, and the number of one of its outputs: a tensor."""


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
        head: The linear layer at the end.
        parameters: `STAGE.REST` -> what the module calls it, of all that are trained.
        norms: The same of batch normalisations.
        plain: Linear layers, convolutions and normalisations that are called and whose parameters
            are used nowhere else, each with the prefix of its parameters' names.
        overwritten: Modules whose output is changed in place afterwards.
    """

    places: tuple[Place, ...]
    head: str
    parameters: Mapping[str, str]
    norms: Mapping[str, str]
    plain: Mapping[str, str]
    overwritten: frozenset[str]


@dataclass(kw_only=True)
class _Call:
    """One call of a submodule."""

    module: str
    edge: _Edge
    given: _Edge | None
    output: Tensor
    version: int


@dataclass(kw_only=True)
class _Pass:
    """A forward pass.

    Attributes:
        calls: In the order in which they ended; of submodules that gave one new tensor of floats.
        times: How often each submodule was called.
        output: What came out.
        start: The samples' own node.
    """

    output: Tensor
    start: Any
    calls: list[_Call] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)


def dissect(module: nn.Module, x: Tensor, classes: int, *, what: str) -> Anatomy:
    """Read a module's anatomy off a pass of a few samples.

    Args:
        module: With parameters that hold numbers; each batch normalisation is static.
        x: Some `SAMPLES` samples.
        what: What errors call it, as "model net.py:Net".

    Raises:
        UserError: For a module that gives no logits [B, classes], or without a linear head.
    """
    played = _play(module, x.detach().requires_grad_(), classes, what)
    head = _head(module, played, what)
    found = _places(module, played, head)
    parts = _parts(module, played, found)
    while (shared := _shared(parts)) is not None:
        first, last = shared  # no cut between two uses of a parameter
        if last == len(found) - 1:
            raise UserError(
                f"{what} uses parameters of its head elsewhere too; a head has its own, since "
                "attacks on labels read their gradient."
            )
        del found[first:last]
        parts = _parts(module, played, found)
    places = tuple(place for place, _ in found)
    owner = {name: i for i, part in reversed(list(enumerate(parts))) for name in part}
    known = {n: _exposed(places[owner.get(n, 0)], n) for n in _trained(module)}
    return Anatomy(
        places=places,
        head=head.module,
        parameters={name: inner for inner, name in known.items()},
        norms={
            _norm(n, places, played, what): n
            for n, part in module.named_modules()
            if isinstance(part, StaticBatchNorm) and n in played.times
        },
        plain=_plain(module, played, known),
        overwritten=frozenset(c.module for c in played.calls if c.output._version != c.version),
    )


def _play(module: nn.Module, x: Tensor, classes: int, what: str) -> _Pass:
    shape = list(x.shape[1:])
    start = x.view_as(x).grad_fn
    assert start is not None
    played = _Pass(output=x, start=start.next_functions[0][0])

    def record(name: str) -> Any:
        def hook(_: nn.Module, given: Any, named: Any, output: Any) -> None:
            played.times[name] = played.times.get(name, 0) + 1
            edge, inputs = _edge(output), [_edge(v) for v in (*given, *named.values())]
            if edge is not None and edge not in inputs:  # else it hands on what it was given
                first = inputs[0] if inputs else None
                played.calls.append(
                    _Call(
                        module=name,
                        edge=edge,
                        given=first,
                        output=output,
                        version=output._version,
                    )
                )

        return hook

    handles = [
        m.register_forward_hook(record(n), with_kwargs=True) for n, m in module.named_modules() if n
    ]
    try:
        with torch.enable_grad():
            output = module(x)
    except Exception as error:  # whatever a foreign module raises
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise UserError(f"{what} cannot take samples of shape {shape} ({text}).") from error
    finally:
        for handle in handles:
            handle.remove()
    got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if got != [SAMPLES, classes]:
        raise UserError(
            f"{what} must give {SAMPLES} samples of shape {shape} logits of shape "
            f"[{SAMPLES}, {classes}], got {got}."
        )
    played.output = output
    return played


def _edge(value: Any) -> _Edge | None:
    """The node and output number that a tensor is; None for what is none or has no gradient."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.grad_fn is not None:
        return value.grad_fn, value.output_nr
    if value.requires_grad:
        node = value.view_as(value).grad_fn
        assert node is not None
        return node.next_functions[0]
    return None


def _head(module: nn.Module, played: _Pass, what: str) -> _Call:
    """The call of the linear layer at the end, of which the output is the logits, or of which the
    log-softmax is, which has the same cross entropy."""
    for call in reversed(played.calls):
        part, logits = module.get_submodule(call.module), call.output
        if type(part) is nn.Linear and part.bias is not None and played.times[call.module] == 1:
            shown = (logits, torch.log_softmax(logits, dim=-1)) if logits.ndim == 2 else ()
            if any(s.shape == played.output.shape and _same(s, played.output) for s in shown):
                return call
    raise UserError(
        f"{what} has no head: it must end with a torch.nn.Linear with bias, used once, whose "
        "output is the logits (a log-softmax after it is fine), since attacks on labels read its "
        "gradient."
    )


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE))


def _passed_by_all(played: _Pass) -> set[_Edge]:
    """Tensors on every path from the samples to the output."""
    reaching: dict[Any, bool] = {played.start: True}
    order: list[Any] = []
    todo: list[tuple[Any, bool]] = [(played.output.grad_fn, False)]
    while todo:  # depth first without recursion: deep networks have thousands of nodes
        node, done = todo.pop()
        nexts = [n for n, _ in node.next_functions if n is not None]
        if done:
            reaching[node] = any(reaching[n] for n in nexts)
            order.append(node)
        elif node not in reaching:
            reaching[node] = False
            todo.append((node, True))
            todo.extend((n, False) for n in nexts if n not in reaching)
    # From the output down, each node after all that lead to it.
    nodes = [n for n in reversed(order) if reaching[n]] + [played.start]
    position = {node: i for i, node in enumerate(nodes)}
    passed: set[_Edge] = set()
    farthest, used = 0, dict[Any, set[int]]()
    for i, node in enumerate(nodes):
        if farthest <= i and len(used.get(node, {0})) == 1:
            passed.add((node, next(iter(used.get(node, {0})))))
        for following, number in node.next_functions:
            if following in position:
                used.setdefault(following, set()).add(number)
                farthest = max(farthest, position[following])
    return passed


def _places(module: nn.Module, played: _Pass, head: _Call) -> list[tuple[Place, _Edge | None]]:
    """Places with their tensors in the order of passing; the head's input and output are last."""
    passed, found = _passed_by_all(played), dict[_Edge, _Call]()
    for call in played.calls:
        if call is head:
            break
        fits = played.times[call.module] == 1 and call.output.shape[0] == SAMPLES
        if not fits or call.edge not in passed:
            continue
        known = found.get(call.edge)
        # A block and its last layer give the same tensor: it is named after the block.
        if known is None or call.module.count(".") < known.module.count("."):
            found[call.edge] = call
    places: list[tuple[Place, _Edge | None]] = []
    for edge, call in found.items():
        stage, shape = call.module.replace(".", "/"), tuple(call.output.shape[1:])
        if stage in (HEAD, HEAD_INPUT):
            stage = f"own_{stage}"
        places.append((Place(stage=stage, module=call.module, shape=shape), edge))
    if head.given is None or not places or places[-1][1] != head.given:
        width = (module.get_submodule(head.module).get_parameter("weight").shape[1],)
        place = Place(stage=HEAD_INPUT, module=head.module, shape=width, before=True)
        places.append((place, head.given))
    shape = tuple(played.output.shape[1:])
    return [*places, (Place(stage=HEAD, module=head.module, shape=shape), _edge(played.output))]


def _parts(
    module: nn.Module, played: _Pass, places: Sequence[tuple[Place, _Edge | None]]
) -> list[set[str]]:
    """The parameters that are used between each place and the one before it."""
    names = {id(p): n for n, p in _trained(module).items()}
    parts, ends = [], {played.start}
    for _, edge in places:
        part: set[str] = set()
        seen, todo = set(ends), [] if edge is None else [edge[0]]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable") and id(node.variable) in names:
                part.add(names[id(node.variable)])
            todo.extend(n for n, _ in node.next_functions if n is not None)
        parts.append(part)
        ends = {played.start} if edge is None else {played.start, edge[0]}
    return parts


def _shared(parts: Sequence[set[str]]) -> tuple[int, int] | None:
    """The first two parts that have a parameter in common."""
    for last, part in enumerate(parts):
        for first in range(last):
            if parts[first] & part:
                return first, last
    return None


def _exposed(place: Place, name: str) -> str:
    """`STAGE.REST`, where what does not lie in the stage's module has its path from the top."""
    path, _, leaf = name.rpartition(".")
    if path == place.module or path.startswith(f"{place.module}."):
        return f"{place.stage}{name.removeprefix(place.module)}"
    return f"{place.stage}./{path.replace('.', '/')}{'.' if path else ''}{leaf}"


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in module.named_parameters() if p.requires_grad}


def _norm(path: str, places: Sequence[Place], played: _Pass, what: str) -> str:
    """The prefix of a batch normalisation's names, in the stage during which it is called."""
    if played.times[path] > 1:
        raise UserError(
            f"{what} calls its batch normalisation {path} {played.times[path]} times in one pass; "
            "each call has statistics of its own, so it needs a normalisation of its own."
        )
    order = {call.module: i for i, call in enumerate(played.calls)}
    own = order.get(path, 0)
    place = next(p for p in places if order[p.module] >= own)
    return _exposed(place, f"{path}.mean").removesuffix(".mean")


def _plain(module: nn.Module, played: _Pass, known: Mapping[str, str]) -> dict[str, str]:
    """See `Anatomy`."""
    uses = _uses(played)
    found = {}
    for name, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False))
        hooked = part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
        if type(part) not in KINDS or not own or hooked:
            continue
        names = [known.get(f"{name}.{leaf}") for leaf in own]
        calls = played.times.get(name, 0)
        if calls and None not in names and all(uses.get(id(p)) == calls for p in own.values()):
            found[name] = str(names[0]).rpartition(".")[0]
    return found


def _uses(played: _Pass) -> dict[int, int]:
    """How often each parameter is used, by its id."""
    uses: dict[int, int] = {}
    seen, todo = set(), [played.output.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                uses[id(following.variable)] = uses.get(id(following.variable), 0) + 1
            todo.append(following)
    return uses
