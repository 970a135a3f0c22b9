"""How a reader names the cells and rows that are meant."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from bench.errors import UserError
from bench.names import check_known
from bench.records import Cell

_PREFIX = re.compile(r"[0-9a-f]{4,24}")
_SHOWN = 12
T = TypeVar("T")


def find(cells: Sequence[Cell], text: str) -> Cell:
    """Return the cell of a key, of a unique prefix of a key (4 digits or more), or of words
    separated by slashes: digits/lenet/spm/dlg/final.

    Raises:
        UserError: For a word that fits no cell, with the nearest, and for words that fit several or
            none together, with the candidates.
    """
    by_key = [c for c in cells if c.key.startswith(text)] if _PREFIX.fullmatch(text) else []
    if len(by_key) > 1:
        raise UserError(f"'{text}' begins several keys: {_list_cells(by_key)}.")
    if by_key:
        return by_key[0]
    words = [w.strip() for w in text.split("/") if w.strip()]
    known = sorted({w for c in cells for w in c.words})
    for word in words:
        check_known("cell or part of a cell's name", word, known)
    matches = [c for c in cells if all(w in c.words for w in words)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise UserError(f"no cell is all of '{text}' at once; there are {_list_cells(cells)}.")
    raise UserError(
        f"'{text}' fits {len(matches)} cells; give more words or a key: {_list_cells(matches)}."
    )


def _list_cells(cells: Sequence[Cell]) -> str:
    names = [f"{c.key[:8]} {c.protocol}/{c.name}/seed={c.seed}" for c in cells[:_SHOWN]]
    more = len(cells) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


_FILTERS = ("protocol", "dataset", "model", "defense", "checkpoint")


def check_wanted(name: str, value: Any, known: Iterable[Any]) -> None:
    """Raise UserError if a filter's value occurs nowhere, with the values that occur."""
    if value is not None:
        check_known(name, str(value), sorted({str(k) for k in known}))


def with_values(items: Sequence[T], wanted: Mapping[str, str | None]) -> list[T]:
    """Return the items whose attributes have the wanted values (None: any).

    Raises:
        UserError: For an attribute of no filter, and for a value that occurs nowhere.
    """
    for key, value in wanted.items():
        check_wanted("filter", key, _FILTERS)
        check_wanted(key, value, (getattr(f, key) for f in items))
    return [f for f in items if all(v in (None, getattr(f, k)) for k, v in wanted.items())]
