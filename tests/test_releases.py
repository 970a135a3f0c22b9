"""Several observed rounds of the same samples: releases."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.analytic import Analytic
from attacks.engine import deep_leakage
from attacks.engine.evidence import Evidence, releases_of, some_terms
from attacks.engine.labels import labels_by_slope
from attacks.engine.observation import SLOPES, parse_view, split_view
from attacks.engine.orders import line_up, link, unite
from attacks.idlg import IDLG
from attacks.ilrg import ILRG
from attacks.ridge import Ridge
from bench.contract.attack import Attack, Context, Seen
from bench.contract.defense import Defense
from bench.data.dataset import Dataset
from bench.errors import UserError
from bench.models import Network
from bench.protocols.export import load_seen, save_seen
from bench.protocols.federation import Federation
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import Truth, observe
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.toolkit.images import ssim
from defenses.depthfl import DepthFL
from defenses.dp_cutmix import DPCutMix
from defenses.lg_fedavg import LGFedAvg
from defenses.ms_pafl import MSPAFL
from defenses.noise import GaussianUpdate
from defenses.pm_sfl import PMSFL
from defenses.selective_shield import SelectiveShield
from defenses.spm import SPM
from tests.conftest import context_for, federation_of, network_for, rehearsing_context, require
from tests.matchers import matcher_for

SPLIT: Mapping[str, Any] = {"cut": "block1", "labels": "shared"}
CUTS: Mapping[str, Any] = {"cuts": ("block1",), "labels": "shared"}


def released(
    federation: Federation,
    data: Dataset,
    protocol: ProtocolSettings,
    count: int,
    *,
    training: LocalWork | None = None,
    **threat: Any,
) -> tuple[Seen, Truth]:
    """What `count` rounds show, all from the present state, or with a round of `training` between
    any two."""
    asked = ThreatSettings(**{"victims": protocol.clients, "rounds": count, **threat})

    def look(number: int | None) -> tuple[Seen, Truth]:
        return observe(
            federation,
            protocol=protocol,
            threat=asked,
            aux_x=data.aux_x,
            defense_known={"name": "test", "settings": {}},
            names=("final",),
            earlier=number,
        )

    before = []
    for number in range(count - 1):
        before.append(look(number)[0])
        if training is not None:
            federation.play(training, [c.id for c in federation.clients])
    seen, truth = look(None)
    return replace(seen, earlier=tuple(before)), truth


def at_init(
    data: Dataset,
    network: Network,
    defense: Defense,
    count: int,
    *,
    split: bool = False,
    **threat: Any,
) -> tuple[Seen, Truth]:
    settings: dict[str, Any] = {"name": "splitfed", **SPLIT} if split else {"name": "fedavg"}
    federation = federation_of(
        data, network, defense, protocol=settings["name"], **(CUTS if split else {})
    )
    protocol = ProtocolSettings(clients=4, local_steps=1, lr=0.1, **settings)
    return released(federation, data, protocol, count, **threat)


context = partial(rehearsing_context, budget=100)


def similarity(attack: Attack, seen: Seen, ctx: Context, truth: Truth) -> float:
    answer = attack.run(seen, ctx)
    return float(ssim(require(answer.images).flatten(0, 1), truth.x.flatten(0, 1)).mean())


def uploads(seen: Seen) -> Tensor:
    kind = str(seen.upload_kind())
    return torch.stack(
        [
            torch.cat([p.values.flatten() for p in seen.of(c, kind)[0].parts.values()])
            for c in seen.clients
        ]
    )


def test_releases_have_the_same_victims_and_samples_and_fresh_randomness(digits: Dataset) -> None:
    network = network_for(digits)
    plain, truth = at_init(digits, network, Defense(), 3)
    noised, same = at_init(digits, network, GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0), 3)
    assert torch.equal(truth.x, same.x)
    assert len({one.clients for one in (*plain.releases, *noised.releases)}) == 1
    for one in plain.earlier:  # nothing is random, and one sample has one order
        assert torch.equal(uploads(one), uploads(plain))
    assert not torch.equal(uploads(noised.earlier[0]), uploads(noised.earlier[1]))
    assert not torch.equal(uploads(noised.earlier[0]), uploads(noised))


def test_the_last_release_is_what_one_round_shows(digits: Dataset) -> None:
    network, defense = network_for(digits), GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0)
    one, _ = at_init(digits, network, defense, 1, batch=2)
    many, _ = at_init(digits, network, defense, 4, batch=2)
    assert one.earlier == ()
    assert torch.equal(uploads(one), uploads(many.releases[-1]))


def test_a_mixer_deals_anew_in_every_release_of_the_initial_state(digits: Dataset) -> None:
    network = network_for(digits)
    defense = DPCutMix(patches=16, group=2, clip=1.0, smashed_std=0.0, label_std=0.0)
    seen, _ = at_init(digits, network, defense, 3, split=True)
    dealt = [
        torch.cat([p.values.flatten() for m in one.messages if m.kind == "patches"
                   for p in m.parts.values()])
        for one in seen.releases
    ]  # fmt: skip
    assert not torch.equal(dealt[0], dealt[1])
    assert not torch.equal(dealt[1], dealt[2])


def test_every_epoch_and_release_has_the_samples_in_an_order_of_its_own(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = at_init(
        digits, network, Defense(), 2, split=True, batch=4, local_steps=2, local_epochs=2
    )
    assert truth.y.shape == (4, 8)
    assert (seen.known["samples"], seen.known["local_steps"]) == (8, 4)
    orders = []
    for one in seen.releases:
        sent = [m.parts["labels"].values.argmax(dim=1) for m in one.of(one.clients[0], "labels")]
        assert len(sent) == 4
        for epoch in (torch.cat(sent[:2]), torch.cat(sent[2:])):  # the same samples
            assert epoch.sort().values.tolist() == truth.y[0].sort().values.tolist()
            orders.append(epoch)
    assert orders[2].tolist() == truth.y[0].tolist()  # the truth has the last release's order
    assert len({tuple(order.tolist()) for order in orders}) > 1


def test_releases_survive_their_files(digits: Dataset, tmp_path: Path) -> None:
    network, defense = network_for(digits), GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0)
    seen, _ = at_init(digits, network, defense, 3)
    save_seen(seen, tmp_path / "a.b-seen")
    back = load_seen(tmp_path / "a.b-seen")
    assert len(back.earlier) == 2
    for one, other in zip(back.releases, seen.releases, strict=True):
        assert torch.equal(uploads(one), uploads(other))
        assert all(torch.equal(one.initial[n], v) for n, v in other.initial.items())
        assert one.earlier == ()
    size = (tmp_path / "a.b-seen.safetensors").stat().st_size
    for most, kept in ((3 * size, [0, 1]), (2 * size, [0]), (size - 1, [])):
        fewer = load_seen(tmp_path / "a.b-seen", most_bytes=most)
        assert len(fewer.earlier) == len(kept)
        for one, place in zip(fewer.earlier, kept, strict=True):
            assert torch.equal(uploads(one), uploads(seen.earlier[place]))
    (tmp_path / "a.b-seen-earlier-1.safetensors").unlink()
    with pytest.raises(UserError, match="earlier-1 is no complete export"):
        load_seen(tmp_path / "a.b-seen")


def test_observed_rounds_are_spread_over_the_run() -> None:
    assert ThreatSettings(rounds=11).schedule(30) == list(range(0, 31, 3))
    assert ThreatSettings(rounds=1).schedule(30) == [30]
    assert ThreatSettings(rounds=3).schedule(2) == [0, 1, 2]


# --- attacks --------------------------------------------------------------------------------------
def test_likelihoods_of_releases_add_up(digits: Dataset) -> None:
    network, defense = network_for(digits), GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0)
    federation = federation_of(digits, network, defense, clients=4)
    settings = ProtocolSettings(name="fedavg", clients=4, local_steps=1, lr=0.1)
    work = LocalWork(protocol="fedavg", batch=8, lr=0.5, local_steps=2)
    seen, truth = released(federation, digits, settings, 3, training=work)
    ctx = context_for(digits, network, defense)
    y = torch.nn.functional.one_hot(truth.y, digits.classes).double()

    def losses(some: Seen) -> Tensor:
        matcher = matcher_for(some, ctx, dtype=torch.float64)
        return matcher.losses(truth.x.double(), y, torch.arange(4))

    assert len(releases_of(Evidence(parse_view(seen), ctx, dtype=torch.float64))) == 3
    each = torch.stack([losses(one) for one in seen.releases])
    assert torch.allclose(losses(seen), each.sum(dim=0), rtol=1e-9)


def test_releases_from_one_state_share_their_evaluations(digits: Dataset) -> None:
    network, defense = network_for(digits), GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0)
    seen, truth = at_init(digits, network, defense, 4)
    matcher = matcher_for(seen, context_for(digits, network, defense), dtype=torch.float32)
    calls, clients = 0, matcher.evidence.clients
    gradients = clients.gradients

    def counted(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        return gradients(x, y)

    clients.gradients = counted  # type: ignore[assignment]
    y = torch.nn.functional.one_hot(truth.y, digits.classes).float()
    matcher.losses(truth.x, y, torch.arange(4))
    assert calls == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "defense", "model", "split"),
    [
        (IDLG(), GaussianUpdate(noise_multiplier=0.002, clip_norm=1.0), "lenet", False),
        (IDLG(), SPM(epsilon=1.0, variant="sign_rr"), "lenet", False),
        (IDLG(), PMSFL(lr_scale=300.0), "lenet", True),
        (Analytic(), GaussianUpdate(noise_multiplier=0.003, clip_norm=1.0), "mlp_spm", False),
        pytest.param(
            Ridge(rows=400), PMSFL(lr_scale=300.0), "lenet", True, marks=pytest.mark.slow
        ),
        pytest.param(
            Ridge(rows=400),
            DPCutMix(patches=16, group=2, clip=1.0, smashed_std=0.1, label_std=0.0),
            *("lenet", True), marks=pytest.mark.slow),
    ],
    ids=["gaussian", "spm", "pm_sfl", "analytic", "ridge-pm_sfl", "ridge-dp_cutmix"],
)  # fmt: skip
def test_more_rounds_are_never_worse_and_mostly_better(
    digits: Dataset, attack: Attack, defense: Defense, model: str, split: bool
) -> None:
    network = network_for(digits, model)
    scores = []
    for count in (1, 6):
        seen, truth = at_init(digits, network, defense, count, split=split)
        ctx = context(digits, network, defense, seen)
        scores.append(similarity(attack, seen, ctx, truth))
    assert scores[1] > scores[0] + 0.2 * (1 - scores[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "defense",
    [
        MSPAFL(epsilon=1e4, noise="analytic", clip_norm=10.0, check_in=1.0),
        SelectiveShield(tau=0.05, rho=0.5, noise_multiplier=0.02, clip_norm=1.0),
        GaussianUpdate(noise_multiplier=0.02, clip_norm=5.0),
        SPM(epsilon=3.9, variant="unbiased"),
    ],
    ids=["ms_pafl", "selective_shield", "gaussian", "spm"],
)
def test_more_rounds_of_a_trained_network_are_never_worse(
    digits: Dataset, defense: Defense
) -> None:
    """The first two train from values of their own, which rounds share: an error that many of them
    make certain."""
    network = network_for(digits)
    work = LocalWork(protocol="fedavg", batch=32, lr=0.5, local_steps=10)
    settings = ProtocolSettings(name="fedavg", clients=8, local_steps=1, lr=0.5)
    federation = federation_of(digits, network, defense, clients=8, each=80)
    for _ in range(12):
        federation.play(work, [c.id for c in federation.clients])
    seen, truth = released(federation, digits, settings, 8, training=work, labels=True)
    one = seen.releases[-1]
    alone = similarity(IDLG(), one, context(digits, network, defense, one), truth)
    together = similarity(IDLG(), seen, context(digits, network, defense, seen), truth)
    assert together > alone - 0.02


@pytest.mark.slow
def test_later_epochs_of_a_split_client_tell_of_the_same_samples(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sends other patches, in an order of its own, from stages that its steps have moved."""
    network = network_for(digits)
    defense = DPCutMix(patches=16, group=2, clip=10.0, low=-5.0, smashed_std=0.1, label_std=0.0)
    threat: dict[str, Any] = {"split": True, "batch": 2, "local_epochs": 4}
    seen, truth = at_init(digits, network, defense, 1, **threat)
    ctx = context(digits, network, defense, seen)
    found = link(parse_view(seen), ctx)
    assert len(found) == 4
    assert all(not one.uploads for one in found[:-1])
    moved = [one.mechanisms[-1].spread ** 0.5 for one in found[:-1]]
    assert moved[0] > 0  # clients' stages part from the mean ones, step by step
    assert moved == sorted(set(moved))
    all_epochs = similarity(IDLG(), seen, ctx, truth)
    monkeypatch.setattr(deep_leakage, "linked", line_up)
    first = similarity(IDLG(), seen, ctx, truth)
    assert all_epochs > first + 0.1


