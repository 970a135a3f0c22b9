"""What a file's code tries outside its own folder is noted, what it may do is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench.attempts import Attempt, attempt_of, watched
from bench.extensions import load_file

CODE = """
import colorsys
import json
import os
import socket
import subprocess
import sqlite3
import threading
from pathlib import Path

def silently(act):
    try:
        act()
    except Exception:
        pass

def try_(name, place):
    place = Path(place)
    silently({
        "write": lambda: (place / "x").write_text("x"),
        "append": lambda: os.open(place / "x", os.O_WRONLY | os.O_APPEND),
        "read": lambda: (place / "secret").read_text(),
        "list": lambda: list(place.iterdir()),
        "walk": lambda: list(os.walk(place)),
        "remove": lambda: (place / "x").unlink(),
        "rename": lambda: os.rename(place / "x", place / "y"),
        "folder": lambda: (place / "new").mkdir(),
        "database": lambda: sqlite3.connect(place / "x"),
        "compiled": lambda: exec(compile(f"open({str(place / 'x')!r}, 'w')", "hidden", "exec")),
        "linked": lambda: (Path(os.environ["OWN"]) / "link" / "x").write_text("x"),
        "connect": lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
        "listen": lambda: socket.socket().bind(("127.0.0.1", 0)),
        "datagram": lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
        "process": lambda: subprocess.run(["true"]),
        "shell": lambda: os.system("true"),
        "thread": lambda: run_in_thread(lambda: (place / "x").write_text("x")),
    }[name])

def run_in_thread(act):
    thread = threading.Thread(target=silently, args=(act,))
    thread.start()
    thread.join()

def honest(own, data):
    (Path(own) / "mine").write_text("x")
    (Path(own) / "mine").read_text()
    list(Path(own).iterdir())
    Path(data, "data").read_text()
    Path(__file__).read_text()
    Path(json.__file__).read_text()
    import wave, torch.utils.data
    open(os.devnull, "w").close()
"""
KINDS = {
    "write": "write", "append": "write", "read": "read", "list": "list", "walk": "list",
    "remove": "remove", "rename": "rename", "folder": "make the folder", "database": "write",
    "compiled": "write", "linked": "write", "connect": "look up", "listen": "listen on",
    "datagram": "send to", "process": "start the process", "shell": "start the process",
    "thread": "write",
}  # fmt: skip


@pytest.fixture
def plugin(tmp_path: Path) -> ModuleType:
    (tmp_path / "plugin.py").write_text(CODE)
    for name in ("own", "data", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "data").write_text("x")
    (tmp_path / "outside" / "secret").write_text("x")
    (tmp_path / "own" / "link").symlink_to(tmp_path / "outside")
    return load_file(tmp_path / "plugin.py")


def tried(plugin: ModuleType, folder: Path, name: str) -> list[Attempt]:
    with watched(
        [folder / "plugin.py"], writable=[folder / "own"], readable=[folder / "data"]
    ) as found:
        if name == "honest":
            plugin.honest(folder / "own", folder / "data")
        else:
            plugin.try_(name, folder / "outside")
    return found


@pytest.mark.parametrize("name", KINDS)
def test_an_attempt_is_noted_with_its_line_though_its_error_is_hidden(
    plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("OWN", str(tmp_path / "own"))
    found = tried(plugin, tmp_path, name)
    assert found, name
    assert found[0].what == KINDS[name]
    lines = CODE.splitlines()
    assert found[0].file == "plugin.py"
    assert f'"{name}": ' in lines[found[0].line - 1]
    place = "link" if name == "linked" else "outside"
    assert (place in found[0].on) == (KINDS[name] in ("read", "list", "write", "remove", "rename",
                                                      "make the folder"))  # fmt: skip


def test_own_folders_data_libraries_and_imports_are_no_attempt(
    plugin: ModuleType, tmp_path: Path
) -> None:
    assert tried(plugin, tmp_path, "honest") == []


def test_what_others_do_and_what_is_done_later_is_no_attempt(
    plugin: ModuleType, tmp_path: Path
) -> None:
    with watched([tmp_path / "plugin.py"]) as found:
        (tmp_path / "outside" / "x").write_text("x")
    plugin.try_("write", tmp_path / "outside")
    assert found == []


def test_a_process_writes_its_attempts_where_they_cannot_be_taken_back(
    plugin: ModuleType, tmp_path: Path
) -> None:
    code = f"""
import sys
from pathlib import Path
from bench.attempts import watch_workers
from bench.extensions import load_file
file = Path({str(tmp_path / "plugin.py")!r})
watch_workers([file])
plugin = load_file(file)
sys.stderr.write("no newline")
sys.stderr.flush()
for _ in range(3):
    plugin.try_("write", {str(tmp_path / "outside")!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    (found,) = filter(None, map(attempt_of, done.stderr.splitlines()))
    assert str(found).startswith(f"write {tmp_path / 'outside' / 'x'}: plugin.py:")
    assert os.environ.get("LEAKBENCH_WATCH") is None


@pytest.mark.parametrize("line", ["", "leakbench-attempt: ", "leakbench-attempt: []", "x"])
def test_other_lines_tell_of_no_attempt(line: str) -> None:
    assert attempt_of(line) is None
