"""Whatever stands in a result folder, a published one, a view or an answer: commands that read it
end with a result or with a sentence, soon, and never with a traceback.

A few dozen changes in every run of the tests, thousands with `--hypothesis-profile=many`.
"""

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import Result

from bench.records import Run
from tests.conftest import part
from tests.small_folders import SUITE, call, go

VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "x" * 100_000, 0, 1, -1, 10**12, 10**400, 1e308, -1e308, 1e-300),
    *(float("nan"), float("inf"), "nan", "inf", [], {}, [[]], {"": None}, [None, 1], "../../x"),
    *("\x1b[31m", "[red]x[/nope]", "=1+1", "\ud800", "a/b", ".", "\x00", "none", "done", "failed"),
)
"""In the place of any value of a JSON file."""
CHANGES = ("value", "value", "value", "key", "nest", "flip", "flip", "cut", "gone", "link", "pipe",
           "folder", "large", "swap")  # fmt: skip
COMMANDS = {
    "made": (
        ("report", "{}", "--details"),
        ("report", "{}", "--figures", "png"),
        ("report", "{}", "--publish", "{}-published"),
        ("compare", "{}", "none", "spm"),
        ("merge", "{}", "--out", "{}-merged"),
        ("plan", "{}.toml", "--out", "{}"),
        ("plan", "{}.toml", "--costs", "{}"),
        ("run", "{}.toml", "--out", "{}", "--device", "cpu", "--jobs", "0"),
        ("export", "{}", "none/dlg/init", "--out", "{}-seen"),
        ("site", "{}", "--out", "{}-site"),
        ("score", "{}", "none/dlg/init", "{}/../answer.npz"),
    ),
    "published": (
        ("report", "{}", "--details"),
        ("compare", "{}", "none", "spm"),
        ("site", "{}", "--out", "{}-site"),
        ("report", "{}", "--figures", "png"),
    ),
    "view": (("attack", "{}/seen", "--attack", "prior_only", "--device", "cpu"),),
    "answer": (("score", "{}/../made", "none/dlg/init", "{}/answer.npz"),
               ("score", "{}/../made", "none/dlg/init", "{}/answer.safetensors")),
}  # fmt: skip
"""By the folder that is changed; {} is its path."""
LONGEST_S = 20
"""Of a command's own computing, which takes a second or two."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound folders of each kind."""
    import torch
    from safetensors.torch import save_file

    place = tmp_path_factory.mktemp("base")
    spm = '{ name = "spm", settings = { epsilon = 2.0 } }'
    two_rows = SUITE.replace('{ name = "none" }', f'{{ name = "none" }}, {spm}')
    assert go(place / "made", two_rows).exit_code == 0
    cell = next(c for c in Run.read(place / "made").cells if c.attack == "dlg")
    assert call("report", place / "made", "--publish", place / "published").exit_code == 0
    assert call("export", place / "made", cell.key, "--out", place / "view" / "seen").exit_code == 0
    shape = json.loads((place / "view" / "seen.json").read_text())["answer"]["images"]
    (place / "answer").mkdir()
    np.savez(place / "answer" / "answer.npz", images=np.full(shape, 0.5, np.float32))
    save_file({"images": torch.full(shape, 0.5)}, place / "answer" / "answer.safetensors")
    shutil.copy(place / "answer" / "answer.npz", place / "answer.npz")
    return place


@pytest.mark.parametrize("kind", list(COMMANDS))
def test_every_command_takes_a_sound_folder(base: Path, tmp_path: Path, kind: str) -> None:
    for number, command in enumerate(COMMANDS[kind]):
        with copied(base, tmp_path / str(number)) as place:
            result = read(place / kind, command)
            assert result.exit_code == 0, (command, result.output)


@pytest.mark.timeout(6 * 3600)
@given(
    kind=st.sampled_from(["made", "made", "made", "published", "published", "view", "answer"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=part(3), deadline=None, suppress_health_check=list(HealthCheck))
def test_no_changed_file_gives_a_traceback_or_hangs(base: Path, kind: str, seed: int) -> None:
    """Change one to three things in a copy, and read it by one command."""
    rng = random.Random(seed)
    with TemporaryDirectory() as temporary, copied(base, Path(temporary) / "copy") as place:
        done = [change(place / kind, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        command = rng.choice(COMMANDS[kind])
        began = time.process_time()
        result = read(place / kind, command)
        told = f"{command} after {done}: {result.output[-600:]}"
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise AssertionError(told) from result.exception
        assert result.exit_code in (0, 1, 2), told
        assert result.exit_code != 2 or "leakbench:" in result.output, told
        assert time.process_time() - began < LONGEST_S, told


@contextmanager
def copied(base: Path, place: Path) -> Iterator[Path]:
    yield shutil.copytree(base, place)


def read(folder: Path, command: tuple[str, ...]) -> Result:
    return call(*(word.replace("{}", str(folder)) for word in command))


def change(folder: Path, rng: random.Random) -> str:
    """Change one file of a folder; says which, and how."""
    files = sorted(
        p
        for p in folder.rglob("*")
        if p.is_file() and not p.is_symlink() and p.stat().st_size < 2**30
    )
    if not files:
        return "all was removed before"
    # As many of each sort: there are more records than any other.
    sorts = {(p.parent.name if len(p.stem) == 24 else p.name): [] for p in files}  # type: ignore[var-annotated]
    for p in files:
        sorts[p.parent.name if len(p.stem) == 24 else p.name].append(p)
    path = rng.choice(sorts[rng.choice(sorted(sorts))])
    how = rng.choice(CHANGES)
    if how in ("value", "key", "nest"):
        if path.suffix != ".json":
            how = "flip"
        else:
            return f"{path.relative_to(folder)}: {_edit(path, how, rng)}"
    content = path.read_bytes()
    if how == "flip" and content:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 8, 200))):
            # Headers stand at the front.
            place = rng.randrange(min(len(changed), rng.choice((16, 400, len(changed)))))
            changed[place] = rng.randrange(256)
        path.write_bytes(changed)
    elif how == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif how == "swap":
        path.write_bytes(rng.choice(files).read_bytes())
    else:
        path.unlink()
    if how == "link":
        path.symlink_to(rng.choice(["/dev/zero", "/dev/full", "/etc/passwd", "/", str(path)]))
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "large":
        path.touch()
        os.truncate(path, 2**40)
    return f"{path.relative_to(folder)}: {how}"


def _edit(path: Path, how: str, rng: random.Random) -> str:
    """Change one value of a JSON file, take it away, or put it deep down."""
    try:
        whole = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # an earlier change spoilt it
        return "as it was"
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    if isinstance(whole, dict | list):
        walk(whole)
    if not places:
        return "nothing"
    holder, key = rng.choice(places)
    mark = "deep down"
    if how == "key":
        del holder[key]
        told = f"without {key}"
    else:
        holder[key] = rng.choice(VALUES) if how == "value" else mark
        told = f"{key} = {str(holder[key])[:40]!r}"
    text = json.dumps(whole)
    if how == "nest":
        depth = rng.choice((100, 5_000, 100_000))
        text = text.replace(json.dumps(mark), "[" * depth + "]" * depth)
    path.write_text(text)
    return told
