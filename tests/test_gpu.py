"""The same code on a GPU: skipped with a reason where there is none."""

from pathlib import Path

import pytest
import torch

from bench import suite as suites
from bench.harness.attack import Attacking
from bench.harness.environment import Environment
from bench.harness.plan import expand
from bench.harness.train import Training
from bench.records import AttackRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


def test_quick_leaks_on_a_gpu_as_on_a_cpu(tmp_path: Path) -> None:
    """Every attack of `quick` on LeNet runs on both devices; iDLG rebuilds every image at init."""
    only = {"defense": "none", "dataset": "digits"}
    plan = expand(suites.read_suite("quick", ["protocol.rounds=2"]), only)
    for device in ("cpu", "cuda"):
        env = Environment(device=device)
        seen = tmp_path / device
        job = plan.trainings[0]
        trained = Training(job=job, env=env, artifacts=seen)()
        for cell in plan.by_training()[job]:
            place = seen / f"{cell.label}-{cell.checkpoint}"
            record = Attacking(job=cell, env=env, trained=trained, observed=seen, artifacts=place)()
            applies = cell.attack != "analytic"  # LeNet does not begin with a linear layer
            assert record.status == ("done" if applies else "not_applicable")
            if cell.attack == "idlg" and cell.checkpoint == "init":
                assert isinstance(record, AttackRecord)
                assert record.values["success"] == [1.0] * 8
