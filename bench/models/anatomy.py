"""What any torch module looks like inside: after which submodules it can be cut, which parameters
come before each cut, and where the head is.

Passes of a few samples tell it. Each submodule's output is replaced by a copy that autograd does
not trace back, so the gradients of one output are those by the outputs that it is computed from and
by the parameters that are used in between. Nothing of the module's code is parsed.
"""

from __future__ import annotations

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
"""Of the passes that everything is read off."""
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


@dataclass(kw_only=True, eq=False)
class _Node:
    """An output of a submodule, or the head's input.

    Attributes:
        modules: Those whose output it is: a layer, and the blocks that end with it.
        given: What the first of them was given, None if that is no tensor.
        output: As it was computed.
        leaf: What stands for it where later gradients are taken.
        copy: Of the leaf, which went on instead.
        version: Of the copy, which an operation in place changes.
        uses: Numbers of the nodes that it is computed from, -1 for the samples.
        parameters: Names of those that are used after these nodes.
    """

    modules: list[str]
    given: Tensor | None
    output: Tensor
    leaf: Tensor
    copy: Tensor
    version: int
    uses: set[int] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)

    def is_still(self, value: Any) -> bool:
        """Return whether a value is the copy, unchanged."""
        return value is self.copy and value._version == self.version


@dataclass(kw_only=True)
class _Pass:
    """A pass of the samples.

    Attributes:
        nodes: In the order of computation; the last is the output.
        needed: Numbers of those that lie between the samples and the output.
        calls: How many nodes there were at the end of each submodule's calls.
    """

    nodes: list[_Node] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    calls: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, given: Tensor | None, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        copy = leaf.clone()
        self.nodes.append(
            _Node(
                modules=[name],
                given=given,
                output=output,
                leaf=leaf,
                copy=copy,
                version=copy._version,
            )
        )
        return copy


def dissect(
    module: nn.Module, x: Tensor, classes: int, *, norms: Collection[str], what: str
) -> Anatomy:
    """Read a module's anatomy off passes of a few samples.

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
    if not any(p.requires_grad for p in module.parameters()):
        raise UserError(f"{what} has no parameter that is trained, so it sends nothing to attack.")
    head = _head(module, _play(module, x, classes, what), what)
    played = _play(module, x, classes, what, head=head)
    places = _places(played, head, classes)
    parts = _parts(played, [number for _, number in places])
    while (shared := _find_shared(parts)) is not None:
        first, last = shared  # no cut between two uses of a parameter
        if last == len(places) - 1:
            raise UserError(
                f"{what} uses parameters of its head elsewhere too; a head has its own, since "
                "attacks on labels read their gradient."
            )
        del places[first:last]
        parts = _parts(played, [number for _, number in places])
    passed = tuple(place for place, _ in places)
    owner = {name: i for i, part in reversed(list(enumerate(parts))) for name in part}
    trained = [n for n, p in module.named_parameters() if p.requires_grad]
    return Anatomy(
        places=passed,
        head=head,
        parameters={_expose_name(passed[owner.get(n, 0)], n): n for n in trained},
        norms={_norm(n, places, played): n for n in norms if n in played.calls},
    )


def _play(
    module: nn.Module, x: Tensor, classes: int, what: str, *, head: str | None = None
) -> _Pass:
    """A pass of the samples; with the head's name, its input is a node too."""
    x = x.detach().requires_grad_()
    played = _Pass()

    def record(name: str) -> Any:
        def hook(_: nn.Module, args: Any, named: Any, output: Any) -> Tensor | None:
            given = [v for v in (*args, *named.values()) if isinstance(v, Tensor)]
            replaced = None
            if not isinstance(output, Tensor) or not output.is_floating_point():
                pass
            elif played.nodes and played.nodes[-1].is_still(output):
                played.nodes[-1].modules.append(name)
            elif output.requires_grad and not any(output is v for v in given):
                replaced = played.add(name, given[0] if given else None, output)
            played.calls.setdefault(name, []).append(len(played.nodes))
            return replaced

        return hook

    def enter(_: nn.Module, args: Any) -> Any:
        return (played.add(f"input of {head}", None, args[0]), *args[1:])

    with ExitStack() as stack:
        for name, part in module.named_modules():
            if name:
                stack.enter_context(part.register_forward_hook(record(name), with_kwargs=True))
        if head is not None:
            stack.enter_context(module.get_submodule(head).register_forward_pre_hook(enter))
        stack.enter_context(torch.enable_grad())
        try:
            output = module(x.clone())
        except Exception as error:  # whatever a foreign module raises
            shape = list(x.shape[1:])
            text = in_one_line(error, 300)
            raise UserError(f"{what} cannot take samples of shape {shape} ({text}).") from error
    got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if got != [SAMPLES, classes]:
        raise UserError(
            f"{what} must give {SAMPLES} samples of shape {list(x.shape[1:])} logits of shape "
            f"[{SAMPLES}, {classes}], got {got}."
        )
    played.nodes.append(
        _Node(modules=[], given=None, output=output, leaf=output, copy=output, version=0)
    )
    _explain(module, x, played, what)
    return played


