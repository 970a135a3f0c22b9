"""Figures of papers beside ours: what the page shows, and that its rows can be measured again."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.contract.attack import Reconstruction, Seen
from bench.contract.defense import Defense
from bench.contract.messages import Part
from bench.data import load_dataset
from bench.metrics.score import score
from bench.models import build
from bench.models.network import Network
from bench.protocols.observe import Truth
from bench.registry import discover
from tests.conftest import context_for, seen_under
from tests.docs_modules import hooks

FOLDER = Path(__file__).parents[1] / "results" / "published"
ROWS: list[dict[str, Any]] = [
    row
    for name in ("figures", "local_training")
    for row in tomllib.loads((FOLDER / f"{name}.toml").read_text())["rows"]
]


def test_the_page_shows_every_row_of_every_file() -> None:
    shown = hooks.published([], "").splitlines()[2:]
    rows = [r for f in sorted(FOLDER.glob("*.toml")) for r in tomllib.loads(f.read_text())["rows"]]
    assert len(shown) == len(rows)
    for line, row in zip(shown, rows, strict=True):
        for key in ("attack", "setting", "published", "command", "difference"):
            assert str(row[key]).replace("|", "\\|") in line


def double_gradients(seen: Seen, truth: Truth, network: Network) -> Seen:
    """The same uploads, computed in float64."""
    messages = []
    for message in seen.messages:
        if message.sender in seen.clients and message.kind == "gradient":
            victim = seen.clients.index(message.sender)
            params = {n: v.double().requires_grad_() for n, v in seen.before.items()}
            logits = network.apply(params, truth.x[victim].double(), buffers=seen.buffers)
            loss = cross_entropy(logits, truth.y[victim])
            values = torch.autograd.grad(loss, list(params.values()))
            message = message.with_parts(
                {n: Part(values=v) for n, v in zip(params, values, strict=True)}
            )
        messages.append(message)
    return replace(seen, messages=tuple(messages))


def answered(
    row: dict[str, Any], data_dir: Path
) -> tuple[Reconstruction, Truth, dict[str, list[float]]]:
    """An attack's answer at a row's setting, the truth, and the scores of each victim."""
    how = row["measure"]
    data = load_dataset(how["dataset"], seed=0, data_dir=data_dir, options=how.get("options"))
    network = build(
        how["model"], shape=data.shape, classes=data.classes, settings=how.get("model_settings")
    )
    work = {"protocol": "fedsgd", "batch": 1} | how.get("work", {})
    seen, truth = seen_under(data, network, Defense(), clients=how["victims"], **work)
    if how.get("gradients") == "float64":
        seen = double_gradients(seen, truth, network)
    attack = discover().usable["attack", row["attack"]].cls(**how.get("settings", {}))
    assert attack.applies(seen) is None
    context = context_for(data, network, Defense(), budget=how.get("budget", 200))
    answer = attack.run(seen, context)
    scores = score(answer, x=truth.x, y=truth.y, classes=data.classes, aux_x=data.aux_x)
    return answer, truth, scores.values


def errors(answer: Reconstruction, truth: Truth) -> Tensor:
    """Mean squared error of each image, a victim's paired as suits them best."""
    assert answer.images is not None
    each = []
    for one, true in zip(answer.images.flatten(2), truth.x.flatten(2), strict=True):
        apart = torch.cdist(one.double(), true.double()).square() / true.shape[1]
        each.append(apart[linear_sum_assignment(apart.numpy())])
    return torch.cat(each)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", ROWS, ids=[r["id"] for r in ROWS])
def test_our_figures_are_measured_again(row: dict[str, Any], data_dir: Path) -> None:
    """Within a row's tolerance: what is left is rounding, and threads add in other orders."""
    answer, truth, scores = answered(row, data_dir)
    means = row["measure"].get("means", {})
    for metric, mean in means.items():
        values = scores[metric]
        assert sum(values) / len(values) == pytest.approx(mean, abs=row["measure"]["tolerance"])
    if means:
        return
    assert answer.failed is not None
    if row["measure"].get("fails"):
        assert answer.failed.all()
        assert answer.notes == tuple(row["measure"]["fails"])
        return
    assert not answer.failed.any()
    psnr = -10 * errors(answer, truth).log10()
    low, high = row["measure"]["psnr"]
    assert float(psnr.min()) == pytest.approx(low, abs=row["measure"]["tolerance"])
    assert float(psnr.max()) == pytest.approx(high, abs=row["measure"]["tolerance"])
    if "mean" in row["measure"]:
        assert float(psnr.mean()) == pytest.approx(row["measure"]["mean"], abs=0.5)
