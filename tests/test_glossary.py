"""A word has one meaning: no two classes share a name, and the glossary names what exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import bench.api
from bench import errors, suite

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ENTRY = re.compile(r"^- \*\*([^*]+)\*\*: (.+(?:\n  .+)*)$", re.MULTILINE)


def class_names() -> Counter[str]:
    """How often each class's name is given in the product."""
    return Counter(
        node.name
        for folder in ("bench", "attacks", "defenses")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )


def test_no_two_classes_share_a_name() -> None:
    shared = {name for name, count in class_names().items() if count > 1}
    assert not shared, "give the newer class a name of its own"


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
        there = [module for module in (bench.api, suite, errors) if hasattr(module, name)]
        assert there, f"no class is named {name}"


def test_other_pages_lead_to_the_glossary() -> None:
    assert "glossary.md" in (ROOT / "docs" / "index.md").read_text()
    assert "glossary.md" in (ROOT / "docs" / "api" / "index.md").read_text()
