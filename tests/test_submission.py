"""From a template to a submission that verifies, and what is refused on the way."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench.cli import plugins, runs, verifying
from bench.errors import UserError
from bench.harness.runner import label_of
from bench.records import AuditSummary, DoubledRun, Flag, FlagCode, to_json
from bench.records.submitted import read_verified, verified_beside
from bench.report.files import Files
from bench.submission.authoring import write_new
from bench.submission.documents import marks, write_manifest
from bench.submission.figures import Comparison, compare
from bench.submission.packing import _check_data, _without_paths, submit
from bench.submission.rerunning import load_plugins
from bench.submission.staged import Rerun, trainings_of
from bench.submission.verification import candidates, open_folder, sample
from tests import made_rows as made_up
from tests.made_records import attacked, trained

APP = typer.Typer()
for command in (plugins.new, plugins.check, plugins.submit, verifying.verify, runs.run):
    APP.command()(command)
runner = CliRunner()

SUITE = """
name = "mine"
version = 1
checkpoints = ["final"]
budget = 5
audit = 0

[protocol]
name = "fedavg"
clients = 3
rounds = 1
local_steps = 1
batch = 8
lr = 0.1

[[tasks]]
dataset = "digits"
model = "mlp_spm"

[[threats]]
victims = 2

[[defenses]]
name = "none"

[[defenses]]
name = "my_defense"
settings = { noise_multiplier = 0.1, clip_norm = 1.0 }

[[attacks]]
name = "my_attack"

