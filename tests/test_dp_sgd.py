"""Noise on gradients and updates: the step against opacus, draws, what is claimed and proven."""

import math

import pytest
import torch
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer

from bench.api import Facts, GaussianNoise, Round
from bench.data.dataset import Dataset
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.privacy.ledger import account
from bench.registry import Registry
from bench.seeding import generator
from bench.toolkit.losses import NetworkLoss
from defenses.dp_fedavg import DPFedAvg
from defenses.dp_sgd import DPSGD, uses_of_a_record
from defenses.noise import GaussianUpdate, LaplaceUpdate
from tests.conftest import context_for, federation_of, network_for, seen_under
from tests.uploads import assert_moments, error_of, play, upload_of

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
    loud, quiet = (DPSGD(noise_multiplier=m, clip_norm=0.5) for m in (2.0, 0.0))
    runs = [federation_of(digits, network, d, clients=1, protocol="fedsgd") for d in (loud, quiet)]
    for run in runs:
        play(run, protocol="fedsgd", lr=1.0, local_steps=1)
    noise = torch.cat([(runs[0].state[n] - runs[1].state[n]).flatten() for n in runs[0].state])
    std = 2.0 * 0.5 / 8
    assert_moments(noise, mean=0, variance=std**2)
    assert loud.mechanisms_in(Round(batch=8)) == (GaussianNoise(of="gradient", std=std),)


@pytest.mark.slow
def test_attackers_know_the_noise_and_the_clip(digits: Dataset, registry: Registry) -> None:
    """With hardly any noise the image comes back, although every gradient was clipped."""
    network = network_for(digits)
    defense = DPSGD(noise_multiplier=1e-6, clip_norm=0.1)
    seen, truth = seen_under(digits, network, defense, victims=1)
    context = context_for(digits, network, defense)
    assert error_of(registry.attack("idlg", {}), seen, truth, context) < 0.01


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
    counts = torch.zeros(23, dtype=torch.int64)
    for rounds in range(1, 9):
        used = play(run, clients=["client-0"], batch=5, local_steps=4).used["client-0"].flatten()
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


SIZE = 100_000


def uploaded(defense: GaussianUpdate | LaplaceUpdate, update: torch.Tensor) -> torch.Tensor:
    return upload_of(defense, update, generator(0, "noise")).parts["p"].values.double()


def test_noise_has_the_stated_scale_and_an_update_is_clipped_first_in_its_norm() -> None:
    update = torch.full((SIZE,), 1.0)
    out = uploaded(GaussianUpdate(noise_multiplier=0.02, clip_norm=5.0), update)
    assert_moments(out, mean=5.0 / math.sqrt(SIZE), variance=0.1**2)
    out = uploaded(LaplaceUpdate(noise_multiplier=0.001, clip_norm=100.0), update)
    clipped, scale = 100.0 / SIZE, 0.1
    assert_moments(out, mean=clipped, variance=2 * scale**2)
    assert_moments((out - clipped).abs(), mean=scale, variance=scale**2)


@pytest.mark.parametrize("kind", [GaussianUpdate, LaplaceUpdate])
def test_a_short_update_without_noise_passes_unchanged(
    kind: type[GaussianUpdate] | type[LaplaceUpdate],
) -> None:
    update = torch.linspace(-1, 1, 50)
    out = uploaded(kind(noise_multiplier=0.0, clip_norm=100.0), update)
    assert torch.equal(out, update.double())


def test_the_real_upload_of_a_federation_is_within_the_clip(digits) -> None:  # type: ignore[no-untyped-def]
    network = network_for(digits, "mlp_spm")
    defense = GaussianUpdate(noise_multiplier=0.0, clip_norm=0.01)
    seen, _ = seen_under(digits, network, defense)
    values, _ = seen.stack("update", seen.clients)
    norms = torch.cat([v.flatten(1) for v in values.values()], dim=1).norm(dim=1)
    assert torch.allclose(norms, torch.full_like(norms, 0.01), rtol=1e-4)
