"""Papers of plugins and data sets: what ships is whole, a bad file says so, BibTeX cites them."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bench
from bench import data
from bench.cli import app
from bench.errors import UserError
from bench.registry import discover
from bench.report.papers import publication_of, read_papers

ROOT = Path(__file__).parents[1]
PLACES = {"defense": "defenses", "attack": "attacks"}


@pytest.mark.parametrize("kind", PLACES)
def test_every_shipped_plugin_has_an_entry_and_every_entry_a_plugin(kind):
    registry = discover()
    own = {
        name: registry.get(kind, name).cls
        for name in registry.names(kind)
        if registry.get(kind, name).origin.endswith("of leakbench")
    }
    papers = read_papers(ROOT / PLACES[kind] / "papers.toml")
    assert papers.keys() == own.keys()
    for name, cls in own.items():
        paper = publication_of(cls)
        assert paper == papers[name]
        assert paper.status is not None
        named = "arXiv" in str(getattr(cls, "source", ""))
        assert not named or paper.title, f"{name} names a paper as its source"


def test_every_shipped_data_set_has_an_entry():
    papers = read_papers(ROOT / "bench" / "data" / "papers.toml")
    assert papers.keys() == data.LOADERS.keys()
    assert all(
        publication_of(loader, name) == papers[name] for name, loader in data.LOADERS.items()
    )


def test_keys_of_bibtex_tell_papers_apart():
    files = [ROOT / p / "papers.toml" for p in ("defenses", "attacks", "bench/data")]
    papers = {p.title: p for f in files for p in read_papers(f).values() if p.title}
    keys = [re.match(r"@misc\{([a-z0-9]+),", p.bibtex)[1] for p in papers.values()]
    assert len(set(keys)) == len(papers)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[mine", "is no readable TOML"),
        ('[mine]\ntitle = "A"', "the key 'mine.short' is missing."),
        ('[mine]\nshort = "A"\nyear = "soon"', "mine.year"),
        ('[mine]\nshort = "A"\nstatus = "perfect"', "mine.status"),
    ],
)
def test_a_plugin_of_another_package_brings_its_paper_or_one_sentence(tmp_path, text, sentence):
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["mine"] = module
    try:
        assert publication_of(module.Mine) is None
        (tmp_path / "papers.toml").write_text('[mine]\nshort = "Mine"')
        assert publication_of(module.Mine).short == "Mine"
        (tmp_path / "papers.toml").write_text(text)
        with pytest.raises(UserError, match=re.escape(sentence)) as error:
            publication_of(module.Mine)
        assert str(tmp_path) in str(error.value)
    finally:
        del sys.modules["mine"]


def test_a_report_writes_what_a_paper_cites(tmp_path):
    arguments = ["report", str(ROOT / "results/quick"), "--format", "json", "--bib"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "references.bib").read_text()
    assert text == bench.load(ROOT / "results/quick").bibtex()
    assert f"version = {{{bench.__version__}}}" in text
    assert "suite quick v" in text
    assert text.count("@") == len(set(re.findall(r"@\w+\{(\w+),", text)))
    for title in ("SPM-FL", "Deep Leakage from Gradients", "Handwritten Digits"):
        assert title in text


def test_the_list_has_each_paper():
    result = CliRunner().invoke(app, ["list", "defenses", "--json"])
    papers = {e["name"]: e["paper"] for e in json.loads(result.output)["defenses"]}
    assert papers["soteria"]["venue"] == "CVPR"
    assert papers["soteria"]["status"] == "known to fail"
