"""Differential privacy of clients: central noise, a tree of it, an adaptive clip, accounting."""

import math
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant
from torch import Tensor

from bench.api import SUM, Facts, Gaussian
from bench.contract.compose import Composed
from bench.contract.messages import State
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.harness.environment import Environment
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.privacy.ledger import account, sampled_gaussian_epsilon
from bench.protocols.federation import Federation
from bench.protocols.settings import ProtocolSettings, TaskSettings
from bench.records import TrainJob
from defenses.aggregator import AGGREGATOR
from defenses.dp_fedavg import CentralDPFedAvg
from defenses.dp_ftrl import DPFTRL, TreeAggregator
from defenses.noise import GaussianUpdate, LocalDP
from defenses.none import NoDefense
from tests.conftest import federation_of, network_for, observed_round, require, seen_under
from tests.docs_modules import canaries
from tests.uploads import play


def flat(state: State) -> Tensor:
    return torch.cat([v.double().flatten() for v in state.values()])


def started(digits: Dataset, defense: Any, **how: Any) -> Federation:
    return federation_of(digits, network_for(digits, "logistic"), defense, **how)


def test_the_model_moves_by_the_noised_sum_of_clipped_updates(digits: Dataset) -> None:
    own = {"clip_norm": 0.1, "expected": 8}
    plain, noised = (
        started(digits, CentralDPFedAvg(noise_multiplier=z, **own)) for z in (0.0, 3.0)
    )
    before = flat(plain.state)
    clipped = [flat({n: p.values for n, p in m.parts.items()}) for m in _terms(plain)]
    torch.testing.assert_close(flat(plain.state) - before, sum(clipped) / 8, rtol=0, atol=1e-7)
    assert all(float(term.norm()) <= 0.1 * (1 + 1e-6) for term in clipped)
    play(noised)
    noise = (flat(noised.state) - flat(plain.state)) * 8
    assert float(noise.std()) == pytest.approx(0.3, rel=0.1)  # of 650 values: 5 errors of 2.8 %


def _terms(federation: Federation) -> list[Any]:
    """What clients told the aggregator in a round that is played."""
    log = play(federation).wire.log
    return [m.with_parts({"term": m.parts["term"]}) for m in log if m.receiver == AGGREGATOR
            and m.kind == "term"]  # fmt: skip


@pytest.mark.parametrize("how", [{}, {"quantile": 0.5}])
def test_the_server_sees_the_mean_of_all_and_attackers_know_its_noise(
    digits: Dataset, how: dict[str, float]
) -> None:
    defense = CentralDPFedAvg(noise_multiplier=2.0, clip_norm=0.1, expected=100, **how)
    seen, truth = seen_under(digits, network_for(digits, "logistic"), defense, victims=4)
    assert seen.clients == (SUM,)
    assert truth.x.shape[:2] == (1, 4)
    (told,) = (m for m in seen.messages if m.sender == SUM)
    stds = [m["std"] for m in seen.known["mechanisms"] if m["kind"] == "GaussianNoise"]
    assert stds == pytest.approx([defense.std * 0.1 / 4])
    values = flat({n: p.values for n, p in told.parts.items()})
    assert float(values.std()) == pytest.approx(defense.std * 0.1 / 4, rel=0.1)
    assert not any(m.parts and m.sender != SUM for m in seen.messages if m.kind == "update"
                   and any(p.presence().any() for p in m.parts.values()))  # fmt: skip


def test_a_prefix_of_a_pass_has_the_noise_of_the_nodes_that_cover_it() -> None:
    draws, period = 40_000, 6
    rng = torch.Generator().manual_seed(0)
    tree = TreeAggregator(
        period=period, clip_norm=1.0, std=2.0, count_std=1.0, quantile=None, expected=1, rng=rng
    )
    defense = DPFTRL(noise_multiplier=2.0, clip_norm=1.0, expected=1, period=period)
    prefix = torch.zeros(draws)
    for number in range(2 * period):
        change = tree.noise(torch.zeros(draws), number)
        prefix = change + (0.0 if number % period == 0 else prefix)
        covering = ((number % period) + 1).bit_count()  # binary digits of the prefix's length
        assert float(prefix.std()) == pytest.approx(2 * math.sqrt(covering), rel=0.02)
        assert float(change.std()) == pytest.approx(2 * defense.spread(number), rel=0.02)


def test_clients_of_dp_ftrl_join_once_in_each_pass(digits: Dataset) -> None:
    defense = DPFTRL(noise_multiplier=4.0, clip_norm=0.2, expected=2, period=3)
    federation = started(digits, defense, clients=6)
    joined = [sorted(c.number for c in play(federation).joined) for _ in range(5)]
    assert joined == [[0, 3], [1, 4], [2, 5], [0, 3], [1, 4]]


