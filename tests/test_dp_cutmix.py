"""DP-CutMixSL and its rivals against reference values, closed forms and by Monte Carlo."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attacks.engine.observation import smashed_of
from bench.contract.defense import Client, Defense, Mixture
from bench.contract.events import Event, Facts, Gaussian, Unprotected
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import SERVER, Message, Part, State
from bench.data.dataset import Dataset
from bench.privacy.gaussian import best_renyi_epsilon, gaussian_std
from bench.privacy.ledger import account, gaussian_epsilon
from bench.protocols.local_training import LocalWork
from bench.protocols.wire import Wire
from bench.registry import Registry
from bench.seeding import generator
from bench.toolkit.patches import patch_map
from defenses import noised_smashed
from defenses.cutmix import CutMix, Cutout, Mixup, VanillaCutMix
from defenses.dp_cutmix import DPCutMix
from defenses.dp_cutmix_rivals import DPSL, DPMixSL
from defenses.mixer import Mixing, deal_boxes, deal_patches, dirichlet
from tests.conftest import federation_of, network_for, seen_under
from tests.oracle import dp_cutmix as oracle

ORACLE = json.loads((Path(__file__).parent / "oracle" / "dp_cutmix.json").read_text())["cases"]
ROSTER = ("client-0", "client-1", "client-2", "client-3", "client-4")
CLASSES = 3


# --- one step as the protocol plays it --------------------------------------------------------


class Step:
    """Mixer, clients and server of one step, over a real wire.

    q: client id -> smashed data. What the server runs is in `mixtures` (None: each its own),
    `leaves` are the uploads as the server's leaf tensors, `parts` as the clients made them.
    """

    def __init__(
        self, defense: Defense, q: dict[str, Tensor], *, share_labels: bool = True, seed: int = 0
    ) -> None:
        roster = list(q)
        batch = len(q[roster[0]])
        self.clients = {
            i: Client(id=i, x=torch.zeros(1), y=torch.zeros(1), rng={"defense": generator(seed, i)})
            for i in roster
        }
        parties = defense.third_parties(seed)
        self.wire = Wire(parties, roster)
        for party in parties.values():
            self.wire.send(party.begin("step", roster, 3, 7))
        self.heard = {i: self.wire.collect(i) for i in roster}
        self.parts, self.labels = {}, {}
        for place, (i, client) in enumerate(self.clients.items()):
            defense.hear("step", client, self.heard[i])
            self.parts[i] = defense.smashed(q[i], client)
            y = torch.zeros(batch, CLASSES)
            y[:, place % CLASSES] = 1
            self.labels[i] = defense.labels(y, client)
            if share_labels:
                self.wire.send([self._message("labels", i, Part(values=self.labels[i]))])
        self.leaves = {
            i: replace(p, values=p.values.detach().clone().requires_grad_())
            for i, p in self.parts.items()
        }
        self.to_server = self.wire.collect(SERVER)
        self.mixtures = defense.mix(self.leaves, self.to_server)

    @staticmethod
    def _message(kind: str, sender: str, part: Part) -> Message:
        return Message(
            kind=kind, sender=sender, receiver=SERVER, round=3, step=7, parts={kind: part}
        )

    @property
    def mixed(self) -> list[Mixture]:
        assert self.mixtures is not None
        return self.mixtures

    def mask(self, client: str) -> Tensor:
        return self.clients[client].plan["patches"]


def tokens(clients: int, *, batch: int = 2, patches: int = 6, width: int = 4) -> dict[str, Tensor]:
    """Activations in [0.05, 0.95], different for every client."""
    rng = generator(0, "tokens")
    return {
        i: torch.rand(batch, patches, width, generator=rng) * 0.9 + 0.05 for i in ROSTER[:clients]
    }


def plain(**changes: Any) -> DPCutMix:
    given: dict[str, Any] = {
        "patches": 6,
        "group": 3,
        "clip": 1.0,
        "smashed_std": 0.0,
        "label_std": 0.0,
    }
    return DPCutMix(**given | changes)


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
    "partition": lambda i: oracle.partition_constants(i["N"], i["n"]),
    "mix": _mix_example,
    "rdp": _views,
    "dp": _converted,
    "sigma": _sigma,
}


@pytest.mark.parametrize("case", ORACLE, ids=lambda c: c["name"])
def test_reference_values(case: dict[str, Any]) -> None:
    computed = COMPUTE[case["name"].split("_")[1]](case["inputs"] | {"name": case["name"]})
    tolerance = case.get("tol", 1e-5)
    for key, expected in case["expected"].items():
        if key == "uploads_eq1":
            for row, other in zip(computed[key], expected, strict=True):
                assert row == pytest.approx(other, rel=tolerance)
        else:
            assert computed[key] == pytest.approx(expected, rel=tolerance), key


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


@given(
    patches=st.integers(1, 90),
    group=st.integers(1, 12),
    extra=st.integers(0, 9),
    mixing=st.sampled_from(["uniform", "dirichlet"]),
    alpha=st.floats(0.01, 100),
    seed=st.integers(0, 2**62),
)
@settings(deadline=None, max_examples=150)
def test_each_group_of_any_roster_partitions_the_patches(
    patches: int, group: int, extra: int, mixing: Mixing, alpha: float, seed: int
) -> None:
    group = min(group, patches)
    roster = [f"client-{i}" for i in range(group + extra)]
    defense = plain(patches=patches, group=group, mixing=mixing, alpha=alpha)
    messages = defense.third_parties(seed)["mixer"].begin("step", roster, 2, 5)
    assert all((m.round, m.step, m.kind, m.sender) == (2, 5, "patches", "mixer") for m in messages)
    shown = [m for m in messages if m.receiver == SERVER]
    assert [i for m in shown for i in m.parts] == roster
    assert len(shown) == -(-len(roster) // group)
    told = {m.receiver: m.parts["patches"].values for m in messages if m.receiver != SERVER}
    for message in shown:
        masks = torch.stack([p.values for p in message.parts.values()])
        assert masks.shape == (len(message.parts), patches)
        assert bool((masks.sum(dim=0) == 1).all())
        sizes = masks.sum(dim=1)
        if mixing == "uniform":
            assert int(sizes.max() - sizes.min()) <= 1
        if len(masks) > 1 and patches > 1 and group <= patches:
            assert int(sizes.max()) < patches
        for i, part in message.parts.items():
            assert torch.equal(told[i], part.values)
            assert part.n_bytes == -(-patches // 8)
        worst = defense.worst_share(Facts(parameters=1, clients=len(roster)))
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


def test_nobody_in_company_gets_every_patch_even_at_tiny_concentrations() -> None:
    rng = generator(2)
    for _ in range(300):
        masks = deal_patches(9, 3, mixing="dirichlet", alpha=0.01, rng=rng)
        assert int(masks.sum(dim=1).max()) < 9
        assert bool((masks.sum(dim=0) == 1).all())
    alone = deal_patches(9, 1, mixing="dirichlet", alpha=0.01, rng=rng)
    assert bool(alone.all())


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


@given(
    side=st.integers(1, 9),
    group=st.integers(1, 12),
    extra=st.integers(0, 9),
    mixing=st.sampled_from(["uniform", "dirichlet"]),
    alpha=st.floats(0.01, 100),
    seed=st.integers(0, 2**62),
)
@settings(deadline=None, max_examples=150)
def test_each_group_of_any_roster_covers_the_grid_by_boxes_once(
    side: int, group: int, extra: int, mixing: Mixing, alpha: float, seed: int
) -> None:
    group = min(group, side * side)
    roster = [f"client-{i}" for i in range(group + extra)]
    defense = VanillaCutMix(positions=side * side, group=group, mixing=mixing, alpha=alpha)
    messages = defense.third_parties(seed)["mixer"].begin("step", roster, 2, 5)
    shown = [m for m in messages if m.receiver == SERVER]
    assert [i for m in shown for i in m.parts] == roster
    worst = defense.worst_share(Facts(parameters=1, clients=len(roster)))
    for message in shown:
        masks = torch.stack([p.values for p in message.parts.values()])
        assert masks.dtype == torch.bool
        assert masks.shape == (len(message.parts), side * side)
        assert bool((masks.sum(dim=0) == 1).all())
        most = int(masks.sum(dim=1).max())
        assert (most == side * side) == (len(masks) == 1)
        assert most / side**2 <= worst + 1e-12


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


def test_nobody_in_company_gets_the_whole_grid_even_at_tiny_concentrations() -> None:
    rng = generator(2)
    for positions in (4, 9):
        for _ in range(300):
            masks = deal_boxes(positions, 2, mixing="dirichlet", alpha=0.01, rng=rng)
            assert 0 < int(masks[0].sum()) < positions
    assert bool(deal_boxes(9, 1, mixing="dirichlet", alpha=0.01, rng=rng).all())


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
    found = smashed_of(seen, dtype=torch.float32)
    assert found is not None
    values, present = found
    told = {i: p.values for m in seen.messages if m.kind == "patches" for i, p in m.parts.items()}
    assert sorted(told) == sorted(seen.clients)
    for client, value, there in zip(seen.clients, values, present, strict=True):
        assert torch.equal(there, told[client].view(8, 8).expand(value.shape))
        assert bool((value[~there] == 0).all())
        assert float(value.abs().sum()) > 0


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"positions": 0}, r"positions must be a square number >= 1 \(.*\), got 0\."),
        ({"positions": -4}, r"positions must be a square number >= 1 \(.*\), got -4\."),
        ({"positions": 8}, r"positions must be a square number >= 1 \(.*\), got 8\."),
        ({"group": 0}, r"group must be >= 1 and <= positions \(4\) \(.*\), got 0\."),
        ({"group": 5}, r"group must be >= 1 and <= positions \(4\) \(.*\), got 5\."),
        ({"mixing": "beta"}, r"mixing must be uniform or dirichlet, got 'beta'\."),
        ({"alpha": math.nan}, r"alpha must lie in \[0\.01, 1e6\] .*, got nan\."),
    ],
)
def test_bad_settings_of_boxes_are_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VanillaCutMix(**{"positions": 4, "group": 2} | settings_)


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


# --- the step ---------------------------------------------------------------------------------


def test_without_noise_the_server_runs_plain_cutmix() -> None:
    q = tokens(5)
    step = Step(plain(group=2), q)
    assert [[i for i, _ in m.members] for m in step.mixed] == [
        ["client-0", "client-1"], ["client-2", "client-3"], ["client-4"],
    ]  # fmt: skip
    for mixture in step.mixed:
        expected = torch.zeros_like(q["client-0"])
        labels = torch.zeros(2, CLASSES)
        for i, weight in mixture.members:
            mask = step.mask(i)
            expected[:, mask] = q[i][:, mask]
            assert weight == pytest.approx(float(mask.sum()) / 6)
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


@pytest.mark.parametrize(
    "defense",
    [
        plain(group=1, clip=1e9),
        plain(group=1, clip=math.inf),
        CutMix(patches=6, group=1),
        VanillaCutMix(positions=9, group=1),
        Mixup(group=1),
    ],
)
def test_zero_strength_is_the_undefended_protocol_bit_for_bit(defense: Defense) -> None:
    q = tokens(3, patches=getattr(defense, "patches", None) or 6)
    step = Step(defense, q)
    assert len(step.mixed) == 3
    for (i, value), mixture in zip(q.items(), step.mixed, strict=True):
        assert torch.equal(mixture.smashed, value)
        assert mixture.targets is not None
        assert torch.equal(mixture.targets, step.labels[i])
        assert mixture.members == [(i, 1.0)]
        assert step.parts[i].present is None


def test_zero_strength_of_the_others_leaves_smashed_data_and_labels_alone() -> None:
    q = tokens(3)
    for defense in (
        DPSL(clip=math.inf, smashed_std=0.0, label_std=0.0),
        Cutout(patches=6, group=1),
    ):
        step = Step(defense, q)
        assert step.mixtures is None
        assert all(torch.equal(step.parts[i].values, q[i]) for i in q)


@pytest.mark.parametrize("labels", ["private", "shared"])
def test_zero_strength_trains_as_the_undefended_protocol_does(digits: Dataset, labels: str) -> None:
    network = network_for(digits)  # its cut layer's activations lie in [0, 1]
    work = LocalWork(protocol="splitfed", batch=4, lr=0.5, local_steps=2)

    def trained(defense: Defense) -> State:
        run = federation_of(
            digits,
            network,
            defense,
            protocol="splitfed",
            cuts=("block1",),
            labels=labels,
            clients=3,
        )
        run.play(work, [c.id for c in run.clients])
        return run.state

    reference = trained(Defense())
    positions = 64  # the cut's map is 8 x 8
    alone: list[Defense] = [plain(patches=4, group=1, clip=1e9), Mixup(group=1)]
    for defense in (*alone, VanillaCutMix(positions=positions, group=1)):
        after = trained(defense)
        assert all(torch.equal(after[n], value) for n, value in reference.items())
    for defense in (plain(patches=4, group=3), VanillaCutMix(positions=positions, group=3)):
        mixed = trained(defense)
        assert any(not torch.equal(mixed[n], value) for n, value in reference.items())


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
    [
        ({}, False),
        ({"smashed_std": 0.1}, True),
        ({"smashed_std": 0.1, "noise": "b3"}, False),
    ],
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


def assert_variance(noise: Tensor, variance: float) -> None:
    """Mean 0 and the variance, each within 5 standard errors of Gaussian draws: a right mechanism
    fails once in 1.7 million per check."""
    draws = noise.numel()
    noise = noise.detach().double().flatten()
    assert abs(float(noise.mean())) < 5 * math.sqrt(variance / draws)
    assert abs(float(noise.square().mean()) / variance - 1) < 5 * math.sqrt(2 / draws)


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
        assert_variance(difference[:, mask], std**2)
        if noise == "eq1":
            assert_variance(difference[:, ~mask], std**2)
        else:
            assert bool((difference[:, ~mask] == 0).all())
    mixed = noised.mixed[0].smashed - clean.mixed[0].smashed
    assert_variance(mixed, std**2 * (group if noise == "eq1" else 1))
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
    assert_variance(mixed, 0.09 / 4)
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
        assert_variance(step.labels[i] - hot, 0.25)


def test_noise_comes_from_the_clients_own_generator() -> None:
    defense = plain(smashed_std=0.1, label_std=0.1)
    q = tokens(3)
    torch.manual_seed(0)
    one, again, other = (Step(defense, q, seed=s) for s in (1, 1, 2))
    assert all(torch.equal(one.parts[i].values, again.parts[i].values) for i in q)
    assert all(torch.equal(one.labels[i], again.labels[i]) for i in q)
    assert not any(torch.equal(one.parts[i].values, other.parts[i].values) for i in q)


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


def test_the_ledger_prints_equation_6_beside_what_the_server_sees() -> None:
    """n = 10, variance 16/255, delta = 1e-5: 8.77 printed, 42.8 against the server."""
    defense = DPCutMix(patches=64, group=10, smashed_size=20, **PAPER)
    facts = Facts(parameters=1, clients=10, delta=1e-5)
    entry = account(defense, facts)
    assert entry.eps_claimed == pytest.approx(8.77104, rel=1e-4)
    assert (entry.claim_delta, entry.unit) == (1e-5, "record")
    assert entry.constants["rdp2_printed"] == pytest.approx(2.86875)
    assert entry.constants["eps_server_one_upload"] == pytest.approx(42.7859, rel=1e-4)
    assert entry.eps_record == math.inf
    assert any("client-held layers" in r for r in entry.reasons)


def test_the_claim_is_equation_6_at_the_real_size_where_it_is_known() -> None:
    """D_s = 12288 at order 2: 785 printed, 889 against the server. The paper's 20 stays beside."""
    facts = Facts(parameters=1, clients=10, delta=1e-5)
    real = DPCutMix(patches=64, group=10, smashed_size=12288, **PAPER)
    unknown = DPCutMix(patches=64, group=10, **PAPER)
    constants = real.constants(facts)
    assert constants["rdp2_printed"] == pytest.approx(785, rel=1e-3)
    assert constants["rdp2_server"] == pytest.approx(889, rel=1e-3)
    entries = [account(d, facts) for d in (real, unknown)]
    slope = (0.04 * 12288 / 10 + 10 / 100) / (16 / 255) / 2  # Eq. 6 over alpha
    expected, _ = best_renyi_epsilon(slope, 1e-5)
    assert entries[0].eps_claimed == pytest.approx(expected)
    assert entries[0].eps_claimed == constants["eps_printed_one_upload"]
    assert entries[1].eps_claimed == pytest.approx(8.77104, rel=1e-4)
    assert all(e.constants["eps_printed_paper_size"] == entries[1].eps_claimed for e in entries)


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


