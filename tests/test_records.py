"""Files of a result folder are what they should be, whatever their version, or are refused in one
sentence."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.errors import UserError
from bench.harness.store import Store
from bench.records import (
    AttackRecord,
    FlagCode,
    NoResult,
    Run,
    TrainRecord,
    is_settled,
    plain,
    read_outcome,
    to_json,
)
from bench.report import leaderboard
from bench.report.verdicts import has_use
from tests.made_records import attacked, trained
from tests.test_comparing import Folder

OLD = Path(__file__).parent / "records"


# --- records ------------------------------------------------------------------------------------


def test_records_of_schema_1_are_still_read() -> None:
    training, attack = (
        read_outcome(OLD / "v1-train.json", "train"),
        read_outcome(OLD / "v1-attack.json", "attack"),
    )
    assert isinstance(training, TrainRecord)
    assert training.ledger.eps_record == math.inf
    assert training.inputs is not None
    assert (training.inputs.audit, training.inputs.protocol.labels) == (0, "private")
    assert (training.audit, training.personal_accuracies, training.files) == (None, (), None)
    assert isinstance(attack, AttackRecord)
    assert (attack.doubled, attack.budget, attack.victims) == (None, None, 8)


@pytest.mark.parametrize(
    "record",
    [
        trained(ledger=replace(trained().ledger, constants={"eps": math.inf, "magnitude": "no"})),
        attacked(values={"psnr": [math.inf, 1.5], "mse": [-math.inf, 0.0]}),
        NoResult(status="timeout", reason="over the limit", traceback="\n"),
    ],
)
def test_a_record_is_read_as_it_was_written(tmp_path: Path, record: Any) -> None:
    kind: Any = "attack" if isinstance(record, AttackRecord) else "train"
    store = Store(tmp_path)
    store.write(kind, "0" * 24, record)
    assert store.read(kind, "0" * 24) == replace(record, key="0" * 24)
    assert "Infinity" not in store.path(kind, "0" * 24).read_text()


def test_only_what_failed_is_made_again() -> None:
    assert is_settled(trained())
    assert is_settled(NoResult(status="not_applicable", reason=""))
    assert not is_settled(NoResult(status="failed", reason=""))
    assert not is_settled(NoResult(status="timeout", reason=""))
    assert not is_settled(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("victims"), "'victims' is missing"),
        (lambda r: r["values"].update(ssim=[0.1]), "ssim has 1 figures for 2 victims"),
        (lambda r: r["values"].update(ssim=[0.1, []]), "input should be a valid number"),
        (lambda r: r.update(status="finished"), "got 'finished'"),
        (lambda r: r.update(schema=7), "'schema': input should be 1, got 7"),
        (lambda r: r.update(files={"../x": 1}), "files are named after it"),
        (lambda r: r.update(victims=10**400), "a very large number"),
    ],
)
def test_what_is_wrong_in_a_record_is_said_with_its_place(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    path = tmp_path / "a.json"
    record = plain(attacked(values={"ssim": [0.1, 0.2]}))
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(UserError) as error:
        read_outcome(path, "attack")
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_half_characters_of_an_exception_do_not_make_a_folder_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(plain(NoResult(status="failed", reason="\ud800"))))
    record = read_outcome(path, "attack")
    assert record.reason == "\\ud800"
    record.reason.encode()


# --- runs ---------------------------------------------------------------------------------------


def test_runs_of_schema_1_are_still_read(tmp_path: Path) -> None:
    """They have a switch in place of a threat's `hears`."""
    shutil.copyfile(OLD / "v1-run.json", tmp_path / "run.json")
    run, old = Run.read(tmp_path), json.loads((OLD / "v1-run.json").read_text())
    assert {t.hears for t in run.suite.threats} == {"every_broadcast"}
    assert [t.key for t in run.trainings] == [t["key"] for t in old["trainings"]]
    assert [c.key for c in run.cells] == [c["key"] for t in old["trainings"] for c in t["cells"]]
    budgets = {a["name"]: a["budget"] or old["suite"]["budget"] for a in old["suite"]["attacks"]}
    assert all(c.job.budget == budgets[c.attack] for c in run.cells)
    assert {t.job.audit for t in run.trainings} == {old["suite"].get("audit", 0)}
    again = Run.of(json.loads(to_json(run)), tmp_path)
    assert again == run


def test_published_records_of_earlier_versions_are_read() -> None:
    """Their inputs have a switch in place of a threat's `hears` too."""
    folder = Path(__file__).parents[1] / "results" / "findings" / "sums"
    run, store = Run.read(folder), Store(folder)
    training = store.read("train", run.trainings[0].key)
    assert isinstance(training, TrainRecord)
    assert training.inputs is not None
    assert {t.hears for t in training.inputs.threats} == {"every_broadcast"}


def test_jobs_are_equal_by_their_inputs() -> None:
    run = Run.of(json.loads((OLD / "v1-run.json").read_text()), OLD)
    one, other = run.trainings[0].job, run.trainings[1].job
    assert one != other
    same = replace(one, settings=dict(one.settings))
    assert (same, hash(same)) == (one, hash(one))
    attack = run.cells[0].job
    assert {attack: 1}[replace(attack, train=same)] == 1
    assert replace(attack, train=other) != attack
    assert replace(attack, label="x") != attack


# --- rows ---------------------------------------------------------------------------------------


def test_a_row_keeps_its_use_where_an_attack_named_diverged_times_out(tmp_path: Path) -> None:
    """The attack is a column like any other; its name is no finding."""
    made = Folder(tmp_path)
    made.row("none", 0, {"dlg": [0.5, 0.6], "diverged_x": "timeout"})
    made.row("spm", 0, {"dlg": [0.5, 0.6], "diverged_x": "timeout"}, diverged="weights grew")
    rows = {r.defense: r for r in leaderboard.rows(made.done())}
    assert [(f.code, f.subject) for f in rows["none"].flags] == [
        (FlagCode.ATTACK_TIMEOUT, "diverged_x"), (FlagCode.BY_BOUND, ""),
    ]  # fmt: skip
    assert has_use(rows["none"])
    assert not has_use(rows["spm"])