def test_the_clip_goes_to_the_quantile_and_clients_hear_it(digits: Dataset) -> None:
    defense = CentralDPFedAvg(noise_multiplier=0.0, clip_norm=5.0, expected=12, quantile=0.5)
    federation = started(digits, defense, clients=12)
    (party,) = federation.parties.values()
    party.count_std = 0.0  # type: ignore[attr-defined]
    clips, within = [], []
    for _ in range(60):
        terms = play(federation).wire.log
        clips.append(next(float(m.parts["clip"].values) for m in terms if m.kind == "clip"))
        within.append([float(m.parts["within"].values) for m in terms if m.kind == "term"])
    assert clips[0] == 5.0
    assert clips[1] == pytest.approx(5.0 * math.exp(-0.2 * 0.5))  # all were within
    assert 0.2 < sum(map(sum, within[-10:])) / 120 < 0.8


@pytest.mark.parametrize("clients", [3, 6])
def test_a_client_moves_the_told_share_by_half_whoever_else_came(
    digits: Dataset, clients: int
) -> None:
    """Of twelve expected; all are within, and the others' count is as secret as they are."""
    defense = CentralDPFedAvg(noise_multiplier=0.0, clip_norm=5.0, expected=12, quantile=0.5)
    federation = started(digits, defense, clients=clients)
    (party,) = federation.parties.values()
    party.count_std = 0.0  # type: ignore[attr-defined]
    play(federation)
    moved = math.log(party.clip_norm / 5.0)  # type: ignore[attr-defined]
    assert moved == pytest.approx(-0.2 * clients / 2 / 12)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 1 / 30, 100), (2.0, 0.1, 50)])
def test_sampled_epsilon_agrees_with_opacus_and_lies_below_renyi(
    noise: float, rate: float, steps: int
) -> None:
    how: dict[str, Any] = {"noise_multiplier": noise, "rate": rate, "steps": steps, "delta": 1e-5}
    added, replaced = (sampled_gaussian_epsilon(**how, replaced=r) for r in (False, True))
    prv = PRVAccountant()
    prv.history = [(noise, rate, steps)]
    assert added == pytest.approx(prv.get_epsilon(1e-5, eps_error=0.01), abs=0.02)
    renyi = RdpAccountant()
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    renyi.compose(event, steps)
    assert added < renyi.get_epsilon(1e-5)
    assert added < replaced < 2 * added


@pytest.mark.parametrize("replaced", [False, True])
def test_sampled_epsilon_without_sampling_or_noise_is_the_exact_one(replaced: bool) -> None:
    whole = sampled_gaussian_epsilon(
        noise_multiplier=4.0, rate=1.0, steps=20, delta=1e-5, replaced=replaced
    )
    mu = (2 if replaced else 1) * math.sqrt(20) / 4
    assert whole == exact_gaussian_epsilon(mu=mu, delta=1e-5)
    none = sampled_gaussian_epsilon(
        noise_multiplier=0.0, rate=0.1, steps=1, delta=1e-5, replaced=replaced
    )
    assert none == math.inf


def test_the_ledger_names_who_each_epsilon_holds_against() -> None:
    """Figures computed with dp-accounting 0.6 by hand: 100 rounds of a thirtieth, 12 uploads of the
    client with the most; 120 rounds in passes of 30."""
    facts = Facts(parameters=7850, rounds=100, clients=3000, participation=1 / 30,
                  participations=12)  # fmt: skip
    fedavg = CentralDPFedAvg(noise_multiplier=2.0, clip_norm=0.1, expected=100)
    entry = account(fedavg, facts)
    assert entry.eps_claimed == pytest.approx(0.706, abs=0.001)
    assert entry.eps_record == pytest.approx(20.125, abs=0.001)
    told = entry.constants
    assert told["eps_client_replaced_who_takes_part_secret"] == pytest.approx(1.281, abs=0.001)
    assert told["eps_client_added"] == pytest.approx(8.385, abs=0.001)
    ftrl = DPFTRL(noise_multiplier=4.0, clip_norm=0.2, expected=100, period=30)
    facts = Facts(parameters=7850, rounds=120, clients=3000, participations=4)
    assert account(ftrl, facts).eps_claimed == pytest.approx(4.983, abs=0.001)


