"""Parts of the site that are made from the code at every build, so that they are never outdated.

A page asks for one by a fenced block: its first word says what, the rest of that line on which
subject, and its lines hold what only a person can say (ranges and meanings). A setting, key or
fact that has no line, or a line that belongs to none, ends the build.

    settings NAME ...    table of a plugin's constructor; lines `name | range | meaning`
    keys MODEL           table of a suite's table; lines `name | meaning`
    facts                what `leakbench ledger --facts` takes; lines `name | meaning`
    flags                letters of the terminal's last column; lines `letter | meaning`
    ledger               the command in its line (leakbench ledger, or python docs/formulas.py), run
                         while the site is built, with what it printed
    results SUITE NAME.. rows of a reference run's last round, beside the undefended one
    scores SUITE         columns of its tables, one in each line, of all its rows
    tasks SUITE          the same of each table's first row, all in one table
    overview SUITE NAME  its overview: leaks of defenses by tables, shaded, and what they cost; or
                         only the named ones beside the undefended one, without its legend
    advice SUITE PROTOCOL NAME ..
                         what each table of its last round under a protocol says to use, of all
                         defenses or of the named ones
    strips SUITE PLACE   lines `defense | caption` (or `truth`): images by docs/reconstructions.py
                         and its leakage in that table of the overview under the first protocol
    board SUITE PLACE .. one of its tables as the terminal shows it, or only the named defenses
    printed PAPER TABLE  a table of a paper beside what its reference run measured
    published            attacks' published figures beside ours, of all files in results/published
    commands             every command with its arguments and options
    catalogue KIND       what `leakbench list KIND` says
    others KIND          sections, from their docstrings, of plugins that no page has settings of
    formulas             lines `what | LaTeX or "words" | equation of the paper`, as MathML
    checksums            of the files of data sets: what their loaders compare, what is installed,
                         and lines `digest  file` of the rest
    cuts                 stages after which each network may be cut
    hooks                every hook of a defense, when it is called and how those of a+b chain
"""

from __future__ import annotations

