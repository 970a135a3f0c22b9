"""Result folders whose records contradict run.json or each other are refused; what reading cannot
refute is marked as unverified."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bench
from bench.errors import UserError
from bench.records.submitted import manifest_of
from tests.small_folders import SUITE, call, go, said

SPM = '{ name = "spm", settings = { epsilon = 2.0 } }'
LIARS = SUITE.replace('{ name = "none" }', f'{{ name = "none" }}, {SPM}').replace(
    '[{ name = "ilrg" }, { name = "dlg" }]',
    '[{ name = "ilrg" }, { name = "idlg" }, { name = "prior_only" }]',
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two defenses and two seeds, and what is published of it."""
    place = tmp_path_factory.mktemp("liars")
    made = go(place / "made", f"seeds = [0, 1]\n{LIARS}")
    assert made.exit_code == 0, made.output
    assert call("report", place / "made", "--publish", place / "published").exit_code == 0
    return place


class Folder:
    """A copy of the run, whose files a lie changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run: dict[str, Any] = json.loads((path / "run.json").read_text())

    def training(self, defense: str = "none", seed: int = 0) -> dict[str, Any]:
        listed: list[dict[str, Any]] = self.run["trainings"]
        return next(t for t in listed if (t["defense"], t["seed"]) == (defense, seed))

    def cell(self, attack: str = "idlg", seed: int = 0) -> dict[str, Any]:
        cells: list[dict[str, Any]] = self.training(seed=seed)["cells"]
        return next(c for c in cells if c["attack"] == attack)

    def file(self, entry: dict[str, Any]) -> Path:
        kind = "train" if "cells" in entry else "attack"
        return self.path / "records" / kind / f"{entry['key']}.json"

    def read(self, entry: dict[str, Any]) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.file(entry).read_text())
        return record

    def set(self, entry: dict[str, Any], changes: dict[str, Any]) -> None:
        """Changes by key, `a.b` of an inner one."""
        record = self.read(entry)
        for name, value in changes.items():
            *outer, last = name.split(".")
            inner = record
            for one in outer:
                inner = inner[one]
            inner[last] = value(inner[last]) if callable(value) else value
        self.file(entry).write_text(json.dumps(record))

    def change_run(self, entry: dict[str, Any], changes: dict[str, Any]) -> None:
        entry.update(changes)
        (self.path / "run.json").write_text(json.dumps(self.run))


def each(value: float) -> Callable[[list[float]], list[float]]:
    return lambda figures: [value] * len(figures)


def copy_seed(folder: Folder, *, touched_up: bool) -> None:
    """The records of seed 0 once more, as seed 1's."""
    old, new = folder.training(seed=0), folder.training(seed=1)
    for one, other in zip((old, *old["cells"]), (new, *new["cells"]), strict=True):
        record = folder.read(one) | {"key": other["key"]}
        if touched_up and "cells" in one:
            record["inputs"]["seed"] = 1
        elif touched_up:
            record["train"] = new["key"]
        folder.file(other).write_text(json.dumps(record))


