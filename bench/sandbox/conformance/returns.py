"""What hooks of a defense may return: types, names, shapes, finite values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from bench.contract.defense import Mixture, Party
from bench.contract.events import Event, Formula, Unit
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import UPLOAD_KINDS, Message, Part, Sealed

Problem = str | None
"""One clause that follows the hook's name, or None."""


def problem_of(hook: str, arguments: tuple[Any, ...], result: Any) -> Problem:
    """What is wrong with a hook's answer to these positional arguments."""
    rule = _RULES.get(hook)
    return None if rule is None else rule(arguments, result)


def part_problem(what: str, part: Any, *, state: Tensor | None = None) -> Problem:
    """What is wrong with one tensor on the wire; state: the tensor that it is an upload of."""
    if not isinstance(part, Part):
        return f"returned {_kind(part)} as {what}, expected a Part"
    values, present = part.values, part.present
    if not isinstance(values, Tensor):
        return f"returned {what} whose values are {_kind(values)}, expected a tensor"
    if state is not None and values.shape != state.shape:
        return f"returned {what} of shape {list(values.shape)}, expected {list(state.shape)}"
    if present is not None:
        if not isinstance(present, Tensor) or present.dtype != torch.bool:
            return f"returned {what} whose `present` is no bool tensor"
        if present.shape != values.shape:
            return (
                f"returned {what} with `present` of shape {list(present.shape)} for values of "
                f"shape {list(values.shape)}"
            )
    if isinstance(part.bits, bool) or not isinstance(part.bits, int) or not 1 <= part.bits <= 64:
        return f"returned {what} with bits {part.bits!r}, expected a whole number from 1 to 64"
    sent = values.detach() if present is None else values.detach()[present]
    if sent.is_floating_point() and not bool(torch.isfinite(sent).all()):
        return f"returned {what} with values that are NaN or infinite"
    if part.bits < 24 and sent.numel() and len(sent.unique()) > 2**part.bits:
        return (
            f"returned {what} with {len(sent.unique())} different values in {part.bits} bit(s) "
            "each, which cannot tell them apart"
        )
    return None


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _is(*types: type) -> Callable[[tuple[Any, ...], Any], Problem]:
    def rule(arguments: tuple[Any, ...], result: Any) -> Problem:
        if isinstance(result, types):
            return None
        return f"returned {_kind(result)}, expected a {types[0].__name__}"

    return rule


def _nothing(arguments: tuple[Any, ...], result: Any) -> Problem:
    return None if result is None else f"returned {_kind(result)}, expected None"


def _state(result: Any, like: Mapping[str, Tensor] | None, what: str = "a state") -> Problem:
    if not isinstance(result, Mapping) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in result.items()
    ):
        return f"returned {_kind(result)}, expected tensors by name"
    for name, value in result.items():
        plain = not torch._C._functorch.is_functorch_wrapped_tensor(value)
        if plain and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return f"returned {what} whose '{name}' is NaN or infinite"
    if like is None:
        return None
    for name in like:
        if name not in result:
            return f"returned {what} without '{name}'"
        if result[name].shape != like[name].shape:
            return (
                f"returned '{name}' of shape {list(result[name].shape)}, expected "
                f"{list(like[name].shape)}"
            )
    return None


def _variables(arguments: tuple[Any, ...], result: Any) -> Problem:
    if not isinstance(result, tuple) or len(result) != 2:
        return f"returned {_kind(result)}, expected a pair (state, constants)"
    return _state(result[0], arguments[0]) or _state(result[1], None, "constants")


def _gradient(arguments: tuple[Any, ...], result: Any) -> Problem:
    return _state(result, arguments[1], "a gradient")


def _same_names(arguments: tuple[Any, ...], result: Any) -> Problem:
    return _state(result, arguments[0])


def _aggregate(arguments: tuple[Any, ...], result: Any) -> Problem:
    return None if result is None else _state(result, arguments[0].state)


def _joins(arguments: tuple[Any, ...], result: Any) -> Problem:
    return _is(bool)(arguments, result)


def _batch(arguments: tuple[Any, ...], result: Any) -> Problem:
    if result is None:
        return None
    client = arguments[0]
    if not isinstance(result, Tensor) or result.dtype != torch.int64 or result.dim() != 1:
        return f"returned {_kind(result)}, expected None or a row of int64 indices"
    if not len(result) or int(result.min()) < 0 or int(result.max()) >= len(client.y):
        return f"returned indices outside of the client's {len(client.y)} samples"
    return None


def _messages(client_at: int) -> Callable[[tuple[Any, ...], Any], Problem]:
    def rule(arguments: tuple[Any, ...], result: Any) -> Problem:
        if not isinstance(result, list) or not all(isinstance(m, Message) for m in result):
            return f"returned {_kind(result)}, expected a list of Message"
        for message in result:
            if message.sender != arguments[client_at].id:
                return (
                    f"sent a message in the name of '{message.sender}', expected "
                    f"'{arguments[client_at].id}'"
                )
        return None

    return rule


def _upload(arguments: tuple[Any, ...], result: Any) -> Problem:
    messages, local, _ = arguments
    problem = _messages(2)(arguments, result)
    if problem:
        return problem
    for message in result:
        is_upload = message.kind in UPLOAD_KINDS
        if is_upload:
            if message.local_steps != local.steps or message.round != messages[0].round:
                return "changed the upload's header (round, local_steps), which the server needs"
            for name in message.parts:
                if name not in local.broadcast:
                    return f"uploaded '{name}', which is no variable of the client's"
        for name, part in message.parts.items():
            state = local.broadcast[name] if is_upload else None
            if problem := part_problem(f"the part '{name}'", part, state=state):
                return problem
        for name, sealed in message.sealed.items():
            if problem := _sealed_problem(name, sealed):
                return problem
    return None


