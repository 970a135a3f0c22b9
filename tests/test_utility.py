"""Minutes-long trainings: undefended models must be worth defending."""

from pathlib import Path

import pytest

from bench import suite as suites
from bench.harness.environment import Environment
from bench.harness.plan import expand
from bench.harness.train import Training
from bench.records import TrainRecord


def accuracy(
    tmp_path: Path, dataset: str, model: str, *, rounds: int, lr: float, epochs: float
) -> float:
    """Accuracy of none after FedAvg over 10 Dirichlet(0.5) clients."""
    overrides = [
        f"tasks.0.dataset={dataset}", f"tasks.0.model={model}", "tasks.0.model_settings={}",
        f"protocol.rounds={rounds}", f"protocol.lr={lr}", f"protocol.local_epochs={epochs}",
    ]  # fmt: skip
    only = {"defense": "none", "dataset": dataset, "model": model}
    (job,) = expand(suites.read_suite("quick", overrides), only).trainings
    record = Training(job=job, env=Environment(), artifacts=tmp_path)()
    assert isinstance(record, TrainRecord)
    assert record.diverged is None
    assert record.correct is not None
    return record.correct / record.test_samples


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp3", "cnn_selective_shield", "cnn_spm"])
def test_networks_read_digits_of_unknown_writers_within_30_rounds(
    tmp_path: Path, model: str
) -> None:
    assert accuracy(tmp_path, "digits", model, rounds=30, lr=0.1, epochs=3) >= 0.88


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp3", "cnn_selective_shield"])
def test_networks_reach_50_percent_on_photos_within_50_rounds(tmp_path: Path, model: str) -> None:
    assert accuracy(tmp_path, "photos", model, rounds=50, lr=0.1, epochs=2) >= 0.50