def _explain(module: nn.Module, x: Tensor, played: _Pass, what: str) -> None:
    """Write into each node what it is computed from."""
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    leaves = [x]
    for node in played.nodes:
        if node.output.requires_grad:
            try:
                grads = torch.autograd.grad(
                    node.output,
                    [*leaves, *trained.values()],
                    torch.ones_like(node.output),
                    retain_graph=True,
                    allow_unused=True,
                )
            except RuntimeError as error:
                raise UserError(
                    f"{what} cannot be differentiated: {in_one_line(error, 300)}"
                ) from error
            used = [g is not None for g in grads]
            node.uses = {i - 1 for i in range(len(leaves)) if used[i]}
            node.parameters = {
                n for n, use in zip(trained, used[len(leaves) :], strict=True) if use
            }
        leaves.append(node.leaf)
    reached, end = {-1}, len(played.nodes) - 1
    for number, node in enumerate(played.nodes):
        if node.uses & reached:
            reached.add(number)
        for source in node.uses - reached:  # made of parameters alone
            node.parameters |= played.nodes[source].parameters
            node.uses = (node.uses - {source}) | played.nodes[source].uses
    if end not in reached:
        raise UserError(
            f"{what} passes no gradient from its samples to its logits (token ids, rounding, a "
            "body under no_grad or detached), so no attack can look for samples; freeze a body by "
            "requires_grad_(False) instead."
        )
    needed = {end}
    for number in range(end, -1, -1):
        if number in needed:
            needed |= played.nodes[number].uses
    played.needed = sorted(needed - {-1})


def _head(module: nn.Module, played: _Pass, what: str) -> str:
    """The module at the end that gives the logits, or what the result is the log-softmax of, which
    has the same cross entropy."""
    *nodes, last = played.nodes
    if len(last.uses) == 1 and not last.parameters and min(last.uses) >= 0:
        node = nodes[min(last.uses)]
        logits = node.output
        same = logits.shape == last.output.shape and (
            _same(logits, last.output) or _same(logits.log_softmax(-1), last.output)
        )
        name = node.modules[0]
        once = len(played.calls[name]) == 1
        if same and once and _is_linear(module.get_submodule(name), node):
            return name
    raise UserError(
        f"{what} has no linear head: its logits must be the output of a torch.nn.Linear, or of a "
        "module that is as linear, used once (a log-softmax after it is fine), since attacks on "
        "labels read its gradient."
    )


def _is_linear(part: nn.Module, node: _Node) -> bool:
    """Return whether a submodule maps [B, F] linearly, with or without a bias."""
    given = node.given
    if given is None or given.ndim != 2 or any(isinstance(m, _BatchNorm) for m in part.modules()):
        return False
    with torch.no_grad():
        if isinstance(part, nn.Linear):
            return _same(linear(given, part.weight, part.bias), node.output)
        x, y = given, given.flip(0) + 1.0
        return _same(part(x) + part(y), part(x + y) + part(torch.zeros_like(x)))


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE))


def _places(played: _Pass, head: str, classes: int) -> list[tuple[Place, int]]:
    """Places with the numbers of their nodes in the order of passing: those nodes that no path
    from the samples to the output leaves out; the head's input and output are last."""
    nodes, end = played.nodes, played.needed[-1]
    farthest = max(i for i in played.needed if -1 in nodes[i].uses)
    places: list[tuple[Place, int]] = []
    for number in played.needed[:-1]:
        node, passed = nodes[number], farthest <= number
        farthest = max(farthest, *(i for i in played.needed if number in nodes[i].uses))
        if head in node.modules:
            break
        before = node.modules[0] == f"input of {head}"
        name = head if before else min(node.modules, key=lambda n: n.count("."))
        once = before or len(played.calls[name]) == 1
        again = before and bool(places) and nodes[places[-1][1]].is_still(node.output)
        if passed and once and not again and node.output.shape[0] == SAMPLES:
            stage = HEAD_INPUT if before else name.replace(".", "/")
            if stage in (HEAD, HEAD_INPUT) and not before:
                stage = f"own_{stage}"
            shape = tuple(node.output.shape[1:])
            places.append((Place(stage=stage, module=name, shape=shape, before=before), number))
    return [*places, (Place(stage=HEAD, module=head, shape=(classes,)), end)]


def _parts(played: _Pass, ends: Sequence[int]) -> list[set[str]]:
    """The parameters that are used between each place and the one before it."""
    parts, begin = [], -1
    for end in ends:
        between = (played.nodes[i].parameters for i in played.needed if begin < i <= end)
        parts.append(set[str]().union(*between))
        begin = end
    return parts


def _find_shared(parts: Sequence[set[str]]) -> tuple[int, int] | None:
    """The first two parts that have a parameter in common."""
    for last, part in enumerate(parts):
        for first in range(last):
            if parts[first] & part:
                return first, last
    return None


def _expose_name(place: Place, name: str) -> str:
    """`STAGE.REST`, where what does not lie in the stage's module has its path from the top."""
    path, _, leaf = name.rpartition(".")
    if path == place.module or path.startswith(f"{place.module}."):
        return f"{place.stage}{name.removeprefix(place.module)}"
    return f"{place.stage}./{path.replace('.', '/')}{'.' if path else ''}{leaf}"


def _norm(path: str, places: Sequence[tuple[Place, int]], played: _Pass) -> str:
    """The prefix of a batch normalisation's names, in the stage during which it is called first."""
    first = played.calls[path][0] - 1
    place = next(place for place, number in places if number >= first)
    return _expose_name(place, f"{path}.mean").removesuffix(".mean")
