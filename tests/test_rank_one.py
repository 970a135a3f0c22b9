"""Inputs of a linear layer from a part of its gradient, or from the order of its magnitudes."""

import numpy as np
import pytest
import torch

from attacks.analytic import Analytic, complete_inputs, inputs_by_rank, rankings, without_ties
from bench.contract.defense import Defense
from bench.data.dataset import Dataset
from bench.seeding import generator
from bench.toolkit.images import ssim
from defenses.fedml_he import FedMLHE, ranks
from defenses.mask_crypt import MaskCrypt
from defenses.selective_shield import SelectiveShield
from tests.conftest import context_for, network_for, require, seen_under


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


@pytest.mark.parametrize("bias_sent", [True, False])
def test_cells_in_the_open_give_their_columns_and_public_samples_the_rest(bias_sent: bool) -> None:
    """A tenth of the cells is seen, a quarter of the columns not at all; inputs are correlated."""
    draws = np.random.default_rng(0)
    factors = draws.uniform(0.2, 1, size=(3, 40))
    inputs = draws.uniform(size=(401, 3)) @ factors + draws.normal(0, 0.1, size=(401, 40))
    x, public = np.abs(inputs[0]), np.abs(inputs[1:])
    db = draws.normal(size=100)
    gradient = np.concatenate([db[:, None] * x, db[:, None]], axis=1)
    present = draws.uniform(size=gradient.shape) < 0.1
    present[:, 30:40] = False
    present[:, 40] &= bias_sent
    answer = require(complete_inputs(gradient, present, public))
    if bias_sent:  # the cells fix the factor too
        np.testing.assert_allclose(answer[:30], x[:30], rtol=1e-6)
        by_mean = np.abs(public.mean(axis=0) - x)[30:].mean()
        assert np.abs(answer[30:] - x[30:]).mean() < 0.7 * by_mean
    else:
        told = answer[:30] / x[:30]
        np.testing.assert_allclose(told, told.mean(), rtol=1e-6)
        assert 0.7 < told.mean() < 1.4
    assert complete_inputs(gradient, np.zeros_like(present), public) is None


def test_what_fedml_he_leaves_in_the_open_tells_more_than_the_floor(digits: Dataset) -> None:
    network, defense = network_for(digits, "mlp_spm"), FedMLHE(share=0.5)
    seen, truth = seen_under(digits, network, defense, clients=8, victims=8)
    context = context_for(digits, network, defense)
    answer = Analytic().run(seen, context)
    assert answer.images is not None
    mean = context.aux_x.mean(dim=0).expand_as(truth.x[:, 0])
    floor = float(ssim(mean, truth.x[:, 0]).mean())
    assert float(ssim(answer.images[:, 0], truth.x[:, 0]).mean()) > floor + 0.2


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
    assert float(ssim(require(answer.images)[:, 0], truth.x[:, 0]).mean()) > 0.95
    assert not require(answer.failed).any()


@pytest.mark.parametrize("defense", [FedMLHE(share=0.5), SelectiveShield(tau=0.05)])
def test_masks_are_not_taken_for_rankings(digits: Dataset, defense: Defense) -> None:
    network = network_for(digits, "mlp_spm")
    seen, _ = seen_under(digits, network, defense, clients=4, victims=4)
    assert any(m.kind == "mask" for m in seen.messages)
    assert rankings(seen) == {}
