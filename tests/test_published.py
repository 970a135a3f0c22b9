"""What is published says all that the run's own folder does, and fits into the repository."""

import gzip
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import bench
from bench.errors import UserError
from bench.harness.store import Store
from bench.records import ARCHIVE, NoResult, Run, read_json, unpack
from bench.records.files import pack
from bench.records.run import PACKED_RUN
from bench.report import leaderboard
from bench.report.files import README, readme, write_published
from tests.conftest import require
from tests.small_folders import leakbench

RESULTS = Path(__file__).parents[1] / "results"


@pytest.fixture
def published(tiny_made: Path, tmp_path: Path) -> Path:
    write_published(tiny_made, tmp_path / "published")
    return tmp_path / "published"


def test_every_record_comes_back_as_it_was(tiny_made: Path, published: Path) -> None:
    own, other = Store(tiny_made), Store(published)
    names = Run.read(tiny_made).record_names
    assert names
    assert [own.read(*n) for n in names] == [other.read(*n) for n in names]  # type: ignore[call-overload]
    assert leaderboard.rows(published) == leaderboard.rows(tiny_made)


def test_published_results_are_compared_as_the_runs_own_folder_is(
    tiny_made: Path, published: Path
) -> None:
    said = []
    for folder in (tiny_made, published):
        code, text = leakbench("compare", folder, "none", "spm:epsilon=2")
        assert code == 0, text
        said.append(text)
    assert said[0] == said[1]
    assert "separated" in said[0]
    victims = [bench.load(f).victims() for f in (tiny_made, published)]
    assert victims[0].equals(victims[1])
    assert "0 failed" in repr(bench.load(published))