def test_what_the_server_returned_explains_all_steps_of_one_sample(digits: Dataset) -> None:
    """No label and no server stage is needed, whatever these did between the steps."""
    network = network_for(digits)
    defense = DPCutMix(patches=16, group=2, clip=10.0, low=-5.0, smashed_std=0.1, label_std=0.0)
    seen, truth = at_init(digits, network, defense, 1, split=True, local_epochs=3)
    ctx = context(digits, network, defense, seen)
    uploads = require(Evidence(parse_view(seen), ctx, dtype=torch.float64).uploads)
    y = torch.full((4, 1, 10), 0.1, dtype=torch.float64)
    missed = uploads.misfit(truth.x.double(), y, torch.arange(4))
    assert float(missed.sqrt().max()) < 1e-5 * float(uploads.values.square().mean().sqrt())
    assert similarity(IDLG(), seen, ctx, truth) > 0.99


def test_epochs_that_tell_nothing_more_are_left_alone(digits: Dataset) -> None:
    network = network_for(digits)
    for defense, split, threat in (
        (Defense(), True, {"local_epochs": 3}),  # exact at once
        (GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0), False, {"local_epochs": 3}),
    ):
        seen, _ = at_init(digits, network, defense, 1, split=split, **threat)
        each = parse_view(seen)
        assert link(each, context(digits, network, defense, seen)) == each


