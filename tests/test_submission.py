"""From a template to a submission that verifies, and what is refused on the way."""

import errno
import hashlib
import json
import math
import os
import re
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

from bench.errors import UserError
from bench.harness.runner import label_of
from bench.records import AuditSummary, DoubledRun, Flag, FlagCode, to_json
from bench.records.submitted import read_verified, verification_path
from bench.report.files import Files
from bench.submission.authoring import write_new
from bench.submission.documents import marks, write_manifest
from bench.submission.figures import Comparison, compare
from bench.submission.packing import _check_data, submit
from bench.submission.rerunning import load_plugins
from bench.submission.staged import trainings_of
from bench.submission.verification import candidates, open_folder, sample
from tests import made_rows as made_up
from tests.conftest import TINY, Run, changed
from tests.made_records import attacked, trained
from tests.small_folders import leakbench

SUITE = changed(
    TINY,
    {
        'checkpoints = ["init", "final"]': 'checkpoints = ["final"]',
        'name = "spm"\nsettings = { epsilon = [0.5, 2.0] }':
            'name = "my_defense"\nsettings = { noise_multiplier = 0.1, clip_norm = 1.0 }',
        'name = "ilrg"': 'name = "my_attack"',
    },
)  # fmt: skip


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
    }  # fmt: skip
    return submit(**{**given, **more})


@pytest.fixture(scope="module")
def packed(workshop: Path) -> Path:
    """The submission of that defense, which no test changes."""
    with pytest.MonkeyPatch.context() as patch:
        quick_check(patch)
        return submit_mine(workshop, workshop / "packed")


@pytest.fixture
def submitted(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "subs" / "my_defense"))


@pytest.fixture
def copy(workshop: Path, tmp_path: Path) -> Path:
    """A copy of the workshop that a test may change."""
    skipped = shutil.ignore_patterns("packed")
    return Path(shutil.copytree(workshop, tmp_path / "copy", ignore=skipped))


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
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", facts["date"])
    assert facts["settings"] == [{"noise_multiplier": 0.1, "clip_norm": 1.0}]
    page = (submitted / "README.md").read_text()
    assert f"A. Author on {facts['date']}" in page
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


def test_a_shipped_plugin_is_submitted_by_its_name_without_a_source(
    tiny: Callable[..., Path], run: Run, tmp_path: Path
) -> None:
    only = {"defense": "none", "checkpoint": "init", "attack": "prior_only"}
    folder = submit("prior_only", run(tiny(), only=only)[0].folder, out=tmp_path / "subs")
    facts = json.loads((folder / "submission.json").read_text())
    (entry,) = [p for p in facts["plugins"] if p["name"] == "prior_only"]
    assert entry["file"] is None
    assert entry["origin"].startswith("attacks.prior_only:PriorOnly")
    assert open_folder(folder).code == []
    assert not (folder / "source").exists()
    code, text = verify(folder, "--sample", "1")
    assert code == 0, text


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


