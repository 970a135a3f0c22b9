"""A name that files are named after never leads out of its folder."""

import itertools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

import bench
from bench import suite as suites
from bench.cli import app
from bench.errors import UserError
from bench.harness import launch
from bench.harness.plan import Plan
from bench.harness.store import Store
from bench.names import is_file_name, is_given_name
from bench.protocols.export import load_truth, save_truth
from bench.protocols.observe import Truth
from bench.protocols.settings import ThreatSettings
from bench.records import Run, read_outcome, to_json
from bench.records.outcomes import Observation
from bench.submission.documents import inside
from tests.made_records import trained
from tests.test_merge import small_suite, write_part

ESCAPES = (
    "../../x", "/../../../x", "/etc/x", "..", ".", "", " ", "a/b", "a\\b", "..\\x", "C:\\x", "C:x",
    "x\0", "x\n", "\x1b[2J", "x" * 256, "é" * 128, ".hidden", "x.", "x ", "\ud800", "a\u202eb",
)  # fmt: skip
SAFE = (
    "quick", "a-b_c.d@e", "v1.5", "Prüfung", "Pru\u0308fung", "試験", "हिन्दी", "٣", "x" * 64, "aux",
)  # fmt: skip
NO_NAMES = (
    *ESCAPES, "a b", "a+b", "a(b)", "-x", "_x", "@x", "~", "x" * 65, "𠀀" * 51, "\u0308x", "²",
    "a%b", "[red]x", "a=b", "a,b",
)  # fmt: skip
PIECES = st.sampled_from(["..", ".", "/", "\\", ":", "x", "é", " ", "\0", "\n", "a" * 120])
ANY_NAME = st.text() | st.lists(PIECES).map("".join)


def everything(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@given(name=ANY_NAME)
@settings(max_examples=100, deadline=None)
def test_a_given_name_is_a_file_name(name: str) -> None:
    assert is_file_name(name) or not is_given_name(name)


@given(suite=ANY_NAME, threat=ANY_NAME)
@settings(max_examples=100, deadline=None)
def test_whatever_a_suite_and_a_threat_are_called_nothing_is_written_elsewhere(
    suite: str, threat: str
) -> None:
    """What a run makes of the two names: its folder, and the files of an observation."""
    try:
        made = small_suite(name=suite, threats=[{"name": threat, "victims": 2}])
    except ValidationError:
        assert not (is_given_name(suite) and is_given_name(threat))
        return
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(os, "fsync", lambda descriptor: None)  # waiting for the disk
        plan = Plan(suite=made, trainings=(), cells=())
        store = launch.store_of(plan, None, (12, 100))
        artifacts = store.artifacts("0" * 24)
        truth = Truth(x=torch.zeros(1, 1, 2), y=torch.zeros(1, 1, dtype=torch.int64))
        file = artifacts / f"final-{made.threats[0].name}-truth.safetensors"
        save_truth(truth, file)
        assert load_truth(file).y.shape == (1, 1)
        assert [p.name for p in Path(place).iterdir()] == ["leakbench-runs"]
        assert [p.name for p in Path("leakbench-runs").iterdir()] == [f"{suite}-12-of-100"]
        assert [p.name for p in artifacts.iterdir()] == [f"final-{threat}-truth.safetensors"]
        stem = Observation(status="done", stem=f"final-{threat}").stem
        store.write("train", "1" * 24, trained(observations={"final": {threat: Observation(
            status="done", stem=stem)}}, files={file.name: 1}))  # fmt: skip
        assert read_outcome(store.path("train", "1" * 24), "train").status == "done"


@pytest.mark.parametrize("where", ["name", "threats.0.name"])
def test_a_name_that_leads_elsewhere_is_refused_in_one_sentence_before_any_work(
    where: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = everything(tmp_path)
    for name in NO_NAMES:
        if "\ud800" not in name:  # no command line holds half a character
            text = f"{where}={json.dumps(name)}"
            done = CliRunner().invoke(app, ["run", path, "--jobs", "0", "--set", text])
            assert done.exit_code == 2, (name, done.output)
            assert len(done.stderr.splitlines()) == 1, name
            assert f"{where}: files are named after it" in done.stderr, name
        given: dict[str, Any] = small_suite().model_dump()
        (given if where == "name" else given["threats"][0])["name"] = name
        with pytest.raises(UserError, match="files are named after it"):
            bench.run(given, jobs=0)
        assert everything(tmp_path) == before, name


def test_a_result_folder_with_a_name_that_leads_elsewhere_is_not_read(tmp_path: Path) -> None:
    folder = write_part(tmp_path / "p")
    whole = (folder / "run.json").read_text()
    names = [name for name in ESCAPES if "\ud800" not in name]
    for name, change in itertools.product(names, ("suite", "threat")):
        run = json.loads(whole)
        if change == "suite":
            run["suite"]["name"] = name
        else:
            run["suite"]["threats"][0]["name"] = name
            for training in run["trainings"]:
                training["threats"][0]["name"] = name
                for cell in training["cells"]:
                    cell["threat"] = name
        (folder / "run.json").write_text(to_json(run))
        with pytest.raises(UserError, match="files are named after it"):
            Run.read(folder)


@pytest.mark.parametrize("name", ["../x", "..", "/etc/x", "a/b", "a\\b", "x\0"])
def test_a_record_that_names_files_elsewhere_is_no_record(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("train", "0" * 24, trained())
    path = store.path("train", "0" * 24)
    whole = json.loads(path.read_text())
    for change in ({"files": {name: 1}}, {"observations": {"init": {"server": {
        "status": "done", "stem": name}}}}):  # fmt: skip
        path.write_text(json.dumps(whole | change))
        with pytest.raises(UserError, match="files are named after it"):
            store.read("train", "0" * 24)


@given(name=ANY_NAME)
@settings(max_examples=100, deadline=None)
def test_a_file_that_a_submission_names_lies_inside_it_or_is_refused(name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "submission"
        folder.mkdir()
        try:
            path = inside(folder, name)
        except UserError:
            return
        assert path.resolve().is_relative_to(folder.resolve())
        assert path.resolve() != folder.resolve()
        assert not path.is_file()


def test_suites_and_threats_may_be_called_so() -> None:
    for name in SAFE:
        assert ThreatSettings(name=name).name == name
        assert suites.Suite.model_validate(small_suite().model_dump() | {"name": name}).name == name
