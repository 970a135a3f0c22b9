"""DP-SGD and DP-FedAvg: the step against opacus, the noise, and what is claimed and proven."""

from __future__ import annotations

import math

import pytest
import torch
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer

from bench.contract.events import Facts, Round
from bench.contract.mechanisms import GaussianNoise
from bench.data.dataset import Dataset
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.privacy.ledger import account
from bench.protocols.local_training import LocalWork
from bench.registry import Registry
from bench.seeding import generator
from bench.toolkit.losses import NetworkLoss
from defenses.dp_fedavg import DPFedAvg
from defenses.dp_sgd import DPSGD, uses_of_a_record
from tests.conftest import context_for, federation_of, network_for, seen_under

FACTS = Facts(parameters=100, rounds=10, clients=20, batch=20, records=100, local_steps=5)


def test_a_step_without_noise_equals_opacus(digits: Dataset) -> None:
    """On its modules, whose hooks do not see vmapped clients."""
    network = network_for(digits, "mlp_spm")
    params = network.init(generator(0, "init"))
    x, y = digits.train_x[:16], digits.train_y[:16]
    one_hot = torch.nn.functional.one_hot(y, 10).float()
    loss = NetworkLoss(network=network, realize=lambda v: v, mode="train", buffers=None)
    for norm in (0.5, 100.0):
        ours = DPSGD(noise_multiplier=1.0, clip_norm=norm).gradient(loss, params, x, one_hot, {})
        plain = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
        )
        for leaf, value in zip(plain.parameters(), params.values(), strict=True):
            leaf.data.copy_(value)
        model = GradSampleModule(plain)
        optimizer = DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=norm,
            expected_batch_size=16,
        )  # fmt: skip
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for leaf, (name, value) in zip(plain.parameters(), params.items(), strict=True):
            assert torch.allclose(value - leaf.data, ours[name], atol=1e-5), name


def test_every_steps_noise_has_its_std_within_5_standard_errors(digits: Dataset) -> None:
    network = network_for(digits, "mlp_spm")
    loud, quiet = DPSGD(noise_multiplier=2.0, clip_norm=0.5), DPSGD(noise_multiplier=0.0,
                                                                    clip_norm=0.5)  # fmt: skip
    work = LocalWork(protocol="fedsgd", batch=8, lr=1.0, local_steps=1)
    runs = [federation_of(digits, network, d, clients=1, protocol="fedsgd") for d in (loud, quiet)]
    for run in runs:
        run.play(work, ["client-0"])
    noise = torch.cat([(runs[0].state[n] - runs[1].state[n]).flatten() for n in runs[0].state])
    std = 2.0 * 0.5 / 8
    assert abs(float(noise.std()) / std - 1) < 5 / math.sqrt(2 * len(noise))
    assert loud.mechanisms_in(Round(batch=8)) == (GaussianNoise(of="gradient", std=std),)


@pytest.mark.slow
def test_attackers_know_the_noise_and_the_clip(digits: Dataset, registry: Registry) -> None:
    """With hardly any noise the image comes back, although every gradient was clipped."""
    network = network_for(digits)
    defense = DPSGD(noise_multiplier=1e-6, clip_norm=0.1)
    seen, truth = seen_under(digits, network, defense, victims=1)
    answer = registry.attack("idlg", {}).run(seen, context_for(digits, network, defense))
    assert answer.images is not None
    assert float((answer.images - truth.x).square().mean()) < 0.01


def test_the_claim_is_opacus_and_the_proof_counts_every_use() -> None:
    entry = account(DPSGD(noise_multiplier=1.5, clip_norm=1.0), FACTS)
    accountant = RDPAccountant()
    accountant.history = [(1.5, 0.2, 50)]
    # Opacus takes the best of a grid of orders, the claim the best order.
    opacus = accountant.get_epsilon(1e-5)
    assert entry.eps_claimed is not None
    assert 0.999 * opacus < entry.eps_claimed <= opacus
    assert uses_of_a_record(FACTS) == 11
    proven = exact_gaussian_epsilon(mu=math.sqrt(11) * 2 / 1.5, delta=1e-5)
    assert entry.eps_record == pytest.approx(proven)


def test_a_record_is_used_no_more_often_than_the_proof_says(digits: Dataset) -> None:
    run = federation_of(digits, network_for(digits, "mlp_spm"), DPSGD(noise_multiplier=0.0,
                        clip_norm=1.0), clients=2, each=23)  # fmt: skip
    work = LocalWork(protocol="fedavg", batch=5, lr=0.1, local_steps=4)
    counts = torch.zeros(23, dtype=torch.int64)
    for rounds in range(1, 9):
        used = run.play(work, ["client-0"], observed=True).used["client-0"].flatten()
        counts += used.bincount(minlength=23)
        facts = Facts(parameters=1, rounds=rounds, batch=5, records=23, local_steps=4)
        assert int(counts.max()) <= uses_of_a_record(facts)


def test_dp_fedavg_shares_its_noise_and_claims_for_the_sum() -> None:
    defense = DPFedAvg(noise_multiplier=4.0, clip_norm=2.0, shared_by=16)
    assert defense.level == 2.0
    entry = account(defense, FACTS)
    assert entry.unit == "client"
    assert entry.eps_claimed is not None
    # Each upload has a quarter of the noise and twice the sensitivity.
    assert entry.eps_record == pytest.approx(
        exact_gaussian_epsilon(mu=math.sqrt(10) * 2 * 4 / 4.0, delta=1e-5)
    )
    assert entry.eps_record > entry.eps_claimed


def test_dp_fedavg_claims_no_more_noise_than_the_clients_of_a_round_add() -> None:
    """Five clients bear the noise of ten. By dp-accounting the epsilon is 4.51 and not 2.81; the
    accountant of the claim, that of the papers, says 5.01 and not 3.12."""
    defense = DPFedAvg(noise_multiplier=2.0, clip_norm=1.0, shared_by=10)
    facts = Facts(parameters=100, rounds=5, clients=10, participation=0.5)
    entry = account(defense, facts)
    mechanism = from_gaussian_mechanism(
        2.0 * 0.5**0.5, sampling_prob=0.5, value_discretization_interval=1e-3
    )
    exact = mechanism.self_compose(5).get_epsilon_for_delta(1e-5)
    assert exact == pytest.approx(4.51, abs=0.005)
    assert entry.eps_claimed == pytest.approx(5.013, abs=0.001)
    # With as many clients as share the noise, or more, the claim is the paper's.
    for shared_by in (1, 5):
        paper = DPFedAvg(noise_multiplier=2.0, clip_norm=1.0, shared_by=shared_by)
        assert account(paper, facts).eps_claimed == pytest.approx(3.122, abs=0.001)
