"""Names that users and files give: which are safe, and what is said of one that is unknown."""

import difflib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator

from bench.errors import UserError

PluginKind = Literal["defense", "attack"]
GROUPS: Mapping[PluginKind, str] = {"defense": "leakbench.defenses", "attack": "leakbench.attacks"}
"""Groups of entry points by which plugins are found."""
MODELS, DATASETS = "leakbench.models", "leakbench.datasets"
"""Groups of entry points of models and of data sets."""
_RESERVED = frozenset('/\\:*?"<>|')
"""What separates folders or is no part of a name, here or where a result folder is copied to."""
_BYTES = 255
"""Of a file's name, as common file systems take it."""
_FIRST = ("Lu", "Ll", "Lt", "Lm", "Lo", "Nd")
"""Unicode's categories of letters and decimal digits."""
_INNER = (*_FIRST, "Mn", "Mc")
"""With marks on letters, which many scripts need."""
_LONGEST = 64
"""Characters of a name that a user gives."""


def is_file_name(name: str) -> bool:
    """Return whether a file of that name stays in the folder that it is meant for, on any
    system."""
    return (
        0 < len(name.encode(errors="replace")) <= _BYTES
        and name.isprintable()
        and not _RESERVED & set(name)
        and name[0] not in ". "
        and name[-1] not in ". "
    )


def file_name(name: str) -> str:
    """The name itself. Raises UserError if it is none by `is_file_name`."""
    if not is_file_name(name):
        raise UserError(
            f"files are named after it, so it must have 1 to {_BYTES} bytes, begin and end with "
            "neither dot nor space, and hold no control character and none of "
            f"{' '.join(sorted(_RESERVED))}"
        )
    return name


def is_given_name(name: str) -> bool:
    """Return whether a suite or a threat may be called so: letters and digits of any script with
    their marks, and `_.@-`, at most 64 characters of 200 bytes, the first a letter or digit, the
    last no dot."""
    return (
        0 < len(name) <= _LONGEST
        and len(name.encode(errors="replace")) <= 200
        and all(c in "_.@-" or unicodedata.category(c) in _INNER for c in name)
        and unicodedata.category(name[0]) in _FIRST
        and name[-1] != "."
    )


def check_given_name(name: str) -> str:
    """The name itself. Raises UserError if it is none by `is_given_name`."""
    if not is_given_name(name):
        raise UserError(
            f"files are named after it, so it must have 1 to {_LONGEST} letters, digits and _.@- "
            "(at most 200 bytes), begin with a letter or digit and end with no dot"
        )
    return name


FileName = Annotated[str, AfterValidator(file_name)]
"""The name of a file in a known folder."""
GivenName = Annotated[str, AfterValidator(check_given_name)]
"""What a user calls a suite or a threat: files are named after it, with more before and behind."""


def count_of(number: int, what: str) -> str:
    """1 seed, 3 seeds."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def close_name(name: str, known: Sequence[str]) -> str | None:
    """The known name nearest to one that is not, None where none is near."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), None)


def did_you_mean(what: str, name: str, known: Sequence[str], *, where: str = "") -> str:
    """One sentence: the unknown name, the nearest known one, and all known ones.

    Args:
        what: What it should be a name of, as "defense".
        name: What was asked for.
        known: What could have been.
        where: In what file or suite it was read.
    """
    near = close_name(name, known)
    place = f" in {where}" if where else ""
    hint = f" Did you mean '{near}'?" if near else ""
    every = ", ".join(sorted(known)) or "nothing at all"
    return f"Unknown {what} '{name}'{place}.{hint} Known: {every}."


def check_known(what: str, name: str, known: Iterable[str], *, where: str = "") -> None:
    """Raise UserError for a name that is not known; see `did_you_mean`."""
    if name not in (names := list(known)):
        raise UserError(did_you_mean(what, name, names, where=where))