def edited(name: str) -> Callable[[Path], None]:
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
        (untouched, {"run_folder": Path("/no/such")}, "is no result folder"),
        (untouched, {"attacks": ()}, "the attack 'my_attack'; give its file by --attack FILE"),
        (with_stranger, {"attacks": ("my_attack.py", "stranger.py")},
         r"no column of an attack from stranger\.py"),
        (edited("my_defense.py"), {}, "source of 'my_defense' has changed since the run"),
        (edited("my_attack.py"), {}, "source of 'my_attack' has changed since the run"),
        (without("none"), {}, "no undefended row"),
        (unfinished, {}, "is not finished"),
    ],
)  # fmt: skip
def test_submit_refuses_with_one_sentence(
    copy: Path, tmp_path: Path, damage: Callable[[Path], None], given: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    damage(copy)
    if "attacks" in given:
        given = {"attacks": tuple(copy / name for name in given["attacks"])}
    with pytest.raises(ValueError, match=message):
        submit_mine(copy, tmp_path / "subs", **given)
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


def test_failed_cells_are_listed_in_sight(copy: Path, tmp_path: Path) -> None:
    path = next((copy / "run" / "records" / "attack").iterdir())
    rewritten(path, lambda r: r.update(status="failed", reason="RuntimeError: boom"))
    folder = submit_mine(copy, tmp_path / "subs")
    assert "Cells without a result" in (folder / "README.md").read_text()
    (label,) = json.loads((folder / "submission.json").read_text())["failed_cells"]
    assert label.endswith("failed")


# --- verify ---------------------------------------------------------------------------------------


def test_a_submission_verifies_on_the_machine_that_made_it(submitted: Path) -> None:
    readme = (submitted / "README.md").read_text()
    assert "**Mark**: 1 seed where 3 are asked for" in readme
    assert "accuracy at chance" in readme
    code, text = verify(submitted, "--sample", "2")
    assert code == 0, text
    assert "Mark: 1 seed where 3 are asked for" in text
    assert "This runs the submitted code: source/my_defense.py, source/my_attack.py" in text
    assert "Versions, device and code are those of the run" in text
    assert "Verified." in text
    assert "differs" not in text
    assert "within tolerance" not in text.split("Versions")[0]


def keep_beside(folder: Path, text: str) -> dict[str, Any]:
    """Keep what `verify --json` printed as a reviewer does."""
    document: dict[str, Any]
    document, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    verification_path(folder).write_text(json.dumps(document))
    return document


def test_a_rerun_that_passed_is_kept_beside_the_submission_and_is_of_its_very_files(
    submitted: Path,
) -> None:
    assert read_verified(submitted) is None
    code, text = verify(submitted, "--sample", "1", "--json")
    assert code == 0, text
    keep_beside(submitted, text)
    verified = read_verified(submitted)
    assert verified is not None
    assert (verified.passed, verified.cells, verified.seed) == (True, 1, 0)
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


def linked(folder: Path) -> None:
    (folder / "README.md").rename(folder.parent / "elsewhere.md")
    (folder / "README.md").symlink_to(folder.parent / "elsewhere.md")


def compiled(folder: Path) -> None:
    (folder / "source" / "__pycache__").mkdir()
    (folder / "source" / "__pycache__" / "my_defense.cpython-311.pyc").write_bytes(b"x")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "extra.py").write_text("x = 1"), r"extra\.py is in .* not in the man"),
        (lambda f: (f / "README.md").unlink(), r"README\.md is in the manifest but not in"),
        (linked, r"README\.md is a link"),
        (lambda f: (f / "source" / "__pycache__").mkdir(), "source/__pycache__ .* holds no file"),
        (compiled, "__pycache__"),
        (lambda f: os.mkfifo(f / "source" / "pipe.py"), r"pipe\.py is in .* not in the manifest"),
    ],
)
def test_a_folder_that_is_not_what_its_manifest_lists_is_refused(
    submitted: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(submitted)
    with pytest.raises(ValueError, match=sentence):
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
def test_a_submission_whose_name_leads_elsewhere_is_not_run_again(
    submitted: Path, tmp_path: Path, name: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    sealed(submitted, "submission.json", lambda made: made.update(name=name))
    code, said = leakbench("verify", submitted)
    assert code in (1, 2)
    assert "files are named after it" in said or "should match pattern" in said
    assert "This runs" not in said
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
    code, text = verify(submitted, "--sample", "0")
    assert (code, "should be greater than or equal to 1" in text) == (2, True)


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


def test_forged_records_are_found_by_the_rerun_which_vouches_for_nothing(submitted: Path) -> None:
    lie(submitted, "attack", "my_defense", no_result("not_applicable"))
    lie(submitted, "train", "none", lambda record: record.update(correct=1))
    lie(submitted, "attack", "none", labelled)
    code, text = verify(submitted, "--sample", "9", "--json")
    assert code == 1, text
    assert "To rerun: 2 trainings and 4 attacks." in text
    document = keep_beside(submitted, text)
    assert (document["passed"], document["end"]) == (False, None)
    assert read_verified(submitted) is None
    off = [c for c in document["comparisons"] if c["verdict"] == "differs"]
    assert sorted((c["what"].split("/")[3].partition("(")[0], c["figure"]) for c in off) == [
        *[("my_defense", "status")] * 2, ("none", "accuracy"),
        *[("none", "values.label_accuracy")] * 2,
    ]  # fmt: skip


def test_figures_that_are_near_on_the_same_machine_are_within_the_tolerance(
    submitted: Path,
) -> None:
    lie(submitted, "train", "", lambda record: record.update(bytes_up=record["bytes_up"] * 1.001))
    code, text = verify(submitted, "--sample", "2")
    assert code == 0, text
    near = "2 figures not bit-equal although versions, device and code are the same"
    assert near in text
    assert "Verified within the tolerance (2 not bit-equal)." in text


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
    submitted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = [label_of(c.job) for c in sample(open_folder(submitted), count=2, seed=0)]
    statuses = [
        Comparison(what=what, figure="status", submitted="failed", rerun="failed", verdict="equal")
        for what in labels
    ]
    monkeypatch.setattr("bench.submission.staged.rerun", lambda *a, **k: (statuses, None))
    code, text = verify(submitted, "--sample", "2")
    assert code == 0, text
    assert "2 of 2 sampled cells gave no figures to compare" in text
    assert "no score was compared" in text
    assert "Verified" not in text


LEDGER = replace(
    trained().ledger, eps_claimed=1.0, unit="record", constants={"c": 2.0, "b": math.inf}
)
AUDIT = AuditSummary(draws=100, confidence=0.95, eps_audited=4.5, eps_at_least=False,
                     verdict_claim="violated", verdict_proof="no proof")  # fmt: skip


AGAIN = DoubledRun(budget=10, values={"ssim": [0.5, 0.5]}, gradient_evaluations=9, seconds=1.0)
TRAINING = trained(correct=50, ledger=LEDGER, audit=AUDIT)
VALUES = {"mse": [1e-17, 1e-17], "ssim": [0.9, 1.0]}
JUDGED = [-10.0, math.inf]
CELL = attacked(
    victims=2, values=VALUES, budget=5, floors={"mse": [0.02, 0.03]}, gradient_evaluations=10,
    doubled=AGAIN, judged=JUDGED,
)  # fmt: skip


@pytest.mark.parametrize(
    ("record", "change", "figure"),
    [
        (TRAINING, {"diverged": "weights grew"}, "diverged"),
        (TRAINING, {"bytes_up": 2.0}, "bytes_up"),
        (TRAINING, {"bytes_down": math.nan}, "bytes_down"),
        (TRAINING, {"rounds_played": 2}, "rounds_played"),
        (TRAINING, {"correct": None}, "accuracy"),
        (TRAINING, {"audit": replace(AUDIT, verdict_claim="consistent")}, "audit.verdict_claim"),
        (TRAINING, {"audit": replace(AUDIT, eps_audited=0.1)}, "audit.eps_audited"),
        (TRAINING, {"ledger": replace(LEDGER, unit="client")}, "ledger.unit"),
        (TRAINING, {"ledger": replace(LEDGER, eps_record=5.0)}, "ledger.eps_record"),
        (TRAINING, {"ledger": replace(LEDGER, constants={"c": 2.0})}, "ledger.constants.b"),
        (replace(CELL, doubled=None), {"values": {"mse": [1e-17, 1e-17]}}, "values.ssim"),
        (CELL, {"values": VALUES | {"psnr": [9.0, 9.0]}}, "values.psnr"),
        (CELL, {"values": VALUES | {"mse": [0.019, 0.019]}}, "values.mse"),
        (CELL, {"values": VALUES | {"ssim": [0.8, 0.8]}}, "values.ssim"),
        (CELL, {"floors": {"mse": [0.02, 0.032]}}, "floors.mse"),
        (CELL, {"is_floor": True}, "is_floor"),
        (CELL, {"gradient_evaluations": 5}, "gradient_evaluations"),
        (CELL, {"judged": [-10.0, -5.0]}, "judged"),
        (CELL, {"doubled": replace(AGAIN, values={"ssim": [0.9, 1.0]})},
         "doubled.values.ssim"),
        # What is near and what is an exact copy on both sides is within the tolerance.
        (CELL, {"values": {"mse": [2e-13, 1e-17], "ssim": [0.9, 1.0]}}, "~values.mse"),
        (CELL, {"values": VALUES | {"ssim": [0.91, 1.0]}}, "~values.ssim"),
        (CELL, {"floors": {"mse": [0.0201, 0.0301]}}, "~floors.mse"),
        (CELL, {"judged": [-10.0 * (1 + 1e-12), math.inf]}, "~judged"),
    ],
)  # fmt: skip
def test_every_figure_of_a_record_is_compared(
    record: Any, change: dict[str, Any], figure: str
) -> None:
    """~: within the tolerance."""

    def verdicts(**changes: Any) -> dict[str, str]:
        comparisons = compare("it", replace(record, **changes), record, 0.02)
        return {c.figure: c.verdict for c in comparisons if c.verdict != "equal"}

    assert verdicts() == {}
    verdict = "within tolerance" if figure[0] == "~" else "differs"
    assert verdicts(**change) == {figure.removeprefix("~"): verdict}


# --- privacy of the author ------------------------------------------------------------------------


def test_a_merged_runs_commands_and_tracebacks_stay_at_home(copy: Path, tmp_path: Path) -> None:
    commands = [
        "leakbench run a.toml --out /mnt/alice/secret/x", "leakbench run a.toml --out=/mnt/a/x/",
        "leakbench run /mnt/a=b/c.toml", r"leakbench run 'C:\Users\a\b.toml'",
        "leakbench run a.toml --set lr=0.5",
    ]  # fmt: skip
    rewritten(copy / "run" / "run.json", lambda r: r.update(
        command=" && ".join(commands), commands=commands, note="/mnt/alice/other",
    ))  # fmt: skip
    path = next((copy / "run" / "records" / "attack").iterdir())
    rewritten(path, lambda r: r.update(
        status="failed", reason="RuntimeError: boom", traceback=f"File {copy}/my_attack.py",
    ))  # fmt: skip
    folder = submit_mine(copy, tmp_path / "subs")
    for path in folder.rglob("*.json"):
        assert "alice" not in path.read_text()
        assert str(copy) not in path.read_text()
    run = json.loads((folder / "run.json").read_text())
    assert run["command"].split(" && ") == [
        "leakbench run a.toml --out x", "leakbench run a.toml --out=x", "leakbench run a=c.toml",
        "leakbench run b.toml", "leakbench run a.toml --set lr=0.5",
    ]  # fmt: skip
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


# --- marks ----------------------------------------------------------------------------------------


def spm_row(*codes: FlagCode, seeds: tuple[int, ...] = (0, 1, 2)) -> Any:
    flags = tuple(Flag(code=code, values={"leak": 0.1}) for code in codes)
    return made_up.row("spm", seeds=seeds, flags=flags)


@pytest.mark.parametrize(
    ("rows", "victims", "sentences"),
    [
        ([spm_row()], 8, []),
        ([spm_row(), made_up.row("none", seeds=(0,))], 8, []),  # it stands beside the defense
        ([spm_row(FlagCode.AT_CHANCE, seeds=(0,))], 2, [
            "1 seed where 3 are asked for", "2 victims per training where 4 are asked for",
            "No row of spm is of use"]),
        ([spm_row(), spm_row(FlagCode.AT_CHANCE)], 8, ["1 of 2 rows of spm are at chance"]),
        ([spm_row(FlagCode.CONTROL_FAILED)], 8, ["Attacks do not work without a defense"]),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_cited_are_marked(
    rows: list[Any], victims: int, sentences: list[str]
) -> None:
    suite = SimpleNamespace(threats=(SimpleNamespace(victims=victims, recorded=False),))
    told = marks(rows, SimpleNamespace(suite=suite), kind="defense", name="spm")  # type: ignore[arg-type]
    assert all(sentence in " ".join(told) for sentence in sentences)
    assert bool(told) == bool(sentences)


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
