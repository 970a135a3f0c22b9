"""The one exception that a user can mend; any other is a bug and shows its traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """Bad input: one sentence with the value, what was expected, and where it stands.

    The command line prints it and exits with 2. It is a ValueError, so that a caller of the Python
    API may catch it as one, and so that pydantic takes it from a validator.
    """


class UnfitError(UserError):
    """A defense has nothing to act on in this network: its cells are not applicable, which is no
    error of a run."""


class Complaints:
    """What several checks find wrong, told in one go."""

    def __init__(self) -> None:
        self._sentences: dict[str, None] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A check that may raise a UserError, whose sentence is kept."""
        try:
            yield
        except UserError as error:
            self._sentences[str(error)] = None

    def tell(self) -> None:
        """Raise UserError with all sentences, if there are any."""
        if self._sentences:
            raise UserError(" ".join(self._sentences))


def problem(error: ValidationError) -> str:
    """The first problem that was found, as one sentence."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(p) for p in first["loc"])
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if first["type"] == "missing":
        return f"'{place}' is missing."
    if not place:
        return f"{message}."
    text = f"'{place}': {message[:1].lower()}{message[1:]}"
    if isinstance(first["input"], (dict, list, tuple)):
        return f"{text}."
    return f"{text}, got {' '.join(_shown(first['input']).split())}."


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return "a very large number"  # Python refuses to print numbers of 4300 digits
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