[[attacks]]
name = "prior_only"
"""


def leakbench(*arguments: str | Path, answer: str | None = None) -> tuple[int, str]:
    given = [str(a) for a in arguments]
    result = runner.invoke(APP, given, env={"COLUMNS": "300"}, input=answer)
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


def verify(folder: Path, *more: str) -> tuple[int, str]:
    """`leakbench verify` in this process, unasked."""
    common = ("--jobs", "0", "--device", "cpu", "--yes", "--sandbox", "none")
    return leakbench("verify", folder, *common, *more)


def quick_check(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the conformance check, which has tests of its own, by a note that it was asked."""
    asked: list[str] = []

    class Passed:
        findings: tuple[object, ...] = ()

    def check(registry: object, kind: str, name: str, settings: object, **_: object) -> Passed:
        asked.append(name)
        return Passed()

    monkeypatch.setattr("bench.submission.packing.check", check)
    return asked


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return quick_check(monkeypatch)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a new defense and attack, their suite, and a finished run."""
    folder = tmp_path_factory.mktemp("workshop")
    write_new("defense", "my_defense", folder)
    write_new("attack", "my_attack", folder)
    (folder / "my.toml").write_text(SUITE)
    code, text = leakbench(
        "run", folder / "my.toml", "--plugin", folder / "my_defense.py", "--plugin",
        folder / "my_attack.py", "--out", folder / "run", "--jobs", "0", "--device", "cpu",
    )  # fmt: skip
    assert code == 0, text
    return folder


def submit_mine(workshop: Path, out: Path, **more: Any) -> Path:
    given: dict[str, Any] = {
        "target": str(workshop / "my_defense.py"), "run_folder": workshop / "run",
        "attacks": (workshop / "my_attack.py",), "author": "A. Author", "out": out,
        "date": "2026-01-02",
    }  # fmt: skip
    return submit(**{**given, **more})


@pytest.fixture
def submitted(workshop: Path, tmp_path: Path) -> Path:
    return submit_mine(workshop, tmp_path / "subs")


# --- new ------------------------------------------------------------------------------------------


def test_new_writes_a_plugin_and_a_test_that_pass_ruff_and_says_what_to_type(
    tmp_path: Path,
) -> None:
    for kind in ("defense", "attack"):
        code, text = leakbench("new", kind, f"my_{kind}", "--dir", tmp_path)
        assert code == 0, text
        assert text.count(str(tmp_path / f"my_{kind}.py")) == 3
        assert "leakbench check" in text
        assert "pytest" in text
        assert "leakbench run my.toml --plugin" in text
    written = sorted(p.name for p in tmp_path.iterdir())
    assert written == ["my_attack.py", "my_defense.py", "test_my_attack.py", "test_my_defense.py"]
    for test in tmp_path.glob("test_*.py"):
        runpy.run_path(str(test))  # all that it imports is there
    config = Path(__file__).parents[1] / "pyproject.toml"
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", str(config), "--no-cache"]
        done = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["defense", "attack"])
def test_a_new_plugins_own_tests_pass(tmp_path: Path, kind: str) -> None:
    _, test = write_new(kind, f"my_{kind}", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(test)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("defence", "my_defense", "Did you mean 'defense'"),
        ("defense", "spm", "name of a known defense"),
        ("defense", "ilrg", "name of a known attack"),
        ("defense", "class", "no word of Python"),
        ("defense", "MyDefense", "snake_case"),
        ("defense", "my-defense", "snake_case"),
        ("defense", "../my_defense", "snake_case"),
        ("defense", "2nd", "snake_case"),
        ("attack", "random", "name of a Python package"),
        ("attack", "torch", "name of a Python package"),
        ("attack", "a_b", "would come back as"),
    ],
)
def test_new_refuses_bad_names(tmp_path: Path, kind: str, name: str, message: str) -> None:
    code, text = leakbench("new", kind, name, "--dir", tmp_path)
    assert code == 2
    assert message in text
    assert not list(tmp_path.iterdir())


def test_new_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "test_my_defense.py").write_text("mine")
    code, text = leakbench("new", "defense", "my_defense", "--dir", tmp_path)
    assert code == 2
    assert "exists already" in text
    assert [p.name for p in tmp_path.iterdir()] == ["test_my_defense.py"]
    assert (tmp_path / "test_my_defense.py").read_text() == "mine"


# --- submit ---------------------------------------------------------------------------------------


def test_a_submission_holds_source_rows_records_and_no_folder_of_the_author(
    workshop: Path, submitted: Path
) -> None:
    names = {str(p.relative_to(submitted)) for p in submitted.rglob("*") if p.is_file()}
    assert {"README.md", "manifest.json", "submission.json", "run.json",
            "source/my_defense.py", "source/my_attack.py"} <= names  # fmt: skip
    assert (submitted / "source" / "my_defense.py").read_text() == (
        workshop / "my_defense.py"
    ).read_text()
    assert {r.defense for r in Files(submitted).rows} == {"none", "my_defense"}
    facts = json.loads((submitted / "submission.json").read_text())
    assert facts["author"] == "A. Author"
    assert facts["date"] == "2026-01-02"
    assert facts["settings"] == [{"noise_multiplier": 0.1, "clip_norm": 1.0}]
    page = (submitted / "README.md").read_text()
    assert "A. Author on 2026-01-02" in page
    assert page.count("| fedavg digits") == 2
    for path in submitted.rglob("*"):
        if path.is_file():
            assert str(workshop) not in path.read_text()
            assert str(Path.home()) not in path.read_text()
    assert [p.name for p in submitted.parent.iterdir()] == ["my_defense"]


def test_an_attack_is_submitted_with_the_rows_that_it_attacked(
    workshop: Path, tmp_path: Path, asked: list[str]
) -> None:
    mine = {"target": str(workshop / "my_attack.py"), "attacks": ()}
    folder = submit_mine(workshop, tmp_path, **mine)
    assert asked == ["my_attack"]
    assert folder.name == "my_attack"
    assert [r.defense for r in Files(folder).rows] == ["none"]
    assert open_folder(folder).code == ["source/my_attack.py"]
    code, text = verify(folder)
    assert code == 0, text
    assert "my_attack at final" in text
    assert "Sample of 1 cell out of 1, seed 0. To rerun: 1 training and 1 attack." in text


def test_a_shipped_plugin_is_submitted_by_its_name_and_needs_no_source(
    workshop: Path, tmp_path: Path
) -> None:
    mine = {"target": "prior_only", "attacks": (workshop / "my_attack.py",)}
    folder = submit_mine(workshop, tmp_path, **mine)
    (entry,) = [
        p for p in json.loads((folder / "submission.json").read_text())["plugins"]
        if p["name"] == "prior_only"
    ]  # fmt: skip
    assert entry["file"] is None
    assert entry["origin"].startswith("attacks.prior_only:PriorOnly")
    code, text = verify(folder)
    assert code == 0, text


def test_a_submission_without_source_of_its_own_has_no_empty_folder(tmp_path: Path) -> None:
    parts = SUITE.split("\n[[")
    shipped = "\n[[".join(p for p in parts if "my_" not in p)
    (tmp_path / "shipped.toml").write_text(shipped)
    out = tmp_path / "run"
    code, text = leakbench(
        "run", tmp_path / "shipped.toml", "--out", out, "--jobs", "0", "--device", "cpu"
    )
    assert code == 0, text
    folder = submit("prior_only", out, out=tmp_path / "subs")
    assert open_folder(folder).code == []
    assert not (folder / "source").exists()


def test_every_setting_is_checked_and_a_failure_refuses(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.sandbox.findings import Finding

    class Failed:
        findings = (Finding(name="arguments untouched", status="failed", reason="x moved."),)

    monkeypatch.setattr("bench.submission.packing.check", lambda *a: Failed())
    with pytest.raises(ValueError, match=r"does not pass `leakbench check`: arguments untouched"):
        submit_mine(workshop, tmp_path / "subs")
    assert not (tmp_path / "subs").exists()


def test_submit_refuses_to_overwrite_unless_asked(workshop: Path, submitted: Path) -> None:
    with pytest.raises(ValueError, match="exists already"):
        submit_mine(workshop, submitted.parent)
    (submitted / "stale.txt").write_text("old")
    submit_mine(workshop, submitted.parent, replaces=True)
    assert not (submitted / "stale.txt").exists()
    assert [p.name for p in submitted.parent.iterdir()] == ["my_defense"]


def test_a_submission_on_a_full_disk_leaves_nothing(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def full(path: Path, text: str) -> None:
        written.append(path)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_text(text)

    monkeypatch.setattr("bench.submission.packing._text", full)
    with pytest.raises(OSError, match="No space left"):  # as `main` tells
        submit_mine(workshop, tmp_path / "subs")
    assert not list((tmp_path / "subs").iterdir())


def copied(workshop: Path, tmp_path: Path) -> Path:
    shutil.copytree(workshop, tmp_path / "copy")
    return tmp_path / "copy"


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def sealed(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a document of a submission, with a manifest to match."""
    rewritten(folder / name, change)
    (folder / "manifest.json").write_text(write_manifest(folder))


