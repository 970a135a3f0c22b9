"""What a job left is what its record says, or is made again or named; no link is followed."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.errors import UserError
from bench.harness.environment import Environment
from bench.harness.merge import merge
from bench.harness.store import Store
from bench.outside.exports import export
from bench.records import AttackRecord, Run, TrainRecord, read_outcome
from bench.report import grids, pictures
from tests.conftest import require
from tests.runs import contents
from tests.small_folders import call, go, said


def flip(path: Path) -> None:
    """Turn the last bit of a file over; its size stays."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def seen(folder: Path) -> Path:
    return next(folder.glob("artifacts/*/*-seen.safetensors"))


def truth(folder: Path) -> Path:
    return next(folder.glob("artifacts/*/*-truth.safetensors"))


def rebuilt(folder: Path) -> Path:
    return next(folder.glob("artifacts/*/reconstruction.safetensors"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "out"
    assert go(folder).exit_code == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "out")


# --- hashes ---------------------------------------------------------------------------------------


def test_a_record_has_the_hash_of_every_file_that_its_job_left(folder: Path) -> None:
    store = Store(folder)
    for kind, key in Run.read(folder).record_names:
        record = require(store.read(kind, key))
        assert record.hashes is not None
        there = {p.name for p in store.artifacts(key).glob("*")}
        assert record.hashes.keys() == (record.files or {}).keys() == there
        assert store.damage(key, record) is None


@pytest.mark.parametrize("which", [seen, truth])
def test_a_changed_observation_is_made_again_before_it_is_attacked(
    folder: Path, which: Callable[[Path], Path]
) -> None:
    before = contents(Store(folder))
    flip(which(folder))
    next(folder.glob("records/attack/*")).unlink()
    result = go(folder)
    assert result.exit_code == 0, result.output
    assert f"{which(folder).name} is not the file whose hash its record lists" in said(result)
    assert "It was made again." in said(result)
    assert "3 run, 0 cached, 0 failed" in said(result)
    assert contents(Store(folder)) == before


def test_a_changed_reconstruction_is_made_again(folder: Path) -> None:
    before = contents(Store(folder))
    flip(rebuilt(folder))
    result = go(folder)
    assert "reconstruction.safetensors is not the file" in said(result)
    assert "1 run, 2 cached, 0 failed" in said(result)
    assert contents(Store(folder)) == before
    assert "0 run, 3 cached" in said(go(folder))


def test_reconstructions_that_were_taken_away_are_not_made_again(folder: Path) -> None:
    shutil.rmtree(folder / "artifacts")
    assert "0 run, 3 cached" in said(go(folder))


def test_a_report_leaves_a_changed_picture_out_and_says_so(folder: Path) -> None:
    whole = pictures.collect(folder)
    flip(rebuilt(folder))
    album = pictures.collect(folder)
    assert len(album["cells"]) == len(whole["cells"]) - 1
    (note,) = album["unreadable"]
    assert "was changed" in note
    assert call("report", folder).exit_code == 0
    assert "was changed" in (folder / "report.html").read_text()
    cells = [c for c in Run.read(folder).cells if c.key == rebuilt(folder).parent.name]
    with pytest.raises(UserError, match=r"reconstruction.safetensors is not the file"):
        grids.pictures(folder, cells)


@pytest.mark.parametrize("which", [seen, truth])
def test_a_changed_observation_is_not_exported_or_merged(
    folder: Path, tmp_path: Path, which: Callable[[Path], Path]
) -> None:
    flip(which(folder))
    with pytest.raises(UserError, match=rf"{which(folder).name} is not the file"):
        export(folder, Run.read(folder).cells[0].key, tmp_path / "seen", Environment())
    with pytest.raises(UserError, match=rf"{which(folder).name} is not the file"):
        merge([folder], tmp_path / "merged")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_records_of_older_versions_have_no_hashes_and_are_not_checked(
    folder: Path, tmp_path: Path
) -> None:
    before = pictures.collect(folder)
    store = Store(folder)
    for kind, key in Run.read(folder).record_names:
        record = read_outcome(store.path(kind, key), kind)
        assert isinstance(record, TrainRecord | AttackRecord)
        store.write(kind, key, replace(record, hashes=None))
        text = json.loads(store.path(kind, key).read_text())
        del text["hashes"]
        store.path(kind, key).write_text(json.dumps(text))
    assert pictures.collect(folder) == before
    assert "0 run, 3 cached" in said(go(folder))
    assert len(merge([folder], tmp_path / "merged").trainings) == 1


# --- links ----------------------------------------------------------------------------------------


def _planted(folder: Path, name: str, outside: Path) -> Path:
    """Move what has that name outside, and leave a link to it."""
    place = folder / name
    if place.exists():
        os.rename(place, outside)
    elif "." in name:
        outside.write_text("mine")
    else:
        outside.mkdir()
    place.symlink_to(outside)
    return place


def _all(place: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(place)): p.read_bytes() if p.is_file() else None
        for p in [place, *sorted(place.rglob("*"))]
    }


@pytest.mark.parametrize(
    "name",
    ["records", "records/train", "records/attack", "artifacts", "scratch", ".lock", "run.json"],
)
def test_a_link_planted_in_a_result_folder_is_not_written_through(
    folder: Path, tmp_path: Path, name: str
) -> None:
    next(folder.glob("records/attack/*")).unlink()
    outside = tmp_path / "outside"
    place = _planted(folder, name, outside)
    before = _all(outside)
    result = go(folder)
    assert result.exit_code in (0, 2)
    assert "Traceback" not in result.output
    if result.exit_code == 2:
        assert str(place) in said(result).replace(" ", "") or ".lock" in result.output
    assert _all(outside) == before


@pytest.mark.parametrize("name", ["figures", "report.html", "leaderboard.csv"])
def test_a_report_writes_through_no_link(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    _planted(folder, name, outside := tmp_path / "outside")
    before = _all(outside)
    result = call("report", folder, *(("--figures", "png") if name == "figures" else ()))
    assert result.exit_code == (2 if name == "figures" else 0), result.output
    assert _all(outside) == before


def test_records_and_artifacts_are_read_through_no_link(folder: Path, tmp_path: Path) -> None:
    path = next(folder.glob("records/attack/*"))
    os.rename(path, tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    result = call("report", folder)
    assert result.exit_code == 2
    assert "is a link, and links in result folders are not followed" in said(result)
    path.unlink()
    os.rename(tmp_path / "elsewhere.json", path)

    made = seen(folder).parent
    os.rename(made, tmp_path / "elsewhere")
    made.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        export(folder, Run.read(folder).cells[0].key, tmp_path / "seen", Environment())


def test_a_result_folder_may_be_named_by_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "named").symlink_to(folder)
    assert call("report", tmp_path / "named").exit_code == 0
    assert "0 run, 3 cached" in said(go(tmp_path / "named"))


def test_pipes_and_devices_in_a_result_folder_hang_nothing(folder: Path, tmp_path: Path) -> None:
    path = rebuilt(folder)
    path.unlink()
    os.mkfifo(path)
    assert call("report", folder).exit_code == 0
    assert "1 run, 2 cached, 0 failed" in said(go(folder))
    for name in ("run.json", "records/train"):
        place = next((folder / name).glob("*")) if name.endswith("train") else folder / name
        place.unlink()
        os.mkfifo(place)
        result = call("report", folder)
        assert result.exit_code == 2
        assert "is no plain file" in said(result)
