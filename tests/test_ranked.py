"""Inputs of a linear layer from the order of its gradient's magnitudes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attacks.analytic import Analytic
from attacks.engine.ranked import inputs_by_rank, rankings, without_ties
from bench.data.dataset import Dataset
from bench.metrics.images import ssim
from bench.seeding import generator
from defenses.fedml_he import FedMLHE, ranks
from defenses.mask_crypt import MaskCrypt
from tests.conftest import context_for, network_for, seen_under


def test_the_order_of_products_gives_their_factors() -> None:
    """Ranks of |db_j x_i| and |db_j|: x is found within a few percent, whatever db."""
    rng = generator(0, "ranked")
    x = torch.rand(60, generator=rng).double() * 0.95 + 0.05
    x[::5] = 0
    db = torch.randn(80, generator=rng).double()
    gradient = {"w": (db[:, None] * x).abs(), "b": db.abs()}
    listed, whole = without_ties(ranks(gradient, 1.0))
    assert whole
    assert torch.equal(listed["w"] > 0, gradient["w"] > 0)
    logs = -np.sort(-np.log(torch.cat([v[v > 0] for v in gradient.values()]).numpy()))
    # Only how far the logs spread must be known, not each of them.
    normal = np.sort(np.random.default_rng(0).normal(size=len(logs)))[::-1]
    normal = normal / normal.std() * logs.std() + logs.mean()
    for start in (logs, normal):
        answer = inputs_by_rank(listed["w"], listed["b"], start)
        assert (answer[::5] == 0).all()
        known = np.arange(60) % 5 != 0
        assert np.abs(np.log(answer[known] / x.numpy()[known])).max() < 0.1


def test_a_short_list_has_no_ties_and_keeps_all_its_ranks() -> None:
    values = {"w": torch.rand(30, 10, generator=generator(0, "short")) + 0.1}
    listed, whole = without_ties(ranks(values, 0.2))
    assert not whole
    assert int((listed["w"] > 0).sum()) == 60


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_mask_crypts_priority_lists_give_away_the_sample_that_it_encrypts(
    digits: Dataset, share: float
) -> None:
    """The lists travel in plain sight; the server never learns the encrypted sum."""
    network, defense = network_for(digits, "mlp_spm"), MaskCrypt(share=share)
    seen, truth = seen_under(digits, network, defense, clients=4, victims=4)
    assert seen.after is None
    assert set(rankings(seen)) == set(seen.clients)
    assert Analytic().applies(seen) is None
    answer = Analytic().run(seen, context_for(digits, network, defense))
    assert answer.images is not None
    assert float(ssim(answer.images[:, 0], truth.x[:, 0]).mean()) > 0.95
    assert answer.failed is not None
    assert not answer.failed.any()


def test_masks_that_are_no_ranking_are_not_taken_for_one(digits: Dataset) -> None:
    network = network_for(digits, "mlp_spm")
    seen, _ = seen_under(digits, network, FedMLHE(share=0.5), clients=4, victims=4)
    assert rankings(seen) == {}