def test_samples_of_all_steps_and_epochs_are_put_in_one_order(digits: Dataset) -> None:
    """Each epoch has an order, and each client in each step patches, of its own."""
    network = network_for(digits)
    defense = DPCutMix(patches=16, group=2, clip=10.0, low=-5.0, smashed_std=0.1, label_std=0.0)
    work = {"batch": 4, "local_steps": 2, "local_epochs": 3}
    seen, truth = at_init(digits, network, defense, 1, split=True, **work)
    ctx = context(digits, network, defense, seen)
    found = link(parse_view(seen), ctx)
    assert len(found) == 3
    x = truth.x.double().flatten(0, 1)
    for one in found:
        view = require(split_view(one, ctx, dtype=torch.float64))
        assert not bool(view.present.all())
        params = {n: v.double() for n, v in one.before.items()}
        sent = view.activations_sent(network.run(params, x, last=view.cut)).unflatten(0, (4, 8))
        gap = torch.where(view.present, view.values - sent, 0.0).square().sum()
        assert float(gap / view.present.sum()) == pytest.approx(view.std**2, rel=0.05)


def test_what_the_server_returned_explains_all_steps_and_epochs_of_several_samples(
    digits: Dataset,
) -> None:
    network = network_for(digits)
    defense = DPCutMix(patches=16, group=2, clip=10.0, low=-5.0, smashed_std=0.1, label_std=0.0)
    work = {"batch": 2, "local_steps": 2, "local_epochs": 3}
    seen, truth = at_init(digits, network, defense, 1, split=True, **work)
    ctx = context(digits, network, defense, seen)
    uploads = require(Evidence(link(parse_view(seen), ctx), ctx, dtype=torch.float64).uploads)
    y = torch.full((4, 4, 10), 0.1, dtype=torch.float64)
    missed = uploads.misfit(truth.x.double(), y, torch.arange(4))
    assert float(missed.sqrt().max()) < 1e-5 * float(uploads.values.square().mean().sqrt())
    unanswered = replace(seen, messages=tuple(m for m in seen.messages if m.kind != SLOPES))
    without = Evidence(link(parse_view(unanswered), ctx), ctx, dtype=torch.float64)
    assert without.uploads is None  # which step used what is not told then