def without(defense: str) -> Callable[[Path], None]:
    def change(run: dict[str, Any]) -> None:
        run["trainings"] = [t for t in run["trainings"] if t["defense"] != defense]

    return lambda copy: rewritten(copy / "run" / "run.json", change)


def unfinished(copy: Path) -> None:
    next((copy / "run" / "records" / "attack").iterdir()).unlink()


def changed(name: str) -> Callable[[Path], None]:
    def change(copy: Path) -> None:
        with (copy / name).open("a") as file:
            file.write("\nCHANGED = True\n")

    return change


def with_stranger(copy: Path) -> None:
    text = (copy / "my_attack.py").read_text().replace("MyAttack", "Stranger")
    (copy / "stranger.py").write_text(text)


def untouched(copy: Path) -> None: ...


@pytest.mark.parametrize(
    ("damage", "given", "message"),
    [
        (untouched, {"target": "spm"}, "the run has no row of defense 'spm'"),
        (untouched, {"target": "spmm"}, "Did you mean 'spm'"),
        (untouched, {"date": "yesterday"}, "--date must be a day"),
        (untouched, {"run_folder": Path("/no/such")}, "is no result folder"),
        (untouched, {"attacks": ()}, "the attack 'my_attack'; give its file by --attack FILE"),
        (with_stranger, {"attacks": ("my_attack.py", "stranger.py")},
         r"no column of an attack from stranger\.py"),
        (changed("my_defense.py"), {}, "source of 'my_defense' has changed since the run"),
        (changed("my_attack.py"), {}, "source of 'my_attack' has changed since the run"),
        (without("none"), {}, "no undefended row"),
        (unfinished, {}, "is not finished"),
    ],
)  # fmt: skip
def test_submit_refuses_with_one_sentence(
    workshop: Path, tmp_path: Path, damage: Callable[[Path], None], given: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    copy = copied(workshop, tmp_path)
    damage(copy)
    if "attacks" in given:
        given = {"attacks": tuple(copy / name for name in given["attacks"])}
    with pytest.raises(ValueError, match=message):
        submit_mine(copy, tmp_path / "subs", **given)
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


def test_failed_cells_are_listed_in_sight(workshop: Path, tmp_path: Path) -> None:
    copy = copied(workshop, tmp_path)
    path = next((copy / "run" / "records" / "attack").iterdir())
    rewritten(path, lambda r: r.update(status="failed", reason="RuntimeError: boom"))
    folder = submit_mine(copy, tmp_path / "subs")
    assert "Cells without a result" in (folder / "README.md").read_text()
    (label,) = json.loads((folder / "submission.json").read_text())["failed_cells"]
    assert label.endswith("failed")


# --- verify ---------------------------------------------------------------------------------------


def test_a_submission_verifies_on_the_machine_that_made_it(submitted: Path) -> None:
    code, text = verify(submitted, "--sample", "2")
    assert code == 0, text
    assert "This runs the submitted code: source/my_defense.py, source/my_attack.py" in text
    assert "Versions, device and code are those of the run" in text
    assert "Verified." in text
    assert "differs" not in text
    assert "within tolerance" not in text.split("Versions")[0]


def kept_beside(folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Verify, and keep what it tells as a reviewer does."""
    code, text = verify(folder, "--json", *more)
    document, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    verified_beside(folder).write_text(json.dumps(document))
    return code, document


def test_a_rerun_that_passed_is_kept_beside_the_submission_and_is_of_its_very_files(
    submitted: Path,
) -> None:
    assert read_verified(submitted) is None
    code, _ = kept_beside(submitted, "--sample", "1")
    assert code == 0
    found = read_verified(submitted)
    assert found is not None
    assert (found.passed, found.cells, found.seed) == (True, 1, 0)
    readme = submitted / "README.md"
    readme.write_text(readme.read_text() + "Trust me.")
    resealed(submitted)
    assert read_verified(submitted) is None


def resealed(folder: Path) -> None:
    """Write the manifest again, as whoever forges a record would."""
    (folder / "manifest.json").write_text(write_manifest(folder))


@pytest.mark.parametrize("name", ["source/my_defense.py", "run.json", "README.md"])
def test_one_changed_byte_is_named(submitted: Path, name: str) -> None:
    with (submitted / name).open("a") as file:
        file.write(" ")
    code, text = leakbench("verify", submitted)
    assert code == 1
    assert f"{name} was changed after the submission was made" in text
    assert "This runs" not in text


def test_missing_extra_and_linked_files_are_refused(submitted: Path, tmp_path: Path) -> None:
    (submitted / "extra.py").write_text("x = 1")
    with pytest.raises(ValueError, match=r"extra\.py is in .* but not in the manifest"):
        open_folder(submitted)
    (submitted / "extra.py").unlink()
    readme = submitted / "README.md"
    text = readme.read_text()
    readme.unlink()
    with pytest.raises(ValueError, match=r"README\.md is in the manifest but not in"):
        open_folder(submitted)
    (tmp_path / "elsewhere.md").write_text(text)
    readme.symlink_to(tmp_path / "elsewhere.md")
    with pytest.raises(ValueError, match="leaves the submission's folder"):
        open_folder(submitted)


@pytest.mark.parametrize(
    "name",
    ["../outside.py", "/etc/hostname", "source/../../x", "a\\b",
     "source/__pycache__/my_defense.cpython-311.pyc", "source/notes.txt", "source/deep/x.py",
     "__pycache__/x.py", "x.py", "records/train/../x.json", "source//x.py", "source/x.so"],
)  # fmt: skip
def test_a_manifest_lists_nothing_but_sources_and_records_inside(
    submitted: Path, name: str
) -> None:
    path = submitted / name
    if path.resolve().is_relative_to(submitted) and "\\" not in name:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1")
    digest = hashlib.sha256(b"x = 1").hexdigest()
    rewritten(submitted / "manifest.json", lambda m: m["files"].update({name: digest}))
    with pytest.raises(ValueError, match=r"no file of a submission|leaves the submission's folder"):
        open_folder(submitted)


@pytest.mark.parametrize("name", ["/../../../x", "..", "/etc/x", "a/b", "a\\b", "x\0", "x" * 300])
def test_a_submission_whose_names_lead_elsewhere_is_not_run_again(
    submitted: Path, tmp_path: Path, name: str
) -> None:
    def rename(run: dict[str, Any]) -> None:
        run["suite"]["threats"][0]["name"] = name
        for training in run["trainings"]:
            training["threats"][0]["name"] = name
            for cell in training["cells"]:
                cell["threat"] = name

    before = sorted(tmp_path.rglob("*"))
    for document, change in (
        ("run.json", rename),
        ("run.json", lambda run: run["suite"].update(name=name)),
        ("submission.json", lambda made: made.update(name=name)),
    ):
        text = (submitted / document).read_text()
        sealed(submitted, document, change)
        code, said = leakbench("verify", submitted)
        assert code in (1, 2)
        assert "files are named after it" in said or "should match pattern" in said
        assert "This runs" not in said
        (submitted / document).write_text(text)
    (submitted / "manifest.json").write_text(write_manifest(submitted))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_source_of_a_submission_outside_of_it_is_never_loaded(
    submitted: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    (submitted.parent / "evil.py").write_text(f"open({str(marker)!r}, 'w')")

    def point_outside(document: dict[str, Any]) -> None:
        for source in document["plugins"]:
            if source["file"]:
                source["file"] = "../evil.py"

    sealed(submitted, "submission.json", point_outside)
    for read in (open_folder, load_plugins):
        with pytest.raises(ValueError, match="leaves the submission's folder"):
            read(submitted)
    assert not marker.exists()


def test_reading_a_submission_runs_nothing_of_it(submitted: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    source = submitted / "source" / "my_defense.py"
    source.write_text(source.read_text() + f"\nopen({str(marker)!r}, 'w')\n")
    (submitted / "manifest.json").write_text(write_manifest(submitted))
    assert open_folder(submitted).code == ["source/my_defense.py", "source/my_attack.py"]
    sample(open_folder(submitted), count=1, seed=0)
    assert not marker.exists()
    with pytest.raises(ValueError, match="other source than the submission was run with"):
        load_plugins(submitted)
    assert marker.exists()


def test_a_submission_whose_hashes_are_of_files_as_before_still_opens(submitted: Path) -> None:
    def as_before(document: dict[str, Any]) -> None:
        for source in document["plugins"]:
            source["sources"] = "0" * 64

    sealed(submitted, "submission.json", as_before)
    assert ("defense", "my_defense") in load_plugins(submitted)[0].usable


def test_the_sample_follows_its_seed_and_begins_with_the_plugins_own_row(submitted: Path) -> None:
    opened = open_folder(submitted)
    drawn = sample(opened, count=9, seed=0)
    assert len({s.name for s in drawn}) == len(drawn) == len(candidates(opened)) == 4
    assert {s.defense for s in drawn} == {"none", "my_defense"}
    assert len(trainings_of(drawn)) == 2
    drawn = {sample(opened, count=1, seed=s)[0].name for s in range(8)}
    assert len(drawn) == 2
    assert all("my_defense" in name for name in drawn)
    both = [sample(opened, count=2, seed=s) for s in range(8)]
    assert any(s.defense == "none" for pair in both for s in pair)
    assert sample(opened, count=1, seed=3) == sample(opened, count=1, seed=3)
    with pytest.raises(ValueError, match="--sample must be >= 1"):
        sample(opened, count=0, seed=0)


def lie(folder: Path, kind: str, defense: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change all records of a kind, or those of a defense, and what has to match them."""
    for training in json.loads((folder / "run.json").read_text())["trainings"]:
        if defense in ("", training["defense"]):
            for entry in [training] if kind == "train" else training["cells"]:
                rewritten(folder / "records" / kind / f"{entry['key']}.json", change)
    resealed(folder)


def no_result(status: str) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update(status=status, reason="not today")


def labelled(record: dict[str, Any]) -> None:
    if "label_accuracy" in record["values"]:
        record["values"]["label_accuracy"] = [0.9] * record["victims"]


FORGED: dict[str, tuple[Any, int, list[str]]] = {
    "cells that did not apply": (
        ("attack", "my_defense", no_result("not_applicable")), 1,
        ["not_applicable", "figures differ"]),
    "cells that failed": (
        ("attack", "my_defense", no_result("failed")), 1, ["failed", "figures differ"]),
    "an undefended row": (
        ("train", "none", lambda r: r.update(correct=1)), 1,
        ["To rerun: 2 trainings and 4 attacks.", "accuracy", "1 of"]),
    "figures that are near on the same machine": (
        ("train", "", lambda r: r.update(bytes_up=r["bytes_up"] * 1.001)), 0,
        ["2 figures not bit-equal although versions, device and code are the same",
         "Verified within the tolerance (2 not bit-equal)."]),
}  # fmt: skip
"""What was changed, the exit code of verify, and what it says."""


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_record_is_found_by_the_rerun(submitted: Path, name: str) -> None:
    forged, expected, words = FORGED[name]
    lie(submitted, *forged)
    code, text = verify(submitted, "--sample", "9")
    assert code == expected, text
    assert all(word in text for word in words), text
    assert ("Verified" in text) == (code == 0)


def test_a_rerun_that_did_not_pass_vouches_for_nothing(submitted: Path) -> None:
    lie(submitted, "attack", "", labelled)
    code, document = kept_beside(submitted, "--sample", "9")
    assert code == 1
    assert read_verified(submitted) is None
    off = {c["figure"] for c in document["comparisons"] if c["verdict"] == "differs"}
    assert off == {"label_accuracy"}


def test_a_submission_without_a_cell_of_its_plugin_is_never_verified(submitted: Path) -> None:
    def no_cells(run: dict[str, Any]) -> None:
        for training in run["trainings"]:
            if training["defense"] == "my_defense":
                training["cells"] = []

    rewritten(submitted / "run.json", no_cells)
    resealed(submitted)
    code, text = verify(submitted)
    assert code == 2, text
    assert "the submission of 'my_defense' holds no such cell to rerun" in text


def test_where_no_score_was_compared_nothing_is_called_verified(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copied(workshop, tmp_path)
    folder = submit_mine(copy, tmp_path / "subs")
    labels = [label_of(c.job) for c in sample(open_folder(folder), count=2, seed=0)]
    statuses = [
        Comparison(what=what, figure="status", submitted="failed", rerun="failed", verdict="equal")
        for what in labels
    ]
    made = Rerun(comparisons=statuses)
    monkeypatch.setattr("bench.submission.staged.rerun", lambda *a, **k: made)
    code, text = verify(folder, "--sample", "2")
    assert code == 0, text
    assert "2 of 2 sampled cells gave no figures to compare" in text
    assert "no score was compared" in text
    assert "Verified" not in text


def test_judged_losses_of_failed_victims_are_infinite_in_both_or_differ() -> None:
    scores = {"values": {"ssim": [0.1, 0.2, 0.3]}, "floors": {}}
    before = attacked(victims=3, judged=[-10.0, math.inf, -5.0], **scores)
    near = replace(before, judged=[-10.0 * (1 + 1e-12), math.inf, -5.0])
    fewer = replace(before, judged=[-10.0, -5.0, -5.0])
    found = [{c.figure: c.verdict for c in compare("it", before, r, 0.02)}["judged loss"]
             for r in (before, near, fewer)]  # fmt: skip
    assert found == ["equal", "within tolerance", "differs"]


LEDGER = replace(
    trained().ledger, eps_claimed=1.0, unit="record", constants={"c": 2.0, "b": math.inf}
)
AUDIT = AuditSummary(draws=100, confidence=0.95, eps_audited=4.5, eps_at_least=False,
                     verdict_claim="violated", verdict_proof="no proof")  # fmt: skip
AGAIN = DoubledRun(budget=10, values={"ssim": [0.5, 0.5]}, gradient_evaluations=9, seconds=1.0)
TRAINING = trained(correct=50, ledger=LEDGER, audit=AUDIT)
CELL = attacked(
    victims=2, values={"mse": [1e-17, 1e-17], "ssim": [0.9, 1.0]}, budget=5,
    floors={"mse": [0.02, 0.03]}, gradient_evaluations=10, doubled=AGAIN,
)  # fmt: skip


def verdicts(honest: Any, **change: Any) -> dict[str, str]:
    """Verdicts other than equal on a record that claims something else."""
    found = compare("it", replace(honest, **change), honest, 0.02)
    return {c.figure: c.verdict for c in found if c.verdict != "equal"}


@pytest.mark.parametrize(
    ("record", "change", "figure"),
    [
        (TRAINING, {"diverged": "weights grew"}, "diverged"),
        (TRAINING, {"bytes_up": 2.0}, "bytes up"),
        (TRAINING, {"bytes_down": math.nan}, "bytes down"),
        (TRAINING, {"rounds_played": 2}, "rounds played"),
        (TRAINING, {"correct": None}, "accuracy"),
        (TRAINING, {"audit": replace(AUDIT, verdict_claim="consistent")}, "audit of the claim"),
        (TRAINING, {"audit": replace(AUDIT, eps_audited=0.1)}, "eps audited"),
        (TRAINING, {"ledger": replace(LEDGER, unit="client")}, "unit of the claim"),
        (TRAINING, {"ledger": replace(LEDGER, eps_record=5.0)}, "eps proven"),
        (TRAINING, {"ledger": replace(LEDGER, constants={"c": 2.0})}, "ledger b"),
        (replace(CELL, doubled=None), {"values": {"mse": [1e-17, 1e-17]}}, "ssim"),
        (CELL, {"values": CELL.values | {"psnr": [9.0, 9.0]}}, "psnr"),  # type: ignore[operator]
        (CELL, {"values": CELL.values | {"mse": [0.019, 0.019]}}, "mse"),  # type: ignore[operator]
        (CELL, {"values": CELL.values | {"ssim": [0.8, 0.8]}}, "ssim"),  # type: ignore[operator]
        (CELL, {"floors": {"mse": [0.02, 0.032]}}, "mse floor"),
        (CELL, {"is_floor": True}, "is floor"),
        (CELL, {"gradient_evaluations": 5}, "gradient evaluations"),
        (CELL, {"doubled": replace(AGAIN, values={"ssim": [0.9, 1.0]})},
         "ssim at twice the budget"),
    ],
)  # fmt: skip
def test_every_figure_of_a_record_is_compared(
    record: Any, change: dict[str, Any], figure: str
) -> None:
    assert verdicts(record) == {}
    assert verdicts(record, **change)[figure] == "differs"
    assert len(verdicts(record, **change)) == 1


def test_near_figures_and_exact_copies_are_within_the_tolerance() -> None:
    near = {"mse": [2e-13, 1e-17], "ssim": [0.91, 1.0]}
    assert verdicts(CELL, values=near) == {"mse": "within tolerance", "ssim": "within tolerance"}
    near = {"mse": [0.0201, 0.0301]}
    assert verdicts(CELL, floors=near) == {"mse floor": "within tolerance"}


# --- privacy of the author ------------------------------------------------------------------------


def test_a_merged_runs_commands_and_tracebacks_stay_at_home(workshop: Path, tmp_path: Path) -> None:
    copy = copied(workshop, tmp_path)
    commands = ["leakbench run a.toml --out /mnt/alice/secret/x", "leakbench run a.toml"]
    rewritten(copy / "run" / "run.json", lambda r: r.update(
        command=" && ".join(commands), commands=commands, note="/mnt/alice/other",
    ))  # fmt: skip
    path = next((copy / "run" / "records" / "attack").iterdir())
    rewritten(path, lambda r: r.update(
        status="failed", reason="RuntimeError: boom", traceback=f"File {copy}/my_attack.py",
    ))  # fmt: skip
    folder = submit_mine(copy, tmp_path / "subs", target=str(copy / "my_defense.py"),
                            attacks=(copy / "my_attack.py",))  # fmt: skip
    for path in folder.rglob("*.json"):
        assert "alice" not in path.read_text()
        assert str(copy) not in path.read_text()
    run = json.loads((folder / "run.json").read_text())
    assert run["command"] == "leakbench run a.toml --out x && leakbench run a.toml"
    assert open_folder(folder).code


@pytest.mark.parametrize("place", ["plugin", "command", "jörg"])
def test_a_reason_that_names_a_folder_of_the_author_is_refused(
    workshop: Path, tmp_path: Path, place: str
) -> None:
    copy = tmp_path / ("jörg" if place == "jörg" else "elsewhere")
    shutil.copytree(workshop, copy)
    said = "/mnt/alice/secret" if place == "command" else str(copy)
    rewritten(copy / "run" / "run.json", lambda r: r.update(
        command="leakbench run a.toml --set threats.0.file=/mnt/alice/secret",
    ))  # fmt: skip
    path = next((workshop / "run" / "records" / "attack").iterdir())
    path = copy / "run" / "records" / "attack" / path.name
    record = json.loads(path.read_text())
    reason = f"OSError: cannot read {said}/x"
    path.write_text(to_json(record | {"status": "failed", "reason": reason}))
    mine = {"target": str(copy / "my_defense.py"), "attacks": (copy / "my_attack.py",)}
    with pytest.raises(ValueError, match="would name a folder of your machine"):
        submit_mine(workshop, tmp_path / "subs", run_folder=copy / "run", **mine)
    assert not any((tmp_path / "subs").iterdir())


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("leakbench run a.toml --out=/mnt/a/x/", "leakbench run a.toml --out=x"),
        ("leakbench run /mnt/a=b/c.toml", "leakbench run a=c.toml"),
        (r"leakbench run 'C:\Users\a\b.toml'", "leakbench run b.toml"),
        ("leakbench run a.toml --set lr=0.5", "leakbench run a.toml --set lr=0.5"),
    ],
)
def test_commands_lose_their_folders(command: str, shown: str) -> None:
    assert _without_paths(command) == shown


def test_what_the_manifest_does_not_list_is_refused_folders_too(submitted: Path) -> None:
    folder = submitted / "source" / "__pycache__"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"the folder source/__pycache__ in .* holds no file"):
        open_folder(submitted)
    (folder / "my_defense.cpython-311.pyc").write_bytes(b"x")
    with pytest.raises(ValueError, match="__pycache__"):
        open_folder(submitted)
    shutil.rmtree(folder)
    os.mkfifo(submitted / "source" / "pipe.py")
    with pytest.raises(ValueError, match=r"pipe\.py is in .* but not in the manifest"):
        open_folder(submitted)