def test_the_same_records_are_packed_to_the_same_bytes(tiny_made: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_published(tiny_made, tmp_path / name)
    assert (tmp_path / "a" / ARCHIVE).read_bytes() == (tmp_path / "b" / ARCHIVE).read_bytes()


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
    with pytest.raises(UserError, match=message):
        leaderboard.rows(published)


def test_tracebacks_stay_behind(tiny_copy: Path, tmp_path: Path) -> None:
    store = Store(tiny_copy)
    kind, key = Run.read(store.folder).record_names[-1]
    whole = require(store.read("attack", key))
    broken = NoResult(
        status="failed", reason="boom", traceback='File "/home/me/attack.py"', key=key,
        inputs=whole.inputs, train=whole.train,
    )  # fmt: skip
    store.write(kind, key, broken)
    write_published(store.folder, tmp_path / "elsewhere")
    assert Store(tmp_path / "elsewhere").read(kind, key) == replace(broken, traceback=None)  # type: ignore[call-overload]


def test_a_run_that_is_not_finished_and_its_own_folder_are_refused(
    tiny_copy: Path, tmp_path: Path
) -> None:
    store = Store(tiny_copy)
    with pytest.raises(UserError, match="publish into another"):
        write_published(store.folder, store.folder)
    store.path(*Run.read(store.folder).record_names[-1]).unlink()
    with pytest.raises(UserError, match="finish the run"):
        write_published(store.folder, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_report_writes_what_can_be_published(tiny_copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    assert leakbench("report", tiny_copy, "--publish", out)[0] == 0
    assert {p.name for p in out.iterdir()} == {README, PACKED_RUN, ARCHIVE}
    text = (out / README).read_text()
    assert f"Command: `{Run.read(tiny_copy).command}`" in text
    assert "| spm |" in text


def test_a_report_of_a_published_folder_leaves_it_as_it_is(
    tiny_copy: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {p.name: p.read_bytes() for p in published.iterdir()}
    assert leakbench("report", published)[0] == 0
    assert {p.name: p.read_bytes() for p in published.iterdir()} == before
    made = tmp_path / "leakbench-runs" / "published-report"
    assert leakbench("report", tiny_copy)[0] == 0
    for name in ("leaderboard.json", "leaderboard.csv", "leaderboard.md"):
        assert (made / name).read_text() == (tiny_copy / name).read_text()
    assert "holds no reconstructions" in (made / "report.html").read_text()


PUBLISHED = [p.parent for p in sorted(RESULTS.rglob(ARCHIVE))]


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda p: p.name)
def test_a_committed_readme_follows_from_the_records_beside_it(folder: Path) -> None:
    assert readme(folder) == (folder / README).read_text()


def test_committed_results_are_small() -> None:
    files = subprocess.run(
        ["git", "ls-files", "-z", "results"], cwd=RESULTS.parent, capture_output=True, check=False
    )
    names = [n for n in files.stdout.decode().split("\0") if n]
    if not names:
        pytest.skip("not in a git checkout")
    places = [RESULTS.parent / n for n in names if (RESULTS.parent / n).exists()]
    assert sum(p.stat().st_size for p in places) <= 15e6
    allowed = {README, PACKED_RUN, ARCHIVE, "errata.toml", "figures"}
    for folder in PUBLISHED:
        assert {p.name for p in folder.iterdir()} <= allowed
        assert len(list((folder / "figures").glob("*"))) <= 3


def verify(folder: Path, *more: str) -> tuple[int, str]:
    common = ("--device", "cpu", "--jobs", "0", "--sandbox", "none")
    return leakbench("verify", folder, *common, *more)


def test_published_results_come_out_again(published: Path) -> None:
    code, text = verify(published, "--trainings", "1")
    assert code == 0
    assert " are as they were written, and no record contradicts" in text
    assert "This runs no code but leakbench's" in text
    assert text.endswith("Verified.")
    cells = Run.read(published).cells
    some = next(c for c in cells if c.attack == "ilrg")
    code, text = verify(published, "--sample", "9", "--only", f"attack=ilrg,seed={some.seed}")
    assert code == 2  # one key each
    code, text = verify(published, "--sample", "1", "--only", "attack=ilrg")
    assert code == 0
    assert f"out of {sum(c.attack == 'ilrg' for c in cells)}" in text


def test_a_figure_that_does_not_come_out_again_is_named(published: Path) -> None:
    records = unpack(published / ARCHIVE)
    for (kind, key), record in records.items():
        if kind == "attack" and "ssim" in getattr(record, "values", {}):
            values = {**record.values, "ssim": [0.99] * record.victims}  # type: ignore[union-attr]
            records[kind, key] = replace(record, values=values)  # type: ignore[call-arg]
    content = pack((kind, record) for (kind, _), record in records.items())
    (published / ARCHIVE).write_bytes(content)
    code, text = verify(published, "--trainings", "1")
    assert code == 1
    assert "differ." in text


def test_results_that_nobody_else_can_run_are_refused(published: Path) -> None:
    file = published / "run.json"  # read before the packed one
    told = read_json(published / PACKED_RUN) | {"plugins": ["mine.py"]}
    file.write_text(json.dumps(told))
    code, text = verify(published)
    assert code == 1
    assert "only a submission can be run again by others" in text
    file.write_text(json.dumps(told | {"plugins": []}))
    (published / ARCHIVE).unlink()
    code, text = verify(published)
    assert code == 1
    assert "run.json names the train record" in text


def test_a_model_that_is_a_file_is_named_and_asked_for_before_it_runs(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text("open('ran', 'w').close()")
    told = json.dumps(read_json(published / PACKED_RUN))
    (published / "run.json").write_text(told.replace('"mlp_spm"', '"theirs.py:Net"'))
    lines = gzip.decompress((published / ARCHIVE).read_bytes())
    lines = lines.replace(b'"model": "mlp_spm"', b'"model": "theirs.py:Net"')
    (published / ARCHIVE).write_bytes(gzip.compress(lines))
    code, text = verify(published)
    assert code == 2
    assert "This runs the submitted code: theirs.py" in text
    assert "nothing was run" in text
    assert not (tmp_path / "ran").exists()
