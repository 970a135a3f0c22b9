"""A new defense inside the tree: its module, one entry point, one test; the docs follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.registry import discover
from tests.test_docs import hooks

NEW = '''
from bench.api import Defense

class Whisper(Defense):
    """Uploads as they are, quietly.

    Args:
        volume: How loud, in [0, 1].
    """
    def __init__(self, *, volume: float, echo: int = 2) -> None:
        self.volume, self.echo = volume, echo
'''


def test_a_defense_without_a_page_gets_a_section_from_its_docstring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hooks.others(["defenses"], "").strip() == ""  # all that ship have a page
    path = tmp_path / "whisper.py"
    path.write_text(NEW)
    plugins = discover((path,))
    monkeypatch.setattr(hooks, "registry", lambda: plugins)
    assert hooks.page_of("whisper") == "index.md#whisper"
    section = hooks.others(["defenses"], "")
    assert section.startswith("## whisper\n")
    assert "volume: How loud, in [0, 1]." in section
    assert "| `volume` | number | required |" in section
    assert (
        "| `echo` | whole number | `2` |" in section or "| `echo` | whole number | 2 |" in section
    )
