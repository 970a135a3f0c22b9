"""What is published says all that the run's own folder does, and shows if it was changed."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bench
from bench.cli import app
from bench.errors import UserError
from bench.harness.store import Store
from bench.records import (
    ARCHIVE,
    LEADERBOARD,
    SUMS,
    NoResult,
    Run,
    check_sum,
    packed,
    sums,
    unpacked,
)
from bench.report import leaderboard, pictures
from bench.report.errata import with_errata
from bench.report.publishing import write_published
from tests.conftest import Run as Runs

RESULTS = Path(__file__).parents[1] / "results"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.conftest import TINY

    folder = tmp_path_factory.mktemp("published")
    suite = folder / "tiny.toml"
    text = TINY.replace('["init", "final"]', '["final"]').replace("rounds = 1", "rounds = 12")
    text = text.replace("lr = 0.1", "lr = 0.5").replace("local_steps = 1", "local_steps = 8")
    suite.write_text(text + '\n[[attacks]]\nname = "analytic"\n')
    bench.run(str(suite), out=folder / "run", jobs=0, device="cpu")
    return folder / "run"


@pytest.fixture
def published(finished: Path, tmp_path: Path) -> Path:
    write_published(finished, tmp_path / "published")
    return tmp_path / "published"


def test_every_record_comes_back_as_it_was(finished: Path, published: Path) -> None:
    own, other = Store(finished), Store(published)
    names = Run.read(finished).record_names
    assert names
    assert [own.read(*n) for n in names] == [other.read(*n) for n in names]  # type: ignore[call-overload]
    assert leaderboard.rows(published) == leaderboard.rows(finished)


def test_published_results_are_compared_as_the_runs_own_folder_is(
    finished: Path, published: Path
) -> None:
    said = []
    for folder in (finished, published):
        result = CliRunner().invoke(app, ["compare", str(folder), "none", "spm:epsilon=2"])
        assert result.exit_code == 0, result.output
        said.append(result.stdout)
    assert said[0] == said[1]
    assert "separated" in said[0]
    victims = [bench.load(f).victims() for f in (finished, published)]
    assert victims[0].equals(victims[1])
    assert "0 failed" in repr(bench.load(published))


def test_the_sums_are_those_that_sha256sum_checks(published: Path) -> None:
    program = shutil.which("sha256sum")
    if program is None:
        pytest.skip("sha256sum is not installed")
    done = subprocess.run([program, "--check", SUMS], cwd=published, check=False)
    assert done.returncode == 0


def test_the_same_records_are_packed_to_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_published(finished, tmp_path / name)
    assert (tmp_path / "a" / ARCHIVE).read_bytes() == (tmp_path / "b" / ARCHIVE).read_bytes()


def test_a_changed_score_is_noticed(published: Path) -> None:
    lines = gzip.decompress((published / ARCHIVE).read_bytes()).decode().splitlines()
    value = json.loads(lines[-1])
    value["record"]["seconds"] = 0.0
    lines[-1] = json.dumps(value)
    (published / ARCHIVE).write_bytes(gzip.compress("\n".join(lines).encode()))
    with pytest.raises(UserError, match="it was changed"):
        leaderboard.rows(published)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", "no readable gzip file"),
        (gzip.compress(b"{")[:-9], "no readable gzip file"),
        (gzip.compress(b"{\n"), "no JSON"),
        (gzip.compress(b"[]\n"), "no record of leakbench"),
        (gzip.compress(b'{"kind": "train", "record": {}}\n'), "no record of leakbench"),
        (gzip.compress(b'{"kind": "x", "record": {}}\n'), "no record of leakbench"),
    ],
    ids=["text", "cut short", "no JSON", "list", "empty", "another kind"],
)
def test_a_broken_file_is_one_sentence(published: Path, content: bytes, message: str) -> None:
    (published / ARCHIVE).write_bytes(content)
    (published / SUMS).write_text(sums({ARCHIVE: content}))
    with pytest.raises(UserError, match=message):
        leaderboard.rows(published)


def test_tracebacks_stay_behind(tiny: Callable[..., Path], run: Runs, tmp_path: Path) -> None:
    store, _ = run(tiny())
    kind, key = Run.read(store.folder).record_names[-1]
    whole = store.read("attack", key)
    assert whole is not None
    broken = NoResult(
        status="failed", reason="boom", traceback='File "/home/me/attack.py"', key=key,
        inputs=whole.inputs, train=whole.train,
    )  # fmt: skip
    store.write(kind, key, broken)
    write_published(store.folder, tmp_path / "elsewhere")
    assert Store(tmp_path / "elsewhere").read(kind, key) == replace(broken, traceback=None)  # type: ignore[call-overload]


def test_a_run_that_is_not_finished_and_its_own_folder_are_refused(
    tiny: Callable[..., Path], run: Runs, tmp_path: Path
) -> None:
    store, _ = run(tiny())
    with pytest.raises(UserError, match="publish into another"):
        write_published(store.folder, store.folder)
    store.path(*Run.read(store.folder).record_names[-1]).unlink()
    with pytest.raises(UserError, match="finish the run"):
        write_published(store.folder, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_report_writes_what_can_be_published(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["report", str(finished), "--publish", str(out)])
    assert result.exit_code == 0, result.output
    assert {p.name for p in out.iterdir()} == {
        "leaderboard.json", "leaderboard.csv", "leaderboard.md", "run.json", "pictures.json",
        ARCHIVE, SUMS,
    }  # fmt: skip


def test_a_part_leaves_nothing_of_what_was_published_there_before(
    finished: Path, tmp_path: Path
) -> None:
    write_published(finished, tmp_path / "out")
    write_published(finished, tmp_path / "out", part=True, with_pictures=False)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"run.json", ARCHIVE, SUMS}


def test_an_archive_of_no_records_is_empty(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(packed([]))
    assert unpacked(tmp_path / ARCHIVE) == {}


BOARDS = [p.parent for p in sorted(RESULTS.rglob(LEADERBOARD)) if (p.parent / ARCHIVE).exists()]


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(f, marks=pytest.mark.slow if f.name == "reference" else ())  # tens of seconds
        for f in BOARDS
    ],
    ids=lambda p: p.name,
)
def test_committed_leaderboards_follow_from_the_records_beside_them(folder: Path) -> None:
    assert with_errata(leaderboard.rows(folder), folder) == leaderboard.load(folder)


def test_committed_files_are_those_that_were_published() -> None:
    folders = [p.parent for p in RESULTS.rglob(SUMS)]
    assert RESULTS / "reference" in folders
    for folder in folders:
        for line in (folder / SUMS).read_text().splitlines():
            check_sum(folder, line.partition("  ")[2])


def verify(folder: Path, *more: str) -> tuple[int, str]:
    common = ("--device", "cpu", "--jobs", "0", "--sandbox", "none")
    result = CliRunner().invoke(app, ["verify", str(folder), *common, *more])
    return result.exit_code, " ".join(result.output.split())


def test_published_results_come_out_again(published: Path) -> None:
    code, text = verify(published, "--trainings", "1")
    assert code == 0
    assert " are as they were written, and no record contradicts" in text
    assert "This runs no code but leakbench's" in text
    assert text.endswith("Verified.")
    cells = Run.read(published).cells
    some = next(c for c in cells if c.attack == "analytic")
    code, text = verify(published, "--sample", "9", "--only", f"attack=analytic,seed={some.seed}")
    assert code == 2  # one key each
    code, text = verify(published, "--sample", "99", "--only", "attack=analytic")
    assert code == 0
    assert f"out of {sum(c.attack == 'analytic' for c in cells)}" in text


def test_a_figure_that_does_not_come_out_again_is_named(published: Path) -> None:
    records = unpacked(published / ARCHIVE)
    for (kind, key), record in records.items():
        if kind == "attack" and "ssim" in getattr(record, "values", {}):
            values = {**record.values, "ssim": [0.99] * record.victims}  # type: ignore[union-attr]
            records[kind, key] = replace(record, values=values)  # type: ignore[call-arg]
    content = packed((kind, record) for (kind, _), record in records.items())
    (published / ARCHIVE).write_bytes(content)
    code, text = verify(published, "--trainings", "1")
    assert code == 1
    assert "is not the file that SHA256SUMS lists" in text
    (published / SUMS).unlink()
    code, text = verify(published, "--trainings", "1")
    assert code == 1
    assert "leaderboard.json is not what this version of leakbench makes of the records" in text
    assert "differ." in text


def test_results_that_nobody_else_can_run_are_refused(published: Path) -> None:
    (published / SUMS).unlink()
    file = published / "run.json"
    told = json.loads(file.read_text()) | {"plugins": ["mine.py"]}
    file.write_text(json.dumps(told))
    code, text = verify(published)
    assert code == 1
    assert "only a submission can be run again by others" in text
    file.write_text(json.dumps(told | {"plugins": []}))
    (published / ARCHIVE).unlink()
    code, text = verify(published)
    assert code == 1
    assert "run.json names the train record" in text


def test_pictures_of_published_parts_are_those_of_the_whole(tmp_path: Path) -> None:
    from tests.conftest import TINY

    suite = tmp_path / "tiny.toml"
    suite.write_text(TINY.replace("audit = 0", "audit = 0\nseeds = [0, 1]"))
    for name, only in (("whole", {}), ("one", {"seed": 0}), ("two", {"seed": 1})):
        bench.run(str(suite), out=tmp_path / name, jobs=0, device="cpu", only=only)
        write_published(tmp_path / name, tmp_path / "published" / name)
    parts = [tmp_path / "published" / name for name in ("two", "one")]
    merged = CliRunner().invoke(app, ["merge", *map(str, parts), "--out", str(tmp_path / "all")])
    assert merged.exit_code == 0, merged.output
    write_published(tmp_path / "all", tmp_path / "published" / "all")
    whole, found = (pictures.load(tmp_path / "published" / n) for n in ("whole", "all"))
    assert found["cells"]
    assert found == whole
    few = pictures.joined(parts, budget=sum(map(len, whole["sprites"])) - 1)
    assert few["victims"] < whole["victims"]
    assert len(few["cells"]) == len(whole["cells"])
    assert {len(c["scores"]) for c in few["cells"]} == {few["victims"]}
    scores = [c["scores"][0] for c in whole["cells"]]
    assert [c["scores"][0] for c in few["cells"]] == scores
    none = pictures.joined(parts, budget=1)
    assert (none["cells"], none["without"]) == ([], len(whole["cells"]))


def test_a_sprite_that_is_no_picture_is_refused(published: Path, tmp_path: Path) -> None:
    told = json.loads((published / "pictures.json").read_text())
    told["sprites"] = ["data:image/png;base64,AAAA"] * len(told["sprites"])
    (published / "pictures.json").write_text(json.dumps(told))
    (published / SUMS).unlink()
    with pytest.raises(UserError, match="a picture that cannot be read"):
        pictures.joined([published], budget=1)


def test_a_part_has_no_more_than_what_merge_needs(finished: Path, tmp_path: Path) -> None:
    part, rich = tmp_path / "part", tmp_path / "rich"
    common = ["report", str(finished), "--format", "md", "--part"]
    assert CliRunner().invoke(app, [*common, "--publish", str(part)]).exit_code == 0
    assert {p.name for p in part.iterdir()} == {"run.json", ARCHIVE, SUMS}
    write_published(finished, rich, part=True)
    assert {p.name for p in rich.iterdir()} == {"run.json", ARCHIVE, SUMS, "pictures.json"}
    assert leaderboard.load(part) == leaderboard.load(finished)
    shown = CliRunner().invoke(app, ["report", str(part), "--format", "md"])
    assert shown.exit_code == 0
    assert (part / "leaderboard.md").read_text() == (finished / "leaderboard.md").read_text()
    assert verify(part, "--trainings", "1")[0] == 0
    assert CliRunner().invoke(app, common).exit_code == 2


def test_a_model_that_is_a_file_is_named_and_asked_for_before_it_runs(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text("open('ran', 'w').close()")
    file = published / "run.json"
    file.write_text(file.read_text().replace('"mlp_spm"', '"theirs.py:Net"'))
    lines = gzip.decompress((published / ARCHIVE).read_bytes())
    lines = lines.replace(b'"model": "mlp_spm"', b'"model": "theirs.py:Net"')
    (published / ARCHIVE).write_bytes(gzip.compress(lines))
    (published / SUMS).unlink()
    code, text = verify(published)
    assert code == 2
    assert "This runs the submitted code: theirs.py" in text
    assert "nothing was run" in text
    assert not (tmp_path / "ran").exists()
