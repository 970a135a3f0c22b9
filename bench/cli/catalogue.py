"""`leakbench list`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.cli.options import AsJson, PluginFile, console, plain_errors
from bench.errors import UserError

LISTS = ("defenses", "attacks", "datasets", "models", "suites")


def list_(
    what: Annotated[str | None, typer.Argument(help=", ".join(LISTS))] = None,
    as_json: AsJson = False,
    plugin: PluginFile = None,
) -> None:
    """List defenses, attacks, datasets, models and suites, broken plugins with their reason."""
    with plain_errors():
        from bench.names import did_you_mean

        if what is not None and what not in LISTS:
            raise UserError(did_you_mean("list", what, LISTS))
        listing = _listing(tuple(p.resolve() for p in plugin or ()))
        chosen = {k: v for k, v in listing.items() if what in (None, k)}
    if as_json:
        typer.echo(json.dumps(chosen, indent=1))
        return
    from rich.table import Table

    for name, entries in chosen.items():
        table = Table(
            title=name,
            title_justify="left",
            title_style="bold",
            show_header=False,
            box=None,
            pad_edge=False,
        )
        for entry in entries:
            note = entry["summary"]
            if entry["broken"]:
                note = f"[red]broken:[/red] {entry['broken']}"
            table.add_row(entry["name"], note, entry["settings"])
        console.print(table)
        console.print()


def _listing(files: tuple[Path, ...]) -> dict[str, list[dict[str, Any]]]:
    import inspect

    from bench import data, models, suite
    from bench.registry import discover

    registry = discover(files)

    def entry(
        name: str, what: Any, settings: Any = None, broken: str | None = None
    ) -> dict[str, Any]:
        doc = what if isinstance(what, str) else inspect.getdoc(getattr(what, "func", what))
        return {
            "name": name,
            "summary": (doc or "").strip().split("\n")[0],
            "settings": settings or "",
            "broken": broken,
        }

    def of_kind(kind: Any) -> list[dict[str, Any]]:
        classes: dict[str, Any] = {n: registry.usable[kind, n].cls for n in registry.names(kind)}
        good = [
            entry(n, c, _settings(c))
            | {"source": c.source, "recovers": sorted(getattr(c, "recovers", ()))}
            for n, c in classes.items()
        ]
        bad = [
            entry(p.name, p.origin, broken=f"{p.origin}: {p.broken}")
            for p in registry.broken
            if p.kind == kind
        ]
        return good + bad

    embedded = [
        entry(n, f, "embedded" if n in data.NO_DOWNLOAD else "--data-dir or --download")
        for n, f in data.LOADERS.items()
    ]
    paths = [entry(f"{n}:PATH", f, "your own") for n, f in data.PATH_LOADERS.items()]
    return {
        "defenses": of_kind("defense"),
        "attacks": of_kind("attack"),
        "datasets": embedded + paths,
        "models": [entry(n, f) for n, f in models.BUILDERS.items()],
        "suites": [entry(n, suite.read_suite(n).description) for n in suite.shipped()],
    }


def _settings(cls: Any) -> str:
    """The settings of a plugin's constructor, as name or name=default."""
    import inspect

    parameters = inspect.signature(cls).parameters.values()
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    )
