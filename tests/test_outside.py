"""Outside attacks: what is exported, and that a reconstruction is scored as our own are."""

import json
import os
import re
import runpy
import shutil
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bench
from bench.harness.environment import Environment, dataset_of
from bench.harness.store import Store, key_of, stage_folder, write_whole
from bench.outside.exports import export
from bench.outside.scores import score_files
from bench.protocols.export import load_seen, load_truth, save_tensors
from bench.records import AttackRecord, Run
from bench.report.choosing import find
from bench.results import Results
from bench.toolkit.images import ssim
from tests.conftest import TINY
from tests.small_folders import leakbench

HERE = Environment()
PAGE = Path(__file__).parents[1] / "docs" / "outside.md"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """An MLP undefended and under SPM, attacked singly and, for label counts, in batches."""
    suite = tomllib.loads(TINY) | {"checkpoints": ["init"]}
    suite["threats"] = [{"victims": 2}, {"name": "batch4", "victims": 2, "batch": 4}]
    suite["attacks"] = [
        {"name": "analytic"}, {"name": "prior_only"}, {"name": "ilrg", "threat": "batch4"},
        {"name": "prior_only", "threat": "batch4"}, {"name": "idlg"},
    ]  # fmt: skip
    suite["defenses"] = [{"name": "none"}, {"name": "spm", "settings": {"epsilon": 2.0}}]
    return bench.run(suite, out=tmp_path_factory.mktemp("outside") / "run", jobs=0, progress=False)


def cell_of(results: Results, text: str) -> Any:
    return find(Run.read(results.folder).cells, text)


def truth_of(results: Results, text: str = "none/analytic") -> Any:
    cell = cell_of(results, text)
    folder = Store(results.folder).artifacts(cell.train_key)
    return load_truth(folder / f"init-{cell.threat}-truth.safetensors")


def save(path: Path, **arrays: torch.Tensor) -> Path:
    save_file({k: v.contiguous() for k, v in arrays.items()}, path)
    return path


