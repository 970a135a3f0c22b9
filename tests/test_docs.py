"""The documentation: it builds, is complete, and what it tells a reader to type works."""

import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import typer.main
from typer.testing import CliRunner

import bench.api
from bench import errors
from bench import suite as suites
from bench.cli import app
from bench.harness.environment import Environment
from bench.harness.plan import expand
from bench.harness.runner import check
from bench.registry import Registry, discover
from tests.conftest import require
from tests.docs_modules import hooks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


REGISTRY: Registry = discover()


# --- the built site ---------------------------------------------------------------------------


class Links(HTMLParser):
    """Links, anchors and loaded resources of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name in ("id", "name"):
            self.ids |= {given[name] or ""} if name in given else set()
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        elif tag == "link" and given.get("rel") != "canonical":
            self.loaded.append(given.get("href") or "")
        elif "src" in given:
            self.loaded.append(given["src"] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Links]:
    """The built pages by path in the site."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (it is of the group dev)")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "404.html").unlink()  # its links begin at the root of wherever the site lies
    return {p.relative_to(folder): Links(p.read_text()) for p in sorted(folder.rglob("*.html"))}


@pytest.mark.slow
def test_every_page_is_built_and_reached_from_every_other_by_the_navigation(
    site: dict[Path, Links],
) -> None:
    assert {p.relative_to(DOCS).with_suffix(".html") for p in DOCS.rglob("*.md")} == set(site)
    for path, page in site.items():
        near = {os.path.normpath(path.parent / urlsplit(link).path or path) for link in page.links}
        missing = {str(p) for p in site} - near - {str(path)}
        assert not missing, f"{path} does not lead to {missing}"


@pytest.mark.slow
def test_every_internal_link_leads_somewhere_and_nothing_is_loaded_from_the_network(
    site: dict[Path, Links],
) -> None:
    for path, page in site.items():
        assert page.loaded
        for source in page.loaded:
            assert not urlsplit(source).netloc, f"{path} loads {source}"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            there = Path(os.path.normpath(path.parent / parts.path)) if parts.path else path
            assert there in site, f"{path} links to {link}"
            anchor = unquote(parts.fragment)
            assert not anchor or anchor in site[there].ids, f"{path} links to {link}"


def test_every_module_that_the_site_documents_is_there() -> None:
    for path in DOCS.rglob("*.md"):
        for name in re.findall(r"^::: (\S+)", path.read_text(), re.MULTILINE):
            place = ROOT.joinpath(*name.split("."))
            modules = (place.with_suffix(".py"), place.parent.with_suffix(".py"))
            assert place.is_dir() or any(m.is_file() for m in modules), f"{path.name}: {name}"


# --- completeness -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["defense", "attack"])
def test_every_plugin_has_a_heading_settings_and_an_example(kind: Any) -> None:
    text = "\n".join(p.read_text() for p in (DOCS / f"{kind}s").glob("*.md"))
    described = {n for m in hooks.BLOCK.finditer(text) if m[1] == "settings" for n in m[2].split()}
    assert described == set(REGISTRY.names(kind))
    for name in REGISTRY.names(kind):
        assert f"\n## {name}\n" in text, name
        assert name in examples(), f"no example entry of {name}"


