"""What hooks of a defense may return: types, names, shapes, finite values.

A check gets a hook's positional arguments and its answer, and says in one clause that follows the
hook's name what is wrong with the answer, or None. `bench.contract.hooks` has them in its table.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from bench.contract.defense import Mixture, Party
from bench.contract.events import Unit
from bench.contract.messages import UPLOAD_KINDS, Absent, Message, Part, Sealed

Problem = str | None
Check = Callable[[tuple[Any, ...], Any], Problem]


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _first(problems: Iterable[Problem]) -> Problem:
    return next((p for p in problems if p), None)


# --- by type --------------------------------------------------------------------------------------


def _expecting(expected: str, holds: Callable[[Any], bool]) -> Check:
    return lambda _, result: (
        None if holds(result) else f"returned {_kind(result)}, expected {expected}"
    )


def _each(container: Any, kinds: type | tuple[type, ...], result: Any) -> bool:
    return isinstance(result, container) and all(isinstance(entry, kinds) for entry in result)


def _names_kinds(kinds: type | tuple[type, ...], result: Any) -> bool:
    return _each(Mapping, str, result) and all(isinstance(v, kinds) for v in result.values())


def instance_of(kind: type) -> Check:
    """The answer is of a type."""
    return _expecting(f"a {kind.__name__}", lambda result: isinstance(result, kind))


def all_of(kind: type) -> Check:
    """The answer is a tuple of a type."""
    return _expecting(f"a tuple of {kind.__name__}", partial(_each, tuple, kind))


parties = _expecting("parties (bench.api.Party) by name", partial(_names_kinds, Party))
constants = _expecting("numbers or texts by name", partial(_names_kinds, (int, float, str)))
nothing = _expecting("None", lambda result: result is None)
plans = _expecting("a sequence of plans", partial(_each, Sequence, Mapping))


def claim(_: tuple[Any, ...], result: Any) -> Problem:
    """The answer is (epsilon, delta, unit) in their ranges, or None."""
    if result is None:
        return None
    if not isinstance(result, tuple) or len(result) != 3:
        return f"returned {_kind(result)}, expected None or (epsilon, delta, unit)"
    epsilon, delta, unit = result
    if not isinstance(epsilon, (int, float)) or math.isnan(epsilon) or epsilon < 0:
        return f"claimed an epsilon of {epsilon!r}, expected a number >= 0"
    if not isinstance(delta, (int, float)) or not 0 <= delta <= 1:
        return f"claimed a delta of {delta!r}, expected a number in [0, 1]"
    if unit not in get_args(Unit):
        return f"claimed a unit '{unit}', expected one of {', '.join(get_args(Unit))}"
    return None


# --- tensors by name ------------------------------------------------------------------------------

_tensors_by_name = _expecting("tensors by name", partial(_names_kinds, Tensor))


def _state(result: Any, like: Mapping[str, Tensor] | None, what: str = "a state") -> Problem:
    if problem := _tensors_by_name((), result):
        return problem
    for name, value in result.items():
        plain = not torch._C._functorch.is_functorch_wrapped_tensor(value)
        if plain and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return f"returned {what} whose '{name}' is NaN or infinite"
    for name, expected in (like or {}).items():
        if name not in result:
            return f"returned {what} without '{name}'"
        if result[name].shape != expected.shape:
            return (
                f"returned '{name}' of shape {list(result[name].shape)}, expected "
                f"{list(expected.shape)}"
            )
    return None


def _like(place: int, what: str = "a state") -> Check:
    return lambda arguments, result: _state(result, arguments[place], what)


def _pair_like_first(first: str, second: str) -> Check:
    def check(arguments: tuple[Any, ...], result: Any) -> Problem:
        if not isinstance(result, tuple) or len(result) != 2:
            return f"returned {_kind(result)}, expected a pair ({first}, {second})"
        return _state(result[0], arguments[0], f"a {first}") or _state(result[1], None, second)

    return check


def state(_: tuple[Any, ...], result: Any) -> Problem:
    """The answer is finite tensors by name."""
    return _state(result, None)


state_like_first = _like(0)
gradient = _like(1, "a gradient")
variables = _pair_like_first("state", "constants")
direction = _pair_like_first("direction", "memory")


def aggregate(arguments: tuple[Any, ...], result: Any) -> Problem:
    """The answer is a state like the server's, or None."""
    return None if result is None else _state(result, arguments[0].state)


# --- one tensor -----------------------------------------------------------------------------------


def tensor_like_first(arguments: tuple[Any, ...], result: Any) -> Problem:
    """The answer is a finite tensor of the first argument's shape."""
    shape = list(arguments[0].shape)
    if not isinstance(result, Tensor) or list(result.shape) != shape:
        got = list(result.shape) if isinstance(result, Tensor) else _kind(result)
        return f"returned {got}, expected a tensor of shape {shape}"
    if not bool(torch.isfinite(result).all()):
        return "returned values that are NaN or infinite"
    return None