def test_a_folder_that_is_none_is_bad_input() -> None:
    code, text = leakbench("verify", "/no/such/folder")
    assert code == 2
    assert "no such folder" in text


# --- marks ----------------------------------------------------------------------------------------


def _marked(rows: list[Any], *, victims: int = 8) -> list[str]:
    suite = SimpleNamespace(threats=(SimpleNamespace(victims=victims, recorded=False),))
    return marks(rows, SimpleNamespace(suite=suite), kind="defense", name="spm")  # type: ignore[arg-type]


def test_rows_that_can_be_cited_have_no_mark() -> None:
    assert _marked([made_up.row("spm", seeds=(0, 1, 2))]) == []


def test_too_few_seeds_and_victims_and_rows_of_no_use_are_marked() -> None:
    chance = (Flag(code=FlagCode.AT_CHANCE),)
    told = " ".join(_marked([made_up.row("spm", seeds=(0,), flags=chance)], victims=2))
    assert "1 seed where 3 are asked for" in told
    assert "2 victims per training where 4 are asked for" in told
    assert "No row of spm is of use" in told
    good = made_up.row("spm", seeds=(0, 1, 2))
    assert (
        "1 of 2 rows of spm are at chance"
        in _marked([good, made_up.row("spm", seeds=(0, 1, 2), flags=chance)])[0]
    )
    failed = (Flag(code=FlagCode.CONTROL_FAILED, values={"leak": 0.1}),)
    assert (
        "Attacks do not work without a defense"
        in _marked([made_up.row("spm", seeds=(0, 1, 2), flags=failed)])[0]
    )