def test_labels_of_all_steps_are_read_off_the_features_gradient(digits: Dataset) -> None:
    network = network_for(digits)
    protocol = ProtocolSettings(
        name="splitfed", clients=4, local_steps=1, lr=0.1, cut="block1", labels="private"
    )
    federation = federation_of(
        digits, network, Defense(), protocol="splitfed", cuts=("block1",), labels="private"
    )
    seen, truth = released(federation, digits, protocol, 1, batch=2, local_steps=2)
    ctx = context(digits, network, Defense(), seen)
    labels, doubt = labels_by_slope(unite(parse_view(seen)[-1], ctx), ctx)
    assert torch.equal(labels.cpu(), truth.y)
    assert float(doubt[:, :2].max()) < 1e-6  # the second step's head has moved


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack", [pytest.param(IDLG(), marks=pytest.mark.slow), Ridge(rows=400)], ids=type
)
@pytest.mark.parametrize("labels", [pytest.param("private", marks=pytest.mark.slow), "shared"])
def test_several_steps_and_epochs_hide_nothing_of_an_undefended_split(
    digits: Dataset, attack: Attack, labels: str
) -> None:
    network = network_for(digits)
    protocol = ProtocolSettings(
        name="splitfed", clients=4, local_steps=1, lr=0.1, **{**SPLIT, "labels": labels}
    )
    federation = federation_of(
        digits, network, Defense(), protocol="splitfed", **{**CUTS, "labels": labels}
    )
    work = {"batch": 2, "local_steps": 2, "local_epochs": 3}
    seen, truth = released(federation, digits, protocol, 1, **work)
    assert similarity(attack, seen, context(digits, network, Defense(), seen), truth) > 0.98


