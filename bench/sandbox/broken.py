"""How a test of a plugin ends that does not pass."""

from __future__ import annotations


class Broken(Exception):
    """A check that a plugin fails: what is wrong, what to change and where, as in `Finding`."""

    def __init__(self, reason: str, change: str, hook: str = "") -> None:
        super().__init__(reason)
        self.reason, self.change, self.hook = reason, change, hook


class NotChecked(Exception):
    """A check that does not apply; the text is the reason."""