def test_undefended_rows_beside_a_defense_are_not_marked() -> None:
    other = made_up.row("none", seeds=(0,))
    assert _marked([made_up.row("spm", seeds=(0, 1, 2)), other]) == []


def test_marks_and_flags_stand_in_the_readme_and_in_what_submit_and_verify_say(
    submitted: Path,
) -> None:
    text = (submitted / "README.md").read_text()
    assert "**Mark**: 1 seed where 3 are asked for" in text
    assert "accuracy at chance" in text
    code, said = verify(submitted, "--sample", "1")
    assert code == 0, said
    assert "Mark: 1 seed where 3 are asked for" in said


@pytest.mark.parametrize(
    ("dataset", "model", "sentence"),
    [
        ("npz:mine.npz", "mlp_spm", "the data set 'npz:...' lies on your machine alone"),
        ("digits", "net.py:Net", "the model 'net.py:Net' lies on your machine alone"),
        ("digits", "handed:Net-0123456789ab", "the model 'handed:Net-"),
    ],
)
def test_a_run_on_what_nobody_else_has_is_not_packed(
    dataset: str, model: str, sentence: str
) -> None:
    task = SimpleNamespace(dataset=dataset, model=model)
    training: Any = SimpleNamespace(job=SimpleNamespace(task=task))
    with pytest.raises(UserError, match=sentence):
        _check_data(training)
