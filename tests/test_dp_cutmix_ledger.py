"""DP-CutMixSL and its rivals: the ledger's closed forms, and settings."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bench.api import Defense, Event, Facts, Gaussian, Mechanism, Unprotected
from bench.data.dataset import Dataset
from bench.privacy.gaussian import best_renyi_epsilon
from bench.privacy.ledger import account, gaussian_epsilon
from bench.protocols.local_training import LocalWork
from bench.seeding import generator
from defenses import noised_smashed
from defenses.cutmix import DPSL, CutMix, Cutout, DPMixSL, Mixup, VanillaCutMix
from defenses.dp_cutmix import DPCutMix
from defenses.mixer import Mixing, deal_boxes
from tests.conftest import federation_of, network_for, require
from tests.dp_cutmix_steps import CLASSES, ROSTER, Step, plain, tokens
from tests.oracle import dp_cutmix as oracle

# --- the ledger -------------------------------------------------------------------------------

PAPER: dict[str, Any] = {
    "clip": 0.2,
    "smashed_std": math.sqrt(16 / 255),
    "label_std": math.sqrt(16 / 255),
}


def gaussians(events: Sequence[Event]) -> list[Gaussian]:
    return [e for e in events if isinstance(e, Gaussian)]


def unprotected(events: Sequence[Event]) -> list[str]:
    return [e.what for e in events if isinstance(e, Unprotected)]


@pytest.mark.parametrize(
    ("size", "constants"),
    [
        (20, {"rdp2_printed": 2.86875, "rdp2_server": 33.2695, "eps_server_one_upload": 42.7859}),
        (12288, {"rdp2_printed": 784.954, "rdp2_server": 888.675}),
        (None, {}),
    ],
)
def test_the_ledger_prints_equation_6_beside_what_the_server_sees(
    size: int | None, constants: dict[str, float]
) -> None:
    """n = 10, variance 16/255, delta = 1e-5, at the paper's D_s of 20, a real and an unknown one:
    8.77 printed, 42.8 against the server."""
    facts = Facts(parameters=1, clients=10, delta=1e-5)
    entry = account(DPCutMix(patches=64, group=10, smashed_size=size, **PAPER), facts)
    slope = (0.04 * 12288 / 10 + 10 / 100) / (16 / 255) / 2  # Eq. 6 over alpha
    expected = best_renyi_epsilon(slope, 1e-5)[0] if size == 12288 else 8.77104
    assert entry.eps_claimed == pytest.approx(expected, rel=1e-5)
    assert (entry.claim_delta, entry.unit) == (1e-5, "record")
    printed = {"eps_printed_one_upload": entry.eps_claimed} if size else {}
    for name, value in {**constants, **printed, "eps_printed_paper_size": 8.77104}.items():
        assert entry.constants[name] == pytest.approx(value, rel=1e-5), name
    assert entry.eps_record == math.inf
    assert any("client-held layers" in r for r in entry.reasons)


def test_the_ledgers_accountant_agrees_with_the_servers_epsilon() -> None:
    defense = DPCutMix(
        patches=64, group=4, smashed_size=640, clip=0.2, smashed_std=3.0, label_std=2.0
    )
    facts = Facts(parameters=1, clients=8, rounds=5, batch=4, records=20, local_steps=3)
    assert noised_smashed.record_uploads(facts) == 3  # 15 steps of 4 of 20 samples
    events = gaussians(defense.guarantee(facts))
    assert [e.count for e in events] == [3, 3]
    assert [e.sensitivity**2 for e in events] == pytest.approx([0.25 * 640 * 0.04, 2.0])
    square = sum(e.count * (e.sensitivity / e.std) ** 2 for e in events)
    reference = gaussian_epsilon(noise_multiplier=square**-0.5, steps=1, delta=facts.delta)
    constants = defense.constants(facts)
    assert constants["eps_server_all_uploads"] == pytest.approx(reference, rel=2e-3)
    exact = oracle.exact_epsilon(square / 2, facts.delta)
    assert exact < float(constants["eps_server_all_uploads"])


def test_two_inputs_at_the_ends_of_the_interval_reach_the_sensitivity() -> None:
    """The worst pair differs by Delta in every value sent, and by a one-hot label."""
    defense = plain(patches=6, group=4, clip=0.2, smashed_std=1.0, label_std=1.0, smashed_size=24)
    step = {
        v: Step(
            plain(patches=6, group=4, clip=0.2), {i: torch.full((1, 6, 4), v) for i in ROSTER[:4]}
        )
        for v in (-5.0, 5.0)
    }
    moved = max(
        float((step[5.0].parts[i].values - step[-5.0].parts[i].values).norm()) for i in ROSTER[:4]
    )
    smashed, label = gaussians(defense.guarantee(Facts(parameters=1, clients=4)))
    assert moved == pytest.approx(smashed.sensitivity)
    hot = torch.eye(CLASSES)
    assert float((hot[0] - hot[1]).norm()) == pytest.approx(label.sensitivity)


@pytest.mark.parametrize(
    ("facts", "mixing", "share"),
    [
        ({"clients": 8}, "uniform", 16 / 64),
        ({"clients": 10}, "uniform", 32 / 64),
        ({"clients": 9}, "uniform", 1.0),
        ({"clients": 7}, "uniform", 22 / 64),
        ({"clients": 8}, "dirichlet", 63 / 64),
        ({"clients": 9}, "dirichlet", 1.0),
        ({"clients": 1}, "uniform", 16 / 64),  # not told how many: at least a group
        ({"clients": 3}, "dirichlet", 63 / 64),
        ({"clients": 10, "participation": 0.6}, "uniform", 0.5),  # 6, 5, 1 of 10
        ({"clients": 10, "participation": 0.5}, "uniform", 1.0),
        ({"clients": 10, "participation": 0.1}, "uniform", 0.25),
        ({"clients": 8, "fewest": 8}, "uniform", 16 / 64),
        ({"clients": 8, "fewest": 6}, "uniform", 0.5),
        ({"clients": 8, "fewest": 5}, "uniform", 1.0),
        ({"clients": 8, "fewest": 1}, "uniform", 1.0),
    ],
)
def test_the_last_smaller_group_or_the_step_of_fewest_clients_sets_the_worst_share(
    facts: dict[str, Any], mixing: Mixing, share: float
) -> None:
    defense = DPCutMix(patches=64, group=4, mixing=mixing, smashed_size=20, **PAPER)
    of = Facts(parameters=1, **facts)
    assert defense.worst_share(of) == pytest.approx(share)
    sensitivity = 0.2 * math.sqrt(share * 20)
    assert gaussians(defense.guarantee(of))[0].sensitivity == pytest.approx(sensitivity)


def test_the_run_knows_the_step_of_fewest_clients(digits: Dataset) -> None:
    """A client with three times the samples takes its last steps alone, so it sends everything."""
    network = network_for(digits)
    run = federation_of(
        digits, network, CutMix(patches=16, group=2), clients=2, protocol="splitfed",
        cuts=("block1",), labels="shared",
    )  # fmt: skip
    run.clients[1].x, run.clients[1].y = run.clients[1].x[:8], run.clients[1].y[:8]
    assert run.fewest is None
    work = LocalWork(protocol="splitfed", batch=8, lr=0.1, local_epochs=1)
    result = run.play(work, [c.id for c in run.clients], observed=True)
    assert run.fewest == 1
    alone = [m.parts["smashed"] for m in result.wire.log if m.kind == "smashed" and m.step == 2]
    assert [bool(part.presence().all()) for part in alone] == [True]


@pytest.mark.parametrize(
    ("group", "mixing", "share"),
    [
        (2, "uniform", 1 - 4 / 16),  # half of 4 x 4 is a box of side 3, of which a corner keeps 2
        (3, "uniform", 1 - 4 / 16),
        (2, "dirichlet", 15 / 16),
    ],
)
def test_the_least_box_sets_the_worst_share_and_reaches_it(
    group: int, mixing: Mixing, share: float
) -> None:
    defense = VanillaCutMix(positions=16, group=group, mixing=mixing, alpha=0.1)
    for clients in (1, group, 4 * group):
        facts = Facts(parameters=1, clients=clients)
        assert defense.worst_share(facts) == pytest.approx(share)
    assert defense.worst_share(Facts(parameters=1, clients=group + 1)) == 1.0
    rng = generator(5)
    dealt = [deal_boxes(16, group, mixing=mixing, alpha=0.1, rng=rng) for _ in range(1000)]
    most = max(int(masks.sum(dim=1).max()) for masks in dealt)
    assert most / 16 == pytest.approx(share)


def test_mixup_and_plain_noise_get_no_amplification_against_the_server() -> None:
    facts = Facts(parameters=1, clients=10)
    sl = DPSL(smashed_size=20, **PAPER)
    mix = DPMixSL(group=10, smashed_size=20, **PAPER)
    assert sl.guarantee(facts) == mix.guarantee(facts)
    assert mix.constants(facts)["rdp2_printed"] == pytest.approx(1.72125)
    assert mix.constants(facts)["rdp2_server"] == pytest.approx(12.75 + 2 / (16 / 255))
    claimed = [d.claim(facts) for d in (mix, DPCutMix(patches=64, group=10, **PAPER), sl)]
    eps = [c[0] for c in claimed if c is not None]
    assert eps == sorted(eps)
    assert len(eps) == 3


@pytest.mark.parametrize(
    ("changes", "open_"),
    [
        ({}, []),
        ({"smashed_std": 0.0}, ["the smashed data"]),
        ({"clip": math.inf}, ["the smashed data"]),
        ({"smashed_size": None}, ["the smashed data"]),
        ({"label_std": 0.0}, ["the labels"]),
        ({"smashed_std": 0.0, "label_std": 0.0}, ["the smashed data", "the labels"]),
    ],
)
def test_what_no_proof_covers_is_reported(changes: Any, open_: list[str]) -> None:
    given: dict[str, Any] = {"smashed_std": 1.0, "label_std": 1.0, "smashed_size": 24}
    defense = plain(**given | changes)
    facts = Facts(parameters=1, clients=3)
    events = defense.guarantee(facts)
    assert unprotected(events) == [*open_, "the update of the client-held layers"]
    assert len(gaussians(events)) == 2 - len(open_)
    assert ("eps_server_one_upload" in defense.constants(facts)) == (not open_)


NOISELESS = (
    CutMix(patches=6, group=3), VanillaCutMix(positions=9, group=3), Cutout(patches=6, group=3),
    Mixup(group=3),
)  # fmt: skip


def test_what_has_no_noise_claims_nothing() -> None:
    facts = Facts(parameters=1, clients=3)
    for defense in NOISELESS:
        assert defense.claim(facts) is None
        assert defense.mechanisms() == ()
        assert account(defense, facts).eps_record == math.inf
        assert unprotected(defense.guarantee(facts)) == [
            "the smashed data", "the labels", "the update of the client-held layers",
        ]  # fmt: skip
    claim = require(plain(smashed_std=1.0).claim(facts))
    assert claim[0] == math.inf


def test_mechanisms_tell_the_clip_and_the_noise_and_survive_json() -> None:
    mechanisms = plain(low=-0.5, smashed_std=0.1, label_std=0.2).mechanisms()
    told = [m.to_dict() for m in mechanisms]
    assert told == [
        {"kind": "SmashedNoise", "of": "smashed", "std": 0.1, "low": -0.5, "high": 0.5},
        {"kind": "LabelNoise", "of": "labels", "std": 0.2},
    ]
    assert tuple(Mechanism.from_dict(d) for d in json.loads(json.dumps(told))) == mechanisms


# --- settings ---------------------------------------------------------------------------------


def test_all_need_smashed_data_and_a_mixer_where_they_mix() -> None:
    noise: dict[str, Any] = {"clip": 0.2, "smashed_std": 0.1, "label_std": 0.1}
    for defense in (*NOISELESS, plain(), DPMixSL(group=2, **noise), DPSL(**noise)):
        assert defense.requires == {"smashed"}
        assert ("mix" in defense.owns) == (not isinstance(defense, DPSL | Cutout))
        assert ("mixer" in defense.third_parties(0)) == (not isinstance(defense, DPSL))


BOXES = VanillaCutMix(positions=16, group=2)


@pytest.mark.parametrize(
    ("defense", "shape", "message"),
    [
        (plain(patches=4), (2, 6, 4), r"patches must be 6, the tokens of .* \[2, 6, 4\], got 4\."),
        (plain(), (2, 3, 6, 6), r"patches must be a square number .*\[2, 3, 6, 6\], got 6"),
        (plain(patches=9), (2, 3, 8, 6), r"must be a square number .*\[2, 3, 8, 6\], got 9"),
        (plain(patches=9), (2, 24), r"patches need smashed data of tokens .*the shape \[2, 24\]"),
        (plain(smashed_size=20), (2, 6, 4), r"smashed_size must be 24, .*\[2, 6, 4\], got 20\."),
        (BOXES, (2, 9, 4), r"positions must be 9, those of the smashed data \[2, 9, 4\], got 16\."),
        (BOXES, (2, 3, 8, 8), r"positions must be 64, .*\[2, 3, 8, 8\], got 16\."),
        (BOXES, (2, 3, 2, 8), r"positions need .* or a square map .*the shape \[2, 3, 2, 8\] at"),
        (BOXES, (2, 16), r"positions need smashed data of tokens .*, got the shape \[2, 16\] at"),
    ],
)
def test_smashed_data_that_does_not_fit_gets_one_clear_sentence(
    defense: Defense, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Step(defense, {i: torch.zeros(shape) for i in ROSTER[: defense.together]})


def test_a_roster_smaller_than_the_group_is_mixed_among_itself() -> None:
    assert plain(group=3).together == 3
    step = Step(plain(group=3), tokens(2))
    assert [len(m.members) for m in step.mixed] == [2]
