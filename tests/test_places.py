"""Smashed data on a grid over the image: tokens and maps, ridge by places, the decoder's map."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attacks.engine.channel as channels
import attacks.engine.regression as local
from attacks.decoder import Data, Decoder
from attacks.engine.channel import Channel, distance
from attacks.engine.inverter import Inverter
from attacks.engine.observation import parse_view
from attacks.engine.regression import (
    FOLDS,
    Features,
    Grid,
    Surroundings,
    cells,
    fit,
    fit_local,
    grid_shape,
    on_grid,
    surroundings,
    uncut,
)
from attacks.ridge import Ridge
from bench.contract.attack import Context, Seen
from bench.contract.defense import Client, Defense
from bench.contract.messages import Part
from bench.data.dataset import Dataset
from bench.protocols.observe import Truth
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator
from defenses.cutmix import CutMix
from tests.conftest import context_for, network_for, require, seen_under
from tests.test_learned_attacks import run, smashed

Case = tuple[Seen, Truth, Context]


def mixed(
    data: Dataset, defense: Defense, *, aux: int, model: str = "vit_small", cut: str = "embed"
) -> Case:
    """A split round under a defense, and an attacker with `aux` public images."""
    network = network_for(data, model)
    split = {"cut": cut, "labels": "shared"}
    seen, truth = seen_under(data, network, defense, protocol="splitfed", split=split, batch=4)
    ctx = context_for(data, network, defense, budget=50)
    return seen, truth, replace(
        ctx, aux_x=ctx.aux_x[:aux], aux_y=ctx.aux_y[:aux],
        shadow=Rehearsals(
            seen=seen, network=network, defense=defense, rng=generator(0, "shadow"),
            device=torch.device("cpu"),
        ),
    )  # fmt: skip


def few(case: Case, aux: int) -> Case:
    seen, truth, ctx = case
    return seen, truth, replace(ctx, aux_x=ctx.aux_x[:aux], aux_y=ctx.aux_y[:aux])


# --- the grid -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((16, 64), (64, 4, 4)),
        ((17, 64), (64, 4, 4)),  # a class token first
        ((5, 3), (3, 2, 2)),
        ((15, 64), None),
        ((18, 64), None),
        ((1, 64), None),
        ((2, 64), None),
        ((12, 8, 6), (12, 8, 6)),
        ((12, 1, 1), None),
        ((192,), None),
    ],
)
def test_tokens_that_fill_a_square_have_a_grid(
    shape: tuple[int, ...], grid: tuple[int, int, int] | None
) -> None:
    assert grid_shape(shape) == grid


def test_a_token_lies_where_its_patch_does(digits: Dataset) -> None:
    network = network_for(digits, "vit_small")
    params = network.init(generator(0, "init"))
    x = torch.zeros(2, *digits.shape)
    x[1, :, 4:8, 8:12] = 1.0
    tokens = network.run(params, x, last="embed")
    moved = on_grid(tokens.flatten(1), tuple(tokens.shape[1:])).diff(dim=0)[0].abs().sum(dim=0)
    assert moved.nonzero().tolist() == [[1, 2]]


def test_the_class_token_is_left_out() -> None:
    tokens = torch.arange(2 * 5 * 3).view(2, 5, 3).float()
    grid = on_grid(tokens.flatten(1), (5, 3))
    assert torch.equal(grid[1, :, 1, 0], tokens[1, 3])
    with pytest.raises(ValueError, match=r"shape \[3, 3\] lie on no grid"):
        on_grid(torch.zeros(2, 9), (3, 3))


def test_cells_cut_images_into_blocks_and_back() -> None:
    x = torch.rand(3, 2, 6, 8, generator=generator(0, "cells"))
    blocks = cells(x, (3, 2))
    assert torch.equal(blocks[1, 2 * 2 + 1].view(2, 2, 4), x[1, :, 4:6, 4:8])
    assert torch.equal(uncut(blocks, (3, 2), (2, 6, 8)), x)
    assert Grid(values=torch.zeros(1, 5, 3, 2), present=None).tiles((2, 6, 8))
    assert not Grid(values=torch.zeros(1, 5, 3, 3), present=None).tiles((2, 6, 8))


def test_surroundings_are_the_nine_cells_around() -> None:
    values = torch.rand(2, 3, 4, 5, generator=generator(0, "around"))
    around = surroundings(values)
    padded = torch.nn.functional.pad(values, (1, 1, 1, 1))
    for i in range(4):
        for j in range(5):
            expected = padded[:, :, i : i + 3, j : j + 3].flatten(2)
            assert torch.equal(around[:, i * 5 + j], expected)


# --- the regression by places -------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
def test_left_out_predictions_equal_those_of_refits_without_the_fold(partial: bool) -> None:
    """Against the slow loop: a design matrix with one column per turn and place."""
    rng = generator(0, "local")
    images, group, size = 15, 2, (2, 3)
    rows = images * group
    values = torch.randn(rows, 2, *size, generator=rng)
    x = torch.rand(rows, 1, 4, 6, generator=rng)
    present = (torch.rand(rows, 1, *size, generator=rng) < 0.6).float() if partial else None
    seen = Grid(values=values * (1 if present is None else present), present=present)
    turn = torch.arange(rows) % group
    factor, everything = 0.1, torch.ones(rows, dtype=torch.bool)
    left_out, predicted, loss = fit_local(
        seen, x, seen, group=group, turn=turn, judged=everything, factors=[factor],
        judge=lambda out: (out - x).square().mean(),
    )  # fmt: skip
    z, y = Surroundings(seen)(seen).double(), cells(x, size).double()
    place = (turn[:, None] * 6 + torch.arange(6)).flatten()
    member = torch.nn.functional.one_hot(place, 12).double().view(rows, 6, 12)
    design = torch.cat([z, member], dim=2)
    fold = torch.arange(images).repeat_interleave(group) % FOLDS

    def refit(keep: Tensor, asked: Tensor) -> Tensor:
        inner = (
            z[keep] - torch.stack([z[keep & (turn == t)].mean(dim=0) for t in (0, 1)])[turn[keep]]
        )
        values = torch.linalg.eigvalsh(inner.flatten(0, 1).mT @ inner.flatten(0, 1))
        penalty = torch.full((design.shape[2],), factor * float(values.clamp_min(0).mean()))
        penalty[z.shape[2] :] = 0
        part = design[keep].flatten(0, 1)
        gram = part.mT @ part + torch.diag(penalty.double())
        weights = torch.linalg.solve(gram, part.mT @ y[keep].flatten(0, 1))
        return uncut(design[asked] @ weights, size, (1, 4, 6)).float()

    for k in range(FOLDS):
        assert torch.allclose(left_out[fold == k], refit(fold != k, fold == k), atol=1e-4)
    upright = everything & (turn == 0)
    assert torch.allclose(predicted[upright], refit(everything, upright), atol=1e-4)
    assert loss == pytest.approx(float((left_out - x).square().mean()), rel=1e-5)


def test_images_beyond_those_taught_are_predicted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is that of a fit without the image: pixels that are pure noise stay unknown."""
    monkeypatch.setattr(local, "TAUGHT", 4 * 20)
    rng = generator(0, "beyond")
    values = torch.randn(90, 1, 2, 2, generator=rng)
    x = torch.stack([values[:, 0], torch.randn(90, 2, 2, generator=rng)], dim=1)
    grid = Grid(values=values, present=None)
    rows = torch.ones(90, dtype=torch.bool)
    left_out, _, _ = fit_local(
        grid, x, grid, group=1, turn=torch.zeros(90, dtype=torch.int64), judged=rows,
        factors=[1e-8, 1.0], judge=lambda out: (out - x).square().mean(),
    )  # fmt: skip
    errors = (left_out - x).square().mean(dim=(2, 3))
    assert float(errors[:, 0].max()) < 1e-6
    assert float(errors[:, 1].mean()) > 1.0