@pytest.mark.slow
def test_patches_of_several_states_unite(digits: Dataset) -> None:
    """Half of the patches are sent in each round; after six rounds hardly any is missing."""
    network = network_for(digits)
    defense = DPCutMix(patches=16, group=2, clip=10.0, low=-5.0, smashed_std=0.0, label_std=0.0)
    settings = ProtocolSettings(name="splitfed", clients=4, local_steps=1, lr=0.1, **SPLIT)
    work = LocalWork(protocol="splitfed", batch=8, lr=0.1, local_steps=2)
    federation = federation_of(digits, network, defense, protocol="splitfed", **CUTS)
    seen, truth = released(federation, digits, settings, 6, training=work)
    for attack in (IDLG(), Ridge(rows=400)):
        one = seen.releases[-1]
        alone = similarity(attack, one, context(digits, network, defense, one), truth)
        together = similarity(attack, seen, context(digits, network, defense, seen), truth)
        assert together > 0.97
        assert together > alone


def test_label_counts_are_surer_over_rounds(digits: Dataset) -> None:
    network, defense = network_for(digits), GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0)
    scores = []
    for count in (1, 8):
        seen, truth = at_init(digits, network, defense, count, batch=8)
        counts = require(ILRG().run(seen, context(digits, network, defense, seen)).label_counts)
        true = torch.nn.functional.one_hot(truth.y, digits.classes).sum(dim=1)
        scores.append(float((counts == true).double().mean()))
    assert scores[1] > scores[0]


