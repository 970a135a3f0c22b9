"""DP-CutMixSL: reference values, masks and boxes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attacks.engine.observation import parse_view
from bench.contract.defense import Client
from bench.contract.events import Facts
from bench.contract.messages import SERVER, Message, Part
from bench.data.dataset import Dataset
from bench.privacy.gaussian import gaussian_std
from bench.seeding import generator
from bench.toolkit.patches import patch_map
from defenses import noised_smashed
from defenses.cutmix import VanillaCutMix
from defenses.mixer import Mixing, deal_boxes, deal_patches, dirichlet
from tests.conftest import network_for, seen_under
from tests.dp_cutmix_steps import CLASSES, ROSTER, Step, plain, tokens
from tests.oracle import assert_reference, reference_cases
from tests.oracle import dp_cutmix as oracle

ORACLE = reference_cases("dp_cutmix")


# --- reference values -------------------------------------------------------------------------


def _views(inputs: dict[str, Any]) -> dict[str, float]:
    return oracle.rdp_views(
        clients=inputs["n"], alpha=inputs["alpha"], variance=inputs["v"], clip=inputs["Delta"],
        smashed_size=inputs["D_s"], label_size=inputs["D_y"],
    )  # fmt: skip


def _converted(inputs: dict[str, Any]) -> dict[str, float]:
    """The paper's numbers (D_s = 20, D_y = 10, Delta = 0.2) at alpha = 1, which is the slope."""
    paper = {"alpha": 1.0, "D_s": 20, "D_y": 10, "Delta": 0.2}
    view = inputs["name"].removeprefix("cutmix_dp_").rsplit("_n", 1)[0]
    return oracle.conversions(
        _views(inputs | paper)[view], releases=inputs["T"], delta=inputs["delta"]
    )


def _sigma(inputs: dict[str, Any]) -> dict[str, float]:
    share = oracle.partition_constants(64, inputs["n"])["lambda_eff_max"]
    assert isinstance(share, float)
    budget = (inputs["eps"], inputs["delta"])
    sizes = {
        f"sigma_Ds{size}": oracle.sigma_for(
            *budget, share=share, clip=inputs["Delta"], smashed_size=size
        )
        for size in (20, 12288)
    }
    epsilon, delta = budget
    mu = 1 / gaussian_std(sensitivity=1.0, epsilon=epsilon, delta=delta)
    return {"mu": mu, **sizes}


def _mix_example(inputs: dict[str, Any]) -> dict[str, Any]:
    """The example through smashed() and mix(), with the masks and the noise that it gives."""
    out: dict[str, Any] = {}
    for noise in ("eq1", "b3"):
        defense = plain(noise=noise, clip=1000.0, smashed_std=1.0)
        uploads, messages = {}, []
        shown = {
            i: Part(values=torch.tensor(mask).bool(), bits=1)
            for i, mask in zip(ROSTER, inputs["M"], strict=False)
        }
        for place, (i, part) in enumerate(shown.items()):
            client = Client(id=i, x=torch.zeros(1), y=torch.zeros(1), rng={"defense": generator(0)})
            client.plan["patches"] = part.values
            drawn = torch.tensor(inputs["noise"][place], dtype=torch.float64).view(1, 6, 1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    noised_smashed, "gaussian_like", lambda v, std, rng, drawn=drawn: drawn
                )
                q = torch.tensor(inputs["s"][place], dtype=torch.float64).view(1, 6, 1)
                uploads[i] = defense.smashed(q, client)
            y = torch.eye(3, dtype=torch.float64)[place : place + 1]
            messages.append(Step._message("labels", i, Part(values=y)))
        messages.append(
            Message(kind="patches", sender="mixer", receiver=SERVER, round=0, parts=shown)
        )
        (mixture,) = defense.mix(uploads, messages) or []
        out["mixed_B3" if noise == "b3" else "mixed_eq1"] = mixture.smashed.flatten().tolist()
        if noise == "eq1":
            out["uploads_eq1"] = [u.values.flatten().tolist() for u in uploads.values()]
        assert mixture.targets is not None
        out["label_mix_thirds_of_onehots"] = mixture.targets.flatten().tolist()
    return out


