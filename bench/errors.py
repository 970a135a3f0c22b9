"""The one exception that a user can mend; any other is a bug and shows its traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: one sentence with the value, what was expected, and where it stands.

    The command line prints it and exits with 2. It is a ValueError, so that a caller of the Python
    API may catch it as one, and so that pydantic takes it from a validator.
    """
