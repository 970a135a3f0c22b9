"""Rows of which a seed failed, is missing or says something else than the others."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.harness.store import Store
from bench.records import AttackRecord, FlagCode, NoResult, PlannedTraining, Row, Run
from bench.report.leaderboard import rows_of
from bench.report.overview import overview
from tests.made_records import audit

FOLDER = Path(__file__).parents[1] / "results" / "quick"
"""With three seeds."""


class Changed(Store):
    """The folder's records, some of them others."""

    def __init__(self, over: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(FOLDER)
        self.over = over

    def read(self, kind: Any, key: str, **how: Any) -> Any:
        return self.over.get((kind, key)) or super().read(kind, key, **how)


@pytest.fixture(scope="module")
def run() -> Run:
    return Run.read(FOLDER)


def of(run: Run, defense: str) -> list[PlannedTraining]:
    """Trainings of a defense under fedavg on the LeNet, one for each seed."""
    places = (("fedavg", "lenet"),)
    trainings = (t for t in run.trainings if (t.job.protocol.name, t.job.task.model) in places)
    return [t for t in trainings if t.job.defense == defense]


def board(run: Run, *trainings: PlannedTraining, **over: Any) -> dict[str, Row]:
    """Rows by their defense."""
    records = Changed(over.pop("over", {}))
    return {r.defense: r for r in rows_of(replace(run, trainings=trainings), records, ["final"])}


def cells(rows: Mapping[str, Row]) -> dict[str, str]:
    return {line.defense: line.verdicts[0].text for line in overview([*rows.values()], 1.0).lines}


def without(trainings: list[PlannedTraining]) -> dict[tuple[str, str], Any]:
    """Records of trainings that failed."""
    over: dict[tuple[str, str], Any] = {}
    for training in trainings:
        over["train", training.key] = NoResult(status="failed", reason="MemoryError")
        for cell in training.cells:
            over["attack", cell.key] = NoResult(status="not_applicable", reason="no training")
    return over


def test_a_row_whose_training_failed_in_some_seeds_is_doubtful_and_of_the_others(run: Run) -> None:
    none, gaussian = of(run, "none"), of(run, "gaussian")
    rows = board(run, *none, *gaussian, over=without(gaussian[1:]))
    assert rows["gaussian"].seeds == (0,)
    assert rows["gaussian"].interval_over == "victims"
    assert cells(rows)["gaussian"].rstrip("^").endswith("?")
    assert not cells(board(run, *none, *gaussian))["gaussian"].rstrip("^").endswith("?")


def test_without_any_training_a_defense_failed_and_is_not_called_inapplicable(run: Run) -> None:
    gaussian = of(run, "gaussian")
    rows = board(run, *of(run, "none"), *gaussian, over=without(gaussian))
    assert cells(rows)["gaussian"] == "failed"


def test_accuracy_lost_against_other_seeds_is_doubted(run: Run) -> None:
    rows = board(run, of(run, "none")[0], *of(run, "gaussian"))
    assert cells(rows)["gaussian"].rstrip("^").endswith("?")


def test_an_undefended_run_that_learned_nothing_is_no_measure_of_accuracy(run: Run) -> None:
    none = of(run, "none")
    over = {}
    for training in none:
        record = Changed({}).read("train", training.key)
        over["train", training.key] = replace(record, diverged="weights not finite")
    line = overview([*board(run, *none, *of(run, "gaussian"), over=over).values()], 0.0).lines[1]
    assert line.verdicts[0].drop is None
    assert line.verdicts[0].doubts


def test_the_audit_that_refutes_a_claim_is_seen_also_where_another_seeds_is_larger(
    run: Run,
) -> None:
    gaussian, over = of(run, "gaussian"), {}
    audits = ((2.9, "violated"), (3.0, "consistent"), (2.8, "consistent"))
    for training, (epsilon, verdict) in zip(gaussian, audits, strict=True):
        record = Changed({}).read("train", training.key)
        over["train", training.key] = replace(record, audit=audit(epsilon, verdict))
    row = board(run, *gaussian, over=over)["gaussian"]
    assert row.audit
    assert (row.audit.eps_audited, row.audit.verdict_claim) == (3.0, "violated")
    assert FlagCode.AUDIT_REFUTES_CLAIM in {f.code for f in row.flags}


@pytest.mark.slow
def test_no_mark_goes_against_what_two_rows_have_in_common(run: Run) -> None:
    gaussian, pafl = of(run, "gaussian"), of(run, "ms_pafl")[:1]
    over = {}
    for training, similar in zip([*gaussian, *pafl], (0.8, 0.3, 0.3, 0.6), strict=True):
        for cell in training.cells:
            record = Changed({}).read("attack", cell.key)
            if isinstance(record, AttackRecord) and "ssim" in record.values:
                values = [similar + 0.01 * i for i in range(record.victims)]
                scores = {**record.values, "ssim": values}
                over["attack", cell.key] = replace(record, values=scores)
    rows = board(run, *of(run, "none"), *gaussian, *pafl, over=over)
    assert rows["gaussian"].leak is not None
    assert rows["ms_pafl"].leak is not None
    assert rows["gaussian"].leak < rows["ms_pafl"].leak  # over all seeds, but not in the first
    assert rows["gaussian"].marks.best
    assert rows["ms_pafl"].marks.best
