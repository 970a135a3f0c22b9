"""Checks what a suite or an option gives a constructor, a loader of data or a model's builder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from bench.errors import UserError
from bench.names import did_you_mean

_STRICT = ConfigDict(strict=True)


def checked_arguments(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    what: str,
    where: str = "",
    supplied: Sequence[str] = (),
    besides: Sequence[str] = (),
) -> dict[str, Any]:
    """Check keyword arguments against a function's names and annotations; int passes as float.

    Args:
        function: A class or function with annotated parameters.
        given: The arguments by name.
        what: What the function makes, for the message, such as "model lenet".
        where: The file that the arguments stand in, for the message.
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
    for name in given:
        if name not in parameters:
            known = [*parameters, *besides]
            raise UserError(did_you_mean(f"setting of {what}", name, known, where=where))
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in given]
    if missing:
        raise UserError(f"{what}{place} needs the setting(s) {', '.join(missing)}.")
    checked = {}
    for name, value in given.items():
        annotation = parameters[name].annotation
        kind = Any if annotation is inspect.Parameter.empty else annotation
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=_STRICT)
        try:
            checked[name] = adapter.validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise UserError(
                f"setting {name} of {what}{place}: {problem[:1].lower()}{problem[1:]}, "
                f"got {value!r}."
            ) from error
    return checked
