"""A defense whose every hook is watched while a real protocol plays it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.contract.defense import Defense, fresh
from bench.contract.messages import Message, Part
from bench.sandbox.conformance.findings import HookError, WrongAnswer
from bench.sandbox.conformance.returns import HOOKS, problem_of
from bench.sandbox.conformance.snapshots import Snapshot, global_generators, moved_generator

_POISON = 1000.0
Listener = Callable[[tuple[Any, ...], Any], None]


@dataclass(kw_only=True)
class Watch:
    """What was noticed. changed: hook -> the argument that it changed. moved: hook -> the global
    generator that it moved. called: hooks that were called. poisons: whether values that are not
    present are replaced before the server gets them. listeners: told of a hook's arguments and
    answer."""

    changed: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    poisons: bool = False
    listeners: Mapping[str, Listener] = field(default_factory=dict)
    inside: bool = False


def watched(defense: Defense, watch: Watch) -> Defense:
    """A copy of the defense that reports to `watch`. Its hooks raise HookError in place of their
    own errors, and WrongAnswer where they return what they may not."""
    copy = fresh(defense)
    cls = type(copy)
    methods = {hook: _spied(hook, getattr(cls, hook), watch) for hook in HOOKS}
    copy.__class__ = type(cls.__name__, (cls,), methods)
    return copy


def _spied(hook: str, method: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    signature = inspect.signature(getattr(Defense, hook))
    names = tuple(signature.parameters)[1:]

    def call(self: Defense, *args: Any, **more: Any) -> Any:
        if watch.inside:  # a hook that calls another of its own
            return method(self, *args, **more)
        if hook == "mix" and watch.poisons:
            args = ({c: poisoned(p) for c, p in args[0].items()}, *args[1:])
        before, generators = Snapshot.of(names, args), global_generators()
        watch.inside = True
        try:
            result = method(self, *args, **more)
        except (HookError, WrongAnswer):
            raise
        except Exception as error:  # reported as the hook's
            raise HookError(hook, error) from error
        finally:
            watch.inside = False
        watch.called.add(hook)
        if (moved := moved_generator(generators)) is not None:
            watch.moved.setdefault(hook, moved)
        if (path := before.changed()) is not None:
            watch.changed.setdefault(hook, path)
        if (problem := problem_of(hook, args, result)) is not None:
            raise WrongAnswer(hook, problem)
        if hook in watch.listeners:
            watch.listeners[hook](args, result)
        if hook == "finish_uploads" and watch.poisons:
            result = {c: [_poisoned_message(m) for m in sent] for c, sent in result.items()}
        return result

    return call


def poisoned(part: Part) -> Part:
    """The part with other values where none is present; finite, since 0 times it must be 0."""
    if part.present is None:
        return part
    return replace(part, values=torch.where(part.present, part.values, part.values + _POISON))


def _poisoned_message(message: Message) -> Message:
    return message.with_parts({n: poisoned(p) for n, p in message.parts.items()})


def flat(parts: Sequence[Tensor]) -> Tensor:
    """Tensors end to end, float64."""
    return torch.cat([p.detach().double().flatten() for p in parts] or [torch.zeros(0)])