import html
import importlib
import inspect
import io
import json
import re
import shlex
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)([^\n`]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """mkdocs: replaces the blocks above in one page's text."""
    from mkdocs.exceptions import PluginError

    try:
        return rendered(markdown)
    except ValueError as error:
        raise PluginError(f"{page.file.src_path}: {error}") from error


def rendered(markdown: str) -> str:
    """The text with every made block in its place. Raises ValueError for one that does not fit."""

    def replace(match: re.Match[str]) -> str:
        maker = MAKERS.get(match[1])
        return match[0] if maker is None else maker(match[2].split(), match[3])

    return BLOCK.sub(replace, markdown)


# --- settings of plugins --------------------------------------------------------------------------


@cache
def registry() -> Any:
    from bench.registry import discover

    return discover()


def plugin_class(name: str) -> type:
    """Class of a defense or an attack. Raises ValueError if there is none."""
    for kind in ("defense", "attack"):
        if (kind, name) in registry().usable:
            cls: type = registry().usable[kind, name].cls
            return cls
    raise ValueError(f"no defense or attack is named '{name}'.")


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    """A constructor's settings by name, annotations as types, without limits."""
    parameters = inspect.signature(cls, eval_str=True).parameters.values()
    return {
        p.name: p.replace(annotation=p.annotation.__origin__)
        if typing.get_origin(p.annotation) is typing.Annotated
        else p
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }


def settings(names: Sequence[str], body: str) -> str:
    known = [parameters(plugin_class(n)) for n in names]
    if any(k != known[0] for k in known):
        raise ValueError(f"{', '.join(names)} do not have the same settings.")
    lines = described(f"settings of {names[0]}", body, list(known[0]), columns=2)
    if not lines:
        return f"`{'`, `'.join(names)}` has no settings.\n"
    rows = []
    for name, parameter in known[0].items():
        given, meaning = lines[name]
        choices = allowed(parameter.annotation)
        if bool(choices) == bool(given):
            raise ValueError(f"{names[0]}.{name} needs a range, or is a choice, which has its own.")
        kind = kind_of(parameter.annotation)
        rows.append([f"`{name}`", kind, given or choices, default_of(parameter), meaning])
    return table(["setting", "type", "range", "default", "meaning"], rows)


def described(what: str, body: str, names: Sequence[str], *, columns: int) -> dict[str, list[str]]:
    """Lines `name | ... | meaning` by name. Raises ValueError unless they are just `names`."""
    meanings: dict[str, list[str]] = {}
    for line in filter(str.strip, body.splitlines()):
        parts = re.split(r"(?<!\\)\|", line)
        name, *rest = (part.strip().replace("\\|", "|") for part in parts)
        if len(rest) != columns or name in meanings:
            raise ValueError(f"{what}: cannot read the line '{line.strip()}'.")
        meanings[name] = rest
    for name in names:
        if name not in meanings:
            raise ValueError(f"{what}: '{name}' is not described.")
    for name in meanings:
        if name not in names:
            raise ValueError(f"{what}: there is no '{name}'.")
    return meanings


def allowed(annotation: Any) -> str:
    """Values of a choice, or of a yes/no; empty for numbers and free text."""
    if typing.get_origin(annotation) is Literal:
        return ", ".join(f"`{v}`" for v in typing.get_args(annotation))
    members = [allowed(a) for a in union(annotation)]
    chosen = [m for m in members if m]
    if chosen and len(chosen) == len(members):
        return ", ".join(chosen)
    return "`true`, `false`" if annotation is bool else ""


def union(annotation: Any) -> list[Any]:
    """Members of `A | B | None` without None; nothing for any other type."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [a for a in typing.get_args(annotation) if a is not types.NoneType]
    return []


def kind_of(annotation: Any) -> str:
    names = {int: "whole number", float: "number", bool: "yes or no", str: "text", dict: "table"}
    if members := union(annotation):
        return " or ".join(dict.fromkeys(kind_of(a) for a in members))
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return "choice"
    if origin is list:
        return f"list of {kind_of(typing.get_args(annotation)[0])}"
    if origin is dict:
        return "table"
    return names.get(annotation, f"[[{getattr(annotation, '__name__', annotation)}]]")


def default_of(parameter: inspect.Parameter) -> str:
    return "required" if parameter.default is parameter.empty else shown(parameter.default)


def shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_escaped(c) for c in line)} |" for line in lines) + "\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


# --- suites and facts -----------------------------------------------------------------------------


def suite_model(name: str) -> Any:
    """A pydantic model of a suite's file by its class's name."""
    from bench import suite
    from bench.protocols import settings as protocol

    for module in (suite, protocol):
        model = getattr(module, name, None)
        if model is not None and hasattr(model, "model_fields"):
            return model
    raise ValueError(f"no table of a suite is named '{name}'.")


def keys(names: Sequence[str], body: str) -> str:
    (name,) = names
    model = suite_model(name)
    lines = described(f"keys of {name}", body, list(model.model_fields), columns=1)
    rows = []
    for key, field in model.model_fields.items():
        default = shown(field.get_default(call_default_factory=True))
        default = "required" if field.is_required() else default
        limits = ", ".join(filter(None, map(_limit, field.metadata)))
        values = allowed(field.annotation) or limits or "any"
        rows.append([f"`{key}`", kind_of(field.annotation), values, default, lines[key][0]])
    return table(["key", "type", "range", "default", "meaning"], rows)


def _limit(constraint: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "at least"}
    for name, sign in signs.items():
        if hasattr(constraint, name):
            entries = " entries" if name == "min_length" else ""
            return f"{sign} {getattr(constraint, name)}{entries}"
    return ""


def facts(_: Sequence[str], body: str) -> str:
    from bench.contract.events import Facts

    lines = described("facts", body, [f.name for f in fields(Facts)], columns=1)
    rows = []
    for field in fields(Facts):
        default = "required" if field.default is MISSING else shown(field.default)
        rows.append([f"`{field.name}`", default, lines[field.name][0]])
    return table(["fact", "default", "meaning"], rows)


def flags(_: Sequence[str], body: str) -> str:
    from bench.report.explain import LETTERS

    lines = described("flags", body, list(LETTERS), columns=1)
    return table(
        ["flag", "in short", "meaning"],
        [[f"**{c}**", text, lines[c][0]] for c, text in LETTERS.items()],
    )


# --- what commands print --------------------------------------------------------------------------


def ledger(_: Sequence[str], body: str) -> str:
    from typer.testing import CliRunner

    from bench.cli import app

    command = body.strip()
    name, *arguments = shlex.split(command)
    if [name, *arguments[:1]] == ["python", "docs/formulas.py"]:
        return f"```sh\n{command}\n```\n\n{code(beside('formulas').main(arguments[1:]))}"
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    if name != "leakbench" or done.exit_code:
        raise ValueError(f"'{command}' ended with {done.exit_code}: {done.output.strip()}")
    return f"```sh\n{command}\n```\n\n{code(done.stdout)}"


def code(text: str, classes: str = "") -> str:
    """A block of plain text that scrolls, as Markdown."""
    fence = f"```text\n{text.rstrip()}\n```\n"
    return f'<div class="{classes}" markdown>\n\n{fence}\n</div>\n' if classes else fence


def catalogue(names: Sequence[str], _: str) -> str:
    from typer.testing import CliRunner

    from bench.cli import app

    (kind,) = names
    entries = json.loads(CliRunner().invoke(app, ["list", kind, "--json"]).stdout)[kind]
    header = ["name", "what"] + (["source"] if kind in ("defenses", "attacks") else [])
    rows = []
    for entry in entries:
        if entry["broken"]:
            raise ValueError(f"{entry['name']} is broken: {entry['broken']}")
        where = page_of(entry["name"]) if kind in ("defenses", "attacks") else None
        name = f"[{entry['name']}]({where})" if where else f"`{entry['name']}`"
        line = [name, marked(entry["summary"])]
        if kind == "datasets":
            line[1] += f" ({entry['settings']})"
        rows.append(line + ([entry["source"]] if "source" in entry else []))
    return table(header, rows)


def marked(text: str) -> str:
    """Plain text as Markdown: formulas keep their stars and underlines."""
    return re.sub(r"([\\*_<\[\]])", r"\\\1", text)


def others(kinds: Sequence[str], _: str) -> str:
    (kind,) = kinds
    parts = []
    for plugin in (n for n in registry().names(kind.removesuffix("s")) if without_page(n)):
        cls = plugin_class(plugin)
        defaults = [
            [f"`{name}`", kind_of(p.annotation), default_of(p)]
            for name, p in parameters(cls).items()
        ]
        parts.append(f"## {plugin}\n\n{code(inspect.getdoc(cls) or '')}")
        parts.append(table(["setting", "type", "default"], defaults) if defaults else "")
    return "\n".join(parts)


def without_page(plugin: str) -> bool:
    return page_of(plugin).startswith("index.md#")


def page_of(plugin: str) -> str:
    """`page.md#name` of the page, in the same folder, that has the plugin's settings; the
    folder's first page where none has."""
    for folder in ("defenses", "attacks"):
        for path in sorted((ROOT / "docs" / folder).glob("*.md")):
            for match in BLOCK.finditer(path.read_text(encoding="utf-8")):
                if match[1] == "settings" and plugin in match[2].split():
                    return f"{path.name}#{plugin}"
    return f"index.md#{plugin}"


def commands(_: Sequence[str], __: str) -> str:
    import typer.main

    from bench.cli import app

    group: Any = typer.main.get_command(app)
    parts = []
    for name, command in group.commands.items():
        shown_params = [p for p in command.params if not getattr(p, "hidden", False)]
        arguments = [p for p in shown_params if p.param_type_name == "argument"]
        options = [p for p in shown_params if p.param_type_name == "option"]
        usage = " ".join(
            ["leakbench", name, *(_argument(a) for a in arguments), "[options]" * bool(options)]
        )
        said = marked(_paragraphs(command.help))
        parts += [f"## {name}", "", said, "", f"```text\n{usage}\n```", ""]
        rows = [[f"`{_argument(a)}`", "argument", marked(a.help or "")] for a in arguments]
        rows += [
            [", ".join(f"`{o}`" for o in p.opts), _takes(p), marked(p.help or "")] for p in options
        ]
        parts += [table(["", "takes", "meaning"], rows)] if rows else []
    return "\n".join(parts)


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper().rstrip("_")
    several = "..." if parameter.nargs == -1 or parameter.multiple else ""
    return f"{name}{several}" if parameter.required else f"[{name}{several}]"


def _takes(parameter: Any) -> str:
    if parameter.is_flag:
        return "nothing"
    default = parameter.default
    if callable(default) or default in (None, (), []):
        return "a value, may be repeated" if parameter.multiple else "a value"
    return f"a value; default `{default}`"


def _paragraphs(text: str | None) -> str:
    return re.sub(r"[ ]*\n(?!\n)[ ]*", " ", inspect.cleandoc((text or "").replace("\b", "")))


# --- reference runs -------------------------------------------------------------------------------


@cache
def reference(suite: str) -> Any:
    from bench.report import leaderboard

    return leaderboard.load(ROOT / "results" / suite)


def results(names: Sequence[str], _: str) -> str:
    from bench.report import tables

    suite, *defenses = names
    parts = [
        f"From the reference run `results/{suite}` (seeds {list(reference(suite)[0].seeds)}), "
        "last round; mean [95 % interval].",
        "",
    ]
    for title, rows in tables.tables(reference(suite)):
        mine = [r for r in rows if r.defense in {*defenses, "none"} and r.checkpoint == "final"]
        if not any(r.defense in defenses for r in mine):
            continue
        header, *body = lines_of(mine)
        told = [any(line[i] not in ("-", "n/a", "") for line in body) for i in range(len(header))]
        kept = [i for i in range(len(header)) if told[i]]
        parts += [f"**{title}**", ""]
        lines = [[marked(line[i]) for i in kept] for line in body]
        parts.append(table([header[i] for i in kept], lines))
    if len(parts) == 2:
        raise ValueError(f"results/{suite} has no row of {', '.join(defenses)}.")
    return "\n".join(parts)


def scores(names: Sequence[str], body: str) -> str:
    from bench.report import tables

    (suite,) = names
    columns = ["defense", *body.splitlines()]
    seeds = list(reference(suite)[0].seeds)
    parts = [f"From the run `results/{suite}` (seeds {seeds}); mean [95 % interval].", ""]
    unknown = set(columns)
    for title, rows in tables.tables(reference(suite)):
        header, *cells = lines_of(rows)
        kept = [c for c in columns if c in header]
        unknown -= set(kept)
        lines = [[marked(line[header.index(c)]) for c in kept] for line in cells]
        parts += [f"**{title}**", "", table(kept, lines)]
    if unknown:
        raise ValueError(f"no table of results/{suite} has a column {sorted(unknown)}.")
    return "\n".join(parts)


def tasks(names: Sequence[str], body: str) -> str:
    from bench.report import tables

    (suite,) = names
    columns = body.splitlines()
    lines = []
    for title, rows in tables.tables(reference(suite)):
        header, *cells = lines_of(rows)
        cells_of_row = [marked(cells[0][header.index(c)]) if c in header else "–" for c in columns]
        lines.append([title, *cells_of_row])
    seeds = list(reference(suite)[0].seeds)
    first = f"From the run `results/{suite}` (seeds {seeds}); mean [95 % interval]."
    return f"{first}\n\n{table(['table', *columns], lines)}"


def lines_of(rows: Sequence[Any]) -> list[list[str]]:
    """The heads and the lines of a table, as text."""
    from bench.report import frames

    frame = frames.texts(frames.board(rows, whole=True))
    return [list(frame), *frame.to_numpy().tolist()]


def leakage_cell(verdict: Any) -> str:
    """An overview's leakage with its signs, its interval below it."""
    value, _, ends = verdict.leakage.partition(" ")
    below = f"<br><small>{ends}</small>" if ends else ""
    return f'<span class="leak {verdict.style}">{value}{verdict.signs}{below}</span>'


def overview(names: Sequence[str], _: str) -> str:
    from bench.report import overview as overviews

    suite, *defenses = names
    parts = []
    for overview in overviews.by_protocol(reference(suite)):
        heads = [" ".join(h.words) for h in overview.heads]
        kept = [x for x in overview.lines if not defenses or x.defense in {*defenses, "none"}]
        if all(line.defense == "none" for line in kept):
            continue
        lines = [
            [
                f"**{line.defense}**",
                *map(leakage_cell, line.verdicts),
                *line.costs,
            ]
            for line in kept
        ]
        first = f"under {overview.protocol}"
        parts.append(table([first, *heads, *overviews.column_notes()], lines))
    if not defenses:
        legend = overviews.legend(overviews.by_protocol(reference(suite)))
        parts.append("\n".join(f"- {marked(words)}" for words in legend))
    return "\n\n".join(parts)


def strips(names: Sequence[str], body: str) -> str:
    from bench.report import overview as overviews

    suite, place = names
    lines = overviews.by_protocol(reference(suite))[0].lines
    leakage = {line.defense: line.verdicts[int(place)].leakage for line in lines} | {"truth": ""}
    figures = []
    for line in filter(None, body.splitlines()):
        name, caption = (part.strip() for part in line.split("|"))
        if name not in leakage:
            raise ValueError(f"results/{suite} has no row of {name}.")
        found = f"<br>leakage {leakage[name]}" if leakage[name] else ""
        figures.append(
            f"<figure><figcaption>{html.escape(caption)}{found}</figcaption>"
            f'<img src="img/{name}.png" alt="{html.escape(caption)}"></figure>'
        )
    return f'<div class="strips">{"".join(figures)}</div>\n'


def advice(names: Sequence[str], _: str) -> str:
    from bench.report import overview as overviews
    from bench.report.advice import advise

    suite, protocol, *defenses = names
    rounds = [r for r in reference(suite) if r.checkpoint == "training"]
    rows = [r for r in rounds if not defenses or r.defense in {*defenses, "none"}]
    said = [
        f"- **{one.head.title.partition(' · ')[2]}**: {' '.join(one.sentences)}"
        for overview in overviews.by_protocol(rows)
        if overview.protocol == protocol
        for one in advise(overview)
    ]
    if not said:
        raise ValueError(f"results/{suite} has no row of {' '.join([protocol, *defenses])}.")
    return "\n".join(said)


def board(names: Sequence[str], _: str) -> str:
    from rich.console import Console

    from bench.report import tables, terminal

    suite, place, *defenses = names
    _, rows = tables.tables(reference(suite))[int(place)]
    shown_rows = [r for r in rows if not defenses or r.defense in defenses]
    out = io.StringIO()
    console = Console(file=out, width=92, color_system=None)
    for made in terminal.boards(shown_rows):
        console.print(made)
    return code("\n".join(line.rstrip() for line in out.getvalue().splitlines()), "wide")


def printed(names: Sequence[str], _: str) -> str:
    printed_ = beside("printed")
    paper, name = names
    printed_table = printed_.read_paper(paper).table(name)
    suite = f"papers/{paper}"
    rows = reference(suite) if (ROOT / "results" / suite).is_dir() else []
    return "\n".join(printed_.markdown(printed_.compared(printed_table, rows, registry())))


def published(_: Sequence[str], __: str) -> str:
    keys = ("attack", "setting", "published", "ours", "seconds", "device", "difference", "command")
    rows = []
    for file in sorted((ROOT / "results" / "published").glob("*.toml")):
        for row in tomllib.loads(file.read_text(encoding="utf-8"))["rows"]:
            rows.append([str(row[k]) for k in keys])
            rows[-1][0], rows[-1][-1] = f"`{row['attack']}`", f"`{row['command']}`"
    return table(keys, rows)


def beside(name: str) -> Any:
    """A module beside this one, which no package holds: printed or formulas."""
    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def cuts(_: Sequence[str], __: str) -> str:
    from bench import models

    rows = []
    for name in models.BUILDERS:
        network = example_of(name)
        size = f"{network.n_parameters:,} ({' x '.join(map(str, network.shape))})"
        rows.append([f"`{name}`", size, ", ".join(f"`{c}`" for c in network.cuts)])
    return table(["model", "parameters (of samples, 10 classes)", "cuts"], rows)


def checksums(_: Sequence[str], body: str) -> str:
    import hashlib

    import sklearn.datasets
    from skimage.data._registry import registry as photographs
    from torchvision import datasets

    from bench.data.standard import TORCHVISION

    lines = ["# MD5, compared by torchvision"]
    for name, cls in TORCHVISION.items():
        of = getattr(datasets, cls)
        files = getattr(of, "resources", None) or [
            *([(of.filename, of.tgz_md5)] if hasattr(of, "tgz_md5") else []),
            *(getattr(of, "train_list", None) or []),
            *(getattr(of, "test_list", None) or []),
            *[v[1:] for k, v in getattr(of, "split_list", {}).items() if k != "extra"],
        ]
        lines += [f"{md5}  {name}/{file}" for file, md5 in files]
    lines += ["", "# SHA-256, compared by scikit-image"]
    names = "astronaut.png chelsea.png coffee.png rocket.jpg retina.jpg ihc.png"
    for file in f"{names} hubble_deep_field.jpg motorcycle_left.png".split():
        lines.append(f"{photographs[f'data/{file}']}  photos/{file}")
    lines += ["", "# SHA-256, computed for this page from the installed scikit-learn"]
    folder = Path(sklearn.datasets.__file__).parent
    for name, file in (
        ("digits", "data/digits.csv.gz"),
        ("breast_cancer", "data/breast_cancer.csv"),
        ("photos", "images/china.jpg"),
        ("photos", "images/flower.jpg"),
    ):
        digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        lines.append(f"{digest}  {name}/{Path(file).name}")
    return code("\n".join([*lines, "", *body.splitlines()]))


def example_of(name: str) -> Any:
    """A network for ten classes of images, or of signals if it takes no images."""
    from bench import models
    from bench.errors import UserError

    try:
        return models.build(name, shape=(3, 32, 32), classes=10)
    except UserError:
        return models.build(name, shape=(9, 128), classes=10)


# --- hooks of a defense ---------------------------------------------------------------------------


def hooks(_: Sequence[str], __: str) -> str:
    from bench.contract.hooks import HOOKS

    rows = []
    for hook in HOOKS:
        chain = " ".join((hook.chain.__doc__ or "").split())
        rows.append([f"`{hook.name}`", hook.when, hook.by, hook.role or "", chain])
    return table(["hook", "when", "by", "role", "members of `a+b`"], rows)


def formulas(_: Sequence[str], body: str) -> str:
    """A table of formulas, or of words in quotation marks; MathML, so that no script and no font is
    loaded."""
    from latex2mathml.converter import convert

    lines = []
    for line in body.strip().splitlines():
        what, formula, *source = (part.strip() for part in f"{line} ".split(" | "))
        if not formula:
            raise ValueError(f"formulas: '{line}' has no formula.")
        of = f"({source[0]})" if source else ""
        words = re.fullmatch('"(.*)"', formula)
        drawn = convert(formula).replace("<math ", '<math displaystyle="true" ', 1)
        shown = html.escape(words[1]) if words else drawn
        lines.append(f"<tr><th>{what}</th><td>{shown}</td><td>{of}</td></tr>")
    return f'<table class="formulas"><tbody>{"".join(lines)}</tbody></table>\n'


MAKERS: dict[str, Callable[[Sequence[str], str], str]] = {
    "settings": settings,
    "keys": keys,
    "facts": facts,
    "flags": flags,
    "ledger": ledger,
    "others": others,
    "results": results,
    "scores": scores,
    "tasks": tasks,
    "overview": overview,
    "advice": advice,
    "strips": strips,
    "board": board,
    "printed": printed,
    "published": published,
    "commands": commands,
    "catalogue": catalogue,
    "formulas": formulas,
    "checksums": checksums,
    "cuts": cuts,
    "hooks": hooks,
}
