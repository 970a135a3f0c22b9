"""A defense whose every hook is watched while a real protocol plays it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.contract.defense import Defense
from bench.contract.hooks import HOOKS, Hook
from bench.contract.messages import Part
from bench.sandbox.conformance.snapshots import Snapshot, global_generators, moved_generator
from bench.sandbox.hooked import check, hooked

_POISON = 1000.0
Listener = Callable[[tuple[Any, ...], Any], None]
_ARGUMENTS = {
    hook.name: tuple(inspect.signature(getattr(Defense, hook.name)).parameters)[1:]
    for hook in HOOKS
}


@dataclass(kw_only=True)
class Watch:
    """What was noticed of a defense's hooks.

    Attributes:
        changed: Hook -> the argument that it changed.
        moved: Hook -> the global generator that it moved.
        called: Hooks that were called.
        poisons: Whether values that are not present are replaced before the server gets them.
        listeners: Told of a hook's arguments and answer.
    """

    changed: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    poisons: bool = False
    listeners: Mapping[str, Listener] = field(default_factory=dict)

    def around(self, hook: Hook, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """One call of a hook, with everything noticed; raises WrongAnswer."""
        name = hook.name
        if name == "mix" and self.poisons:
            arguments = ({c: poisoned(p) for c, p in arguments[0].items()}, *arguments[1:])
        before, generators = Snapshot.of(_ARGUMENTS[name], arguments), global_generators()
        result = call(*arguments)
        self.called.add(name)
        if (moved := moved_generator(generators)) is not None:
            self.moved.setdefault(name, moved)
        if (path := before.changed()) is not None:
            self.changed.setdefault(name, path)
        check(hook, arguments, result)
        if name in self.listeners:
            self.listeners[name](arguments, result)
        if name == "finish_uploads" and self.poisons:
            return {
                client: [m.with_parts({n: poisoned(p) for n, p in m.parts.items()}) for m in sent]
                for client, sent in result.items()
            }
        return result


def watched(defense: Defense, watch: Watch) -> Defense:
    """A copy of the defense that reports to `watch`; its hooks raise HookError or WrongAnswer."""
    return hooked(defense, watch.around)


def poisoned(part: Part) -> Part:
    """The part with other values where none is present; finite, since 0 times it must be 0."""
    if part.present is None:
        return part
    return replace(part, values=torch.where(part.present, part.values, part.values + _POISON))


def flat(parts: Sequence[Tensor]) -> Tensor:
    """Tensors end to end, float64."""
    return torch.cat([p.detach().double().flatten() for p in parts] or [torch.zeros(0)])