def test_an_adaptive_clip_costs_the_sum_a_little_noise_and_proves_the_same() -> None:
    fixed, adaptive = (
        CentralDPFedAvg(noise_multiplier=2.0, clip_norm=0.1, expected=100, quantile=q)
        for q in (None, 0.5)
    )
    assert adaptive.std**-2 + (2 * 5) ** -2 == pytest.approx(2.0**-2)
    facts = Facts(parameters=10, rounds=100, participations=12)
    events = [d.guarantee(facts)[0] for d in (fixed, adaptive)]
    assert all(isinstance(e, Gaussian) for e in events)
    ratios = [e.sensitivity / e.std for e in events if isinstance(e, Gaussian)]
    assert ratios == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(("sensitivity", "proven"), [(1e-4, 8.5e8), (1.0, 25.4), (2.0, 10.4)])
def test_local_dp_proves_what_its_noise_does(sensitivity: float, proven: float) -> None:
    """At Flower's example, of which the noise is 4.845e-5."""
    defense = LocalDP(clip_norm=1.0, sensitivity=sensitivity, epsilon=10.0)
    longer = LocalDP(clip_norm=5.0, sensitivity=sensitivity, epsilon=10.0)
    assert longer.level == defense.level == pytest.approx(0.4845 * sensitivity, rel=1e-3)
    entry = account(defense, Facts(parameters=10, rounds=1))
    assert (entry.eps_claimed, entry.unit) == (10.0, "client")
    assert entry.eps_record == pytest.approx(proven, rel=0.01)


# --- the server's own step --------------------------------------------------------------------


def test_the_server_adds_a_share_of_its_last_step(digits: Dataset) -> None:
    plain = started(digits, NoDefense())
    moving = started(digits, NoDefense(), server_lr=0.5, server_momentum=0.9)
    start = flat(plain.state)
    play(plain)
    result = play(moving)
    first = flat(plain.state) - start
    torch.testing.assert_close(flat(result.after), flat(plain.state))
    torch.testing.assert_close(flat(moving.state), start + 0.5 * first)
    fork = moving.fork("other")
    middle = flat(moving.state)
    second = flat(play(moving).after) - middle
    torch.testing.assert_close(flat(moving.state), middle + 0.5 * (second + 0.9 * first))
    torch.testing.assert_close(flat(fork.last_step), first)  # a fork goes on with the same


def test_the_server_knows_what_it_aggregated_before_its_own_step(digits: Dataset) -> None:
    federation = started(digits, NoDefense(), server_lr=0.5)
    seen, _ = observed_round(federation, digits, ProtocolSettings(local_steps=1), victims=3)
    updates = [flat({n: p.values for n, p in m.parts.items()})
               for m in seen.messages if m.kind == "update"]  # fmt: skip
    assert len(updates) == 3
    moved = flat(require(seen.after)) - flat(seen.before)
    torch.testing.assert_close(moved, sum(updates) / 3, rtol=0, atol=1e-6)


def test_a_split_protocol_has_no_step_at_the_server() -> None:
    with pytest.raises(ValueError, match="splitfed takes no step at the server"):
        ProtocolSettings(name="splitfed", cut="block1", local_steps=1, server_momentum=0.9)


def test_a_suite_without_a_server_step_is_recorded_as_before() -> None:
    kept = ProtocolSettings(local_steps=1).model_dump()
    assert not {"server_lr", "server_momentum"} & set(kept)


def test_central_noise_seals_uploads_so_that_nothing_comes_after() -> None:
    central = CentralDPFedAvg(noise_multiplier=2.0, clip_norm=0.1, expected=4)
    with pytest.raises(UserError, match="sealed every upload"):
        Composed({"central": central, "noise": GaussianUpdate(noise_multiplier=1.0, clip_norm=1.0)})


# --- canaries ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "own", "mu"),
    [
        ("dp_fedavg_central", {}, math.sqrt(6) / 4),  # in all of six rounds
        # Three passes of two rounds with noise A and B - A: the first tells 2 nodes, the second 1.
        ("dp_ftrl", {"period": 2}, (math.sqrt(6) + math.sqrt(3)) / 2 / 4),
    ],
)
def test_canaries_find_what_the_noise_lets_them(name: str, own: dict[str, Any], mu: float) -> None:
    job = TrainJob(
        task=TaskSettings(dataset="digits", model="logistic"),
        protocol=ProtocolSettings(clients=4, rounds=6, local_steps=1, batch=4, partition="iid"),
        defense=name,
        settings={"noise_multiplier": 4.0, "clip_norm": 0.1, "expected": 200, **own},
        threats=(),
        checkpoints=(),
        delta=1e-5,
        seed=0,
    )
    env = Environment()
    found = canaries.measure(canaries.start(job, 400, env), job, 400)
    assert found.mu == pytest.approx(mu, abs=0.21)  # three standard errors
    assert found.bound <= found.estimate + 0.5
    assert found.bound <= found.proven
