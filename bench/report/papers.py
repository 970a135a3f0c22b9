"""The papers behind defenses, attacks and data sets: a `papers.toml` beside the module of each."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

import bench
from bench import data
from bench.extensions import BrokenImport
from bench.names import DATASETS, GROUPS, PluginKind
from bench.records import Row, Run
from bench.records.files import read_toml
from bench.registry import discover, snake_case
from bench.report.escaping import latex

PAPERS = "papers.toml"
Status = Literal["as published", "differs from the paper", "baseline", "deployed", "known to fail"]
"""How an implementation stands to its paper; defenses/papers.toml says when each holds."""


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What a papers.toml says of one plugin or data set; empty where unknown.

    Attributes:
        short: The name that readers know, as Soteria.
        authors: With ` and ` between them, as BibTeX has it; `and others` for the rest.
        venue: Conference or journal, or arXiv.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    short: str
    title: str = ""
    authors: str = ""
    venue: str = ""
    year: int | None = None
    arxiv: str = ""
    doi: str = ""
    url: str = ""
    status: Status | None = None

    @property
    def link(self) -> str:
        """Address of the paper, empty if unknown."""
        arxiv = f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else ""
        return self.url or arxiv or (f"https://doi.org/{self.doi}" if self.doi else "")

    @property
    def bibtex(self) -> str:
        """Its BibTeX entry."""
        first = self.authors.split(" and ")[0]
        surname = first.split(",")[0] if "," in first else first.split(" ")[-1]
        word = next(iter(re.findall(r"[^\W_]+", self.title)), "")
        key = re.sub(r"[^a-z0-9]", "", f"{surname}{self.year or ''}{word}".lower())
        arxiv = self.venue == "arXiv"
        return _entry(
            "misc", key, author=latex(self.authors), title=f"{{{latex(self.title)}}}",
            howpublished="" if arxiv else latex(self.venue), year=str(self.year or ""),
            eprint=self.arxiv, archiveprefix="arXiv" * bool(self.arxiv), doi=self.doi, url=self.url,
        )  # fmt: skip


def publication_of(cls: Callable[..., Any], name: str | None = None) -> Publication | None:
    """Return what the papers.toml beside a plugin's or loader's module says of it, None if nothing.

    Args:
        cls: Class of a defense or attack, or a function that loads a data set.
        name: By default that of its entry point, or of a class in a single file.

    Raises:
        UserError: If papers.toml is no file of publications.
    """
    cls = getattr(cls, "func", cls)
    if name is None:
        value = f"{cls.__module__}:{cls.__qualname__}"
        points = [p for group in (*GROUPS.values(), DATASETS) for p in entry_points(group=group)]
        name = next((p.name for p in points if p.value == value), snake_case(cls.__name__))
    place = Path(inspect.getfile(cls)).parent / PAPERS
    return read_papers(place).get(name) if place.is_file() else None


def read_papers(place: Path) -> dict[str, Publication]:
    """Return the publications of a papers.toml by name. Raises UserError if it is none."""
    return _parse(place, place.stat().st_mtime_ns)


@cache  # a page asks for every defense of the same file
def _parse(place: Path, changed: int) -> dict[str, Publication]:
    return read_toml(place, dict[str, Publication])


def papers_of(kind: PluginKind, names: Iterable[str]) -> dict[str, Publication]:
    """Return what is known of the installed plugins of some names.

    Raises:
        UserError: As `publication_of`.
    """
    wanted = list(dict.fromkeys(names))
    usable = discover(needed=[(kind, name) for name in wanted]).usable
    return _papers_by_name({n: usable[kind, n].cls for n in wanted if (kind, n) in usable})


def _papers_by_name(makers: Mapping[str, Any]) -> dict[str, Publication]:
    papers = {n: publication_of(maker, n) for n, maker in makers.items() if maker}
    return {name: paper for name, paper in papers.items() if paper}


def publications(rows: Sequence[Row]) -> list[Publication]:
    """Return the papers of the installed defenses, attacks and data sets in some rows, each once.

    Raises:
        UserError: As `publication_of`.
    """
    defenses = papers_of("defense", (n for r in rows for n in r.defense.split("+")))
    attacks = papers_of("attack", (n.partition("@")[0] for r in rows for n in r.attacks))
    data_sets = _papers_by_name({row.dataset: _loader(row.dataset) for row in rows})
    papers = [*defenses.values(), *attacks.values(), *data_sets.values()]
    return list({p.title: p for p in papers if p.title}.values())


def to_bibtex(rows: Sequence[Row], run: Run) -> str:
    """Return BibTeX of leakbench, with the run's suite, and of its rows' `publications`."""
    seeds = ", ".join(map(str, run.seeds))
    title = "what privacy defenses for federated and split learning protect, and what they cost"
    note = latex(f"suite {run.title}, {run.device or 'unknown device'}, seeds {seeds}")
    own = _entry(
        "software", "leakbench", author="{The leakbench developers}",
        title=f"{{leakbench: {title}}}", version=bench.__version__, note=note,
    )  # fmt: skip
    return "\n".join([own, *(p.bibtex for p in publications(rows))])


def _loader(name: str) -> Callable[..., Any] | None:
    if name in data.LOADERS or name not in (points := data.foreign()):
        return data.LOADERS.get(name)
    try:
        return data.foreign_loader(points[name])
    except BrokenImport:
        return None


def _entry(kind: str, key: str, **fields: str) -> str:
    lines = [f"  {name} = {{{value}}},\n" for name, value in fields.items() if value]
    return f"@{kind}{{{key},\n{''.join(lines)}}}\n"
