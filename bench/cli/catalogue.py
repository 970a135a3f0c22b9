"""`leakbench list`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.cli.options import AsJson, PluginFile, announce, console, open_table, plain_errors
from bench.errors import UserError

LISTS = ("defenses", "attacks", "datasets", "models", "suites")


def list_(
    what: Annotated[str | None, typer.Argument(help=", ".join(LISTS))] = None,
    as_json: AsJson = False,
    plugin: PluginFile = None,
) -> None:
    """List defenses, attacks, datasets, models and suites, broken plugins with their reason."""
    with plain_errors():
        from rich.text import Text

        from bench.names import did_you_mean

        if what is not None and what not in LISTS:
            raise UserError(did_you_mean("list", what, LISTS))
        files = tuple(p.resolve() for p in plugin or ())
        announce(plugin or ())
        chosen = {k: v for k, v in _listing(files).items() if what in (None, k)}
    if as_json:
        typer.echo(json.dumps(chosen, indent=1))
        return
    for name, entries in chosen.items():
        table = open_table(name, title_style="bold", show_header=False)
        for entry in entries:
            broken = Text.assemble(("broken: ", "red"), str(entry["broken"]))
            table.add_row(
                entry["name"], broken if entry["broken"] else entry["summary"], entry["settings"]
            )
        console.print(table)
        console.print()


def _listing(files: tuple[Path, ...]) -> dict[str, list[dict[str, Any]]]:
    import inspect

    from bench import data, models, suite
    from bench.extensions import installed, origin_of
    from bench.names import MODELS
    from bench.registry import discover

    registry = discover(files)

    def entry(name: str, summary: str, settings: str = "", **more: Any) -> dict[str, Any]:
        return {"name": name, "summary": summary, "settings": settings, "broken": None, **more}

    def describe(name: str, maker: Any, settings: str = "") -> dict[str, Any]:
        doc = inspect.getdoc(getattr(maker, "func", maker)) or ""
        return entry(name, doc.split("\n")[0], settings)

    def plugins_of(kind: Any) -> list[dict[str, Any]]:
        entries = []
        for plugin in [registry.usable[kind, name] for name in registry.names(kind)]:
            cls: Any = plugin.cls
            recovers = sorted(getattr(cls, "recovers", ()))
            more = {"source": cls.source, "recovers": recovers}
            entries.append(entry(plugin.name, plugin.summary, _settings(cls), **more))
        return entries + [
            entry(p.name, p.origin.split("\n")[0], broken=f"{p.origin}: {p.broken}")
            for p in registry.broken
            if p.kind == kind
        ]

    def foreign_entry(point: Any) -> dict[str, Any]:
        origin = origin_of(point)
        try:
            return describe(point.name, data.foreign_loader(point), origin)
        except UserError as error:
            return entry(point.name, origin) | {"broken": f"{origin}: {error}"}

    def place_of(loader: Any) -> str:
        accepted = inspect.signature(loader).parameters
        options = "--data-dir or --download" if "download" in accepted else "--data-dir"
        return options if "data_dir" in accepted else "embedded"

    datasets = [describe(name, loader, place_of(loader)) for name, loader in data.LOADERS.items()]
    datasets += [foreign_entry(point) for point in data.foreign().values()]
    return {
        "defenses": plugins_of("defense"),
        "attacks": plugins_of("attack"),
        "datasets": datasets
        + [describe(f"{n}:PATH", f, "your own") for n, f in data.PATH_LOADERS.items()],
        "models": [describe(n, f) for n, f in models.BUILDERS.items()]
        + [entry(n, origin_of(p)) for n, p in installed(MODELS).items()]
        + [entry(n, text) for n, text in models.OWN.items()],
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
