"""Attacks run without the truth, scores without plugins, defenses apart from each other."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from torch import Tensor

import bench
from attacks.prior_only import PriorOnly
from bench.harness.environment import Environment
from bench.harness.keys import Code
from bench.harness.store import Store
from bench.metrics import floors, score
from bench.metrics.named import METRICS, Metric
from bench.records import AttackRecord, Cell, Run, TrainRecord
from bench.report.boards import details
from bench.report.frames import to_csv
from bench.report.leaderboard import rows
from bench.report.verdicts import has_use
from bench.submission import staged
from bench.submission.figures import Comparison
from bench.submission.isolation import isolation
from bench.submission.packing import submit
from tests.board import SCHEMA
from tests.conftest import Run as RunIt
from tests.test_submission import quick_check

SNOOP = '''
import gc, os
import torch
from attacks.prior_only import PriorOnly
from bench.data.dataset import Dataset

class Snoop(PriorOnly):
    """Takes what it finds of the private samples in its process; the public ones are its own."""
    is_floor = False

    def run(self, seen, ctx):
        answer = super().run(seen, ctx)
        objects = gc.get_objects()
        data = [o for o in objects if isinstance(o, Dataset)]
        mine = {t.data_ptr() for t in (ctx.aux_x, answer.images)}
        shape = tuple(answer.images.shape)
        like = [o for o in objects if isinstance(o, torch.Tensor) and tuple(o.shape) == shape
                and o.data_ptr() not in mine and o.ndim == 5]
        notes = (f"{len(data)} data sets, {len(like)} tensors like the samples",)
        images = like[0].clone() if like else answer.images
        return type(answer)(images=images, labels=answer.labels, notes=notes)
'''


PATCHES = '''
import bench.metrics.score, bench.protocols.export, bench.harness.scoring
from attacks.prior_only import PriorOnly
from bench.api import Defense

def patched(target, name):
    real = getattr(target, name)
    def other(*args, **more):
        return real(*args, **more)
    setattr(target, name, other)

class Scorer(Defense):
    """Replaces what scores."""
    def __init__(self):
        patched(bench.metrics.score, "image_values")

class Attacker(Defense):
    """Replaces an attack."""
    def __init__(self):
        patched(PriorOnly, "run")

class Writer(Defense):
    """Replaces what writes the truth, in the middle of a round."""
    def upload(self, messages, local, client):
        patched(bench.protocols.export, "save_truth")
        return messages
'''


def by_attack(store: Store) -> dict[tuple[str, str], Any]:
    records = {}
    for cell in Run.read(store.folder).cells:
        if cell.checkpoint == "init":
            records[cell.defense, cell.attack] = store.read("attack", cell.key)
    return records


def test_the_process_of_an_attack_holds_neither_data_set_nor_truth(
    run: RunIt, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Not even after the training ran, which needs both, for the same worker."""
    plugin = tmp_path / "snoop.py"
    plugin.write_text(SNOOP)
    suite = tiny(append='\n[[attacks]]\nname = "snoop"\n')
    only = {"defense": "none", "checkpoint": "init", "attack": "prior_only,snoop"}
    store, report = run(suite, plugins=(plugin,), only=only, workers=1)
    assert not report.failures
    records = by_attack(store)
    assert records["none", "snoop"].notes == ("0 data sets, 0 tensors like the samples",)
    assert records["none", "snoop"].values["ssim"] == records["none", "prior_only"].values["ssim"]


