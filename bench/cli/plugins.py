"""`leakbench list`, `new`, `check` and `submit`: from an idea to a row that others can rerun."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bench.cli import options
from bench.errors import UserError
from bench.names import MODELS, check_known

if TYPE_CHECKING:
    from bench.registry import Registry
    from bench.sandbox.findings import Conformance

LISTS = ("defenses", "attacks", "datasets", "models", "suites")


def list_(
    what: Annotated[str | None, typer.Argument(help=", ".join(LISTS))] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="With the settings of each.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Of suites: print the JSON schema, for editors.")
    ] = False,
    as_json: options.AsJson = False,
    plugin: options.PluginFile = None,
) -> None:
    """List defenses, attacks, datasets, models and suites, broken plugins with their reason."""
    with options.plain_errors():
        if schema:
            from bench.suite import Suite

            if what != "suites":
                raise UserError("--schema is that of suite files: leakbench list suites --schema.")
            options.print_json(Suite.model_json_schema())
            return
        if what is not None:
            check_known("list", what, LISTS)
        listed = _listing(options.registry_of(plugin))
        chosen = {name: entries for name, entries in listed.items() if what in (None, name)}
    if as_json:
        options.print_json(chosen)
        return
    for name, entries in chosen.items():
        lines, brief = [], name in ("defenses", "attacks", "suites") and not settings
        for entry in entries:
            broken = Text.assemble(("broken: ", "red"), str(entry["broken"]))
            whole = Text(entry["summary"], no_wrap=brief, overflow="ellipsis")
            own = () if brief else (entry["settings"],)
            lines.append((entry["name"], broken if entry["broken"] else whole, *own))
        heads = ("", "") if brief else ("", "", "")
        options.print_table(heads, lines, title=name, title_style="bold", show_header=False)
        options.console.print()


def _listing(registry: Registry) -> dict[str, list[dict[str, Any]]]:
    from dataclasses import asdict

    from bench import data, models, suite
    from bench.extensions import BrokenImport, list_installed, origin_of
    from bench.report.papers import publication_of

    def entry(name: str, summary: str, settings: str = "", **more: Any) -> dict[str, Any]:
        return {"name": name, "summary": summary, "settings": settings, "broken": None, **more}

    def summary_of(maker: Any) -> str:
        return (inspect.getdoc(getattr(maker, "func", maker)) or "").split("\n")[0]

    def cited(maker: Any, name: str, *about: str, **more: Any) -> dict[str, Any]:
        paper = publication_of(maker, name)
        return entry(name, *about, **more, paper=None if paper is None else asdict(paper))

    def plugins_of(kind: Any) -> list[dict[str, Any]]:
        usable = ((name, registry.usable[kind, name]) for name in registry.names(kind))
        entries = [
            cited(p.cls, name, p.summary, _settings(p.cls), source=getattr(p.cls, "source", ""))
            for name, p in usable
        ]
        return entries + [
            entry(p.name, p.origin.split("\n")[0], broken=f"{p.origin}: {p.broken}")
            for p in registry.broken
            if p.kind == kind
        ]

    def foreign_entry(point: Any) -> dict[str, Any]:
        origin = origin_of(point)
        try:
            loader = data.foreign_loader(point)
            return cited(loader, point.name, summary_of(loader), origin)
        except BrokenImport as error:
            return entry(point.name, origin, broken=f"{origin}: {error}")

    def place_of(loader: Any) -> str:
        accepted = inspect.signature(loader).parameters
        options = "--data-dir or --download" if "download" in accepted else "--data-dir"
        return options if "data_dir" in accepted else "embedded"

    datasets = [cited(f, n, summary_of(f), place_of(f)) for n, f in data.LOADERS.items()]
    datasets += [foreign_entry(point) for point in data.foreign().values()]
    return {
        "defenses": plugins_of("defense"),
        "attacks": plugins_of("attack"),
        "datasets": datasets
        + [entry(f"{n}:PATH", summary_of(f), "your own") for n, f in data.PATH_LOADERS.items()],
        "models": [entry(n, summary_of(f)) for n, f in models.BUILDERS.items()]
        + [entry(n, origin_of(p)) for n, p in list_installed(MODELS).items()]
        + [entry(n, text) for n, text in models.OWN.items()],
        "suites": [entry(n, suite.read_suite(n).description) for n in suite.list_shipped()],
    }


def _settings(cls: Any) -> str:
    """The settings of a plugin's constructor, as name or name=default."""
    own = [p for p in inspect.signature(cls).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in own)


