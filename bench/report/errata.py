"""Rows of a published folder that later turned out wrong, as its errata.toml lists them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from bench.protocols.settings import STRICT
from bench.records import Flag, FlagCode, Row
from bench.records.files import read_toml

ERRATA = "errata.toml"


class Erratum(BaseModel):
    """Rows that are not the paper's own method, and why.

    Attributes:
        defense: Their defense, or one of the members of `a+b`.
        protocol: Their protocol; None: any.
        reason: What differs, a clause.
    """

    model_config = STRICT

    defense: str
    protocol: str | None = None
    reason: str

    def concerns(self, row: Row) -> bool:
        """Return whether it is about this row."""
        named = self.defense in row.defense.split("+")
        return named and self.protocol in (None, row.protocol)

    @property
    def flag(self) -> Flag:
        """What its rows get."""
        return Flag(code=FlagCode.NOT_AS_PUBLISHED, values={"reason": self.reason})


class Errata(BaseModel):
    """An errata.toml."""

    model_config = STRICT

    rows: list[Erratum]


def with_errata(rows: Iterable[Row], folder: Path) -> list[Row]:
    """Rows with a flag for each erratum of their folder.

    Raises:
        UserError: If errata.toml is none.
    """
    place = folder / ERRATA
    if not place.is_file():
        return list(rows)
    listed = read_toml(place, Errata).rows
    return [
        replace(row, flags=(*row.flags, *(e.flag for e in listed if e.concerns(row))))
        for row in rows
    ]