@pytest.mark.parametrize("std", [0.0, 0.05])
def test_samples_are_found_again_in_the_batches_of_other_rounds(
    digits: Dataset, std: float
) -> None:
    network = network_for(digits)
    defense = DPCutMix(patches=16, group=1, clip=10.0, low=-5.0, smashed_std=std, label_std=0.0)
    settings = ProtocolSettings(name="splitfed", clients=4, local_steps=1, lr=0.1, **SPLIT)
    work = LocalWork(protocol="splitfed", batch=8, lr=0.1, local_steps=2)
    federation = federation_of(digits, network, defense, protocol="splitfed", **CUTS)
    seen, truth = released(federation, digits, settings, 3, training=work, batch=4)
    found = line_up(parse_view(seen), context(digits, network, defense, seen))
    labels, shuffled = ([one.granted for one in some] for some in (found, parse_view(seen)[:-1]))
    assert all(one is not None and torch.equal(one, truth.y) for one in labels)
    assert not all(one is not None and torch.equal(one, truth.y) for one in shuffled)


def test_rounds_that_do_not_fit_the_memory_are_read_in_part_and_a_note_says_so(
    run: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.harness.attack.RELEASES_BYTES", 1)
    suite = tiny(**{"victims = 2": "victims = 2\nrounds = 2"})
    store, _ = run(suite, only={"defense": "none", "checkpoint": "init"})
    notes = [
        json.loads(p.read_text())["notes"] for p in (store.folder / "records/attack").glob("*.json")
    ]
    assert ["read 1, which fit the memory, of 2 observed rounds"] in [n[-1:] for n in notes]
    assert [] in notes  # what looks at nothing


def test_a_descent_over_many_states_begins_with_some_and_ends_with_all(digits: Dataset) -> None:
    network = network_for(digits)
    federation = federation_of(digits, network, Defense(), clients=4)
    protocol = ProtocolSettings(name="fedavg", clients=4, local_steps=1, lr=0.1)
    work = LocalWork(protocol="fedavg", batch=8, lr=0.1)
    seen, _ = released(federation, digits, protocol, 6, training=work)
    evidence = Evidence(
        parse_view(seen), context_for(digits, network, Defense()), dtype=torch.float32
    )
    assert evidence.costly
    assert some_terms(evidence, 1.0) == evidence.terms
    for share, places in ((1 / 3, (0, 3)), (1 / 8, (0,))):
        own = [releases_of(evidence)[place].own for place in places]
        assert some_terms(evidence, share) == [term for terms in own for term in terms]
    same, _ = at_init(digits, network, Defense(), 6)  # which share their evaluations
    assert not Evidence(
        parse_view(same), context_for(digits, network, Defense()), dtype=torch.float32
    ).costly


@pytest.mark.slow
@pytest.mark.parametrize("defense", [LGFedAvg(keep=0.5), DepthFL()])
def test_what_one_round_tells_is_told_beside_others_that_mislead(
    digits: Dataset, defense: Defense
) -> None:
    """Under LG-FedAvg nothing was kept in the first round, but later clients trained layers that
    never leave them, of which there is but an estimate: all rounds together bend the images to .36.
    Under DepthFL they find one victim of two, an SSIM of .53."""
    network = network_for(digits)
    work = LocalWork(protocol="fedavg", batch=32, lr=0.5, local_steps=30)
    settings = ProtocolSettings(name="fedavg", clients=4, local_steps=1, lr=0.5)
    federation = federation_of(digits, network, defense, clients=4, each=80)
    seen, truth = released(federation, digits, settings, 3, training=work, victims=2)
    assert similarity(IDLG(), seen, context(digits, network, defense, seen), truth) > 0.95