def test_every_table_of_a_suite_is_documented() -> None:
    text = "\n".join(p.read_text() for p in PAGES)
    shown = {m[2].strip() for m in hooks.BLOCK.finditer(text) if m[1] == "keys"}
    assert shown == {
        "Suite", "ProtocolSettings", "TaskSettings", "ThreatSettings", "DefenseSettings",
        "AttackSettings",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("settings gaussian\nclip_norm | (0, 1) | x\n", "'noise_multiplier' is not described"),
        ("settings none\nnope | x | x\n", "there is no 'nope'"),
        ("keys DefenseSettings\nname | x\n", "'tasks' is not described"),
        ("facts\nparameters | x\n", "'rounds' is not described"),
        ("settings nope\n", "no defense or attack is named 'nope'"),
        ("results quick nope\n", "no row of nope"),
        ("scores quick\nnope\n", "has a column \\['nope'\\]"),
        ("ledger\nleakbench ledger nope\n", "ended with 2"),
    ],
)
def test_a_block_that_does_not_fit_the_code_ends_the_build(block: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        hooks.rendered(f"```{block}```\n")


def test_named_defenses_of_an_overview_stand_beside_the_undefended_one_alone() -> None:
    shown = hooks.rendered("```overview quick spm\n```\n")
    whole = hooks.rendered("```overview quick\n```\n")
    assert "**gaussian**" in whole
    assert "under splitfed" in whole
    assert [line.split("**")[1] for line in shown.splitlines() if "**" in line] == ["none", "spm"]
    assert "under splitfed" not in shown


def test_a_new_option_or_command_appears_by_itself() -> None:
    page = hooks.rendered((DOCS / "cli.md").read_text())
    for name, command in COMMANDS.items():
        assert f"\n## {name}\n" in page
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert f"`{parameter.opts[0]}`" in page, f"{name} {parameter.opts[0]}"


# --- what readers type ------------------------------------------------------------------------


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    for path in PAGES:
        for match in hooks.BLOCK.finditer(path.read_text()):
            if match[1] == language:
                yield path, match[3]


def command_lines() -> Iterator[tuple[Path, str]]:
    """Lines in code blocks that begin with the command, continued lines put together."""
    for path in PAGES:
        text = path.read_text()
        shells = ("sh", "text", "ledger")
        fenced = "".join(m[3] for m in hooks.BLOCK.finditer(text) if m[1] in shells)
        plain = "\n".join(re.findall(r"^ {4}(.*)$", hooks.BLOCK.sub("", text), re.MULTILINE))
        shown = re.sub(r"\\\n\s*|\n\s+(?=\[--)", " ", f"{fenced}\n{plain}")
        for line in shown.splitlines():
            command = re.match(r"^(?:pip install uv && )?(?:uv run )?(leakbench .*)$", line)
            if command:
                yield path, re.split(r"\s{3,}|\s+#", command[1])[0]


LINES = list(command_lines())


def test_the_documentation_shows_commands() -> None:
    assert len(LINES) > 40
    assert {line.split()[1] for _, line in LINES} >= {"run", "plan", "list", "ledger", "audit"}


@pytest.mark.parametrize(("path", "line"), LINES, ids=[f"{p.stem}: {s}" for p, s in LINES])
def test_a_quoted_command_is_one_that_the_program_takes(
    path: Path, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a command that is run may write a file
    _, name, *arguments = shlex.split(line.replace("[", " ").replace("]", " ")
                                      if is_synopsis(line) else line)  # fmt: skip
    assert name in COMMANDS, line
    command = COMMANDS[name]
    if is_synopsis(line):
        known = {o for p in command.params for o in p.opts}
        assert {a for a in arguments if a.startswith("--")} <= known, line
        return
    given = command.make_context(name, [*arguments]).params  # raises for an unknown option
    if name in ("run", "plan") and given["suite"] in suites.list_shipped():
        expanded(given["suite"], tuple(given["set_"] or ()), tuple(given["only"] or ()))
    if name == "audit" and not given["plugin"]:
        REGISTRY.defense(given["defense"], suites.parse_pairs(given["set_"] or (), "--set"))
    if name == "ledger" and not given["plugin"]:
        done = CliRunner().invoke(app, [name, *arguments])
        assert done.exit_code == 0, done.output


@cache
def expanded(suite: str, overrides: tuple[str, ...], only: tuple[str, ...]) -> None:
    """Raises ValueError for what the suite does not take; of `full`, which has a hundred thousand
    cells, one seed, and one task where none is chosen."""
    chosen = suites.parse_pairs(only, "--only")
    part = {"seed": 0} | (chosen or {"task": 0}) if suite == "full" else chosen
    expand(suites.read_suite(suite, overrides), part)


def is_synopsis(line: str) -> bool:
    """Whether it shows the form of a command: words in capitals or options in brackets."""
    return bool(re.search(r"\[--|\[[a-z]+\||(?<![\w./=-])[A-Z]{3,}\b|k=v", line))


def test_commands_named_in_a_sentence_exist() -> None:
    for path in PAGES:
        for name, rest in re.findall(r"`leakbench ([a-z]+)([^`]*)`", path.read_text()):
            assert name in COMMANDS, f"{path.name}: leakbench {name}"
            known = {o for p in COMMANDS[name].params for o in p.opts}
            assert set(re.findall(r"--[a-z-]+", rest)) <= known, f"{path.name}: {rest}"


TOML = list(blocks("toml"))


@pytest.mark.parametrize(
    ("path", "text"), TOML, ids=[f"{p.stem}-{i}" for i, (p, _) in enumerate(TOML)]
)
def test_a_toml_block_is_a_suite_or_tables_of_one(path: Path, text: str) -> None:
    data = tomllib.loads(text)
    if {"name", "tasks"} <= set(data):
        check(expand(suites.Suite.model_validate(data)), REGISTRY, Environment())
        return
    assert set(data) <= set(suites.Suite.model_fields), path
    protocol = data.get("protocol")
    if protocol is not None:
        suites.ProtocolSettings.model_validate(protocol)
    for key, model in (("threats", suites.ThreatSettings), ("tasks", suites.TaskSettings)):
        for entry in data.get(key, []):
            model.model_validate(entry)  # type: ignore[attr-defined]
    for entry in data.get("defenses", []):
        defense = suites.DefenseSettings.model_validate(entry)
        for settings in suites.grid(defense.settings):
            REGISTRY.defense(defense.name, settings)
    for entry in data.get("attacks", []):
        attack = suites.AttackSettings.model_validate(entry)
        REGISTRY.attack(attack.name, attack.settings)


def test_python_blocks_compile() -> None:
    for path, text in blocks("python"):
        compile(text, str(path), "exec")


# --- ranges in the tables of settings ---------------------------------------------------------


def examples() -> dict[str, dict[str, Any]]:
    """Settings of each plugin's first example, which a range is tried on."""
    settings: dict[str, dict[str, Any]] = {}
    for path, text in blocks("toml"):
        if path.parent.name in ("defenses", "attacks"):
            data = tomllib.loads(text)
            for entry in [*data.get("defenses", []), *data.get("attacks", [])]:
                settings.setdefault(entry["name"], suites.grid(entry.get("settings", {}))[0])
    return settings


INTERVAL = re.compile(r"^([(\[])(-?[\d.∞e]+), (-?[\d.∞e]+)([)\]])(, or text)?$")


def ranges() -> Iterator[tuple[str, str, str]]:
    for path in PAGES:
        for match in hooks.BLOCK.finditer(path.read_text()):
            if match[1] == "settings":
                for line in match[3].splitlines():
                    name, interval, _ = (p.strip() for p in re.split(r"(?<!\\)\|", line))
                    if INTERVAL.match(interval):
                        yield from ((plugin, name, interval) for plugin in match[2].split())


RANGES = list(ranges())


def test_most_numbers_have_an_interval_that_is_tried() -> None:
    assert len(RANGES) > 80


@pytest.mark.parametrize(("plugin", "name", "interval"), RANGES)
@pytest.mark.filterwarnings("ignore:epsilon .* is beyond Lemma 1")
def test_a_stated_range_is_the_one_that_the_constructor_keeps(
    plugin: str, name: str, interval: str
) -> None:
    cls = hooks.plugin_class(plugin)
    whole = "number" not in hooks.kind_of(hooks.parameters(cls)[name].annotation).replace(
        "whole number", ""
    )
    base = dict(examples()[plugin])
    if (plugin, name) == ("pm_sfl", "epsilon"):
        base["noise"] = "smashed"
    if name == "patches":
        base["group"] = 1
    match = require(INTERVAL.match(interval))
    for bracket, text, outwards in ((match[1], match[2], -1), (match[4], match[3], 1)):
        end = float(text.replace("∞", "inf"))
        if math.isinf(end) and whole:
            continue  # a whole number has no infinity to try
        value = int(end) if whole else end
        if bracket in "[]":
            cls(**{**base, name: value})
            value = value + outwards * (1 if whole else 1e-3) if math.isfinite(end) else math.nan
        if not math.isnan(value):
            with pytest.raises(ValueError, match=name):
                cls(**{**base, name: value})


def test_formulas_are_drawn_without_script_or_font_and_a_line_without_one_is_refused() -> None:
    page = hooks.rendered(
        "```formulas\nupload | s \\cdot |v| \\cdot t | Eq. 3\nserver | \\sum_i s_i\n```\n"
    )
    assert page.count("<math") == 2
    assert "(Eq. 3)" in page
    assert "```" not in page
    assert "<script" not in page
    with pytest.raises(ValueError, match="has no formula"):
        hooks.rendered("```formulas\nupload |\n```\n")


# --- the glossary -----------------------------------------------------------------------------

GLOSSARY = (DOCS / "glossary.md").read_text()
ENTRY = re.compile(r"^- \*\*([^*]+)\*\*: (.+(?:\n  .+)*)$", re.MULTILINE)


def test_every_word_is_explained_once_in_whole_sentences() -> None:
    words = [word for word, _ in ENTRY.findall(GLOSSARY)]
    assert len(words) == GLOSSARY.count("\n- ")
    assert len(words) > 70
    assert [w for w, count in Counter(words).items() if count > 1] == []
    for word, text in ENTRY.findall(GLOSSARY):
        assert text[0].isupper(), word
        assert text.endswith("."), word


def test_every_class_that_the_glossary_names_can_be_imported() -> None:
    named = set(re.findall(r"`([A-Z]\w+)[`.]", ENTRY.sub(r"\2", GLOSSARY)))
    assert {"Suite", "Seen", "Facts", "UserError"} <= named
    for name in named:
        there = [module for module in (bench.api, suites, errors) if hasattr(module, name)]
        assert there, f"no class is named {name}"


def test_other_pages_lead_to_the_glossary() -> None:
    assert "glossary.md" in (DOCS / "index.md").read_text()
    assert "glossary.md" in (DOCS / "api" / "index.md").read_text()
