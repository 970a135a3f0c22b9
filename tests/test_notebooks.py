"""Notebooks run, and print what they show."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_prints_what_it_was_saved_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    names: dict[str, object] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), names)
            saved = "".join(t for o in cell["outputs"] for t in o["text"])
            assert printed.getvalue() == saved
