"""Whether something changed: arguments of a call, a plugin's attributes, the process's own state;
and a defense whose every hook is watched for it while a real protocol plays it."""

import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.contract.defense import Client, Defense
from bench.contract.hooks import HOOKS, Hook
from bench.contract.messages import Part
from bench.foreign import Left, foreign_code
from bench.sandbox.conformance.contract import Case
from bench.sandbox.findings import Broken
from bench.sandbox.hooked import check, hook

_DEPTH = 12
_DATA = (dict, list, set, Tensor, np.ndarray, torch.Generator, int, float)
"""Kinds of class attributes that could hold state."""
_WRITABLE = ("memory", "plan", "rng")
"""Fields of a client that hooks may write to."""
_POISON = 1000.0
Listener = Callable[[tuple[Any, ...], Any], None]
_ARGUMENTS = {
    h.name: tuple(inspect.signature(getattr(Defense, h.name)).parameters)[1:] for h in HOOKS
}
_NOTICES = (
    "arguments untouched",
    "global generators untouched",
    "process untouched",
    "no state on self",
)
"""Checks of what was noticed."""


def leaves(value: Any, path: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """What an argument holds, with the way to it; what hooks may change is left out."""
    if isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        return
    if isinstance(value, Mapping):
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    elif is_dataclass(value) and not isinstance(value, type):
        left_out = _WRITABLE if isinstance(value, Client) else ()
        names = [f.name for f in fields(value) if f.name not in left_out]
        items = [(f"{path}.{name}" if path else name, getattr(value, name)) for name in names]
    else:
        yield path, value
        return
    for place, item in items if depth else ():
        yield from leaves(item, place, depth - 1)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, where a NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())


def _all_leaves(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in arguments.items():
        yield from leaves(value, name)


def _copy(leaf: Any) -> tuple[int, Tensor] | None:
    return (leaf._version, leaf.detach().clone()) if isinstance(leaf, Tensor) else None


def _find_change(before: list[tuple[str, Any, Any]], arguments: Mapping[str, Any]) -> str | None:
    """The way to something that is not as it was, or None."""
    for old, new in zip_longest(before, _all_leaves(arguments)):
        if old is None or new is None or old[0] != new[0]:
            return str((old or new)[0])
        path, leaf, copy = old
        if new[1] is not leaf:
            return path
        if copy and (leaf._version != copy[0] or not same(leaf.detach(), copy[1])):
            return path
    return None


def attributes(plugin: object, base: type) -> dict[str, str]:
    """A fingerprint of every attribute of a plugin and of its classes below `base`."""
    values = dict(vars(plugin))
    for cls in type(plugin).__mro__[: type(plugin).__mro__.index(base)]:
        for name, value in vars(cls).items():
            if isinstance(value, _DATA) and not name.startswith("__"):
                values[f"class attribute {name}"] = value
    return {name: _print(value) for name, value in values.items()}


def _print(value: Any) -> str:
    """A text that is equal for equal values; of what cannot be looked into, its type."""
    if isinstance(value, torch.Generator):
        return repr(value.get_state().tolist())
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return str({str(k): _print(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return str([_print(v) for v in value])
    try:
        return repr(pickle.dumps(value))
    except Exception:  # whatever a foreign object's own methods raise
        return type(value).__qualname__


@dataclass(kw_only=True)
class Watch:
    """What was noticed of a plugin's calls.

    Attributes:
        faults: The first reason and hook by check of `_NOTICES`.
        poisons: Whether values that are not present are replaced before the server gets them.
        listeners: Told of a hook's arguments and answer.
    """

    faults: dict[str, tuple[str, str]] = field(default_factory=dict)
    poisons: bool = False
    listeners: Mapping[str, Listener] = field(default_factory=dict)

    def call(self, name: str, call: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """The answer of a call, with what it changed noticed."""
        before = [(path, leaf, _copy(leaf)) for path, leaf in _all_leaves(arguments)]
        left = Left()
        with foreign_code(left, relays=False):
            answer = call()
        path = _find_change(before, arguments)
        noticed = {
            "arguments untouched": path and f"changed its argument {path} in place",
            "global generators untouched": left.moved and f"moved {' and '.join(left.moved)}",
            "process untouched": left.deciding
            and f"changed {' and '.join(left.deciding)} for the whole process",
        }
        for notice, what in noticed.items():
            if what:
                self.faults.setdefault(notice, (f"{name} {what}.", name))
        return answer

    def compare(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """Notice an attribute that differs between two fingerprints of a plugin."""
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                reason = f"the attribute {name} changed during a run."
                self.faults.setdefault("no state on self", (reason, name))

    def cases(self) -> list[Case]:
        """A check of each thing that might have been noticed."""
        return [(name, partial(self._check, name)) for name in _NOTICES]

    def _check(self, name: str) -> str:
        if name in self.faults:
            raise Broken(*self.faults[name])
        return ""

    def around(self, hook: Hook, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """One call of a hook, with everything noticed; raises WrongAnswer."""
        name = hook.name
        if name == "mix" and self.poisons:
            arguments = ({c: poison(p) for c, p in arguments[0].items()}, *arguments[1:])
        given = dict(zip(_ARGUMENTS[name], arguments, strict=False))
        result = self.call(name, partial(call, *arguments), given)
        check(hook, arguments, result)
        if name in self.listeners:
            self.listeners[name](arguments, result)
        if name == "upload" and self.poisons:
            return [m.with_parts({n: poison(p) for n, p in m.parts.items()}) for m in result]
        return result


def watch_defense(defense: Defense, watch: Watch) -> Defense:
    """A copy of the defense that reports to `watch`; its hooks raise HookError or WrongAnswer."""
    return hook(defense, watch.around)


def poison(part: Part) -> Part:
    """The part with other values where none is present; finite, since 0 times it must be 0."""
    if part.present is None:
        return part
    return replace(part, values=torch.where(part.present, part.values, part.values + _POISON))
