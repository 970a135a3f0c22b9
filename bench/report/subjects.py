"""Pages of a site about one defense, attack or data set: how it works, and its rows of all
reports."""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench import data
from bench.errors import UserError
from bench.records import Row
from bench.registry import Registry
from bench.report.papers import Publication, publication_of
from bench.report.verdicts import UNDEFENDED

SubjectKind = Literal["defense", "attack", "data"]
_UNSAFE = re.compile(r"[^\w.+@-]")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What one page is about.

    Attributes:
        kind: What it is.
        name: As rows have it.
        file: The page's path on the site.
        paragraphs: How it works, in paragraphs; empty where it is not installed here.
        settings: What its settings mean, as its docstring has them, or nothing.
        source: Paper and place in it, or nothing.
        paper: As its papers.toml has it.
    """

    kind: SubjectKind
    name: str
    file: str
    paragraphs: tuple[str, ...] = ()
    settings: str = ""
    source: str = ""
    paper: Publication | None = None

    def rows_of(self, table: Sequence[Row]) -> list[Row]:
        """Return its rows of a table: of a defense or attack with the undefended row, of data
        all."""
        if self.kind == "data":
            return [r for r in table if r.dataset == self.name]
        if self.kind == "attack":
            ran = (r for r in table if any(map(self.is_column, r.attacks)))
            return [
                r
                for r in ran
                if r.defense == UNDEFENDED or (r.ranking and self.is_column(r.ranking.attack))
            ]
        own = any(r.defense == self.name for r in table)
        return [r for r in table if own and r.defense in (self.name, UNDEFENDED)]

    def is_column(self, column: str) -> bool:
        """Return whether a column, such as `dlg@run`, is this attack's."""
        return self.kind == "attack" and column.partition("@")[0] == self.name


def subjects(rows: Sequence[Row], registry: Registry) -> dict[SubjectKind, list[Subject]]:
    """Return the subjects that the rows name, by kind and name. Undefended rows are on every
    page."""
    floors = {n for r in rows for n, a in r.attacks.items() if a.is_floor}
    names: dict[SubjectKind, set[str]] = {
        "defense": {r.defense for r in rows} - {UNDEFENDED},
        "attack": {n.partition("@")[0] for r in rows for n in r.attacks if n not in floors},
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
            paper=publication_of(plugin, name) if plugin else None,
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