COMPUTE: dict[str, Any] = {
    "cutmix_partition": lambda i: oracle.partition_constants(i["N"], i["n"]),
    "cutmix_mix": _mix_example,
    "cutmix_rdp": _views,
    "cutmix_dp": _converted,
    "cutmix_sigma": _sigma,
}


@pytest.mark.parametrize("case", ORACLE, ids=lambda c: c["name"])
def test_reference_values(case: dict[str, Any]) -> None:
    assert_reference(case, COMPUTE)


@pytest.mark.parametrize(
    "case", [c for c in ORACLE if "partition" in c["name"]], ids=lambda c: c["name"]
)
def test_masks_have_the_reference_sizes(case: dict[str, Any]) -> None:
    n, patches = case["inputs"]["n"], case["inputs"]["N"]
    masks = deal_patches(patches, n, mixing="uniform", alpha=1.0, rng=generator(0))
    assert masks.sum(dim=1).tolist() == case["expected"]["sizes"]
    assert bool((masks.sum(dim=0) == 1).all())
    q = torch.ones(2, 3, 16, 16)
    assert all(
        patch_map(m, q).view(2, 3, 8, 2, 8, 2).float().var(dim=(3, 5)).max() == 0 for m in masks
    )


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
    """Uniform dealing: within 5 standard errors of 1/3 for all 18 pairs of client and patch."""
    draws, rng = 6000, generator(0)
    dealt = [deal_patches(6, 3, mixing="uniform", alpha=1.0, rng=rng) for _ in range(draws)]
    share = torch.stack(dealt).double().mean(dim=0)
    assert float((share - 1 / 3).abs().max()) < 5 * math.sqrt(2 / 9 / draws)


def test_dirichlet_ratios_and_sizes_have_their_moments() -> None:
    """Within 5 standard errors: ratio variance (n-1)/(n^2 (n a+1)), and that of the sizes."""
    n, alpha, patches, draws, rng = 4, 0.7, 30, 6000, generator(1)
    ratios = torch.stack([dirichlet(alpha, n, rng=rng) for _ in range(draws)])
    assert torch.allclose(ratios.sum(dim=1), torch.ones(draws, dtype=torch.float64))
    variance = (n - 1) / (n * n * (n * alpha + 1))
    spread = (ratios - 1 / n).square()
    error = float(spread[:, 0].std()) / math.sqrt(draws)
    assert float((spread[:, 0].mean() - variance).abs()) < 5 * error
    dealt = [
        deal_patches(patches, n, mixing="dirichlet", alpha=alpha, rng=rng).sum(dim=1)
        for _ in range(draws)
    ]
    sizes = torch.stack(dealt).double()
    p, total = 1 / n, n * alpha
    variance = patches * p * (1 - p) * (patches + total) / (1 + total)
    spread = (sizes - patches / n).square()
    error = float(spread[:, 0].std()) / math.sqrt(draws)
    assert float((spread[:, 0].mean() - variance).abs()) < 5 * error + 0.02 * variance


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


def is_rectangle(mask: Tensor) -> bool:
    """Whether the true positions [H, W] are all those between their first and last row, column."""
    rows, columns = (mask.any(dim=d).nonzero().flatten().tolist() for d in (1, 0))
    inside = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return bool(inside.all()) and int(inside.sum()) == int(mask.sum())


@given(
    side=st.integers(2, 20),
    mixing=st.sampled_from(["uniform", "dirichlet"]),
    alpha=st.floats(0.01, 100),
    seed=st.integers(0, 2**62),
)
@settings(deadline=None, max_examples=150)
def test_of_a_pair_one_client_gets_a_rectangle_and_the_other_the_rest(
    side: int, mixing: Mixing, alpha: float, seed: int
) -> None:
    masks = deal_boxes(side * side, 2, mixing=mixing, alpha=alpha, rng=generator(seed))
    one, other = masks.view(2, side, side)
    assert torch.equal(one, ~other)
    assert is_rectangle(one) or is_rectangle(other)


