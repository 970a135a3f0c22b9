"""Files of a result folder are what they should be, whatever their version, or are refused in one
sentence."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bench
from bench.cli import app
from bench.errors import UserError
from bench.harness.plan import expand
from bench.harness.store import Store
from bench.metrics.intervals import Interval
from bench.protocols.settings import ProtocolSettings
from bench.records import (
    AttackEntry,
    AttackRecord,
    Cell,
    Flag,
    FlagCode,
    NoResult,
    PlannedTraining,
    Row,
    Run,
    TrainRecord,
    WorstCase,
    plain,
    read_outcome,
    rows_to_json,
    settled,
    to_json,
)
from bench.report import leaderboard
from bench.report.verdicts import has_use
from bench.suite import Suite
from tests.made_records import attacked, attacked_for, trained, trained_for

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
    assert settled(trained())
    assert settled(NoResult(status="not_applicable", reason=""))
    assert not settled(NoResult(status="failed", reason=""))
    assert not settled(NoResult(status="timeout", reason=""))
    assert not settled(None)


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
    found = read_outcome(path, "attack")
    assert found.reason == "\\ud800"
    found.reason.encode()


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


def test_an_attack_named_diverged_costs_no_rank_where_it_times_out() -> None:
    timed_out = Flag(code=FlagCode.ATTACK_TIMEOUT, subject="diverged_x")
    assert not timed_out.costs_rank
    assert Flag(code=FlagCode.DIVERGED, values={"reason": "x"}).costs_rank
    assert Flag(code=FlagCode.AT_CHANCE).costs_rank


def test_a_row_keeps_its_use_where_an_attack_named_diverged_times_out(tmp_path: Path) -> None:
    """The attack is a column like any other; its name is no finding."""
    suite = Suite.model_validate(
        SUITE
        | {"defenses": [{"name": "none"}], "attacks": [{"name": "dlg"}, {"name": "diverged_x"}]}
    )
    plan, store = expand(suite), Store(tmp_path)
    (job,) = plan.trainings
    store.write("train", "0" * 24, trained_for(job))
    cells = []
    for number, attack in enumerate(plan.cells, start=1):
        key = f"{number:024x}"
        cells.append(Cell(key=key, train_key="0" * 24, job=attack))
        values = {"ssim": [0.5, 0.6] * (attack.threat.victims // 2)}
        done = attacked_for(attack, "0" * 24, values=values)
        late = NoResult(
            status="timeout", reason="over the limit of 5 s", inputs=done.inputs, train="0" * 24
        )
        store.write("attack", key, late if attack.attack == "diverged_x" else done)
    training = PlannedTraining(key="0" * 24, job=job, cells=tuple(cells))
    (tmp_path / "run.json").write_text(to_json(Run(suite=suite, trainings=(training,))))
    (row,) = leaderboard.rows(tmp_path)
    assert [(f.code, f.subject) for f in row.flags] == [
        (FlagCode.ATTACK_TIMEOUT, "diverged_x"), (FlagCode.BY_BOUND, ""),
    ]  # fmt: skip
    assert has_use(row)
    store.write("train", "0" * 24, trained_for(job, diverged="weights grew 120-fold"))
    (row,) = leaderboard.rows(tmp_path)
    assert not has_use(row)


def test_a_row_is_written_with_its_sentences(tmp_path: Path) -> None:
    i = Interval(mean=0.5, lo=0.25, hi=math.inf)
    entry = AttackEntry(status="done", reason=None, threat="server", is_floor=False, n=8, failed=0,
                        scores={"ssim": i}, floor={"ssim": 0.1})  # fmt: skip
    flag = Flag(code=FlagCode.CUT_SHORT, subject="dlg", values={"gain": 0.123456789})
    row = Row(
        suite="s v1", protocol="fedavg", protocol_settings=ProtocolSettings(local_steps=1),
        dataset="digits", model="lenet", defense="spm", variant="", settings={"epsilon": 1.5},
        checkpoint="final", threat="", seeds=(0,), accuracy=i, eps_claimed=None,
        eps_record=math.inf, delta=1e-5, unit=None, bytes_up=1.0, bytes_down=1.0,
        client_seconds=1.0, attacks={"dlg": entry}, flags=(flag,),
        worst=WorstCase(attack="dlg", metric="ssim", interval=i),
    )  # fmt: skip
    path = tmp_path / "rows.json"
    path.write_text(rows_to_json([row], lambda f: "accuracy at chance"))
    (written,) = json.loads(path.read_text())
    assert written["eps_record"] == "inf"
    assert written["flags"][0]["text"] == "accuracy at chance"
    assert written["flags"][0]["level"] == "warn"
    assert row.setting == "spm(epsilon=1.5)"


# --- folders that somebody edited ---------------------------------------------------------------

SUITE = {
    "name": "small",
    "version": 1,
    "checkpoints": ["init"],
    "budget": 3,
    "audit": 100,
    "protocol": {"name": "fedsgd", "clients": 2, "rounds": 1, "batch": 4, "partition": "iid"},
    "tasks": [{"dataset": "digits", "model": "mlp_spm"}],
    "threats": [{"victims": 2}],
    "defenses": [{"name": "none"}, {"name": "spm", "settings": {"epsilon": 2.0}}],
    "attacks": [{"name": "analytic"}, {"name": "prior_only"}],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records") / "run"
    bench.run(SUITE, out=folder, jobs=0, progress=False)
    return folder


def commands(folder: Path, root: Path) -> dict[str, list[str]]:
    suite = root / "suite.toml"
    suite.write_text(
        'name = "small"\nversion = 1\ncheckpoints = ["init"]\nbudget = 3\naudit = 100\n'
        '[protocol]\nname = "fedsgd"\nclients = 2\nrounds = 1\nbatch = 4\npartition = "iid"\n'
        '[[tasks]]\ndataset = "digits"\nmodel = "mlp_spm"\n[[threats]]\nvictims = 2\n'
        '[[defenses]]\nname = "none"\n[[attacks]]\nname = "analytic"\n'
    )
    to = str(folder)
    return {
        "report": ["report", to, "--format", "html,md,csv,json"],
        "compare": ["compare", to, "none", "spm"],
        "merge": ["merge", to, "--out", str(root / "merged")],
        "plan": ["plan", str(suite), "--out", to, "--costs", to],
        "export": ["export", to, "none/analytic", "--out", str(root / "seen")],
        "score": ["score", to, "none/analytic", str(root / "answer.npz")],
    }


def check_ends(folder: Path, root: Path, what: object) -> None:
    """Every command succeeds or says in one sentence what is wrong."""
    for name, arguments in commands(folder, root).items():
        ended = CliRunner().invoke(app, arguments)
        shutil.rmtree(root / "merged", ignore_errors=True)
        if ended.exception is not None and not isinstance(ended.exception, SystemExit):
            raise AssertionError(f"{name} after {what}") from ended.exception
        assert ended.exit_code in (0, 2), f"{name} after {what}: {ended.output}"
        if ended.exit_code == 2:
            assert ended.stderr.count("leakbench: ") == 1, f"{name} after {what}: {ended.output}"


VALUES: list[Any] = [
    None, [], {}, "", "x", "inf", "nan", True, -1, 0, 3, 0.5, 1e308, 10**30, 2**63, [[[[1]]]],
    {"a": {"b": []}}, [None], "../../x", "a" * 5000, "\ud800", "\x1b[31m", "[red]x[/nope]",
]  # fmt: skip


def edited(rng: random.Random, text: str) -> tuple[str, str]:
    """The text of a JSON file with one random change, and what it was."""
    way = rng.randrange(10)
    if way == 0:
        cut = rng.randrange(len(text))
        return text[:cut], f"cut at {cut}"
    value = json.loads(text)
    places = list(_places(value))
    parent, key = rng.choice(places)
    if way <= 3:
        if isinstance(parent, dict):
            del parent[key]
        else:
            parent.pop(key)
        return json.dumps(value), f"without {key}"
    if way == 4 and isinstance(parent, dict):
        parent[rng.choice(["x", "schema", "status", "inf", ""])] = rng.choice(VALUES)
        return json.dumps(value), f"more beside {key}"
    if way == 5:
        spot = f'"{key}": '
        return text.replace(spot, f"{spot}{'9' * rng.choice((400, 5000))}, {spot}", 1), "digits"
    if way == 6:
        return "[" * 5000 + text, "depth"
    parent[key] = rng.choice(VALUES)
    return json.dumps(value), f"{key} = {parent[key]!r:.60}"


def _places(value: Any) -> Any:
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in inside:
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


EDITS = int(os.environ.get("LEAKBENCH_EDITS", "6"))
"""Of each kind of file; more take longer."""


@pytest.mark.parametrize("kind", ["run.json", "train", "attack"])
def test_random_edits_end_in_success_or_one_sentence(made: Path, tmp_path: Path, kind: str) -> None:
    rng = random.Random(f"{kind} {os.environ.get('LEAKBENCH_EDITS_SEED', '0')}")
    folder = tmp_path / "run"
    shutil.copytree(made, folder)
    places = [folder / kind] if "." in kind else sorted((folder / "records" / kind).iterdir())
    for _ in range(EDITS):
        path = rng.choice(places)
        before = path.read_text()
        text, what = edited(rng, before)
        path.write_text(text)
        check_ends(folder, tmp_path, f"{path.name} {what}")
        path.write_text(before)


@pytest.mark.parametrize("name", ["run.json", "record"])
@pytest.mark.parametrize("what", ["device", "pipe", "large", "folder"])
def test_what_is_no_plain_file_of_a_sane_size_is_refused(
    made: Path, tmp_path: Path, name: str, what: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made, folder)
    path = folder / name
    if name == "record":
        path = next((folder / "records" / "attack").iterdir())
    path.unlink(missing_ok=True)
    if what == "device":
        path.symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 2**40)
    check_ends(folder, tmp_path, f"{name} as {what}")


def test_a_folder_that_is_reported_names_the_record_that_is_none(
    made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made, folder)
    path = sorted((folder / "records" / "attack").iterdir())[0]
    path.write_text('{"schema": 1}')
    ended = CliRunner().invoke(app, ["report", str(folder)])
    assert ended.exit_code == 2
    assert path.name in ended.stderr
    # A run makes it anew.
    results = bench.run(SUITE, out=folder, jobs=0, progress=False)
    assert results.failures == []
    assert read_outcome(path, "attack").status == "done"
