"""DP-CutMixSL and its rivals in a step: mixing, gradients, noise by Monte Carlo."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.contract.defense import Defense
from bench.contract.events import Facts
from bench.contract.messages import SERVER
from bench.seeding import generator
from bench.toolkit.patches import patch_map
from defenses.cutmix import DPSL, CutMix, Cutout, DPMixSL, Mixup
from tests.dp_cutmix_steps import CLASSES, ROSTER, Step, plain, tokens

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
