"""Checks what a suite or an option gives a constructor, a loader of data or a model's builder."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from bench.errors import UserError
from bench.names import did_you_mean

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_MOST = 10**15
"""Of a whole number; a float64 still holds every one up to it."""


def check_arguments(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    what: str,
    where: str = "",
    kind: str = "setting",
    supplied: Sequence[str] = (),
    besides: Sequence[str] = (),
) -> dict[str, Any]:
    """Check keyword arguments against a function's names and annotations; int passes as float.

    Numbers are finite, but where a parameter is annotated as `bench.api.FloatOrInf`, and whole ones
    lie within 10^15.

    Args:
        function: A class or function with annotated parameters.
        given: The arguments by name.
        what: What the function makes, for the message, such as "model lenet".
        where: The file that the arguments stand in, for the message.
        kind: What one of them is called there.
        supplied: Parameters that the caller adds, which nobody may set.
        besides: Names that the caller takes itself, for the message.

    Returns:
        The arguments as they are to be passed.

    Raises:
        UserError: For an unknown or missing argument, or one of the wrong type.
    """
    parameters = {
        p.name: p
        for p in inspect.signature(function, eval_str=True).parameters.values()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in supplied
    }
    place = f" in {where}" if where else ""
    wrong = []
    for name in given:
        if name not in parameters:
            known = [*parameters, *besides]
            wrong.append(did_you_mean(f"{kind} of {what}", name, known, where=where))
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in given]
    if missing:
        wrong.append(f"{what}{place} needs the {kind}(s) {', '.join(missing)}.")
    checked = {}
    for name, value in given.items():
        if name in parameters:
            try:
                checked[name] = _check(parameters[name].annotation, value)
            except UserError as problem:
                wrong.append(f"{kind} {name} of {what}{place}: {problem}, got {value!r:.100}.")
    if wrong:
        raise UserError(" ".join(wrong))
    return checked


def _check(annotation: Any, value: Any) -> Any:
    """A value as a parameter takes it. Raises UserError, a clause, for another."""
    kind = Any if annotation is inspect.Parameter.empty else annotation
    if any(abs(number) > _MOST for number in _whole_numbers(value)):
        raise UserError("whole numbers must lie within 10^15")
    try:
        return TypeAdapter(kind, config=_STRICT).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise UserError(f"{problem[:1].lower()}{problem[1:]}") from error


def _whole_numbers(value: Any) -> Iterator[int]:
    """Yield all whole numbers in a value of a suite."""
    if isinstance(value, int):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(inner, Iterable) and not isinstance(inner, str | bytes):
        for item in inner:
            yield from _whole_numbers(item)