def test_an_absent_cell_shows_its_neighbours_and_no_value() -> None:
    rng = generator(0, "absent")
    present = torch.ones(4, 1, 3, 3)
    present[0, :, 1, 1] = 0
    grid = Grid(values=torch.randn(4, 2, 3, 3, generator=rng) * present, present=present)
    columns = Surroundings(grid)(grid).view(4, 9, -1)
    around = columns[..., : 3 * 9].view(4, 9, 3, 9)
    others = columns[..., 3 * 9 :].view(4, 9, 3, 8)
    assert bool((around[0, 4, :, 4] == 0).all())
    assert bool((around[1, 4, :2, 4] != 0).all())
    assert torch.equal(others[0, 4], around[0, 4][:, [0, 1, 2, 3, 5, 6, 7, 8]])
    assert bool((others[1] == 0).all())


def test_wide_activations_are_reduced_to_what_varies() -> None:
    rng = generator(0, "wide")
    basis = torch.linalg.qr(torch.randn(400, 6, generator=rng)).Q
    values = torch.einsum("mkhw,dk->mdhw", torch.randn(40, 6, 2, 2, generator=rng), basis)
    reduced = Surroundings(Grid(values=values, present=None))(Grid(values=values, present=None))
    assert reduced.shape[2] <= local.WIDTH
    assert float(reduced.square().sum()) > 0
    inner = (values - values.mean(dim=0)) / (values - values.mean(dim=0)).square().mean().sqrt()
    centre = reduced.view(40, 4, -1, 9)[..., 4].square().sum()
    assert float(centre) == pytest.approx(float(inner.square().sum()), rel=1e-3)