def batch(arguments: tuple[Any, ...], result: Any) -> Problem:
    """The answer is a row of indices of the client's samples, or None."""
    if result is None:
        return None
    samples = len(arguments[0].y)
    if not isinstance(result, Tensor) or result.dtype != torch.int64 or result.dim() != 1:
        return f"returned {_kind(result)}, expected None or a row of int64 indices"
    if not len(result) or int(result.min()) < 0 or int(result.max()) >= samples:
        return f"returned indices outside of the client's {samples} samples"
    return None


def smashed(arguments: tuple[Any, ...], result: Any) -> Problem:
    """The answer is a part of the activations' shape."""
    return _part("the smashed data", result, like=arguments[0])


def _part(what: str, part: Any, *, like: Tensor | None) -> Problem:
    """What is wrong with one tensor on the wire; like: what has its shape, if anything has."""
    if not isinstance(part, Part):
        return f"returned {_kind(part)} as {what}, expected a Part"
    values, present = part.values, part.present
    if not isinstance(values, Tensor):
        return f"returned {what} whose values are {_kind(values)}, expected a tensor"
    if like is not None and values.shape != like.shape:
        return f"returned {what} of shape {list(values.shape)}, expected {list(like.shape)}"
    if present is not None:
        if not isinstance(present, Tensor) or present.dtype != torch.bool:
            return f"returned {what} whose `present` is no bool tensor"
        if present.shape != values.shape:
            return (
                f"returned {what} with `present` of shape {list(present.shape)} for values of "
                f"shape {list(values.shape)}"
            )
    if part.absent not in get_args(Absent):
        return f"returned {what} with absent {part.absent!r}, expected kept or zero"
    if isinstance(part.bits, bool) or not isinstance(part.bits, int) or not 1 <= part.bits <= 64:
        return f"returned {what} with bits {part.bits!r}, expected a whole number from 1 to 64"
    sent = values.detach() if present is None else values.detach()[present]
    if sent.is_floating_point() and not bool(torch.isfinite(sent).all()):
        return f"returned {what} with values that are NaN or infinite"
    if part.bits < 24 and sent.numel() and len(sent.unique()) > part.grids * 2**part.bits:
        return (
            f"returned {what} with {len(sent.unique())} different values in {part.bits} bit(s) "
            "each, which cannot tell them apart"
        )
    return None


# --- messages -------------------------------------------------------------------------------------


def say(arguments: tuple[Any, ...], result: Any) -> Problem:
    """The answer is messages of the client's own."""
    return _messages(arguments[1].id, result)


def _messages(client: str, result: Any) -> Problem:
    if not _each(list, Message, result):
        return f"returned {_kind(result)}, expected a list of Message"
    for message in result:
        if message.sender != client:
            return f"sent a message in the name of '{message.sender}', expected '{client}'"
    return None


def upload(arguments: tuple[Any, ...], result: Any) -> Problem:
    """The answer is messages whose headers, names and shapes the server can use."""
    messages, local, client = arguments
    return _messages(client.id, result) or _first(
        _check_upload(message, messages[0], local) for message in result
    )


def _check_upload(message: Message, given: Message, local: Any) -> Problem:
    is_upload = message.kind in UPLOAD_KINDS
    if is_upload:
        if message.local_steps != local.steps or message.round != given.round:
            return "changed the upload's header (round, local_steps), which the server needs"
        for name in message.parts:
            if name not in local.broadcast:
                return f"uploaded '{name}', which is no variable of the client's"
    return _first(
        _part(f"the part '{name}'", part, like=local.broadcast[name] if is_upload else None)
        for name, part in message.parts.items()
    ) or _check_sealed(message)


def _check_sealed(message: Message) -> Problem:
    for name, sealed in message.sealed.items():
        if not isinstance(sealed, Sealed) or sealed.covers.dtype != torch.bool:
            return f"returned a sealed '{name}' whose `covers` is no bool tensor"
        held = _count_held_bytes(sealed.box)
        if held > sealed.n_bytes:
            return f"sealed {held} bytes of '{name}' and declared n_bytes = {sealed.n_bytes}"
    return None


def _count_held_bytes(box: Any) -> int:
    if isinstance(box, (bytes, bytearray)):
        return len(box)
    if isinstance(box, Mapping):
        box = tuple(box.values())
    return sum(map(_count_held_bytes, box)) if isinstance(box, (list, tuple)) else 0


def mix(arguments: tuple[Any, ...], result: Any) -> Problem:
    """The answer is mixtures in which every client is, or None."""
    if result is None:
        return None
    if not _each(list, Mixture, result):
        return f"returned {_kind(result)}, expected None or a list of Mixture"
    if {client for m in result for client, _ in m.members} != set(arguments[0]):
        return "left clients out of the mixtures, or named clients that sent nothing"
    return None
