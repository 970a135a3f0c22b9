"""The one exception that a user can mend; any other is a bug and shows its traceback."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

MOST_OF_KEY = 100
"""Characters of a key that are shown."""
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxlong = _SHOWN.maxother = 60
_SHOWN.maxlevel = 2


class UserError(ValueError):
    """Bad input: one sentence with the value, what was expected, and where it stands.

    The command line prints it and exits with 2. It is a ValueError, so that a caller of the Python
    API may catch it as one, and so that pydantic takes it from a validator.
    """


class UnfitError(UserError):
    """A defense has nothing to act on in this network: its cells are not applicable, which is no
    error of a run."""


@contextmanager
def noting(problems: dict[str, None]) -> Iterator[None]:
    """A check that may raise a UserError, whose sentence becomes one of the problems."""
    try:
        yield
    except UserError as error:
        problems[str(error)] = None


def problem(error: ValidationError) -> str:
    """Return the first problem of a validation as one sentence."""
    return sentence_of(error.errors(include_url=False)[0])


def sentence_of(problem: ErrorDetails, *, quote: str = "'") -> str:
    """Return one problem of a validation as one sentence: its place within quotes, what is wrong,
    and what was got, cut where that is long."""
    keys = map(str, problem["loc"])
    path = ".".join(k if len(k) <= MOST_OF_KEY else f"{k[:MOST_OF_KEY]}..." for k in keys)
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    if problem["type"] == "missing":
        return f"the key '{path}' is missing."
    if not path:
        return f"{message}."
    got = problem["input"]
    huge = isinstance(got, int) and got.bit_length() > 200  # Python refuses to print 4300 digits
    shown = "a very large number" if huge else _SHOWN.repr(got)
    return f"{quote}{path}{quote}: {message[:1].lower()}{message[1:]}, got {shown}."
