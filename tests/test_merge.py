"""Result folders made in parts come together as one whole run."""

import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bench
from bench import records
from bench import suite as suites
from bench.harness.merge import merge
from bench.harness.plan import expand
from bench.harness.store import Store, key_of, write_whole
from bench.records import AttackRecord, Cell, NoResult, PlannedTraining, plain, to_json
from bench.report import leaderboard
from tests.conftest import TINY
from tests.conftest import part as share
from tests.made_records import VERSIONS, attacked_for, trained_for
from tests.runs import timeless
from tests.small_folders import leakbench

Run = dict[str, Any]


def small_suite(**changes: Any) -> suites.Suite:
    data = tomllib.loads(TINY) | {"seeds": [0, 1], "checkpoints": ["init"]} | changes
    return suites.Suite.model_validate(data)


def write_part(
    folder: Path, only: Callable[[int], bool] = lambda place: True, *, device: str = "cpu",
    torch: str = "2.0", suite: suites.Suite | None = None, command: str = "leakbench run tiny",
    status: str = "done", seconds: float = 1.0,
) -> Path:  # fmt: skip
    """A result folder as a run and its jobs write it, with made-up figures that
    follow from the key; only: which cells of the plan, by their place."""
    plan = expand(suite or small_suite())
    store = Store(folder)
    versions = {**VERSIONS, "torch": torch}
    trainings = []
    kept = [cell for place, cell in enumerate(plan.cells) if only(place)]
    for job in plan.trainings:
        mine = [c for c in kept if c.train == job]
        if not mine:
            continue
        key = key_of(job.inputs())
        same: dict[str, Any] = {"seconds": seconds, "versions": versions, "device": device}
        correct = {"correct": int(key[:2], 16), "test_samples": 256}
        store.write("train", key, trained_for(job, **correct, **same))
        (store.artifacts(key)).mkdir(parents=True)
        (store.artifacts(key) / "init-server-seen.json").write_text(key)
        cells = []
        for cell in mine:
            own = key_of({"train": key, **cell.inputs()})
            cells.append(Cell(key=own, train_key=key, job=cell))
            values = {"ssim": [int(own[:4], 16) / 65536] * cell.threat.victims}
            record: AttackRecord | NoResult = attacked_for(cell, key, values=values, **same)
            if status != "done":
                about: dict[str, Any] = {"inputs": record.inputs, "train": key}
                record = NoResult(status=status, reason=status, **about)  # type: ignore[arg-type]
            store.write("attack", own, record)
            store.artifacts(own).mkdir(parents=True)
            (store.artifacts(own) / "reconstruction.safetensors").write_text(own)
        trainings.append(PlannedTraining(key=key, job=job, cells=tuple(cells)))
    run = records.Run(
        suite=plan.suite, trainings=tuple(trainings), command=command, device=device,
        versions=versions,
    )  # fmt: skip
    write_whole(folder / "run.json", to_json(run))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def edit(folder: Path, change: Callable[[Run], object]) -> Path:
    run = json.loads((folder / "run.json").read_text())
    change(run)
    (folder / "run.json").write_text(to_json(run))
    return folder


