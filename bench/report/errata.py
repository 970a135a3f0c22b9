"""Rows of a published folder that are known to be wrong, as its errata.toml lists them."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from bench.protocols.settings import STRICT
from bench.records import Flag, FlagCode, Row
from bench.records.files import read_toml

ERRATA = "errata.toml"


class Erratum(BaseModel):
    """Rows that are not the paper's own method, or attacked too weakly, and why.

    Attributes:
        defense: Their defense, or one of the members of `a+b`.
        protocol: Their protocol; None: any.
        model: Their model; None: any.
        checkpoint: Their checkpoint, `training` for recorded rounds; None: any.
        code: What is wrong.
        reason: What differs, or what more can be read, a clause.
    """

    model_config = STRICT

    defense: str
    protocol: str | None = None
    model: str | None = None
    checkpoint: str | None = None
    code: Literal["not_as_published", "weak_attack"] = "not_as_published"
    reason: str

    def concerns(self, row: Row) -> bool:
        """Return whether it is about this row."""
        named = self.defense in row.defense.split("+")
        where = ("protocol", "model", "checkpoint")
        return named and all(getattr(self, n) in (None, getattr(row, n)) for n in where)

    @property
    def flag(self) -> Flag:
        """What its rows get."""
        return Flag(code=FlagCode(self.code), values={"reason": self.reason})


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
