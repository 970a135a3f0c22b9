"""Pages of a site about one defense, attack or data set of a result folder: how it works, and its
rows with their curves, pictures, claims, proofs and audits."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import quote

from bench import data
from bench.errors import UserError
from bench.records import Marks, Row
from bench.registry import Registry
from bench.report.tables import tables
from bench.report.verdicts import UNDEFENDED

SubjectKind = Literal["defense", "attack", "data"]
KINDS: Mapping[SubjectKind, str] = {"defense": "Defenses", "attack": "Attacks", "data": "Data"}
_LEADS: Mapping[SubjectKind, str] = {
    "defense": "Below: all tables that it is in, each with the undefended row. Press a row for "
    "what its epsilon means, its proof and its audit.",
    "attack": "Below: all tables that it is in, with its own figures beside what needs no leak; "
    "marks are of all attacks together, and stand in the whole report.",
    "data": "Below: all tables on it.",
}
_UNSAFE = re.compile(r"[^\w.+@-]")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What one page is about.

    Attributes:
        kind: What it is.
        name: As rows have it.
        file: The page's path below the folder's report.
        told: How it works, in paragraphs; empty where it is not installed here.
        settings: What its settings mean, as its docstring has them, or nothing.
        source: Paper and place in it, or nothing.
    """

    kind: SubjectKind
    name: str
    file: str
    told: tuple[str, ...] = ()
    settings: str = ""
    source: str = ""

    @property
    def address(self) -> str:
        """The page's path in a link."""
        return quote(self.file, safe="/+@")

    @property
    def lead(self) -> str:
        """What the page shows."""
        return _LEADS[self.kind]

    @property
    def overall(self) -> bool:
        """Whether verdicts over all attacks are about it: on an attack's page they are not."""
        return self.kind != "attack"

    def rows_of(self, rows: Sequence[Row]) -> list[Row]:
        """Its rows: of a defense with the undefended rows of the same tables, of an attack with its
        own figures and those that need no leak."""
        if self.kind == "data":
            return [r for r in rows if r.dataset == self.name]
        if self.kind == "defense":
            wanted = (self.name, UNDEFENDED)
            return [
                row
                for _, members in tables(rows)
                if any(m.defense == self.name for m in members)
                for row in members
                if row.defense in wanted
            ]
        return [
            replace(
                r,
                attacks={n: a for n, a in r.attacks.items() if a.is_floor or self._is(n)},
                worst=None,  # of all attacks, as the next three
                choice=None,
                leaks=None,
                marks=Marks(),
            )
            for r in rows
            if any(map(self._is, r.attacks))
        ]

    def _is(self, column: str) -> bool:
        """Whether a column, such as `dlg@run`, is this attack's."""
        return _attack_of(column) == self.name


def _attack_of(column: str) -> str:
    """See `bench.records.run.labels`."""
    return column.partition("@")[0]


def subjects(rows: Sequence[Row], registry: Registry) -> dict[SubjectKind, list[Subject]]:
    """Of each kind those that the rows name, by name. Undefended rows are on every page."""
    floors = {n for r in rows for n, a in r.attacks.items() if a.is_floor}
    names: dict[SubjectKind, set[str]] = {
        "defense": {r.defense for r in rows} - {UNDEFENDED},
        "attack": {_attack_of(n) for r in rows for n in r.attacks if n not in floors},
        "data": {r.dataset for r in rows},
    }
    return {kind: list(_named(kind, sorted(found), registry)) for kind, found in names.items()}


def _named(kind: SubjectKind, names: Sequence[str], registry: Registry) -> Iterator[Subject]:
    for number, name in enumerate(names):
        safe = _UNSAFE.sub("_", name)
        # Two data sets of a folder's path may come to the same file.
        mark = f"-{number}" if safe != name else ""
        made = _maker(kind, name, registry)
        told, settings = _parts(made)
        source = str(getattr(made, "source", "") or "")
        yield Subject(
            kind=kind, name=name, file=f"{kind}/{safe}{mark}.html", told=told, settings=settings,
            source=source,
        )  # fmt: skip


def _maker(kind: SubjectKind, name: str, registry: Registry) -> Any:
    """The class or loader of that name, None where it is not installed or one of several."""
    if kind == "data":
        return data.LOADERS.get(name)
    try:
        return registry.get(kind, name).cls
    except UserError:
        return None


def _parts(made: Any) -> tuple[tuple[str, ...], str]:
    """A docstring's paragraphs and, of the module before them, its own; and what its settings
    are."""
    if made is None:
        return (), ""
    text, _, rest = (inspect.getdoc(made) or "").partition("\nArgs:\n")
    settings = inspect.cleandoc(re.split(r"\n\S", rest, maxsplit=1)[0]) if rest else ""
    texts = [text]
    if inspect.isclass(made):
        texts.append(inspect.getdoc(inspect.getmodule(made)) or "")
    paragraphs = [" ".join(p.split()) for t in texts for p in t.split("\n\n") if p.strip()]
    return tuple(paragraphs), settings