def test_an_export_holds_what_was_seen_and_public_facts_and_never_the_truth(
    results: Results, tmp_path: Path
) -> None:
    for name in ("none/analytic", "spm/analytic", "none/ilrg"):
        paths = export(results.folder, name, tmp_path / "x" / "seen", HERE)
        cell = cell_of(results, name)
        folder = Store(results.folder).artifacts(cell.train_key)
        stem = f"{cell.checkpoint}-{cell.threat}"
        kept, seen = load_seen(folder / f"{stem}-seen"), load_seen(tmp_path / "x" / "seen")
        assert (seen.known, seen.clients, seen.network) == (kept.known, kept.clients, kept.network)
        assert [m.kind for m in seen.messages] == [m.kind for m in kept.messages]
        about, public = json.loads(paths.text.read_text()), load_file(paths.public)
        truth = load_truth(folder / f"{stem}-truth.safetensors")
        assert about["cell"] == cell.key
        assert about["answer"]["images"] == list(truth.x.shape)
        assert about["answer"]["labels"] == list(truth.y.shape)
        assert about["known"]["defense"]["name"] == cell.defense
        assert "truth_labels" not in about["known"]
        assert "seed" not in paths.text.read_text()
        private = truth.x.flatten(0, 1).flatten(1)
        assert torch.cdist(public["x"].flatten(1), private).min() > 1e-3
        for tensor in load_file(paths.tensors).values():
            if tensor.numel() and tensor.shape[-1] == private.shape[1]:
                rows = tensor.reshape(-1, private.shape[1]).float()
                assert torch.cdist(rows, private).min() > 1e-3
        assert sorted(p.name for p in (tmp_path / "x").iterdir()) == [
            "seen-public.safetensors", "seen.json", "seen.safetensors",
        ]  # fmt: skip


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_exports_and_result_folders_are_readable_by_whom_the_umask_says(
    results: Results, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        export(results.folder, "none/analytic", tmp_path / "x" / "seen", HERE)
        write_whole(tmp_path / "text.json", "{}")
        with stage_folder(tmp_path / "folder") as stage:
            save_tensors({"x": torch.zeros(1)}, stage / "x.safetensors")
    finally:
        os.umask(before)
    made = list(tmp_path.rglob("*"))
    assert len(made) == 7
    for path in made:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path
    kept = {p.stat().st_mode & 0o777 for p in results.folder.rglob("*") if p.is_file()}
    assert kept == {0o666 & ~before}


def test_every_key_of_an_export_is_described(results: Results, tmp_path: Path) -> None:
    text = PAGE.read_text()
    paths = export(results.folder, "spm/analytic", tmp_path / "seen", HERE)
    about = json.loads(paths.text.read_text())
    for key in [*about, *about["known"], *about["network"], *about["messages"][0],
                *about["states"], *about["answer"]]:  # fmt: skip
        assert f"`{key}`" in text or f"`{key}/NAME`" in text, key
    prefixes = {name.split("/")[0].rstrip("0123456789") for name in load_file(paths.tensors)}
    assert prefixes <= {"before", "after", "initial", "const", "buffers", "m"}


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_our_own_reconstruction_scores_exactly_as_recorded(
    results: Results, tmp_path: Path, kind: str
) -> None:
    store = Store(results.folder)
    compared = 0
    for cell in Run.read(results.folder).cells:
        record = store.read("attack", cell.key)
        path = store.artifacts(cell.key) / "reconstruction.safetensors"
        if not path.is_file():
            continue
        assert isinstance(record, AttackRecord)
        images = load_file(path)["images"]
        mine = tmp_path / f"mine.{kind}"
        if kind == "npz":
            np.savez(mine, images=images.numpy())
        else:
            save(mine, images=images)
        scored = score_files(results.folder, cell.key, [mine], HERE)
        (answer,) = scored.answers
        assert set(answer.values) == {"ssim", "mse", "psnr", "success", "recognised"}
        for name, values in answer.values.items():
            assert values == record.values[name]
            assert scored.floors[name] == record.floors[name]
            assert scored.beside[name]["own"] == pytest.approx(answer.figures[name].mean)
        compared += 1
    assert compared >= 6


def test_labels_and_counts_are_scored_and_samples_may_come_in_any_order(
    results: Results, tmp_path: Path
) -> None:
    cell = cell_of(results, "none/ilrg")
    truth = truth_of(results, "none/ilrg")
    order = torch.tensor([2, 0, 3, 1])
    counts = torch.nn.functional.one_hot(truth.y, 10).sum(dim=1)
    mine = save(tmp_path / "mine.safetensors", images=truth.x[:, order], labels=truth.y[:, order],
                label_counts=counts)  # fmt: skip
    scored = score_files(results.folder, cell.key, [mine], HERE)
    (answer,) = scored.answers
    assert answer.values["label_accuracy"] == answer.values["lnacc"] == [1.0, 1.0]
    assert min(answer.values["ssim"]) > 0.999999
    assert (scored.victims, scored.samples, answer.failed) == (2, 4, 0)
    assert scored.beside["lnacc"]["own"] is not None
    assert 0 < (scored.beside["lnacc"]["floor"] or 0) < 1


def test_victims_without_an_answer_are_scored_as_the_mean_public_image(
    results: Results, tmp_path: Path
) -> None:
    truth = truth_of(results)
    images = truth.x.clone()
    images[1] = float("nan")
    mine = save(tmp_path / "mine.safetensors", images=images[:, 0],
                failed=torch.tensor([False, True]))  # fmt: skip
    scored = score_files(results.folder, "none/analytic", [mine], HERE)
    (answer,) = scored.answers
    assert answer.failed == 1
    assert answer.values["ssim"][0] == pytest.approx(1)
    mean = public_mean(results).expand_as(truth.x)
    assert answer.values["ssim"][1] == pytest.approx(float(ssim(mean, truth.x)[1].mean()))


def test_label_counts_of_a_victim_without_an_answer_need_not_add_up_and_name_no_label(
    results: Results, tmp_path: Path
) -> None:
    cell = cell_of(results, "none/ilrg")
    truth = truth_of(results, "none/ilrg")
    counts = torch.nn.functional.one_hot(truth.y, 10).sum(dim=1)
    counts[1] = 9
    mine = save(tmp_path / "mine.safetensors", label_counts=counts,
                failed=torch.tensor([False, True]))  # fmt: skip
    (answer,) = score_files(results.folder, cell.key, [mine], HERE).answers
    assert answer.values["irec"] == [1.0, 0.0]
    mine = save(tmp_path / "mine.safetensors", label_counts=counts)
    with pytest.raises(ValueError, match=r"must add up to its 4 sample\(s\), got 90 of victim 1"):
        score_files(results.folder, cell.key, [mine], HERE)


def test_answers_stand_beside_our_own_on_the_same_victims(results: Results, tmp_path: Path) -> None:
    truth, cell = truth_of(results), cell_of(results, "spm/analytic")
    own = tmp_path / "own.safetensors"
    kept = Store(results.folder).artifacts(cell.key) / "reconstruction.safetensors"
    save(own, images=load_file(kept)["images"])
    labels = save(tmp_path / "labels.safetensors", labels=truth.y)
    scored = score_files(results.folder, cell.key, [own, labels], HERE)
    row = next(r for r in results.rows if r["defense"] == "spm")
    beside = scored.beside["ssim"]
    # The run has one seed and one threat on images, so the row's victims are the cell's.
    assert beside["choice"] == pytest.approx(row["choice"]["ssim"]["mean"])
    assert beside["worst"] == pytest.approx(row["worst"]["ssim"]["mean"])
    assert scored.answers[0].figures["ssim"].mean == pytest.approx(beside["own"], abs=1e-6)
    assert scored.beside["label_accuracy"]["own"] is None  # analytic names no labels


def test_labels_stand_beside_an_attack_on_labels(results: Results, tmp_path: Path) -> None:
    cell = cell_of(results, "none/ilrg")
    truth = truth_of(results, "none/ilrg")
    wrong = torch.zeros(2, 10, dtype=torch.int64)
    wrong[:, 0] = 4
    mine = save(tmp_path / "mine.safetensors", label_counts=wrong)
    scored = score_files(results.folder, cell.key, [mine], HERE)
    record = Store(results.folder).read("attack", cell.key)
    assert isinstance(record, AttackRecord)
    right = [sum(int(c) == (4 if i == 0 else 0) for i, c in enumerate(counts)) / 10
             for counts in (torch.bincount(y, minlength=10) for y in truth.y)]  # fmt: skip
    assert scored.answers[0].values["lnacc"] == pytest.approx(right)
    assert scored.beside["lnacc"]["own"] == pytest.approx(sum(record.values["lnacc"]) / 2)


def public_mean(results: Results) -> torch.Tensor:
    job = cell_of(results, "none/analytic").job.train
    return dataset_of(job, HERE).aux_x.mean(dim=0)


def _twins(path: Path) -> Path:
    np.savez(path, labels=np.zeros((2, 1), int))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("labels", archive.read("labels.npy"))
    return path


def _npz_of_objects(path: Path) -> Path:
    np.savez(path, images=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return path


GOOD = torch.full((2, 1, 1, 16, 16), 0.5)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": GOOD[:1]}, "images must be a tensor [2, 1, 1, 16, 16], got [1, 1, 1, 16, 16]"),
        ({"images": GOOD.double() * 255}, "images must lie in [0, 1], got values from 127.5 to"),
        ({"images": GOOD - 0.6}, "images must lie in [0, 1], got values from -0.1"),
        ({"images": (GOOD * 255).to(torch.uint8)}, "of bytes divided by 255, got torch.uint8"),
        ({"images": torch.full_like(GOOD, float("nan"))}, "images of victim(s) 0, 1 hold NaN"),
        ({"labels": torch.zeros(2)}, "labels must be whole numbers, got torch.float32"),
        ({"labels": torch.tensor([3, 10])}, "labels must lie in 0..9, got 3 to 10"),
        (
            {"labels": torch.zeros(3, dtype=torch.int64)},
            "labels must be a tensor [2, 1], got [3, 1]",
        ),
        (
            {"label_counts": torch.zeros(2, 9, dtype=torch.int64)},
            "label_counts must be a tensor [2, 10], got [2, 9]",
        ),
        ({"label_counts": torch.full((2, 10), -1)}, "label_counts must be integers >= 0"),
        (
            {"label_counts": torch.zeros(2, 10, dtype=torch.int64)},
            "label_counts of a victim must add up to its 1 sample(s), got 0 of victim 0, 0 of "
            "victim 1",
        ),
        ({"image": GOOD}, "Did you mean 'images'?"),
        ({"failed": torch.tensor([True, False])}, "holds no images, labels or label_counts"),
        ({"images": GOOD, "failed": torch.tensor([1, 0])}, "failed must be bool [2]"),
    ],
)
def test_a_wrong_answer_gets_one_sentence(
    results: Results, tmp_path: Path, arrays: dict[str, torch.Tensor], message: str
) -> None:
    mine = save(tmp_path / "mine.safetensors", **arrays)
    with pytest.raises(ValueError, match=re.escape(message)):
        score_files(results.folder, "none/analytic", [mine], HERE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "none.npz", "no such file"),
        (lambda p: _npz_of_objects(p / "objects.npz"), "allow_pickle=False"),
        (lambda p: _text(p / "text.npz"), "is truncated or no npz file"),
        (lambda p: _text(p / "text.safetensors"), "cannot read"),
        (lambda p: _text(p / "mine.pt"), "is a .safetensors or .npz file, got mine.pt"),
        (lambda p: _zip(p / "empty.npz"), "holds no images"),
        (lambda p: _twins(p / "twins.npz"), "it has two arrays named labels"),
        (lambda p: _zip(p / "other.npz", "readme.txt"), "other.npz: readme.txt must hold numbers"),
    ],
)
def test_a_file_that_is_no_reconstruction_is_refused(
    results: Results, tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        score_files(results.folder, "none/analytic", [make(tmp_path)], HERE)


def _text(path: Path) -> Path:
    path.write_text("no arrays at all, but long enough to look like something")
    return path


def _zip(path: Path, *members: str) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in members:
            file.writestr(name, "text")
    return path


def test_cells_are_found_by_key_prefix_and_words(results: Results) -> None:
    cells = Run.read(results.folder).cells
    cell = cell_of(results, "digits/mlp_spm/spm/analytic/init")
    assert (cell.defense, cell.label) == ("spm", "analytic")
    assert find(cells, cell.key) == find(cells, cell.key[:10]) == find(cells, cell.name) == cell
    for text, message in (
        (".", "Unknown cell or part of a cell's name '.'"),
        ("/", "fits 10 cells; give more words or a key"),
        ("digits/mlp_spm/spm/analytik/init", "Did you mean 'analytic'?"),
        ("digits/mlp_spm/none", "fits 5 cells; give more words or a key"),
        ("ilrg/server", "no cell is all of"),
        ("", "give more words"),
        ("x" * 300, "Unknown cell or part"),
        (key_of({"no": "cell"}), "Unknown cell or part"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            find(cells, text)
        with pytest.raises(ValueError, match=re.escape(message)):
            score_files(results.folder, text, [Path("mine.npz")], HERE)


def test_a_cell_without_observation_says_why(results: Results, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(results.folder, folder)
    cell = cell_of(results, "none/analytic")
    path = Store(folder).path("train", cell.train_key)
    record = json.loads(path.read_text())
    shutil.rmtree(folder / "artifacts")
    with pytest.raises(ValueError, match="holds no artifacts of cell"):
        export(folder, "none/analytic", tmp_path / "seen", HERE)
    look = {"status": "not_applicable", "reason": "no client checked in"}
    record["observations"]["init"]["server"] = look
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="has no observation: no client checked in"):
        export(folder, "none/analytic", tmp_path / "seen", HERE)
    path.write_text(json.dumps(record | {"status": "failed", "reason": "boom"}))
    with pytest.raises(ValueError, match=r"not done \(failed: boom\)"):
        export(folder, "none/analytic", tmp_path / "seen", HERE)
    assert not (tmp_path / "seen.json").exists()
    with pytest.raises(ValueError, match="a file name without dots"):
        export(results.folder, "none/analytic", tmp_path / "spm-0.5", HERE)


def test_the_pages_example_rebuilds_the_images_and_the_commands_score_it(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run = str(results.folder)
    code, text = leakbench("export", run, "digits/mlp_spm/none/analytic/init", "--out", "seen")
    assert code == 0, text
    assert "seen-public.safetensors: public samples" in text
    for number, name in ((1, "my_attack.py"), (2, "match.py")):
        block = PAGE.read_text().split("```python\n")[number].split("```")[0]
        Path(name).write_text(block)
        runpy.run_path(name)
    assert "loss of the answer" in capsys.readouterr().out
    code, text = leakbench("score", run, "seen", "mine.safetensors")
    assert code == 0, text
    for word in ("SSIM", "label_accuracy", "floor", "own: analytic", "upper bound"):
        assert word in text
    answers = ("mine.safetensors", "matched.safetensors")
    code, text = leakbench("score", run, "seen", *answers)
    assert code == 0, text
    assert all(name in text for name in answers)
    code, text = leakbench("score", run, "seen.json", *answers, "--json")
    document = json.loads(text)
    answer, matched = document["answers"]
    assert matched["figures"]["ssim"]["mean"] > 0.99
    for key in (*document, *answer, *document["beside"]["ssim"]):
        assert f"`{key}`" in PAGE.read_text(), key
    assert answer["figures"]["ssim"]["mean"] > 0.999
    assert answer["figures"]["label_accuracy"]["mean"] == 1.0
    assert document["beside"]["ssim"]["own"] > 0.99
    # Of two victims the floor may be high by chance; it is the one of leakbench's own attack, and
    # all of the way from it to a perfect copy is gone.
    cell = cell_of(results, "digits/mlp_spm/none/analytic/init")
    own = Store(results.folder).read("attack", cell.key)
    assert isinstance(own, AttackRecord)
    floor, told = (sum(own.floors[n]) / 2 for n in ("ssim", "ssim_class_mean"))
    assert document["beside"]["ssim"]["floor"] == pytest.approx(floor)
    assert document["beside"]["ssim"]["floor_class_mean"] == pytest.approx(told)
    assert floor < told < 0.9
    assert (answer["figures"]["ssim"]["mean"] - floor) / (1 - floor) > 0.99
    assert len(answer["values"]["ssim"]) == document["victims"] == 2
    Path("mine.json").write_text("{}")
    for arguments, message in (
        (("score", run, "mine", "mine.safetensors"), "it names no cell"),
        (("score", run, "nonee", "mine.safetensors"), "Did you mean 'none'?"),
        (("score", "/no/such", "seen", "mine.safetensors"), "is no result folder"),
        (("export", run, "digits", "--out", "seen"), "fits 10 cells"),
    ):
        code, text = leakbench(*arguments)
        assert code == 2, text
        assert message in text
        assert text.startswith("leakbench: ")
