"""The one exception that a user can mend; any other is a bug and shows its traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Bad input: one sentence with the value, what was expected, and where it stands.

    The command line prints it and exits with 2. It is a ValueError, so that a caller of the Python
    API may catch it as one, and so that pydantic takes it from a validator.
    """


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
        """Raises UserError with all sentences, if there are any."""
        if self._sentences:
            raise UserError(" ".join(self._sentences))