def test_code_that_replaces_what_measures_it_fails_and_harms_no_other_row(
    run: RunIt, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The settings are tried in this process too, which is put back.
    monkeypatch.setattr(score, "image_values", score.image_values)
    monkeypatch.setattr(PriorOnly, "run", PriorOnly.run)
    plugin = tmp_path / "patches.py"
    plugin.write_text(PATCHES)
    names = ("scorer", "attacker", "writer")
    suite = tiny(append="".join(f'\n[[defenses]]\nname = "{n}"\n' for n in names))
    only = {"defense": ",".join(("none", *names)), "attack": "prior_only", "checkpoint": "init"}
    store, report = run(suite, plugins=(plugin,), only=only, workers=1)
    measures = "was replaced in the process that measures"
    assert len(report.failures) >= len(names)
    assert all(measures in reason for _, reason in report.failures)
    plain = next(r for r in rows(store.folder) if r.defense == "none")
    assert plain.attacks["prior_only"].status == "done"
    for name in names:
        (row,) = (r for r in rows(store.folder) if r.defense == name)
        assert not has_use(row)
        assert row.leak is None


@pytest.mark.slow
def test_what_was_answered_is_scored_again_where_scores_change_and_not_attacked(
    run: RunIt, tiny: Callable[..., Path], tiny_copy: Path
) -> None:
    store = Store(tiny_copy)
    before = {}
    for path in sorted((store.folder / "records" / "attack").iterdir()):
        record = json.loads(path.read_text())
        if record["status"] == "done":
            before[path.stem] = record
            older = {"scoring": "of older code", "values": {}, "floors": {}}
            path.write_text(json.dumps(record | older))
    assert before
    files = {p: p.stat().st_mtime_ns for p in store.folder.glob("artifacts/*/answer-*")}
    assert files
    _, second = run(tiny())
    assert (second.ran, second.cached) == (len(before), 15 - len(before))
    assert files == {p: p.stat().st_mtime_ns for p in store.folder.glob("artifacts/*/answer-*")}
    for key, record in before.items():
        again = store.read("attack", key)
        assert isinstance(again, AttackRecord)
        assert again.values == record["values"]
        assert again.floors == record["floors"]


def test_a_new_metric_is_one_entry_and_needs_no_attack_again(
    run: RunIt, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def worst_pixel(guess: Tensor, truth: Tensor) -> Tensor:
        return (guess - truth).abs().flatten(2).amax(dim=2)

    suite = tiny(**{"epsilon = [0.5, 2.0]": "epsilon = 0.5"})
    only = {"attack": "prior_only", "checkpoint": "init"}
    store, _ = run(suite, only=only)
    answers = {p: p.stat().st_mtime_ns for p in store.folder.glob("artifacts/*/answer-*")}
    entry = Metric(title="worst pixel", sign=-1.0, perfect=0.0, of_images=worst_pixel)
    monkeypatch.setitem(METRICS, "worst_pixel", entry)
    monkeypatch.setattr(Code, "scoring", "of code with one more entry")
    monkeypatch.setattr(floors, "_fit", floors._fit.__wrapped__)  # it keeps what it fitted before
    _, report = run(suite, only=only)
    assert not report.failures
    assert answers == {p: p.stat().st_mtime_ns for p in store.folder.glob("artifacts/*/answer-*")}
    results = bench.load(store.folder)
    for row in results.rows:
        scores = row["attacks"]["prior_only"]
        assert 0 < scores["worst_pixel"]["mean"] <= 1
        assert 0 < scores["floor"]["worst_pixel"] <= 1
    jsonschema.validate(results.rows, SCHEMA)
    assert {"worst_pixel", "worst_pixel_floor"} <= set(results.attacks().columns)
    shown = rows(store.folder)
    assert "worst_pixel_lo" in to_csv(shown).splitlines()[0]
    assert "worst_pixel" in details(shown)["metrics"]


def test_an_answer_without_scores_is_no_result_yet(run: RunIt, tiny: Callable[..., Path]) -> None:
    """As a run leaves it that was killed between an attack and its score."""
    only = {"defense": "none", "checkpoint": "init"}
    store, _ = run(tiny(), only=only)
    key = min(key for kind, key in store.names if kind == "attack")
    record = store.read("attack", key)
    assert isinstance(record, AttackRecord)
    store.write("attack", key, replace(record, scoring="", values={}, floors={}))
    assert store.read("attack", key) is None
    assert store.read("attack", key, unscored=True) is not None
    _, again = run(tiny(), only=only)
    assert again.ran == 1
    assert store.read("attack", key) == replace(record, memory=store.read("attack", key).memory)  # type: ignore[union-attr]


def rerun(folder: Path, cells: list[Cell], sandbox: str) -> list[Comparison]:
    comparisons, _ = staged.rerun(
        folder, cells, isolation=isolation(sandbox), env=Environment(), tolerance=0.02, workers=0
    )
    return comparisons


STEALS = '''
import os
from pathlib import Path
import torch
from safetensors.torch import load_file
from attacks.prior_only import PriorOnly
from bench.api import Reconstruction

class Steals(PriorOnly):
    """Reads the truth where it lies, or the data set."""
    is_floor = False

    def run(self, seen, ctx):
        answer = super().run(seen, ctx)
        shape = answer.images.shape
        beside = Path(os.environ.get("TMPDIR", "/tmp")).parents
        for place in (Path.cwd(), Path(__file__).parent, *beside):
            if str(place) == "/":
                continue
            for file in place.rglob("*-truth.safetensors"):
                x = load_file(file)["x"]
                if x.shape == shape:
                    return Reconstruction(images=x, labels=answer.labels, notes=("truth",))
        from bench.data import load_dataset
        load_dataset("digits", seed=0)
        return Reconstruction(images=answer.images, labels=answer.labels, notes=("data",))
'''


@pytest.mark.slow
@pytest.mark.skipif(isolation("auto").bwrap is None, reason="bubblewrap does not work here")
def test_in_the_sandbox_an_attack_finds_neither_truth_nor_data_set(
    run: RunIt, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the machine can be read in a run; see docs/strangers.md."""
    plugin = tmp_path / "steals.py"
    plugin.write_text(STEALS)
    suite = tiny(append='\n[[attacks]]\nname = "steals"\n')
    only = {"defense": "none", "checkpoint": "init", "attack": "prior_only,steals"}
    store, report = run(suite, plugins=(plugin,), only=only)
    assert not report.failures
    assert by_attack(store)["none", "steals"].notes == ("truth",)
    assert min(by_attack(store)["none", "steals"].values["ssim"]) == 1.0
    quick_check(monkeypatch)
    folder = submit(str(plugin), store.folder, out=tmp_path / "subs")
    cells = [c for c in Run.read(folder).cells if c.attack == "steals"]
    made = rerun(folder, cells, "bwrap")
    told = {c.figure: c for c in made if c.what.endswith("steals at init")}
    assert told["status"].verdict == "differs"
    assert "failed" in told["status"].rerun
    truths = [c for c in made if c.figure.startswith("truth of")]
    assert [c.verdict for c in truths] == ["equal"]


FALSE_TRUTH = '''
import torch
from bench.api import Defense

class FalseTruth(Defense):
    """Has its own samples stand as the truth: no scorer's file says otherwise."""
    def upload(self, messages, local, client):
        client.x.copy_(torch.rand(client.x.shape, generator=client.rng["defense"]))
        return messages
'''


def test_verify_makes_the_truth_again_and_scores_against_it(
    run: RunIt, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "false_truth.py"
    plugin.write_text(FALSE_TRUTH)
    suite = tiny(append='\n[[defenses]]\nname = "false_truth"\n')
    only = {"defense": "none,false_truth", "checkpoint": "init", "attack": "prior_only"}
    store, _ = run(suite, plugins=(plugin,), only=only)
    keys = {c.defense: c.train_key for c in Run.read(store.folder).cells}
    trained = store.read("train", keys["false_truth"])
    assert isinstance(trained, TrainRecord)
    assert any("samples of client" in reason for reason in trained.undeclared)
    quick_check(monkeypatch)
    folder = submit(str(plugin), store.folder, out=tmp_path / "subs")
    cells = [c for c in Run.read(folder).cells if c.defense == "false_truth"]
    made = rerun(folder, cells[:1], "none")
    (truth,) = (c for c in made if c.figure.startswith("truth of"))
    assert (truth.verdict, truth.rerun) == ("differs", "other samples")