def swap(folder: Folder, one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = folder.read(one), folder.read(other)
    folder.file(one).write_text(json.dumps(second | {"key": one["key"]}))
    folder.file(other).write_text(json.dumps(first | {"key": other["key"]}))


def victims(folder: Folder, take: Callable[[list[float]], list[float]], count: int) -> None:
    """All attacks of a training with other victims."""
    for cell in folder.training()["cells"]:
        record = folder.read(cell)
        for scores in ("values", "floors"):
            record[scores] = {n: take(v) for n, v in record[scores].items()}
        for name in ("judged", "loss"):
            record[name] = record[name] and take(record[name])
        folder.file(cell).write_text(json.dumps(record | {"victims": count}))


def baseline(folder: Folder, attacks: tuple[str, ...]) -> None:
    for attack in attacks:
        folder.set(folder.cell(attack), {"floors.ssim": each(0.9)})


Changes = dict[str, Any]
TRAIN: dict[str, tuple[Changes, str]] = {
    "a personal accuracy of 1.5": ({"personal_accuracies": [1.5]}, "accuracy beyond 0 to 1"),
    "chance of 2": ({"class_chance": 2.0}, "accuracy beyond 0 to 1"),
    "more right answers than tests": ({"correct": 10**6}, "right answers of"),
    "bytes below 0": ({"bytes_up": -1.0}, "seconds or bytes below 0"),
    "seconds below 0": ({"seconds": -1.0}, "seconds or bytes below 0"),
    "more rounds than planned": ({"rounds_played": 9}, "it played 9 rounds of 1"),
    "facts of more clients": ({"facts.clients": 1000}, "facts have other clients"),
    "facts of rarer rounds": ({"facts.participation": 0.1}, "facts have other clients"),
    "an epsilon below 0": ({"ledger.eps_record": -1.0}, "an epsilon below 0"),
    "another job's inputs": ({"inputs.delta": 0.1}, "record of another job"),
    "another key": ({"key": "0" * 24}, "is the record 0000"),
    "another threat observed": (
        {"observations.init": lambda looks: looks | {"kind": next(iter(looks.values()))}},
        "under a threat that run.json does not name",
    ),
}
ATTACK: dict[str, tuple[Changes, str]] = {
    "SSIM 5": ({"values.ssim": each(5.0)}, "it has the figure ssim 5"),
    "SSIM -2": ({"values.ssim": each(-2.0)}, "it has the figure ssim -2"),
    "an error below 0": ({"values.mse": each(-0.1)}, "it has the figure mse -0.1"),
    "label accuracy 1.5": ({"values.label_accuracy": each(1.5)}, "label_accuracy 1.5"),
    "a baseline of 2": ({"floors.ssim": each(2.0)}, "it has the figure ssim 2"),
    "more failures than victims": ({"failed": 3}, "3 of its 2 victims failed"),
    "a smaller budget": ({"budget": 1}, "its budget is 1, that of run.json 5"),
    "another budget's inputs": ({"inputs.budget": 50}, "record of another job"),
    "another training's": ({"train": "0" * 24}, "is of another training"),
    "other views": ({"views": [5, 5]}, "its views have other victims"),
    "seconds below 0": ({"seconds": -1.0}, "seconds below 0"),
}
LIES: dict[str, tuple[Callable[[Folder], Any], str]] = {
    **{n: (lambda f, c=c: f.set(f.training(), c), s) for n, (c, s) in TRAIN.items()},
    **{f"attack: {n}": (lambda f, c=c: f.set(f.cell(), c), s) for n, (c, s) in ATTACK.items()},
    "one seed as two": (lambda f: copy_seed(f, touched_up=False), "record of another job"),
    "one seed as two, touched up": (lambda f: copy_seed(f, touched_up=True), "stands for both"),
    "swapped defenses": (
        lambda f: swap(f, f.training("none"), f.training("spm")),
        "record of another job",
    ),
    "swapped attacks": (lambda f: swap(f, f.cell("idlg"), f.cell("ilrg")), "record of another job"),
    "one victim left out": (lambda f: victims(f, lambda v: v[:1], 1), "1 victims, run.json names"),
    "a thousand copies": (
        lambda f: victims(f, lambda v: v[:1] * 1000, 1000),
        "1000 victims, run.json names 2",
    ),
    "one baseline raised": (lambda f: baseline(f, ("idlg",)), "different baselines of ssim"),
    "settings changed in run.json": (
        lambda f: f.change_run(f.training(), {"delta": 0.5}),
        "record of another job",
    ),
    "attacks on a training that failed": (
        lambda f: f.file(f.training()).write_text(
            json.dumps({"schema": 1, "status": "failed", "reason": "lost", "key": ""})
        ),
        "attacks on a training that is not done",
    ),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_records_that_contradict_are_refused(base: Path, tmp_path: Path, lie: str) -> None:
    shutil.copytree(base / "made", tmp_path / "copy")
    folder, (tell, sentence) = Folder(tmp_path / "copy"), LIES[lie]
    tell(folder)
    for command in (
        ("report", folder.path),
        ("compare", folder.path, "none", "spm"),
        ("merge", folder.path, "--out", tmp_path / "merged"),
        ("site", folder.path, "--out", tmp_path / "site"),
        ("verify", folder.path, "--yes", "--sandbox", "none"),
    ):
        result = call(*command)
        assert result.exit_code in (1, 2), (command, result.output)
        assert "Traceback" not in result.output
    with pytest.raises(UserError, match=sentence):
        bench.load(folder.path).rows  # noqa: B018


def invent(folder: Folder) -> None:
    for seed in (0, 1):
        folder.set(folder.cell(seed=seed), {"values.ssim": each(0.01), "values.mse": each(0.2)})


def edit_leaderboard(folder: Folder) -> None:
    (folder.path / "SHA256SUMS").unlink()
    path = folder.path / "leaderboard.json"
    path.write_text(path.read_text().replace('"victims": 2', '"victims": 3'))


UNVERIFIED = "nobody reran a cell"
UNREFUTED: dict[str, tuple[str, Callable[[Folder], Any], str]] = {
    "nothing": ("made", lambda f: None, UNVERIFIED),
    "scores that can be": ("made", invent, UNVERIFIED),
    "a lower epsilon": (
        "made",
        lambda f: f.set(f.training("spm"), {"ledger.eps_record": 1.0}),
        UNVERIFIED,
    ),
    "all baselines raised": (
        "made",
        lambda f: baseline(f, ("idlg", "ilrg", "prior_only")),
        UNVERIFIED,
    ),
    "the name of a shipped suite": (
        "made",
        lambda f: f.change_run(f.run["suite"], {"name": "quick", "version": 10}),
        "This is not suite quick v10 as leakbench ships it: it has other ",
    ),
    "no records": (
        "published",
        lambda f: (f.path / "records.jsonl.gz").unlink(),
        "came without records",
    ),
    "an edited leaderboard": ("published", edit_leaderboard, UNVERIFIED),
}


@pytest.mark.parametrize("lie", list(UNREFUTED))
def test_what_reading_cannot_refute_is_unverified(base: Path, tmp_path: Path, lie: str) -> None:
    kind, tell, sentence = UNREFUTED[lie]
    shutil.copytree(base / kind, tmp_path / "copy")
    folder = Folder(tmp_path / "copy")
    tell(folder)
    shown = call("report", folder.path)
    assert shown.exit_code == 0, shown.output
    assert sentence in said(shown)
    assert sentence in " ".join((folder.path / "report.html").read_text().split())
    assert "unverified" in repr(bench.load(folder.path))


def test_a_rerun_that_agreed_is_named_until_a_record_changes(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "made", tmp_path / "copy")
    folder = Folder(tmp_path / "copy")
    about = {"manifest": manifest_of(folder.path), "date": "2026-11-27", "cells": 3, "seed": 0}
    (tmp_path / "copy.verified.json").write_text(json.dumps({**about, "passed": True}))
    words = "3 of 12 attack cells were rerun on 2026-11-27 and came out again"
    assert words in said(call("report", folder.path))
    assert "unverified" not in repr(bench.load(folder.path))
    folder.set(folder.cell(), {"values.mse": each(0.2)})
    assert UNVERIFIED in said(call("report", folder.path))


def test_published_records_are_each_there_once(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "published", tmp_path / "copy")
    place = tmp_path / "copy" / "records.jsonl.gz"
    lines = gzip.decompress(place.read_bytes()).splitlines(keepends=True)
    place.write_bytes(gzip.compress(b"".join([*lines, lines[-1]])))
    compare = ("compare", tmp_path / "copy", "none", "spm")
    assert "is not the file that SHA256SUMS lists" in said(call(*compare))
    (tmp_path / "copy" / "SHA256SUMS").unlink()
    assert "holds a record twice" in said(call(*compare))
