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
        paragraphs: How it works, in paragraphs; empty where it is not installed here.
        settings: What its settings mean, as its docstring has them, or nothing.
        source: Paper and place in it, or nothing.
    """

    kind: SubjectKind
    name: str
    file: str
    paragraphs: tuple[str, ...] = ()
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
            names = (self.name, UNDEFENDED)
            every = (members for _, members in tables(rows))
            own = (table for table in every if any(r.defense == self.name for r in table))
            return [r for table in own for r in table if r.defense in names]
        return [
            replace(
                r,
                attacks={n: a for n, a in r.attacks.items() if a.is_floor or self._is_column(n)},
                worst=None,  # of all attacks, as the next three
                choice=None,
                leaks=None,
                marks=Marks(),
            )
            for r in rows
            if any(map(self._is_column, r.attacks))
        ]

    def _is_column(self, column: str) -> bool:
        """Return whether a column, such as `dlg@run`, is this attack's."""
        return _attack_of(column) == self.name


def _attack_of(column: str) -> str:
    """See `bench.records.run.labels`."""
    return column.partition("@")[0]


def subjects(rows: Sequence[Row], registry: Registry) -> dict[SubjectKind, list[Subject]]:
    """Return the subjects that the rows name, by kind and name. Undefended rows are on every
    page."""
    floors = {n for r in rows for n, a in r.attacks.items() if a.is_floor}
    names: dict[SubjectKind, set[str]] = {
        "defense": {r.defense for r in rows} - {UNDEFENDED},
        "attack": {_attack_of(n) for r in rows for n in r.attacks if n not in floors},
        "data": {r.dataset for r in rows},
    }
    return {kind: [*_subjects(kind, sorted(n), registry)] for kind, n in names.items()}


def _subjects(kind: SubjectKind, names: Sequence[str], registry: Registry) -> Iterator[Subject]:
    for number, name in enumerate(names):
        safe = _UNSAFE.sub("_", name)
        # Two data sets of a folder's path may come to the same file.
        mark = f"-{number}" if safe != name else ""
        plugin = _maker(kind, name, registry)
        about, settings = _parts(plugin)
        source = str(getattr(plugin, "source", "") or "")
        yield Subject(
            kind=kind, name=name, file=f"{kind}/{safe}{mark}.html", paragraphs=about,
            settings=settings, source=source,
        )  # fmt: skip


def _maker(kind: SubjectKind, name: str, registry: Registry) -> Any:
    """The class or loader of that name, None where it is not installed or one of several."""
    if kind == "data":
        return data.LOADERS.get(name)
    try:
        return registry.get(kind, name).cls
    except UserError:
        return None


def _parts(plugin: Any) -> tuple[tuple[str, ...], str]:
    """Return the paragraphs of a docstring and of its module's docstring, and its settings."""
    if plugin is None:
        return (), ""
    text, _, arguments = (inspect.getdoc(plugin) or "").partition("\nArgs:\n")
    settings = inspect.cleandoc(re.split(r"\n\S", arguments, maxsplit=1)[0]) if arguments else ""
    texts = [text]
    if inspect.isclass(plugin):
        texts.append(inspect.getdoc(inspect.getmodule(plugin)) or "")
    paragraphs = [" ".join(p.split()) for t in texts for p in t.split("\n\n") if p.strip()]
    return tuple(paragraphs), settings
