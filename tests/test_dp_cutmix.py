"""DP-CutMixSL and its rivals: reference values, masks, boxes, and a step as it is played."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attacks.engine.observation import parse_view
from bench.contract.defense import Defense
from bench.contract.events import Facts
from bench.contract.messages import SERVER
from bench.data.dataset import Dataset
from bench.seeding import generator
from bench.toolkit.patches import patch_map
from defenses.cutmix import DPSL, CutMix, Cutout, DPMixSL, Mixup, VanillaCutMix
from defenses.mixer import Mixing, deal_boxes, deal_patches, dirichlet
from tests.conftest import network_for, seen_under
from tests.dp_cutmix_steps import CLASSES, ROSTER, Step, plain, tokens
from tests.oracle import assert_reference, reference_cases
from tests.oracle import dp_cutmix as oracle
from tests.uploads import assert_moments, assert_share

ORACLE = reference_cases("dp_cutmix")


# --- reference values -------------------------------------------------------------------------


def _views(inputs: dict[str, Any]) -> dict[str, float]:
    return oracle.rdp_views(
        clients=inputs["n"], alpha=inputs["alpha"], variance=inputs["v"], clip=inputs["Delta"],
        smashed_size=inputs["D_s"], label_size=inputs["D_y"],
    )  # fmt: skip


def _partition(inputs: dict[str, Any]) -> dict[str, Any]:
    patches, clients = inputs["N"], inputs["n"]
    masks = deal_patches(patches, clients, mixing="uniform", alpha=1.0, rng=generator(0))
    sizes = masks.sum(dim=1).tolist()
    return {"sizes": sizes, "total": sum(sizes), "lambda_eff_max": max(sizes) / patches}


def _converted(inputs: dict[str, Any]) -> dict[str, float]:
    """The paper's numbers (D_s = 20, D_y = 10, Delta = 0.2) at alpha = 1, which is the slope."""
    paper = {"alpha": 1.0, "D_s": 20, "D_y": 10, "Delta": 0.2}
    view = inputs["name"].removeprefix("cutmix_dp_").rsplit("_n", 1)[0]
    return oracle.conversions(
        _views(inputs | paper)[view], releases=inputs["T"], delta=inputs["delta"]
    )


COMPUTE: dict[str, Any] = {
    "cutmix_partition": _partition,
    "cutmix_rdp": _views,
    "cutmix_dp": _converted,
}


@pytest.mark.parametrize("case", ORACLE, ids=lambda c: c["name"])
def test_reference_values(case: dict[str, Any]) -> None:
    assert_reference(case, COMPUTE, whole=True)