def test_boxes_of_a_pair_are_those_of_the_definition_clipped_at_the_borders() -> None:
    """Every centre of a 6 x 6 grid by a loop: half the grid is a box of side round(6 / sqrt 2) =
    4, from two before its centre to one after. All 36 occur, and no other; either client's."""
    expected = set()
    for row in range(6):
        for column in range(6):
            box = [
                6 * y + x
                for y in range(6)
                for x in range(6)
                if row - 2 <= y <= row + 1 and column - 2 <= x <= column + 1
            ]
            expected |= {(owner, frozenset(box)) for owner in (0, 1)}
    rng = generator(0)
    found = []
    for _ in range(2000):
        masks = deal_boxes(36, 2, mixing="uniform", alpha=1.0, rng=rng)
        dealt = [(i, frozenset(m.nonzero().flatten().tolist())) for i, m in enumerate(masks)]
        found += [d for d in dealt if d in expected]
        assert any(d in expected for d in dealt)
    assert set(found) == expected


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


@pytest.mark.parametrize("mixing", ["uniform", "dirichlet"])
@pytest.mark.parametrize("clients", [2, 3, 5])
def test_boxes_agree_with_a_slow_loop_by_yun_et_als_lambda(clients: int, mixing: Mixing) -> None:
    for side in (4, 7, 8, 16):
        for seed in range(10):
            given: dict[str, Any] = {"mixing": mixing, "alpha": 1.5}
            masks = deal_boxes(side**2, clients, rng=generator(seed), **given)
            owner = pasted_slowly(side, clients, rng=generator(seed), **given)
            assert masks.long().argmax(dim=0).view(side, side).tolist() == owner


@pytest.mark.parametrize("map_shaped", [False, True])
def test_the_server_runs_boxes_and_weighs_labels_by_the_share_kept(map_shaped: bool) -> None:
    rng = generator(1, "boxes")
    shape = (2, 3, 5, 5) if map_shaped else (2, 25, 4)
    q = {i: torch.rand(shape, generator=rng) for i in ROSTER}
    step = Step(VanillaCutMix(positions=25, group=2), q)
    assert [len(m.members) for m in step.mixed] == [2, 2, 1]
    for mixture in step.mixed:
        assert any(is_rectangle(step.mask(i).view(5, 5)) for i, _ in mixture.members)
        expected, labels = torch.zeros(shape), torch.zeros(2, CLASSES)
        for i, weight in mixture.members:
            mask = step.mask(i)
            for position in mask.nonzero().flatten().tolist():
                at = (..., position // 5, position % 5) if map_shaped else (slice(None), position)
                expected[at] = q[i][at]
            assert weight == pytest.approx(int(mask.sum()) / 25)
            labels = labels + weight * step.labels[i]
        assert torch.equal(mixture.smashed, expected)
        assert mixture.targets is not None
        assert torch.allclose(mixture.targets, labels)
        assert sum(w for _, w in mixture.members) == pytest.approx(1.0)


def test_boxes_cost_a_bit_per_position_and_the_values_kept() -> None:
    step = Step(VanillaCutMix(positions=9, group=2), tokens(4, patches=9))
    told = [m for m in step.wire.log if m.kind == "patches"]
    assert [m.n_bytes for m in told if m.receiver == SERVER] == [2 * 2, 2 * 2]  # 9 bits each
    assert [m.receiver for m in told if m.receiver != SERVER] == list(ROSTER[:4])
    assert step.wire.bytes_down == 4 * 2
    for i, part in step.parts.items():
        assert part.n_bytes == 4 * 2 * 4 * int(step.mask(i).sum())
        assert torch.equal(part.presence()[0, :, 0], step.mask(i))
    assert sum(p.n_bytes for p in step.parts.values()) == 2 * (4 * 2 * 9 * 4)


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


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 9, 4), r"positions must be 9, those of the smashed data \[2, 9, 4\], got 16\."),
        ((2, 3, 8, 8), r"positions must be 64, .*\[2, 3, 8, 8\], got 16\."),
        ((2, 3, 2, 8), r"positions need .* or a square map .*, got the shape \[2, 3, 2, 8\] at"),
        ((2, 16), r"positions need smashed data of tokens .*, got the shape \[2, 16\] at"),
    ],
)
def test_boxes_on_other_positions_than_the_smashed_datas_are_refused(
    shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Step(VanillaCutMix(positions=16, group=2), {i: torch.zeros(shape) for i in ROSTER[:2]})
