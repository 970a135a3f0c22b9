"""`leakbench list` remembers what it shows, and forgets it when a file changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import app, remembered
from bench.cli.remembered import Listing

SPM = {"name": "spm", "summary": "", "settings": "", "broken": None}


class _Made:
    """Counts how often the listing is made."""

    def __init__(self, **more: str) -> None:
        self.times, self.listing = 0, {"defenses": [SPM | more]}

    def __call__(self) -> Listing:
        self.times += 1
        return self.listing


def test_it_is_made_once(tmp_path: Path) -> None:
    made = _Made()
    told = [remembered.remembered(made, tmp_path / "new") for _ in range(3)]
    assert told == [made.listing] * 3
    assert made.times == 1


def test_a_changed_file_of_a_package_has_it_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_plugins"
    package.mkdir()
    for name in ("__init__.py", "one.py"):
        (package / name).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(remembered._files_of(package.name))
    assert [line.split()[0] for line in before] == [
        str(package / n) for n in ("__init__.py", "one.py")
    ]
    assert package.name not in sys.modules  # found, not imported
    (package / "one.py").write_text("# longer")
    assert list(remembered._files_of(package.name)) != before
    made = _Made()
    remembered.remembered(made, tmp_path)
    monkeypatch.setattr(remembered, "_fingerprint", lambda: "another")
    remembered.remembered(made, tmp_path)
    assert made.times == 2


def test_a_broken_plugin_is_looked_at_each_time(tmp_path: Path) -> None:
    made = _Made(broken="no torch")
    for _ in range(2):
        remembered.remembered(made, tmp_path)
    assert made.times == 2


@pytest.mark.parametrize("content", ["", "[]", "{", '{"made_from": 1}', "\x00"])
def test_a_file_that_is_none_of_ours_is_written_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "list.json").write_text(content)
    assert remembered.remembered(_Made(), tmp_path)["defenses"] == [SPM]
    assert json.loads((tmp_path / "list.json").read_text())["listing"] == {"defenses": [SPM]}


def test_where_nothing_can_be_written_it_is_made_each_time(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("")
    made = _Made()
    for _ in range(2):
        assert remembered.remembered(made, place) == made.listing
    assert made.times == 2


def test_a_second_list_says_the_same_and_imports_no_torch(tmp_path: Path) -> None:
    first = CliRunner().invoke(app, ["list", "--json"])
    assert first.exit_code == 0
    code = (
        "import sys; from bench.cli import app\n"
        "try: app(['list', '--json'])\n"
        "finally: sys.exit(7 if 'torch' in sys.modules else 0)"
    )
    # Paths to where the first one remembered it come with the environment.
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(first.stdout)