def _sealed_problem(name: str, sealed: Any) -> Problem:
    if not isinstance(sealed, Sealed) or sealed.covers.dtype != torch.bool:
        return f"returned a sealed '{name}' whose `covers` is no bool tensor"
    held = _held_bytes(sealed.box)
    if held > sealed.n_bytes:
        return f"sealed {held} bytes of '{name}' and declared n_bytes = {sealed.n_bytes}"
    return None


def _held_bytes(box: Any) -> int:
    if isinstance(box, (bytes, bytearray)):
        return len(box)
    if isinstance(box, (list, tuple)):
        return sum(map(_held_bytes, box))
    return sum(map(_held_bytes, box.values())) if isinstance(box, Mapping) else 0


def _finish_uploads(arguments: tuple[Any, ...], result: Any) -> Problem:
    if not isinstance(result, Mapping) or set(result) != set(arguments[0]):
        return f"returned {_kind(result)} that does not have exactly the clients it was given"
    for messages in result.values():
        for message in messages:
            for name, sealed in message.sealed.items():
                if problem := _sealed_problem(name, sealed):
                    return problem
    return None


def _smashed(arguments: tuple[Any, ...], result: Any) -> Problem:
    return part_problem("the smashed data", result, state=arguments[0])


def _like_first(arguments: tuple[Any, ...], result: Any) -> Problem:
    given = arguments[0]
    if not isinstance(result, Tensor) or result.shape != given.shape:
        got = list(result.shape) if isinstance(result, Tensor) else _kind(result)
        return f"returned {got}, expected a tensor of shape {list(given.shape)}"
    if not bool(torch.isfinite(result).all()):
        return "returned values that are NaN or infinite"
    return None


def _mix(arguments: tuple[Any, ...], result: Any) -> Problem:
    if result is None:
        return None
    if not isinstance(result, list) or not all(isinstance(m, Mixture) for m in result):
        return f"returned {_kind(result)}, expected None or a list of Mixture"
    members = [client for m in result for client, _ in m.members]
    if set(members) != set(arguments[0]):
        return "left clients out of the mixtures, or named clients that sent nothing"
    return None


def _all_of(kind: type) -> Callable[[tuple[Any, ...], Any], Problem]:
    def rule(arguments: tuple[Any, ...], result: Any) -> Problem:
        if isinstance(result, tuple) and all(isinstance(m, kind) for m in result):
            return None
        return f"returned {_kind(result)}, expected a tuple of {kind.__name__}"

    return rule


def _claim(arguments: tuple[Any, ...], result: Any) -> Problem:
    if result is None:
        return None
    if not isinstance(result, tuple) or len(result) != 3:
        return f"returned {_kind(result)}, expected None or (epsilon, delta, unit)"
    epsilon, delta, unit = result
    if not isinstance(epsilon, (int, float)) or math.isnan(epsilon) or epsilon < 0:
        return f"claimed an epsilon of {epsilon!r}, expected a number >= 0"
    if not isinstance(delta, (int, float)) or not 0 <= delta < 1:
        return f"claimed a delta of {delta!r}, expected a number in [0, 1)"
    if unit not in get_args(Unit):
        return f"claimed a unit '{unit}', expected one of {', '.join(get_args(Unit))}"
    return None


def _constants(arguments: tuple[Any, ...], result: Any) -> Problem:
    if isinstance(result, dict) and all(
        isinstance(k, str) and isinstance(v, (int, float, str)) for k, v in result.items()
    ):
        return None
    return f"returned {_kind(result)}, expected numbers or texts by name"


def _parties(arguments: tuple[Any, ...], result: Any) -> Problem:
    if isinstance(result, Mapping) and all(isinstance(p, Party) for p in result.values()):
        return None
    return f"returned {_kind(result)}, expected parties (bench.api.Party) by name"


def _plans(arguments: tuple[Any, ...], result: Any) -> Problem:
    if isinstance(result, Sequence) and all(isinstance(p, Mapping) for p in result):
        return None
    return f"returned {_kind(result)}, expected a sequence of plans"


def _named(arguments: tuple[Any, ...], result: Any) -> Problem:
    return _state(result, None)


_RULES: Mapping[str, Callable[[tuple[Any, ...], Any], Problem]] = {
    "third_parties": _parties,
    "extra_parameters": _named,
    "variables": _variables,
    "draw": _named,
    "receive": _same_names,
    "realize": _named,
    "mean_realize": _named,
    "gradient": _gradient,
    "inspects": _is(bool),
    "inspect": _named,
    "joins": _joins,
    "batch": _batch,
    "say": _messages(1),
    "hear": _nothing,
    "smashed": _smashed,
    "labels": _like_first,
    "features_grad": _like_first,
    "upload": _upload,
    "finish_uploads": _finish_uploads,
    "mix": _mix,
    "aggregate": _aggregate,
    "mechanisms": _all_of(Mechanism),
    "mechanisms_in": _all_of(Mechanism),
    "public_plans": _plans,
    "guarantee": _all_of(Event),
    "claim": _claim,
    "constants": _constants,
    "paper_formulas": _all_of(Formula),
}
HOOKS = tuple(_RULES)
"""Hooks of a defense in the order of bench/api.py."""