_STYLES = {"passed": "green", "failed": "bold red", "skipped": "dim"}


def new(
    kind: Annotated[str, typer.Argument(help="defense or attack.")],
    name: Annotated[str, typer.Argument(help="Its name, in snake_case.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where to write.")] = Path(),
) -> None:
    """Write a small working defense or attack, and its test, to start from."""
    with options.plain_errors():
        from bench.submission.authoring import next_commands, write_new

        plugin, test = write_new(kind, name, folder)
    lines = [*(f"Written: {p}" for p in (plugin, test)), "Next:"]
    options.say("\n".join([*lines, *(f"    {c}" for c in next_commands(kind, plugin, test))]))


def check(
    target: Annotated[str, typer.Argument(help="A name, FILE.py, or a model FILE.py:Net.")],
    set_: options.DefenseSet = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Leave out what takes longest, while you write it.")
    ] = False,
    dataset: Annotated[str | None, typer.Option(help="On whose samples a model is tried.")] = None,
    timeout: Annotated[
        float, typer.Option(help="Most seconds for the check of one plugin.")
    ] = 600.0,
    as_json: options.AsJson = False,
) -> None:
    """Play a defense or attack in tiny rounds, or try a model, and say where it breaks.

    The plugin runs in a process of its own, in an empty temporary folder.
    """
    with options.plain_errors():
        from bench.sandbox.conformance.process import check_in_process

        conformances = []
        settings = options.pairs_of(set_, "--set")
        options.announce(options.file_in(target))
        for conformance in check_in_process(
            target, settings, fast=fast, dataset=dataset, timeout_s=timeout
        ):
            conformances.append(conformance)
            if not as_json:
                _show(conformance)
        if as_json:
            options.print_json([c.to_dict() for c in conformances])
    if not all(c.passed for c in conformances):
        raise typer.Exit(1)


def _show(conformance: Conformance) -> None:
    given = ", ".join(f"{k}={v}" for k, v in conformance.settings.items())
    title = f"{conformance.kind} {conformance.name}{' ' if given else ''}{given}"
    lines = []
    for finding in conformance.findings:
        text = Text(finding.reason)
        if finding.status == "failed":
            text.append(f"\n-> {finding.change}", style="bold")
            if finding.hook:
                text.append(f" (hook {finding.hook})", style="dim")
        status = Text(finding.status, style=_STYLES[finding.status])
        lines.append((status, finding.name, text))
    options.print_table(("", "check", "what was found"), lines, title=title)
    counts = {s: sum(f.status == s for f in conformance.findings) for s in _STYLES}
    options.console.print(
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped in "
        f"{conformance.seconds:.0f} s.\n"
    )


def submit(
    target: Annotated[str, typer.Argument(help="A plugin's name, or FILE.py.")],
    run: Annotated[Path, typer.Option(help="The result folder with its rows.")],
    attack: Annotated[
        list[Path] | None, typer.Option(help="FILE.py of your own attack in that run.")
    ] = None,
    author: Annotated[str, typer.Option(help="Who submits.")] = "anonymous",
    out: Path = Path("results/submissions"),
    data_dir: options.DataDir = None,
    replace: Annotated[bool, typer.Option("--replace", help="Write it anew.")] = False,
) -> None:
    """Pack a plugin's source, rows and records into a folder that others can verify."""
    with options.plain_errors():
        from bench.submission import packing
        from bench.submission.documents import marks_of

        options.announce([*options.file_in(target), *(attack or ())])
        folder = packing.submit(
            target,
            run,
            attacks=tuple(attack or ()),
            author=author,
            out=out,
            data_dir=data_dir.resolve() if data_dir else None,
            replaces=replace,
            tell=options.say,
        )
        options.say(f"Written: {folder}")
        for mark in marks_of(folder):
            options.say(f"Mark: {mark}", style="yellow")
        options.say(f"Next: leakbench verify {folder}")
