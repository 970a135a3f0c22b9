"""Secure aggregation: masks that cancel, the sum that the server reads, and attacks on it."""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from attacks.dlg import DLG
from bench.api import (
    SUM,
    Client,
    Clip,
    Defense,
    FixedPoint,
    GaussianNoise,
    Local,
    Mechanism,
    Message,
    SignPerturbation,
)
from bench.contract.compose import Composed
from bench.contract.events import Facts, Gaussian, Summed
from bench.contract.mechanisms import Averaged, average
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.privacy.ledger import account, record_epsilon
from bench.protocols.federation import Federation
from bench.protocols.wire import Wire
from bench.registry import Registry
from bench.seeding import generator
from defenses.dp_fedavg import DPFedAvg
from defenses.dp_sgd import DPSGD
from defenses.fedml_he import FedMLHE
from defenses.lg_fedavg import LGFedAvg
from defenses.noise import GaussianUpdate
from defenses.secure_aggregation import (
    MASKED,
    MODULUS,
    SecureAggregation,
    agree_on_seed,
    pair_mask,
    public_key,
)
from defenses.sun_adaptive import SunAdaptive
from tests.conftest import context_for, federation_of, network_for, seen_under
from tests.matchers import evidence_for
from tests.uploads import distance, one_hot, play


def rng(name: str) -> torch.Generator:
    return generator(0, "test secure aggregation", name)


def played(digits: Dataset, defense: Defense, **how: Any) -> tuple[Federation, Wire]:
    federation = federation_of(digits, network_for(digits, "mlp_spm"), defense, **how)
    return federation, play(federation).wire


# --- arithmetic -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=8)
@given(rows=st.lists(st.lists(st.floats(-1, 1), min_size=5, max_size=5), min_size=1, max_size=6))
def test_the_sum_of_masked_messages_decodes_to_the_sum(rows: list[list[float]]) -> None:
    encoding = SecureAggregation(clip=1.0, levels=2**16)
    names = [f"client-{i}" for i in range(len(rows))]
    secrets = [bytes([7 + i]) * 32 for i in range(len(rows))]
    total = torch.zeros(5, dtype=torch.int64)
    for i, row in enumerate(rows):
        message = encoding.encode(torch.tensor(row), rng("round"))
        for j, other in enumerate(names):
            if j != i:
                seed = agree_on_seed(secrets[i], public_key(secrets[j]))
                message = message + pair_mask(names[i], other, seed, 5)
        total = total + message % MODULUS
    decoded = encoding.decode(total % MODULUS, len(rows))
    expected = torch.tensor(rows, dtype=torch.float64).sum(dim=0)
    assert bool(((decoded - expected).abs() <= len(rows) * encoding.step + 1e-6).all())


def test_two_clients_agree_on_one_seed() -> None:
    a, b, c = (bytes([i]) * 32 for i in (1, 2, 3))
    assert agree_on_seed(a, public_key(b)) == agree_on_seed(b, public_key(a))
    assert agree_on_seed(a, public_key(b)) != agree_on_seed(a, public_key(c))


def test_rounding_is_right_in_the_mean_cuts_at_the_clip_and_is_the_declared_one() -> None:
    encoding = SecureAggregation(clip=1.0, levels=4)  # steps of one half
    values, n = torch.tensor([0.1, -0.6, 5.0, -5.0]), 40_000
    sent = encoding.decode(encoding.encode(values.repeat(n), rng("mean")), 1).view(n, 4)
    (law,) = encoding.mechanisms()
    told = law.sample(values.expand(n, 4), rng("law")).double()
    for draws in (sent, told):
        assert set(draws[:, 0].unique().tolist()) == {0.0, 0.5}
        assert set(draws[:, 1].unique().tolist()) == {-1.0, -0.5}
        # The least likely step has a standard error of .5 sqrt(.2 .8 / 40000) = .001.
        expected = torch.tensor([0.1, -0.6, 1.0, -1.0]).double()
        torch.testing.assert_close(draws.mean(dim=0), expected, rtol=0, atol=0.005)