# --- masks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("boxes", [False, True])
@given(
    side=st.integers(1, 9),
    group=st.integers(1, 12),
    extra=st.integers(0, 9),
    mixing=st.sampled_from(["uniform", "dirichlet"]),
    alpha=st.one_of(st.just(0.01), st.floats(0.01, 100)),
    seed=st.integers(0, 2**62),
)
@settings(deadline=None, max_examples=150)
def test_each_group_of_any_roster_partitions_the_patches_or_positions(
    boxes: bool, side: int, group: int, extra: int, mixing: Mixing, alpha: float, seed: int
) -> None:
    """Nobody in company gets everything, even at tiny concentrations."""
    patches = side * side if boxes else 10 * side
    group = min(group, patches)
    roster = [f"client-{i}" for i in range(group + extra)]
    given_: dict[str, Any] = {"group": group, "mixing": mixing, "alpha": alpha}
    defense = (
        VanillaCutMix(positions=patches, **given_) if boxes else plain(patches=patches, **given_)
    )
    messages = defense.third_parties(seed)["mixer"].begin("step", roster, 2, 5)
    assert all((m.round, m.step, m.kind, m.sender) == (2, 5, "patches", "mixer") for m in messages)
    shown = [m for m in messages if m.receiver == SERVER]
    assert [i for m in shown for i in m.parts] == roster
    assert len(shown) == -(-len(roster) // group)
    told = {m.receiver: m.parts["patches"].values for m in messages if m.receiver != SERVER}
    worst = defense.worst_share(Facts(parameters=1, clients=len(roster)))
    for message in shown:
        masks = torch.stack([p.values for p in message.parts.values()])
        assert masks.dtype == torch.bool
        assert masks.shape == (len(message.parts), patches)
        assert bool((masks.sum(dim=0) == 1).all())
        sizes = masks.sum(dim=1)
        if mixing == "uniform" and not boxes:
            assert int(sizes.max() - sizes.min()) <= 1
        assert (int(sizes.max()) == patches) == (len(masks) == 1)
        for i, part in message.parts.items():
            assert torch.equal(told[i], part.values)
            assert part.n_bytes == -(-patches // 8)
        assert float(sizes.max()) / patches <= worst + 1e-12


@given(height=st.integers(1, 4), width=st.integers(1, 4), side=st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_a_mask_is_constant_within_each_patch_of_a_map(height: int, width: int, side: int) -> None:
    mask = torch.rand(side * side, generator=generator(0)) < 0.5
    own = patch_map(mask, torch.zeros(2, 3, side * height, side * width))
    for row in range(side * height):
        for column in range(side * width):
            expected = bool(mask[row // height * side + column // width])
            assert bool((own[:, :, row, column] == expected).all())


def test_every_patch_is_dealt_to_every_client_equally_often() -> None:
    rng = generator(0)
    dealt = [deal_patches(6, 3, mixing="uniform", alpha=1.0, rng=rng) for _ in range(6000)]
    for pair in torch.stack(dealt).flatten(1).T:
        assert_share(pair, 1 / 3)


def test_dirichlet_ratios_and_sizes_have_their_moments() -> None:
    """Ratio variance (n-1)/(n^2 (n a+1)), and that of the sizes."""
    n, alpha, patches, rng = 4, 0.7, 30, generator(1)
    ratios = torch.stack([dirichlet(alpha, n, rng=rng) for _ in range(6000)])
    assert torch.allclose(ratios.sum(dim=1), torch.ones(6000, dtype=torch.float64))
    total = n * alpha
    assert_moments(ratios[:, 0], mean=1 / n, variance=(n - 1) / (n * n * (total + 1)))
    how: dict[str, Any] = {"mixing": "dirichlet", "alpha": alpha, "rng": rng}
    sizes = torch.stack([deal_patches(patches, n, **how).sum(dim=1) for _ in range(6000)])
    variance = patches * (n - 1) / n**2 * (patches + total) / (1 + total)
    assert_moments(sizes[:, 0], mean=patches / n, variance=variance)


def test_masks_change_from_step_to_step_and_follow_the_seed() -> None:
    defense = plain()
    first, again = defense.third_parties(4)["mixer"], defense.third_parties(4)["mixer"]

    def masks(mixer: Any) -> Tensor:
        return torch.stack([m.parts["patches"].values for m in mixer.begin("step", ROSTER, 0, 0)
                            if m.receiver != SERVER])  # fmt: skip

    one, two = masks(first), masks(first)
    assert not torch.equal(one, two)
    assert torch.equal(one, masks(again))
    assert torch.equal(two, masks(again))
    assert first.begin("round", ROSTER, 0, 0) == []


# --- boxes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "mixing"), [(2, "uniform"), (4, "uniform"), (3, "dirichlet")])
def test_boxes_give_every_client_the_same_share_on_average(clients: int, mixing: Mixing) -> None:
    draws, rng = 4000, generator(3)
    dealt = [deal_boxes(64, clients, mixing=mixing, alpha=1.0, rng=rng) for _ in range(draws)]
    shares = torch.stack(dealt).double().mean(dim=2)
    error = shares.std(dim=0) / math.sqrt(draws)
    assert bool(((shares.mean(dim=0) - 1 / clients).abs() < 5 * error).all())


def pasted_slowly(
    side: int, clients: int, *, mixing: Mixing, alpha: float, rng: torch.Generator
) -> list[list[int]]:
    """Owner of every row and column: boxes in the order dealt, position by position."""
    order = torch.randperm(clients, generator=rng).tolist()
    ratios = [1 / clients] * clients
    if mixing == "dirichlet":
        ratios = dirichlet(alpha, clients, rng=rng).tolist()
    owner = [[order[0]] * side for _ in range(side)]
    for k in range(1, clients):
        kept = sum(ratios[:k]) / sum(ratios[: k + 1])  # Yun et al.'s lambda for a pair
        nearest = math.floor(side * math.sqrt(1 - kept) + 0.5 + 1e-9)
        width = min(max(nearest, 1), side - 1)
        centre = torch.randint(side, (2,), generator=rng).tolist()
        first = [c - width // 2 for c in centre]
        for y in range(side):
            for x in range(side):
                if all(f <= at < f + width for f, at in zip(first, (y, x), strict=True)):
                    owner[y][x] = order[k]
    return owner


@given(
    side=st.integers(2, 16),
    clients=st.integers(2, 5),
    mixing=st.sampled_from(["uniform", "dirichlet"]),
    alpha=st.one_of(st.just(1.5), st.floats(0.01, 100)),
    seed=st.integers(0, 2**62),
)
@settings(deadline=None, max_examples=200)
def test_boxes_agree_with_a_slow_loop_by_yun_et_als_lambda(
    side: int, clients: int, mixing: Mixing, alpha: float, seed: int
) -> None:
    """Of a pair one gets a rectangle, clipped at the borders, and the other the rest."""
    clients = min(clients, side * side)
    given_: dict[str, Any] = {"mixing": mixing, "alpha": alpha}
    masks = deal_boxes(side**2, clients, rng=generator(seed), **given_)
    owner = pasted_slowly(side, clients, rng=generator(seed), **given_)
    assert masks.long().argmax(dim=0).view(side, side).tolist() == owner


def test_an_attack_sees_which_positions_of_a_box_are_whose(digits: Dataset) -> None:
    """The round through splitfed: smashed data is present exactly where the masks say."""
    defense = VanillaCutMix(positions=64, group=2)
    seen, _ = seen_under(
        digits, network_for(digits), defense, protocol="splitfed", clients=4,
        split={"cut": "block1", "labels": "shared"}, batch=2,
    )  # fmt: skip
    ((values, present),) = parse_view(seen)[-1].by_sample["smashed"]
    told = {i: p.values for m in seen.messages if m.kind == "patches" for i, p in m.parts.items()}
    assert sorted(told) == sorted(seen.clients)
    for client, value, there in zip(seen.clients, values, present, strict=True):
        assert torch.equal(there, told[client].view(8, 8).expand(value.shape))
        assert bool((value[~there] == 0).all())
        assert float(value.abs().sum()) > 0


# --- the step ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defense", "shape"),
    [
        (plain(group=2), (2, 6, 4)),
        (VanillaCutMix(positions=25, group=2), (2, 25, 4)),
        (VanillaCutMix(positions=25, group=2), (2, 3, 5, 5)),
    ],
)
def test_without_noise_the_server_runs_cutmix_and_weighs_labels_by_the_share_kept(
    defense: Defense, shape: tuple[int, ...]
) -> None:
    rng = generator(1, "mixtures")
    q = {i: torch.rand(shape, generator=rng) for i in ROSTER}
    step = Step(defense, q)
    assert [[i for i, _ in m.members] for m in step.mixed] == [
        ["client-0", "client-1"], ["client-2", "client-3"], ["client-4"],
    ]  # fmt: skip
    for mixture in step.mixed:
        expected, labels = torch.zeros(shape), torch.zeros(2, CLASSES)
        for i, weight in mixture.members:
            mask = step.mask(i)
            at = (..., mask.view(5, 5)) if len(shape) == 4 else (slice(None), mask)
            expected[at] = q[i][at]
            assert weight == pytest.approx(float(mask.double().mean()))
            labels = labels + weight * step.labels[i]
        assert torch.equal(mixture.smashed, expected)
        assert mixture.targets is not None
        assert torch.allclose(mixture.targets, labels)
        assert sum(w for _, w in mixture.members) == pytest.approx(1.0)


def test_private_labels_leave_targets_to_the_clients() -> None:
    step = Step(plain(label_std=1.0), tokens(3), share_labels=False)
    (mixture,) = step.mixed
    assert mixture.targets is None
    assert [w for _, w in mixture.members] == pytest.approx([1 / 3] * 3)


def test_mixup_weighs_smashed_data_and_labels_alike() -> None:
    q = tokens(3)
    for mixing in ("uniform", "dirichlet"):
        step = Step(Mixup(group=3, mixing=mixing), q)
        (mixture,) = step.mixed
        weights = dict(mixture.members)
        assert sum(weights.values()) == pytest.approx(1.0)
        expected = torch.stack([w * q[i] for i, w in weights.items()]).sum(dim=0)
        assert torch.allclose(mixture.smashed, expected)
        assert mixture.targets is not None
        assert mixture.targets[0].tolist() == pytest.approx(list(weights.values()))
        if mixing == "uniform":
            assert list(weights.values()) == pytest.approx([1 / 3] * 3)


def test_cutout_sends_what_cutmix_sends_but_nobody_fills_the_gaps() -> None:
    q = tokens(3)
    cutout, cutmix = Step(Cutout(patches=6, group=3), q), Step(CutMix(patches=6, group=3), q)
    assert cutout.mixtures is None
    for i in q:
        assert torch.equal(cutout.parts[i].values, cutmix.parts[i].values)
        assert bool((cutout.parts[i].values[:, ~cutout.mask(i)] == 0).all())


@pytest.mark.parametrize(
    ("changes", "whole"),
    [({}, False), ({"smashed_std": 0.1}, True), ({"smashed_std": 0.1, "noise": "b3"}, False)],
)
def test_only_what_is_not_known_to_be_zero_costs_bytes(changes: Any, whole: bool) -> None:
    step = Step(plain(**changes), tokens(3))
    for i, part in step.parts.items():
        assert part.n_bytes == 4 * 2 * 6 * 4 // (1 if whole else 3)
        if not whole:
            assert torch.equal(part.presence()[0, :, 0], step.mask(i))
            assert bool((part.values[~part.presence()] == 0).all())


def test_the_server_never_reads_a_value_that_was_not_sent() -> None:
    step = Step(plain(), tokens(3))
    spoilt = {
        i: replace(p, values=torch.where(p.presence(), p.values, torch.nan))
        for i, p in step.leaves.items()
    }
    (mixture,) = plain().mix(spoilt, step.to_server) or []
    assert torch.equal(mixture.smashed, step.mixed[0].smashed)


def test_the_wire_carries_masks_to_each_client_and_each_groups_masks_to_the_server() -> None:
    step = Step(plain(group=2, patches=6), tokens(5))
    sent = [m for m in step.wire.log if m.kind == "patches"]
    assert [m.receiver for m in sent if m.receiver != SERVER] == list(ROSTER)
    groups = [list(m.parts) for m in sent if m.receiver == SERVER]
    assert groups == [list(ROSTER[:2]), list(ROSTER[2:4]), list(ROSTER[4:])]
    assert all(m.n_bytes == len(m.parts) for m in sent)
    assert step.wire.bytes_down == len(ROSTER)
    assert all([m.receiver for m in heard] == [i] for i, heard in step.heard.items())


def test_smashed_data_is_clipped_to_the_interval_before_the_mask() -> None:
    q = {i: v * 10 - 5 for i, v in tokens(3).items()}
    for low in (0.0, -0.1):
        (mixture,) = Step(plain(clip=0.2, low=low), q).mixed
        smashed = mixture.smashed.detach()
        assert float(smashed.min()) == pytest.approx(low)
        assert float(smashed.max()) == pytest.approx(low + 0.2)


def test_blank_patches_are_zero_before_the_noise_even_outside_the_interval() -> None:
    step = Step(plain(clip=0.2, low=0.3, smashed_std=1e-6), tokens(3))
    for i, part in step.parts.items():
        assert float(part.values[:, ~step.mask(i)].abs().max()) < 1e-4
        assert float(part.values[:, step.mask(i)].min()) > 0.299


# --- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["eq1", "b3"])
@pytest.mark.parametrize("map_shaped", [False, True])
def test_each_client_gets_its_own_gradient_only_at_its_patches(
    noise: str, map_shaped: bool
) -> None:
    rng = generator(0, "gradients")
    shape = (2, 3, 6, 6) if map_shaped else (2, 9, 4)
    q = {i: (torch.rand(shape, generator=rng) * 0.9 + 0.05).requires_grad_() for i in ROSTER[:3]}
    step = Step(plain(patches=9, noise=noise, smashed_std=0.1), q)
    slope = torch.randn(shape, generator=rng)
    (mixture,) = step.mixed
    loss = (mixture.smashed * slope).sum()
    returned = dict(
        zip(q, torch.autograd.grad(loss, [p.values for p in step.leaves.values()]), strict=True)
    )
    for i, value in q.items():
        (own,) = torch.autograd.grad(step.parts[i].values, value, returned[i])
        mask = patch_map(step.mask(i), value)
        assert torch.equal(own, torch.where(mask, slope, 0.0))


def test_clipped_values_get_no_gradient() -> None:
    q = {i: v.requires_grad_() for i, v in tokens(3).items()}
    step = Step(plain(clip=0.5), q)
    for i, value in q.items():
        (own,) = torch.autograd.grad(step.parts[i].values.sum(), value)
        assert torch.equal(own, ((value < 0.5) & step.mask(i)[None, :, None]).float())


def test_mixup_returns_each_client_its_weighted_gradient() -> None:
    step = Step(Mixup(group=3, mixing="dirichlet", alpha=2.0), tokens(3))
    (mixture,) = step.mixed
    leaves = [step.leaves[i].values for i, _ in mixture.members]
    grads = torch.autograd.grad(mixture.smashed.sum(), leaves)
    for (_, weight), grad in zip(mixture.members, grads, strict=True):
        assert torch.allclose(grad, torch.full_like(grad, weight))


# --- noise by Monte Carlo ---------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["eq1", "b3"])
def test_noise_of_uploads_and_of_the_mixture_has_its_variance(noise: str) -> None:
    """Eq. 1: every upload value carries sigma^2, the mixture of n carries n sigma^2. B.3: own
    patches carry sigma^2 and so does the mixture."""
    std, group = 0.3, 4
    q = tokens(group, batch=500, patches=8, width=16)
    noised = Step(plain(patches=8, group=group, noise=noise, smashed_std=std), q)
    clean = Step(plain(patches=8, group=group), q)
    for i in q:
        difference = noised.parts[i].values - clean.parts[i].values
        mask = noised.mask(i)
        assert torch.equal(mask, clean.mask(i))
        assert_moments(difference[:, mask], mean=0, variance=std**2)
        if noise == "eq1":
            assert_moments(difference[:, ~mask], mean=0, variance=std**2)
        else:
            assert bool((difference[:, ~mask] == 0).all())
    mixed = noised.mixed[0].smashed - clean.mixed[0].smashed
    assert_moments(mixed, mean=0, variance=std**2 * (group if noise == "eq1" else 1))
    facts = Facts(parameters=1, clients=group)
    told = plain(patches=8, group=group, noise=noise, smashed_std=std).constants(facts)
    assert float(told["mixed_noise_std"]) ** 2 == pytest.approx(
        std**2 * (group if noise == "eq1" else 1)
    )


def test_mixup_scales_the_noise_with_the_ratios() -> None:
    """Variance sigma^2 / n at uniform ratios, which undoes Eq. 5's amplification."""
    q = tokens(4, batch=500, patches=8, width=16)
    defense = DPMixSL(group=4, clip=1.0, smashed_std=0.3, label_std=0.0)
    mixed = Step(defense, q).mixed[0].smashed - Step(Mixup(group=4), q).mixed[0].smashed
    assert_moments(mixed, mean=0, variance=0.09 / 4)
    told = defense.constants(Facts(parameters=1, clients=4))
    assert float(told["mixed_noise_std"]) ** 2 == pytest.approx(0.09 / 4)


@pytest.mark.parametrize(
    "defense",
    [
        plain(label_std=0.5),
        DPSL(clip=1.0, smashed_std=0.0, label_std=0.5),
        DPMixSL(group=3, clip=1.0, smashed_std=0.0, label_std=0.5),
    ],
)
def test_label_noise_has_its_variance(defense: Defense) -> None:
    step = Step(defense, tokens(3, batch=20_000, width=1))
    for place, i in enumerate(step.labels):
        hot = torch.nn.functional.one_hot(torch.tensor(place), CLASSES).float()
        assert_moments(step.labels[i] - hot, mean=0, variance=0.25)
