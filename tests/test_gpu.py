"""The same code on a GPU: skipped with a reason where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import jobs
from bench import suite as suites

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


def test_quick_leaks_on_a_gpu_as_on_a_cpu(tmp_path: Path) -> None:
    overrides = ["protocol.rounds=2"]
    only = {"defense": "none", "dataset": "digits", "checkpoint": "init"}
    plan = suites.expand(suites.load("quick", overrides), only)
    for device in ("cpu", "cuda"):
        env = jobs.Environment(device=device)
        trained = jobs.run_training(plan.trainings[0], env, tmp_path / device)
        for cell in plan.cells:
            record = jobs.run_attack(
                cell, env, trained, tmp_path / device, tmp_path / device / cell.label
            )
            assert record["status"] == "done"
            if cell.attack in ("dlg", "idlg"):
                assert record["values"]["success"] == [1.0] * 8