# --- rounds -----------------------------------------------------------------------------------


def test_the_model_is_that_of_plain_averaging_up_to_the_rounding(digits: Dataset) -> None:
    plain, _ = played(digits, Defense())
    summed, _ = played(digits, SecureAggregation())
    assert distance(summed.state, plain.state) < 16 / 2**22 + 1e-6
    assert all(c.kept is None for c in summed.clients)


class _Boxes(SecureAggregation):
    """Keeps what the clients sent."""

    boxes: ClassVar[dict[str, Tensor]] = {}

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        (sent,) = super().upload(messages, local, client)
        box = bytearray(sent.sealed[MASKED].box)
        self.boxes[client.id] = torch.frombuffer(box, dtype=torch.uint32).long()
        return [sent]


def test_a_single_masked_upload_is_uniform_and_shows_no_value(digits: Dataset) -> None:
    _, wire = played(digits, _Boxes())
    for masked in _Boxes.boxes.values():
        counts = torch.bincount(masked // 2**26, minlength=64)  # of the highest 6 bits
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    one, two = list(_Boxes.boxes.values())[:2]
    assert abs(float(torch.corrcoef(torch.stack([one, two]).double())[0, 1])) < 0.05
    uploads = [m for m in wire.messages_for("server") if m.kind == "update" and m.sender != SUM]
    assert len(uploads) == 4
    assert not any(bool(p.presence().any()) for m in uploads for p in m.parts.values())
    assert all(m.sealed[MASKED].box is None for m in uploads)


def test_the_sum_of_those_that_did_not_drop_out_is_exact(digits: Dataset) -> None:
    counts = set()
    for seed in range(8):
        defense = SecureAggregation(dropout=0.4, threshold=0.1)
        federation, wire = played(digits, defense, seed=seed)
        sent = [m.sender for m in wire.log if m.kind == "update" and MASKED in m.sealed]
        # Those that dropped out lose their round, and nothing of theirs becomes personal.
        assert all(c.kept is None for c in federation.clients)
        if sent and len(sent) not in counts:
            plain = federation_of(digits, federation.network, Defense(), seed=seed)
            play(plain, clients=sent)
            assert distance(federation.state, plain.state) < 1e-5
        counts.add(len(sent))
    assert {2, 3} <= counts


def test_with_too_few_uploads_the_round_is_lost(digits: Dataset) -> None:
    defense = SecureAggregation(dropout=0.9, threshold=1.0)
    federation, wire = played(digits, defense)
    arrived = [m for m in wire.log if MASKED in m.sealed]
    assert len(arrived) < 4
    fresh = federation_of(digits, federation.network, defense)
    assert distance(fresh.state, federation.state) == 0
    assert not [m for m in wire.log if m.sender == SUM]


def test_levels_that_overflow_are_refused(digits: Dataset) -> None:
    with pytest.raises(ValueError, match=r"levels must be < 1073741824 for the sum of 4 clients"):
        played(digits, SecureAggregation(levels=2**31))


# --- what is seen -----------------------------------------------------------------------------


def test_what_is_seen_of_a_sum_is_one_victim_with_all_samples(digits: Dataset) -> None:
    network = network_for(digits, "mlp_spm")
    plain, alone = seen_under(digits, network, Defense(), clients=3, batch=2, local_steps=2)
    seen, truth = seen_under(
        digits, network, SecureAggregation(dropout=0.9), clients=3, batch=2, local_steps=2,
    )  # fmt: skip
    assert seen.clients == (SUM,)
    assert seen.after is not None  # the server forms the model
    assert truth.x.shape[:2] == truth.y.shape == (1, 12)
    # Step after step, and in each client after client.
    expected = [alone.y[c, s * 2 + b] for s in range(2) for c in range(3) for b in range(2)]
    assert truth.y[0].tolist() == [int(y) for y in expected]
    assert (seen.known["batch"], seen.known["samples"], seen.known["summed"]) == (6, 12, 3)
    (message,) = seen.of(SUM, "update")
    for name, part in message.parts.items():
        mean = torch.stack([plain.of(c, "update")[0].parts[name].values for c in plain.clients])
        torch.testing.assert_close(part.values, mean.mean(dim=0), rtol=0, atol=1e-5)


def test_under_a_split_protocol_every_client_is_seen(digits: Dataset) -> None:
    seen, truth = seen_under(
        digits, network_for(digits), SecureAggregation(), protocol="splitfed", clients=2,
        split={"cut": "block1", "labels": "private"},
    )  # fmt: skip
    assert len(seen.clients) == len(truth.y) == 2
    assert "summed" not in seen.known


@pytest.mark.parametrize("steps", [1, 2])
def test_the_true_samples_explain_a_sum_of_clipped_and_rounded_updates(
    digits: Dataset, steps: int
) -> None:
    """Each client's update is clipped by a factor of its own before the sum."""
    network = network_for(digits)
    clipped = GaussianUpdate(noise_multiplier=0.0, clip_norm=0.5)
    defense = Composed({"gaussian": clipped, "sum": SecureAggregation()})
    seen, truth = seen_under(digits, network, defense, clients=3, batch=2, local_steps=steps)
    evidence = evidence_for(seen, context_for(digits, network, defense), dtype=torch.float64)
    assert evidence.uploads is not None
    assert not evidence.noisy  # the rounding is below what is looked for
    x, y = truth.x.double(), one_hot(truth)
    square = evidence.uploads.observation.square
    size = sum(v[0].numel() for v in evidence.uploads.observation.values.values())
    victim = torch.zeros(1, dtype=torch.int64)
    assert float(evidence.uploads.misfit(x, y, victim).detach()) * size < 1e-5 * float(square)
    swapped = torch.cat([x[:, 1:], x[:, :1]], dim=1)
    assert float(evidence.uploads.misfit(swapped, y, victim).detach()) * size > 1e-4 * float(square)


def test_the_sum_of_two_clients_is_rebuilt(digits: Dataset) -> None:
    network, defense = network_for(digits), SecureAggregation()
    seen, truth = seen_under(digits, network, defense, protocol="fedsgd", clients=2)
    images = DLG().run(seen, context_for(digits, network, defense, budget=50)).images
    assert images is not None
    errors = [float((images - x).square().mean()) for x in (truth.x, truth.x.flip(1))]
    assert min(errors) < 1e-3


def test_several_noises_of_a_mean_are_one_and_laws_that_are_not_known_are_not_told() -> None:
    clip = Clip(of="update", norm=1.0)
    noise = GaussianNoise(of="update", std=0.3)
    point = FixedPoint(of="update", clip=8.0, step=0.6**0.5)  # a variance of .1 in the mean
    laws = average((clip, noise, point), 4)
    assert laws[0] == clip
    cut, both = laws[1], laws[2]
    assert isinstance(both, GaussianNoise)
    assert both.std == pytest.approx(((0.09 + 0.1) / 4) ** 0.5)
    assert cut.apply(torch.tensor([[9.0, -1.0]])).tolist() == [[8.0, -1.0]]
    assert Mechanism.from_dict(cut.to_dict()) == cut
    assert average((clip, point), 1) == [clip, point]
    signs = SignPerturbation(of="update", keep=0.9, low=1.0, high=1.0)
    (unknown,) = average((signs,), 2)
    assert isinstance(unknown, Averaged)
    assert not unknown.known_law


# --- ledger -----------------------------------------------------------------------------------


def test_a_sum_proves_nothing_and_takes_nothing_from_noise() -> None:
    facts = Facts(parameters=100, clients=4, rounds=3)
    assert account(SecureAggregation(), facts).eps_record == float("inf")
    event = Gaussian(sensitivity=1.0, std=1.0, unit="record")
    assert record_epsilon((event, Summed(what="updates")), 1e-5) == record_epsilon((event,), 1e-5)
    # More noise than the clip has room for is cut, so that the proof is that of one upload.
    noise = GaussianUpdate(noise_multiplier=5.0, clip_norm=1.0)
    alone, both = (account(d, facts) for d in (noise, summed(noise)))
    assert both.eps_record == alone.eps_record
    assert "The noises of a sum are not added up" in both.reasons[-1]


def summed(noise: Defense, **settings_: Any) -> Composed:
    return Composed({"gaussian": noise, "secure_aggregation": SecureAggregation(**settings_)})


@pytest.mark.parametrize(
    ("settings_", "fewest"),
    [
        ({}, 5),
        ({"dropout": 0.1}, 3),  # half of five, rounded up
        ({"dropout": 0.1, "threshold": 0.2}, 1),
        ({"dropout": 0.1, "threshold": 1.0}, 5),
    ],
)
@pytest.mark.parametrize("shared_by", [None, 5])
def test_noise_of_the_fewest_clients_that_unmask_a_sum_adds_up(
    settings_: dict[str, Any], fewest: int, shared_by: int | None
) -> None:
    facts = Facts(parameters=100, clients=10, participation=0.5, rounds=3)
    given_ = {"noise_multiplier": 2.0, "clip_norm": 0.1}
    noise = DPFedAvg(**given_, shared_by=shared_by) if shared_by else GaussianUpdate(**given_)
    mu = 2 * 0.1 * 3**0.5 / (noise.level * fewest**0.5)
    entry = account(summed(noise, **settings_), facts)
    assert entry.eps_record == pytest.approx(exact_gaussian_epsilon(mu=mu, delta=1e-5), rel=1e-3)
    assert entry.eps_record >= exact_gaussian_epsilon(mu=mu, delta=1e-5)
    assert f"at least {fewest} are summed" in entry.reasons[0]


def test_noise_adds_up_only_where_nothing_else_changes_the_uploads() -> None:
    facts = Facts(parameters=100, clients=10)
    noise = GaussianUpdate(noise_multiplier=2.0, clip_norm=0.1)
    one = account(noise, facts).eps_record
    assert account(summed(noise), facts).eps_record < one / 2
    lg = LGFedAvg()
    for members in (
        {"lg_fedavg": lg, "gaussian": noise},
        {"gaussian": noise, "lg_fedavg": lg},
        {"both": Composed({"gaussian": noise, "lg_fedavg": lg})},
    ):
        both = Composed({**members, "secure_aggregation": SecureAggregation()})
        assert not [e for e in both.guarantee(facts) if isinstance(e, Gaussian) and e.summed]


def grid_law(mean: float, std: float, *, clip: float, step: float) -> np.ndarray:
    """Chances of -clip, ..., clip: N(mean, std^2) cut, and rounded up or down at random."""
    places = -clip + step * np.arange(round(2 * clip / step) + 1)
    z = (mean - places) / std
    beyond = std * stats.norm.pdf(z) + (mean - places) * stats.norm.cdf(z)  # E max(0, x - place)
    up = -np.diff(beyond) / step  # P(above the place), less what is rounded down to it
    return -np.diff(np.concatenate([[1.0], up, [0.0]]))


def exact_delta(means: list[float], others: list[float], epsilon: float, **law: float) -> float:
    """Smallest delta at epsilon of two sums of independent values with these means."""
    p, q = np.ones(1), np.ones(1)
    for one, other in zip(means, others, strict=True):
        p, q = np.convolve(p, grid_law(one, **law)), np.convolve(q, grid_law(other, **law))
    return float(max(np.maximum(0, a - np.exp(epsilon) * b).sum() for a, b in ((p, q), (q, p))))


@pytest.mark.parametrize("std", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("place", [0.0, 0.3, 1.0])
def test_a_sum_of_rounded_noised_values_keeps_its_epsilon(
    std: float, count: int, place: float
) -> None:
    """Against the sum's exact law, at noise that is hardly wider than the grid."""
    sums = Summed(what="", fewest=count, most=count, clip=100.0, step=1.0)
    event = Gaussian(sensitivity=2.0, std=std, unit="record", largest=1.0, summed=sums)
    epsilon = record_epsilon((event,), 1e-5)
    exact = exact_gaussian_epsilon(mu=2 / std / count**0.5, delta=1e-5)
    assert exact < epsilon < exact * 1.001
    delta = exact_delta(
        [1.0, *[place] * (count - 1)], [-1.0, *[place] * (count - 1)], epsilon,
        std=std, clip=100.0, step=1.0,
    )  # fmt: skip
    assert 1e-6 < delta <= 1e-5  # rounding adds some noise of its own


def test_noise_that_is_cut_before_the_sum_does_not_add_up() -> None:
    """Ten clients at the edge of the clip: the sum of their noises would be a false proof."""
    sums = Summed(what="", fewest=10, most=10, clip=2.0, step=0.05)
    event = Gaussian(sensitivity=2.0, std=1.0, unit="record", largest=1.0, summed=sums)
    law = {"std": 1.0, "clip": 2.0, "step": 0.05}
    means, others = [1.0] * 10, [-1.0, *[1.0] * 9]
    added = exact_gaussian_epsilon(mu=2 / 10**0.5, delta=1e-5)
    assert exact_delta(means, others, added, **law) > 40 * 1e-5
    epsilon = record_epsilon((event,), 1e-5)
    assert epsilon == record_epsilon((replace(event, summed=None),), 1e-5)
    assert exact_delta(means, others, epsilon, **law) <= 1e-5


@pytest.mark.parametrize(
    ("name", "sealer"),
    [
        ("gaussian", SecureAggregation()),
        ("top_k", SecureAggregation()),
        ("laplace", SunAdaptive(epsilon=1.0, shuffled=True)),
    ],
)
def test_what_would_change_uploads_after_they_are_sealed_is_refused(
    registry: Registry, name: str, sealer: Defense
) -> None:
    given_ = {"keep": 0.1} if name == "top_k" else {"noise_multiplier": 1.0, "clip_norm": 1.0}
    later = registry.defense(name, given_)
    with pytest.raises(UserError) as refused:
        Composed({"none": Defense(), "sealer": sealer, name: later})
    assert str(refused.value) == (
        f"defense '{name}' comes after 'sealer', which has sealed every upload, so that it would "
        f"change nothing of the sum that the server reads; combine them as '{name}+sealer'."
    )
    Composed({name: later, "sealer": sealer})
    # What acts in the local steps is in the upload before it is sealed.
    Composed({"sealer": sealer, "dp_sgd": DPSGD(noise_multiplier=1.0, clip_norm=1.0)})


def test_noise_after_an_encrypted_zone_acts_on_what_is_in_the_open(digits: Dataset) -> None:
    """The ciphertexts are as before, and nothing is proven, as for the encrypted zone alone."""
    noise = GaussianUpdate(noise_multiplier=1.0, clip_norm=1.0)
    both = Composed({"fedml_he": FedMLHE(share=0.3), "gaussian": noise})
    network = network_for(digits, "mlp_spm")
    seen, plain = (seen_under(digits, network, d, clients=2)[0] for d in (both, FedMLHE(share=0.3)))
    for client in seen.clients:
        (one,), (other,) = (s.of(client, "update") for s in (seen, plain))
        moved = torch.cat([
            (p.values - other.parts[n].values)[p.presence()] for n, p in one.parts.items()
        ])  # fmt: skip
        assert float(moved.std()) == pytest.approx(1.0, rel=0.05)
        for name, part in one.parts.items():
            assert torch.equal(part.presence(), other.parts[name].presence())
    assert account(both, Facts(parameters=100)).eps_record == float("inf")
