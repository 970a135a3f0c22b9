"""A run that was stopped: what has not run is called pending, never failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.harness.store import Store
from bench.records import FlagCode, read_json
from bench.report import leaderboard
from bench.report.files import Files
from bench.report.overview import overview
from tests.conftest import Run


def _forget(store: Store, kind: str, label: str = "") -> None:
    """Remove the records of a kind, or of one attack, of the last setting."""
    run = read_json(store.folder / "run.json")
    training = run["trainings"][-1]
    keys = [training["key"]] if kind == "train" else []
    keys += [c["key"] for c in training["cells"] if label in ("", c["label"])]
    for key in keys:
        for kind_ in ("train", "attack"):
            Store(store.folder).path(kind_, key).unlink(missing_ok=True)  # type: ignore[arg-type]


@pytest.fixture
def finished(tiny_copy: Path) -> Store:
    return Store(tiny_copy)


def test_a_finished_run_says_nothing_of_it(finished: Store) -> None:
    assert Files(finished.folder).missing == []
    assert 'class="missing"' not in Files(finished.folder).text("html")


def test_an_attack_that_has_not_run_is_pending_and_not_failed(finished: Store) -> None:
    _forget(finished, "attack", "ilrg")
    row = next(r for r in leaderboard.rows(finished.folder) if r.settings == {"epsilon": 2.0})
    entry = row.attacks["ilrg"]
    assert (entry.status, entry.failed) == ("pending", 0)
    codes = [f.code for f in row.flags]
    assert FlagCode.ATTACK_PENDING in codes
    assert FlagCode.ATTACK_FAILED not in codes
    lines = overview([row], 1.0).lines
    assert all(v.doubtful for line in lines for v in line.verdicts if v.row is not None)


def test_every_form_of_a_report_says_how_far_a_stopped_run_is(finished: Store) -> None:
    _forget(finished, "train")
    jobs = len(list(finished.folder.glob("records/*/*.json")))
    words = f"5 of {jobs + 5} jobs have not run yet: the same command goes on with them."
    assert Files(finished.folder).missing == [words]
    files = Files(finished.folder)
    assert words in files.text("html")
    assert f"**Missing**: {words}" in files.text("md")
    result = CliRunner().invoke(app, ["report", str(finished.folder)])
    assert result.exit_code == 0
    assert words in result.stdout


@pytest.mark.slow
def test_every_form_of_a_report_says_that_a_part_of_a_suite_was_run(
    tiny: Callable[..., Path], run: Run
) -> None:
    """Each seed that lacks tasks is named with how many it has; jobs are counted always."""
    split = '[[tasks]]\ndataset = "digits"\nmodel = "mlp_spm"\nprotocol = { rounds = 2 }\n'
    suite = tiny(
        **{"version = 1": "version = 1\nseeds = [0, 1]", "[[threats]]": f"{split}[[threats]]"}
    )
    folder = run(suite, only={"seed": 1, "task": 0})[0].folder
    jobs = len(list(folder.glob("records/*/*.json")))
    part = f"{jobs} of its {4 * jobs} jobs; seed 0 on 0 of 2 tasks; seed 1 on 1 of 2 tasks"
    words = f"A part of suite tiny was run: {part}."
    files = Files(folder)
    assert files.missing == [words]
    assert words in files.text("html")
    assert f"**Missing**: {words}" in files.text("md")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert words in " ".join(result.stdout.split())
