"""Whether something changed: arguments of a hook, a plugin's attributes, the process's own state;
and a defense whose every hook is watched for it while a real protocol plays it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.contract.defense import Client, Defense
from bench.contract.hooks import HOOKS, Hook
from bench.contract.messages import Part
from bench.foreign import Left, foreign_code
from bench.sandbox.hooked import check, hooked

_DEPTH = 12
_DATA = (dict, list, set, Tensor, np.ndarray, torch.Generator, int, float)
"""Kinds of class attributes that could hold state."""
_OWN = ("memory", "plan", "rng")
"""Fields of a client that hooks may write to."""
_POISON = 1000.0
Listener = Callable[[tuple[Any, ...], Any], None]
_ARGUMENTS = {
    hook.name: tuple(inspect.signature(getattr(Defense, hook.name)).parameters)[1:]
    for hook in HOOKS
}


def tensors_in(value: Any, path: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Tensors in arguments of hooks with the way to them; what hooks may change is left out."""
    if isinstance(value, Tensor):
        if not torch._C._functorch.is_functorch_wrapped_tensor(value):
            yield path, value
    elif depth == 0 or isinstance(value, (str, bytes, torch.Generator)):
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}[{key!r}]", depth - 1)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{i}]", depth - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for name in (f.name for f in fields(value)):
            if not (isinstance(value, Client) and name in _OWN):
                place = f"{path}.{name}" if path else name
                yield from tensors_in(getattr(value, name), place, depth - 1)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, where a NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())


@dataclass(frozen=True)
class Snapshot:
    """Arguments of a hook as they were."""

    tensors: list[tuple[str, Tensor, int, Tensor]]
    keys: list[tuple[str, Any, tuple[Any, ...]]]

    @staticmethod
    def of(names: tuple[str, ...], arguments: tuple[Any, ...]) -> Snapshot:
        tensors: list[tuple[str, Tensor, int, Tensor]] = []
        keys: list[tuple[str, Any, tuple[Any, ...]]] = []
        for name, argument in zip(names, arguments, strict=False):
            for path, t in tensors_in(argument, name):
                tensors.append((path, t, t._version, t.detach().clone()))
            if isinstance(argument, dict):
                keys.append((name, argument, tuple(argument)))
            elif isinstance(argument, list):
                keys.append((name, argument, tuple(map(id, argument))))
            elif isinstance(argument, Client):
                keys.append((name, argument, _identities(argument)))
        return Snapshot(tensors, keys)

    def changed(self) -> str | None:
        """The way to something that is not as it was, or None."""
        for path, tensor, version, copy in self.tensors:
            if tensor._version != version or not same(tensor.detach(), copy):
                return path
        for name, argument, before in self.keys:
            if isinstance(argument, Client):
                now = _identities(argument)
                for own, a, b in zip(_client_fields(), before, now, strict=True):
                    if a != b:
                        return f"{name}.{own}"
            elif isinstance(argument, dict):
                if tuple(argument) != before:
                    return name
            elif tuple(map(id, argument)) != before:
                return name
        return None


def _client_fields() -> list[str]:
    return [f.name for f in fields(Client) if f.name not in ("memory", "plan")]


def _identities(client: Client) -> tuple[int, ...]:
    return tuple(id(getattr(client, name)) for name in _client_fields())


def attributes(plugin: object, base: type) -> dict[str, str]:
    """A fingerprint of every attribute of a plugin and of its classes below `base`."""
    found = {name: _print(value) for name, value in vars(plugin).items()}
    for cls in type(plugin).__mro__:
        if cls is base or not issubclass(cls, base):
            break
        for name, value in vars(cls).items():
            if isinstance(value, _DATA) and not name.startswith("__"):
                found[f"class attribute {name}"] = _print(value)
    return found


def changed_attribute(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            return name
    return None


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


# --- a watched defense ----------------------------------------------------------------------------


@dataclass(kw_only=True)
class Watch:
    """What was noticed of a defense's hooks.

    Attributes:
        changed: Hook -> the argument that it changed.
        moved: Hook -> the global generators that it moved.
        state: Hook -> what it changed that decides figures.
        called: Hooks that were called.
        poisons: Whether values that are not present are replaced before the server gets them.
        listeners: Told of a hook's arguments and answer.
    """

    changed: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    poisons: bool = False
    listeners: Mapping[str, Listener] = field(default_factory=dict)

    def around(self, hook: Hook, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """One call of a hook, with everything noticed; raises WrongAnswer."""
        name = hook.name
        if name == "mix" and self.poisons:
            arguments = ({c: poisoned(p) for c, p in arguments[0].items()}, *arguments[1:])
        before, left = Snapshot.of(_ARGUMENTS[name], arguments), Left()
        with foreign_code(left, relays=False):
            result = call(*arguments)
        self.called.add(name)
        for found, what in ((self.moved, left.moved), (self.state, left.deciding)):
            if what:
                found.setdefault(name, " and ".join(what))
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