def test_sigma_for_a_budget_meets_it_exactly() -> None:
    sigma = oracle.sigma_for(2.0, 1e-5, share=0.25, clip=0.2, smashed_size=640)
    defense = DPCutMix(patches=64, group=4, clip=0.2, smashed_std=sigma, label_std=sigma)
    slope = defense.server_slope(640, Facts(parameters=1, clients=4))
    assert oracle.exact_epsilon(slope, 1e-5) == pytest.approx(2.0)


def test_two_inputs_at_the_ends_of_the_interval_reach_the_sensitivity() -> None:
    """The worst pair differs by Delta in every value sent, and by a one-hot label."""
    defense = plain(patches=6, group=4, clip=0.2, smashed_std=1.0, label_std=1.0, smashed_size=24)
    step = {
        v: Step(
            plain(patches=6, group=4, clip=0.2),
            {i: torch.full((1, 6, 4), v) for i in ROSTER[:4]},
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
    ("clients", "mixing", "share"),
    [
        (8, "uniform", 16 / 64),
        (10, "uniform", 32 / 64),
        (9, "uniform", 1.0),
        (7, "uniform", 22 / 64),
        (8, "dirichlet", 63 / 64),
        (9, "dirichlet", 1.0),
        (1, "uniform", 16 / 64),  # not told how many: at least a group
        (3, "dirichlet", 63 / 64),
    ],
)
def test_the_last_smaller_group_sets_the_worst_share(
    clients: int, mixing: Mixing, share: float
) -> None:
    defense = DPCutMix(patches=64, group=4, mixing=mixing, smashed_size=20, **PAPER)
    facts = Facts(parameters=1, clients=clients)
    assert defense.worst_share(facts) == pytest.approx(share)
    assert gaussians(defense.guarantee(facts))[0].sensitivity == pytest.approx(
        0.2 * math.sqrt(share * 20)
    )


def test_participation_sets_the_worst_share_but_no_round_is_smaller_than_a_group() -> None:
    defense = DPCutMix(patches=64, group=4, smashed_size=20, **PAPER)
    for participation, share in ((0.6, 0.5), (0.5, 1.0), (0.1, 0.25)):  # 6, 5, 1 of 10
        facts = Facts(parameters=1, clients=10, participation=participation)
        assert defense.worst_share(facts) == pytest.approx(share)


@pytest.mark.parametrize(("fewest", "share"), [(8, 16 / 64), (6, 0.5), (5, 1.0), (1, 1.0)])
def test_steps_of_few_clients_set_the_worst_share(fewest: int, share: float) -> None:
    defense = DPCutMix(patches=64, group=4, smashed_size=20, **PAPER)
    facts = Facts(parameters=1, clients=8, fewest=fewest)
    assert defense.worst_share(facts) == pytest.approx(share)


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


def test_what_has_no_noise_claims_nothing() -> None:
    facts = Facts(parameters=1, clients=3)
    for defense in (
        CutMix(patches=6, group=3),
        VanillaCutMix(positions=9, group=3),
        Cutout(patches=6, group=3),
        Mixup(group=3),
    ):
        assert defense.claim(facts) is None
        assert defense.mechanisms() == ()
        assert account(defense, facts).eps_record == math.inf
        assert unprotected(defense.guarantee(facts)) == [
            "the smashed data", "the labels", "the update of the client-held layers",
        ]  # fmt: skip
    claim = plain(smashed_std=1.0).claim(facts)
    assert claim is not None
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


def test_all_are_registered_and_need_smashed_data(registry: Registry) -> None:
    shared: dict[str, Any] = {"clip": 0.2, "smashed_std": 0.1, "label_std": 0.1}
    made: dict[str, dict[str, Any]] = {
        "dp_cutmix": {"patches": 4, "group": 2, **shared},
        "cutmix": {"patches": 4, "group": 2, "mixing": "dirichlet", "alpha": 0.5},
        "cutout": {"patches": 4, "group": 2},
        "dp_mixsl": {"group": 2, **shared},
        "mixup": {"group": 2},
        "vanilla_cutmix": {"positions": 4, "group": 2, "mixing": "dirichlet", "alpha": 1.0},
        "dp_sl": shared,
    }
    for name, values in made.items():
        defense = registry.defense(name, values)
        assert defense.requires == {"smashed"}
        assert defense.owns == (frozenset() if name in ("dp_sl", "cutout") else {"mix"})
        assert ("mixer" in defense.third_parties(0)) == (name != "dp_sl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patches": 0, "group": 1}, r"patches must be >= 1 .*, got 0\."),
        ({"group": 0}, r"group must be >= 1 and <= patches \(6\) \(clients mixed .*\), got 0\."),
        ({"group": 7}, r"group must be >= 1 and <= patches \(6\) \(clients mixed .*\), got 7\."),
        ({"clip": 0.0}, r"clip must be > 0 \(width .*\), got 0\.0\."),
        ({"low": math.inf}, r"low must be finite"),
        ({"smashed_std": -0.1}, r"smashed_std must be >= 0 .*, got -0\.1\."),
        ({"label_std": math.nan}, r"label_std must be >= 0 .*, got nan\."),
        ({"noise": "eq2"}, r"noise must be eq1 .* or b3 .*, got 'eq2'\."),
        ({"mixing": "even"}, r"mixing must be uniform or dirichlet, got 'even'\."),
        ({"alpha": 0.0}, r"alpha must lie in \[0\.01, 1e6\] .*, got 0\.0\."),
        ({"smashed_size": 0}, r"smashed_size must be >= 1 .*, got 0\."),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain(**changes)


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"patches": 4}, (2, 6, 4), r"patches must be 6, the tokens of .* \[2, 6, 4\], got 4\."),
        ({"patches": 6}, (2, 3, 6, 6), r"patches must be a square number .*\[2, 3, 6, 6\], got 6"),
        ({"patches": 9}, (2, 3, 8, 6), r"patches must be a square number .*\[2, 3, 8, 6\], got 9"),
        ({"patches": 9}, (2, 24), r"patches need smashed data of tokens .*the shape \[2, 24\]"),
        ({"smashed_size": 20}, (2, 6, 4), r"smashed_size must be 24, .*\[2, 6, 4\], got 20\."),
    ],
)
def test_smashed_data_that_does_not_fit_gets_one_clear_sentence(
    changes: dict[str, Any], shape: tuple[int, ...], message: str
) -> None:
    q = {i: torch.zeros(shape) for i in ROSTER[:3]}
    with pytest.raises(ValueError, match=message):
        Step(plain(**changes), q)


def test_a_roster_smaller_than_the_group_is_mixed_among_itself() -> None:
    assert plain(group=3).together == 3
    step = Step(plain(group=3), tokens(2))
    assert [len(m.members) for m in step.mixed] == [2]


def test_a_client_without_patches_is_refused_rather_than_sent_whole() -> None:
    client = Client(id="client-0", x=torch.zeros(1), y=torch.zeros(1), rng={})
    client.plan["patches"] = torch.ones(6, dtype=torch.bool)
    plain().hear("step", client, [])
    with pytest.raises(ValueError, match=r"client 'client-0' heard of no patches"):
        plain().smashed(torch.zeros(1, 6, 4), client)
