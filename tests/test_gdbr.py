"""GDBR: label counts behind a hidden head."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.engine.observation import parse_view
from attacks.gdbr import GDBR, bias_gradient
from attacks.ilrg import ILRG
from bench.contract.defense import Defense
from bench.data import load_dataset
from bench.data.dataset import Dataset
from defenses.fedml_he import FedMLHE
from tests.conftest import network_for, rehearsing_context, seen_under
from tests.gdbr_figures import HiddenHead, measure
from tests.uploads import one_hot

PUBLISHED = Path(__file__).parents[1] / "results" / "published" / "gdbr.toml"
ROWS: list[dict[str, Any]] = tomllib.loads(PUBLISHED.read_text())["rows"]


@pytest.mark.parametrize(
    ("model", "defense"),
    [("mlp3", HiddenHead()), ("lenet", HiddenHead()), ("lenet", FedMLHE(share=0.9))],
)
@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_counts_behind_a_hidden_head_are_read_at_initialisation(
    digits: Dataset, model: str, defense: Defense, protocol: str
) -> None:
    network = network_for(digits, model)
    seen, truth = seen_under(digits, network, defense, protocol=protocol, lr=0.1, batch=8)
    assert GDBR().applies(seen) is None
    if isinstance(defense, HiddenHead):
        assert "no value of the head" in str(ILRG().applies(seen))
    counts = GDBR().run(seen, rehearsing_context(digits, network, defense, seen)).label_counts
    assert counts is not None
    assert float((counts == one_hot(truth).sum(dim=1)).double().mean()) > 0.97


def test_the_heads_bias_gradient_is_exact_where_all_samples_are_one_image(digits: Dataset) -> None:
    """The mean gradient of a logit over public samples is then that of every sample."""
    grey = {f"{part}_x": getattr(digits, f"{part}_x") * 0 + 0.5 for part in ("train", "aux")}
    data, network = replace(digits, **grey), network_for(digits, "mlp3")
    seen, truth = seen_under(data, network, HiddenHead(), protocol="fedsgd", batch=8, clients=2)
    with torch.no_grad():
        softmax = network.apply(seen.before, data.aux_x).double().softmax(dim=1)
    ctx = rehearsing_context(data, network, HiddenHead(), seen)
    estimate, explained = bias_gradient(parse_view(seen)[0], ctx, softmax, data.aux_y)
    expected = (softmax[0] - one_hot(truth)).mean(dim=1)
    assert torch.allclose(estimate, expected, atol=2e-3)
    assert explained > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=[r["id"] for r in ROWS])
def test_our_figures_are_measured_again(row: dict[str, Any], data_dir: Path) -> None:
    """Within .05: threads add in other orders."""
    how = dict(row["measure"])
    labels, data = how.pop("labels"), load_dataset(how.pop("dataset"), seed=0, data_dir=data_dir)
    assert measure(data, **how)["labels"] == pytest.approx(labels, abs=0.05)
