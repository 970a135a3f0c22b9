"""Error texts for names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def did_you_mean(what: str, name: str, known: Sequence[str], *, where: str = "") -> str:
    """One sentence: the unknown name, the nearest known one, and all known ones.

    Args:
        what: What it should be a name of, as "defense".
        name: What was asked for.
        known: What could have been.
        where: In what file or suite it was read.
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    place = f" in {where}" if where else ""
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"Unknown {what} '{name}'{place}.{hint} Known: {', '.join(sorted(known)) or 'none'}."