# --- ridge --------------------------------------------------------------------------------------


def test_the_smallest_penalty_leaves_out_exactly_beside_many_intercepts() -> None:
    """Rounding of the intercepts' eigenvalues, over a tiny penalty, once made left-out images
    nearly exact where there are more features than rows: the penalty chosen was always this."""
    rng = generator(0, "tiny")
    rows, group = 120, 4
    x = torch.randn(rows, 400, generator=rng, dtype=torch.float64) * 10
    y = torch.randn(rows, 3, generator=rng, dtype=torch.float64)
    strata = torch.arange(rows) % 2 * (1 + torch.arange(rows) // 2 % 2)
    everything = torch.ones(rows, dtype=torch.bool)
    fitted = fit(Features(x, group=group, strata=strata), y, judged=everything,
                judge=lambda out: (out - y).square().mean())  # fmt: skip
    assert fitted.loss > 0.9


def test_a_hundred_public_images_open_tokens(photos: Dataset) -> None:
    """48 pixels of a patch from 64 numbers of its token: with places 40 images are enough, from
    all tokens to all pixels (1024 to 768) they are not."""
    case = few(smashed(photos, "vit_small", "embed"), 40)
    assert run(Ridge(rows=400), photos, case) > 0.999
    inverter = Inverter(Channel(parse_view(case[0]), case[2]), case[2], rows=800)
    assert inverter.pieces[0].loss < 1e-3


@pytest.mark.parametrize("cut", ["embed", "block1"])
def test_ridge_by_places_beats_the_flat_one(photos: Dataset, cut: str) -> None:
    case = few(smashed(photos, "vit_small", cut), 40)
    blind = pytest.MonkeyPatch()
    placed = run(Ridge(), photos, case, "mse")
    with blind.context() as patched:
        patched.setattr(Channel, "grid", lambda self, blocks: None)
        flat = run(Ridge(), photos, case, "mse")
    assert placed < 0.7 * flat


@pytest.mark.parametrize("std", [0.0, 0.05])
def test_the_loss_that_ridge_expects_is_the_one_it_has(digits: Dataset, std: float) -> None:
    """With single images left out, the regression on top would expect 0.72 here and get 0.92."""
    seen, truth, ctx = smashed(digits, "lenet", "block2", std=std, clients=20)
    inverter = Inverter(Channel(parse_view(seen), ctx), ctx, rows=360)
    images, expected = inverter.predict()
    true = distance(images, truth.x.flatten(0, 1), variance=inverter.variance).mean()
    assert float(true) < 1.15 * float(expected.mean())


# --- patches that others sent -------------------------------------------------------------------


def test_a_patch_is_present_or_absent_by_one_number(digits: Dataset) -> None:
    seen, _, ctx = mixed(digits, CutMix(patches=16, group=2), aux=8)
    channel = Channel(parse_view(seen), ctx)
    grid = require(channel.grid(channel.blocks))
    assert channel.blocks["presence smashed"].shape == (32, 16)
    assert grid.present is not None
    gone = grid.present == 0
    assert 0 < int(gone.sum()) < gone.numel()
    assert bool((grid.values[gone.expand_as(grid.values)] == 0).all())
    assert bool((grid.values[~gone.expand_as(grid.values)] != 0).all())


class SendsHalf(Defense):
    """Sends half of the numbers of each cell, drawn afresh."""

    def smashed(self, q: Tensor, client: Client) -> Part:
        kept = torch.rand(q.shape, generator=client.rng["defense"]) < 0.5
        return Part(values=torch.where(kept, q, 0.0), present=kept)


def test_cells_sent_in_part_show_which_numbers(digits: Dataset) -> None:
    seen, _, ctx = mixed(digits, SendsHalf(), aux=20, model="lenet", cut="block1")
    channel = Channel(parse_view(seen), ctx)
    grid = require(channel.grid(channel.blocks))
    assert channel.blocks["presence smashed"].shape == channel.blocks["smashed"].shape
    assert grid.present is not None
    assert grid.present.shape == (32, 1, 8, 8)
    assert 0.4 < float(grid.present.mean()) < 0.6


def test_a_shadow_call_has_no_more_clients_than_their_weights_fit(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trains weights of its own, however little smashed data it sends."""
    seen, _, ctx = mixed(digits, Defense(), aux=70, model="mlp3", cut="hidden1")
    together = Channel(parse_view(seen), ctx).pairs(group=1).blocks["smashed"]
    (update,) = seen.of(seen.clients[0], str(seen.upload_kind()))
    held = sum(p.values.numel() for p in update.parts.values())
    assert 5 * together.shape[1] < held < sum(v.numel() for v in seen.before.values())
    sizes: list[int] = []

    def counted(x: Tensor, y: Tensor, release: Seen | None = None) -> Seen:
        sizes.append(len(x))
        return ctx.shadow(x, y, release=release)

    monkeypatch.setattr(channels, "SHADOW_WEIGHTS", 30 * held)
    channel = Channel(parse_view(seen), replace(ctx, shadow=counted))
    sizes.clear()
    apart = channel.pairs(group=1).blocks["smashed"]
    assert sizes == [30, 30, 10]
    assert torch.allclose(apart, together, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [Ridge(rows=200), pytest.param(Decoder(rows=200), marks=pytest.mark.slow)],
    ids=["ridge", "decoder"],
)
def test_absent_patches_are_filled_in_from_those_around(
    digits: Dataset, attack: Ridge | Decoder
) -> None:
    """A flat regression gets 0.75 here: half of the patches belong to somebody else."""
    case = mixed(digits, CutMix(patches=16, group=2), aux=100)
    assert run(attack, digits, case) > 0.9


def test_the_decoder_sees_tokens_and_presence_as_a_map(digits: Dataset) -> None:
    seen, _, ctx = mixed(digits, CutMix(patches=16, group=2), aux=10)
    channel = Channel(parse_view(seen), ctx)
    data = Data(Inverter(channel, ctx, rows=20), channel, ctx)
    assert data.feature_shape == (65, 4, 4)
    seen, _, ctx = few(smashed(digits, "mlp3", "hidden1"), 10)
    channel = Channel(parse_view(seen), ctx)
    assert len(Data(Inverter(channel, ctx, rows=20), channel, ctx).feature_shape) == 1