@pytest.fixture(autouse=True, scope="module")
def _no_fsync() -> Iterator[None]:
    """Waiting for the disk is most of what these tests would do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


N_CELLS = len(expand(small_suite()).cells)


@settings(max_examples=share(20), deadline=None)
@given(
    owners=st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=N_CELLS, max_size=N_CELLS),
    order=st.permutations(range(3)),
    timing=st.tuples(*[st.floats(0.5, 2.0)] * 3),
)
def test_parts_merge_to_the_whole_in_any_order_however_cells_were_shared_out(
    owners: Sequence[set[int]], order: Sequence[int], timing: tuple[float, ...]
) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        parts = [
            write_part(root / f"p{i}", lambda n, i=i: i in owners[n], seconds=timing[i])  # type: ignore[misc]
            for i in range(3)
        ]
        merge(parts, root / "a")
        merge([parts[i] for i in order], root / "b")
        assert contents(root / "a") == contents(root / "b")
        merge([root / "a", root / "b", parts[order[0]]], root / "c")
        assert contents(root / "c") == contents(root / "a")
        whole = contents(write_part(root / "whole"))
        merged = contents(root / "a")
        assert merged.keys() == whole.keys()
        assert merged["run.json"] == whole["run.json"]
        assert all(merged[n] == whole[n] for n in whole if n.startswith("artifacts"))
        merge([parts[0], merge_of(root / "bc", parts[1:])], root / "d")
        assert contents(root / "d") == merged


def merge_of(out: Path, parts: Sequence[Path]) -> Path:
    merge(parts, out)
    return out


def test_a_folder_merged_with_itself_stays_as_it_is(tmp_path: Path) -> None:
    part = write_part(tmp_path / "p", lambda n: n % 3 != 0)
    merge([part, part], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(part)
    merge([part], tmp_path / "alone")
    assert contents(tmp_path / "alone") == contents(part)


@pytest.mark.slow
def test_shards_merge_to_the_run_and_leaderboard_of_the_whole(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Every training is in one shard, with all its cells."""
    suite = tiny(**{"version = 1": "version = 1\nseeds = [0, 1]", "[0.5, 2.0]": "2.0"})
    parts = []
    for shard in ((1, 1), (1, 2), (2, 2)):
        made = bench.run(
            suite, shard=shard, only={"checkpoint": "init", "attack": "prior_only"}, jobs=0,
            out=tmp_path / str(shard), progress=False,
        )  # fmt: skip
        parts.append(made.folder)
    whole, *shards = parts
    merged = merge(shards[::-1], tmp_path / "merged")
    assert (len(merged.trainings), len(merged.cells)) == (4, 4)
    rows = leaderboard.rows(tmp_path / "merged")
    assert [len(r.seeds) for r in rows] == [2] * 2
    one, other = (json.loads((f / "run.json").read_text()) for f in (whole, tmp_path / "merged"))
    assert one["trainings"] == other["trainings"]
    assert other["command"] == " && ".join(sorted(other["commands"]))
    stems = {p.parent.name for p in (tmp_path / "merged").rglob("reconstruction.safetensors")}
    assert stems == {p.parent.name for p in whole.rglob("reconstruction.safetensors")}
    for kind, key in merged.record_names:
        record, again = (Store(f).read(kind, key) for f in (whole, tmp_path / "merged"))  # type: ignore[call-overload]
        assert timeless(plain(record)) == timeless(plain(again))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Two folders of the same figures."""
    return [write_part(tmp_path / name) for name in "ab"]


def test_artifacts_are_copies_that_no_later_run_reaches(tmp_path: Path) -> None:
    part = write_part(tmp_path / "p")
    merge([part], tmp_path / "out")
    for path in (tmp_path / "out" / "artifacts").rglob("*"):
        if path.is_file():
            path.write_text("changed")
    assert b"changed" not in contents(part).values()


def test_a_record_that_failed_gives_way_to_one_that_is_done(tmp_path: Path) -> None:
    good = write_part(tmp_path / "good")
    for status in ("failed", "timeout"):
        bad = write_part(tmp_path / status, status=status)
        for i, parts in enumerate(itertools.permutations((good, bad))):
            merge(parts, tmp_path / f"{status}{i}")
            assert contents(tmp_path / f"{status}{i}") == contents(good)


def test_attacks_on_a_training_that_failed_are_left_out_where_another_folder_has_it_done(
    tmp_path: Path,
) -> None:
    good = write_part(tmp_path / "good")
    bad = write_part(tmp_path / "bad", status="not_applicable")
    for path in (bad / "records" / "train").iterdir():
        record = json.loads(path.read_text())
        path.write_text(to_json(record | {"status": "failed", "reason": "out of memory"}))
    merge([bad, good], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(good)
    for path in (good / "records" / "attack").iterdir():
        path.unlink()
    merge([bad, good], tmp_path / "open")
    assert not (tmp_path / "open" / "records" / "attack").exists()


def test_different_figures_under_one_key_are_an_error_that_names_it(
    tmp_path: Path, parts: list[Path]
) -> None:
    path = sorted((parts[1] / "records" / "attack").iterdir())[0]
    record = json.loads(path.read_text())
    record["values"]["ssim"][0] /= 2
    path.write_text(to_json(record))
    with pytest.raises(ValueError, match=rf"attack {path.stem} has different .*values.ssim.0: "):
        merge(parts, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_different_artifacts_of_one_key_are_an_error(tmp_path: Path, parts: list[Path]) -> None:
    next((parts[1] / "artifacts").rglob("*.safetensors")).write_text("other")
    with pytest.raises(ValueError, match="differs from the same artifact"):
        merge(parts, tmp_path / "out")


def test_devices_and_versions_are_kept(tmp_path: Path) -> None:
    half = N_CELLS // 2
    parts = [
        write_part(tmp_path / "a", lambda n: n < half, command="one"),
        write_part(tmp_path / "b", lambda n: n >= half, device="cuda", torch="2.1", command="two"),
    ]
    made = merge(parts, tmp_path / "out")
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["device"] == "cpu, cuda"
    assert run["versions"]["torch"] == "2.0, 2.1"
    assert (run["command"], run["commands"]) == ("one && two", ["one", "two"])
    assert len(made.cells) == N_CELLS
    merge([tmp_path / "out", parts[1]], tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["suite"].update(name="other"), 'name is "tiny" in one and "other"'),
        (lambda r: r["suite"].update(version=2), "version is 1 in one and 2 in the other"),
        (lambda r: r["suite"].update(budget=6), "budget is 5 in one and 6"),
        (lambda r: r["suite"]["protocol"].update(lr=0.2), "different suites: protocol is"),
        (lambda r: r["versions"].update(leakbench="0.2.0"), "leakbench 0.1.0, "),
        (lambda r: r.update(schema=2), "'schema': input should be 1, got 2"),
        (lambda r: r.update(code={"leakbench": "b"}), "different code of leakbench"),
        (lambda r: r["trainings"][0].update(key="0" * 24), "was made twice"),
        (lambda r: r["trainings"][0].update(key="../../x"), "should match pattern"),
        (lambda r: r["trainings"][0]["cells"][0].update(key="1" * 24), "under different keys"),
        (lambda r: r.pop("trainings"), "must hold a suite and its trainings"),
    ],
)
def test_what_does_not_belong_together_is_refused_in_one_sentence(
    tmp_path: Path, parts: list[Path], change: Callable[[Run], object], message: str
) -> None:
    edit(parts[0], lambda r: r.update(code={"leakbench": "a", "defense spm": "s"}))
    edit(parts[1], change)
    with pytest.raises(ValueError, match=re.escape(message)):
        merge(parts, tmp_path / "out")
    with pytest.raises(ValueError, match=r"\.$"):
        merge(parts[::-1], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_code_hashes_of_parts_are_joined(tmp_path: Path, parts: list[Path]) -> None:
    edit(parts[0], lambda r: r.update(code={"leakbench": "a", "defense spm": "s"}))
    edit(parts[1], lambda r: r.update(code={"leakbench": "a", "attack dlg": "d"}))
    merge(parts, tmp_path / "out")
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["code"] == {"attack dlg": "d", "defense spm": "s", "leakbench": "a"}


def test_code_that_later_parts_share_is_compared_too(tmp_path: Path) -> None:
    parts = [write_part(tmp_path / name) for name in "abc"]
    for part, code in zip(parts, ({}, {"defense spm": "s"}, {"defense spm": "t"}), strict=True):
        edit(part, lambda r, code=code: r.update(code={"leakbench": "a", **code}))  # type: ignore[misc]
    for order in itertools.permutations(parts):
        with pytest.raises(ValueError, match=r"different code of defense spm\.$"):
            merge(order, tmp_path / "out")


def test_another_defense_is_joined_to_a_board_with_or_without_its_undefended_row(
    tmp_path: Path,
) -> None:
    names = ("none", "spm", "top_k", "laplace")
    listed: list[Run] = [{"name": name} for name in names]
    board = write_part(tmp_path / "board", suite=small_suite(defenses=listed[:3]))
    for defenses in ([listed[0], listed[3]], listed[3:]):
        mine = write_part(
            tmp_path / str(len(defenses)), suite=small_suite(seeds=[0], defenses=defenses)
        )
        run = merge([mine, board], tmp_path / f"out-{len(defenses)}")
        assert contents(tmp_path / f"out-{len(defenses)}") == contents(
            merge_of(tmp_path / f"turned-{len(defenses)}", [board, mine])
        )
        assert tuple(d.name for d in run.suite.defenses) == names
        assert len(run.trainings) == len(records.Run.read(board).trainings) + 1
        rows = leaderboard.rows(tmp_path / f"out-{len(defenses)}")
        assert {r.defense: tuple(r.seeds) for r in rows} == {
            "none": (0, 1), "spm": (0, 1), "top_k": (0, 1), "laplace": (0,),
        }  # fmt: skip


def test_ciphertexts_of_other_lengths_are_no_other_figures(
    tmp_path: Path, parts: list[Path]
) -> None:
    path = next((parts[1] / "records" / "train").iterdir())
    record = json.loads(path.read_text())
    file = next((parts[1] / "artifacts" / path.stem).iterdir())
    file.write_text("7 bytes more")
    size, digest = {file.name: 12}, {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    path.write_text(to_json(record | {"bytes_up": 7.0, "files": size, "hashes": digest}))
    made = []
    for order in (parts, parts[::-1]):
        merge(order, tmp_path / "out")
        made.append(contents(tmp_path / "out"))
        shutil.rmtree(tmp_path / "out")
    assert made[0] == made[1]
    kept = json.loads(made[0][f"records/train/{path.name}"])
    assert len(made[0][f"artifacts/{path.stem}/{file.name}"]) == (12 if kept["files"] else 24)


def test_out_must_be_new_or_empty_and_folders_must_be_results(tmp_path: Path) -> None:
    part = write_part(tmp_path / "p")
    with pytest.raises(ValueError, match="is not empty: give --out a new folder"):
        merge([part], part)
    with pytest.raises(ValueError, match="is no result folder"):
        merge([tmp_path / "none"], tmp_path / "out")
    with pytest.raises(ValueError, match="at least one"):
        merge([], tmp_path / "out")
    (tmp_path / "out").mkdir()
    merge([part], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(part)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_links_in_artifacts_are_not_followed(tmp_path: Path) -> None:
    part = write_part(tmp_path / "p")
    (tmp_path / "secret").write_text("secret")
    (next((part / "artifacts").iterdir()) / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="is a link"):
        merge([part], tmp_path / "out")


def test_the_command_publishes_the_merged_leaderboard(tmp_path: Path) -> None:
    parts = [
        write_part(
            tmp_path / device, suite=small_suite(seeds=[0, 1]), device=device,
            only=lambda place, half=half: (place < N_CELLS // 2) == half,  # type: ignore[misc]
            command=f"leakbench run on {device}",
        )
        for device, half in (("cuda", False), ("cpu", True))
    ]  # fmt: skip
    code, text = leakbench("merge", *parts, "--out", tmp_path / "out")
    assert code == 0, text
    assert f"6 trainings and {N_CELLS} cells of 2 folder(s)" in text
    rows = json.loads((tmp_path / "out" / "leaderboard.json").read_text())
    assert {tuple(r["seeds"]) for r in rows} == {(0, 1)}
    report = (tmp_path / "out" / "leaderboard.md").read_text()
    for device in ("cpu", "cuda"):
        assert f"\n- `leakbench run on {device}`\n" in report
