"""Records in one-hot groups from sums over several of them, or from a part of one's gradient."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks.analytic import Analytic
from attacks.cocktail_party import CocktailParty
from attacks.engine.mixture import MixedRows
from attacks.engine.one_hot import MOST, decode, find_groups
from attacks.engine.records import complete, find_records, join_alike, one_hot_groups, read_units
from attacks.idlg import IDLG
from attacks.judge import Likelihood
from attacks.tabular import Covers, Tabular
from bench.contract.attack import Attack, Context, Seen
from bench.contract.defense import Defense
from bench.contract.mechanisms import GaussianNoise
from bench.data.dataset import Dataset, from_features
from bench.harness.cascade import EXPLAINED
from bench.metrics.score import of_anyone, score
from bench.protocols.observe import Truth
from defenses.fedml_he import FedMLHE
from defenses.mask_crypt import MaskCrypt
from defenses.noise import GaussianUpdate
from defenses.quantise import Quantise
from defenses.secure_aggregation import SecureAggregation
from tests.conftest import context_for, network_for, require, seen_under

GROUPS = ((2, 12), (12, 21), (21, 29), (29, 34))


@pytest.fixture(scope="module")
def table() -> Dataset:
    """Two numeric columns and four groups, of independent records of three classes."""
    return made(GROUPS)


def made(groups: tuple[tuple[int, int], ...]) -> Dataset:
    rng = np.random.default_rng(0)
    columns = [rng.normal(size=(600, 2))]
    for first, last in groups:
        columns.append(np.eye(last - first)[rng.integers(last - first, size=600)])
    x, y = np.concatenate(columns, axis=1), rng.integers(3, size=600)
    train, test, aux = ((x[n : n + 200], y[n : n + 200]) for n in (0, 200, 400))
    names = ("a", "b", "c")
    return from_features(
        name="made", train=train, test=test, aux=aux, class_names=names, categorical=groups
    )


def observed(
    data: Dataset, defense: Defense | None = None, *, model: str = "logistic", **more: Any
) -> tuple[Seen, Truth, Context]:
    defense, network = defense or Defense(), network_for(data, model)
    seen, truth = seen_under(data, network, defense, **{"clients": 4, **more})
    return seen, truth, context_for(data, network, defense)


def attacked(
    data: Dataset, *given: Any, attack: Attack | None = None, **more: Any
) -> dict[str, Any]:
    """Scores of the answer, how many victims failed, and what it leaves unexplained."""
    seen, truth, ctx = observed(data, *given, **more)
    attack = attack or Analytic()
    assert attack.applies(seen) is None
    answer = attack.run(seen, ctx)
    scores = score(
        answer, x=truth.x, y=truth.y, classes=3, aux_x=data.aux_x, categorical=data.categorical
    )
    assert scores.images is not None
    means = {n: float(np.mean(v)) for n, v in scores.values.items()}
    left = Likelihood().unexplained(seen, ctx, answer)
    anyone = float(np.mean(of_anyone(scores.images, truth.x)["mse_anyone"]))
    return {**means, "failed": scores.failed, "left": left, "anyone": anyone}


@pytest.mark.parametrize(("model", "batch"), [("logistic", 8), ("mlp3", 4)])
def test_a_batch_gives_all_its_records(table: Dataset, model: str, batch: int) -> None:
    """Three classes tell as many equations as there are numeric values."""
    got = attacked(table, model=model, batch=batch, clients=1)
    assert (got["failed"], got["exact"], got["label_accuracy"]) == (0, 1.0, 1.0)
    assert got["anyone"] <= got["mse"] < 1e-4
    assert got["left"] is None or float(got["left"].max()) < EXPLAINED


def test_what_no_record_can_be_comes_after_records(table: Dataset) -> None:
    """Both explain all that was sent, and the Gaussian of public records knows no categories."""
    seen, _, ctx = observed(table, batch=8, clients=1)
    records = Analytic().run(seen, ctx)
    matched = IDLG().run(seen, replace(ctx, budget=400))
    judge = Likelihood()
    for answer, decoded in ((records, True), (matched, False)):
        left, loss = judge.unexplained(seen, ctx, answer), judge.losses(seen, ctx, answer)
        assert left is not None
        assert loss is not None
        assert float(left.max()) < 1e-8
        assert (float(loss.max()) < -1e8) == decoded


def test_a_sum_over_clients_gives_the_records_of_all(table: Dataset) -> None:
    got = attacked(table, SecureAggregation(), batch=1)
    assert (got["failed"], got["exact"], got["label_accuracy"]) == (0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("defense", "batch"),
    [(FedMLHE(share=0.2), 1), (FedMLHE(share=0.05), 4), (MaskCrypt(share=0.5), 1)],
)
def test_records_are_read_off_a_part(table: Dataset, defense: Defense, batch: int) -> None:
    """MaskCrypt hides all that is not 0, but its lists name it."""
    got = attacked(table, defense, batch=batch)
    assert (got["failed"], got["attribute_accuracy"]) == (0, 1.0)
    floor = float(table.aux_x.var(dim=0).mean())
    assert got["mse"] < floor / 2


def test_what_does_not_reproduce_the_gradient_fails(table: Dataset) -> None:
    seen, _, ctx = observed(table, batch=4)
    (upload,) = seen.of(seen.clients[0], "update")
    for part in upload.parts.values():
        part.values.mul_(0.5)  # a sum of halved errors, which no softmax has
    failed = require(Analytic().run(seen, ctx).failed)
    assert failed.tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("defense", "more", "reason"),
    [
        (GaussianUpdate(clip_norm=5.0, noise_multiplier=0.1), {}, "noise or rounding"),
        (None, {"batch": MOST + 1}, "more subsets than can be searched"),
        (None, {"local_steps": 2}, "a sum over 2 local steps"),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    table: Dataset, defense: Defense | None, more: dict[str, Any], reason: str
) -> None:
    seen, _, _ = observed(table, defense, **{"batch": 4, **more})
    assert reason in str(Analytic().applies(seen))


@pytest.mark.parametrize(
    ("defense", "more"),
    [
        (Defense(), {"batch": 16}),
        (Defense(), {"batch": 4, "local_steps": 2}),
        (SecureAggregation(), {"batch": 3}),
        (GaussianUpdate(clip_norm=1.0, noise_multiplier=1e-5), {"batch": 4}),
        (FedMLHE(share=0.1), {"batch": 4}),
        (MaskCrypt(share=0.1), {"batch": 2}),
    ],
)
def test_a_wide_layer_tells_all_records_apart(
    table: Dataset, defense: Defense, more: dict[str, Any]
) -> None:
    got = attacked(table, defense, attack=CocktailParty(), model="mlp3", **more)
    assert (got["failed"], got["attribute_accuracy"], got["label_accuracy"]) == (0, 1.0, 1.0)
    assert got["mse"] < 0.01


def test_of_many_one_hot_vectors_those_are_records_whose_gradients_were_sent() -> None:
    few = made(((2, 6), (6, 10), (10, 14)))  # ten independent categories
    got = attacked(few, attack=CocktailParty(), model="mlp3", batch=9)
    assert got["attribute_accuracy"] == 1.0


def test_numbers_of_records_alike_in_their_categories_stay_plausible(table: Dataset) -> None:
    rng = torch.Generator().manual_seed(0)
    x, public = table.train_x[:2].double(), table.aux_x.double()
    x[1, 2:] = x[0, 2:]
    one, other = torch.randn(2, 40, generator=rng).double()
    errors = torch.stack([one, 1e-5 * other - 0.999 * one])  # which nearly cancel
    grad = (errors.T @ torch.cat([x, torch.ones(2, 1)], dim=1)).float().double()
    mixture = MixedRows(grad, 2, torch.ones_like(x[0]), torch.zeros_like(x[0]), public)
    size = torch.linalg.svdvals(grad)[:2]
    c, free = find_records(mixture, 1e-8 * size[0] / size, one_hot_groups(public))
    assert (len(c), len(free)) == (1, 1)
    assert float((c @ mixture.span.T).abs().max()) < 5


def test_units_that_are_live_for_one_record_tell_it_together(table: Dataset) -> None:
    rng = torch.Generator().manual_seed(0)
    x, public = table.train_x[:4].double(), table.aux_x.double()
    groups = one_hot_groups(public)
    errors = torch.randn(60, 4, generator=rng).double()
    errors[:40] *= torch.eye(4).repeat(10, 1)  # the others are live for all
    grad, told = errors @ x, torch.rand(60, 34, generator=rng) < 0.3
    told[:, 1] = False
    parts, sure = read_units(torch.where(told, grad, 0.0), told, groups, public)
    assert 24 < len(parts) <= 40
    apart = (x[:, None] - parts).abs() * sure
    nearest = apart.amax(dim=2).amin(dim=0)
    assert int((nearest > 1e-6).sum()) <= 1  # a unit of which one category is told can mislead
    joined, sure = join_alike(parts, sure, public, 4, 0)
    order = torch.cdist(x[:, 2:], joined[:4, 2:]).argmin(dim=1)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert bool((sure[:4].sum(dim=1) > 28).all())
    assert not bool(sure[:, 1].any())
    missed = (joined[order] - x).abs()
    assert float(missed[sure[order]].max()) < 1e-6


def test_half_of_a_gradient_tells_most_of_the_records(table: Dataset) -> None:
    for defense in (FedMLHE(share=0.5), MaskCrypt(share=0.5)):
        got = attacked(table, defense, attack=CocktailParty(), model="mlp3", batch=4)
        assert got["attribute_accuracy"] > 0.8, defense


def test_a_part_tells_small_rows_of_a_gradient_as_well_as_large_ones() -> None:
    rng = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 3, generator=rng).double() for n in (60, 40))
    left[:30, 2] = 0  # what only small rows show
    left[30:] *= 1e-7
    whole = left @ right.T
    told = torch.rand(60, 40, generator=rng) > 0.3
    completed, rows, columns = complete(torch.where(told, whole, 0.0), told, 3, rng)
    assert bool(rows.all())
    assert bool(columns.all())
    assert float(((completed - whole).norm(dim=1) / whole.norm(dim=1)).max()) < 1e-4


def test_a_part_is_not_completed_where_what_is_told_of_it_is_zero() -> None:
    rng = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 3, generator=rng).double() for n in (60, 40))
    left[:30, 2] = 0
    right[:20, 2] = 0
    told = torch.ones(60, 40, dtype=torch.bool)
    told[30:, 25] = False
    told[40, 20:] = False
    whole = left @ right.T
    completed, rows, columns = complete(torch.where(told, whole, 0.0), told, 3, rng)
    assert (~rows).nonzero().flatten().tolist() == [40]
    assert (~columns).nonzero().flatten().tolist() == [25]
    assert torch.allclose(completed, whole * rows[:, None] * columns, atol=1e-6)
    told[:, -1] = False  # the bias's
    assert not any(part.any() for part in complete(whole * told, told, 3, rng))


@pytest.mark.parametrize("noise", [0.001, 0.01])
def test_noise_that_hides_categories_leaves_the_public_mean(table: Dataset, noise: float) -> None:
    defense = GaussianUpdate(clip_norm=1.0, noise_multiplier=noise)
    seen, _, ctx = observed(table, defense, model="mlp3", batch=4)
    answer = CocktailParty().run(seen, ctx)
    assert require(answer.failed).all()
    assert torch.equal(require(answer.images)[0, 0], table.aux_x.double().mean(dim=0).float())


def test_a_category_without_public_records_joins_the_group_that_lacks_it() -> None:
    public = np.array([[1, 0, 0, 0, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 1]], dtype=float)
    public[[0, 2], 3:] = [0, 1]
    total = np.array([0.9])
    first = np.array([[0.5], [0.0], [0.4], [0.0], [0.9]])  # the third column completes the first
    second = np.array([[0.5], [0.4], [0.4], [0.0], [0.5]])
    assert find_groups(public, first, total, 1e-6) == [range(3), range(3, 5)]
    assert find_groups(public, second, total, 1e-6) == [range(2), range(2, 5)]
    numeric = np.random.default_rng(0).normal(size=(5, 3))
    told = np.ones((4, 1), dtype=bool)
    assert decode(np.ones((4, 1)), told, numeric, 2, 1e-6, None) == []


# --- categories summed over ------------------------------------------------------------------


def test_summing_over_categories_gives_all_records_of_a_batch(table: Dataset) -> None:
    got = attacked(table, batch=4, clients=1, attack=Tabular())
    assert (got["failed"], got["exact"], got["label_accuracy"]) == (0, 1.0, 1.0)
    assert got["mse"] < 1e-3


@pytest.mark.parametrize(
    "defense",
    [Quantise(how="int8"), GaussianUpdate(clip_norm=5.0, noise_multiplier=0.0002)],
)
def test_rounding_and_little_noise_hide_no_categories(table: Dataset, defense: Defense) -> None:
    got = attacked(table, defense, batch=4, clients=2, attack=Tabular())
    assert got["attribute_accuracy"] > 0.95
    assert got["mse"] < float(table.aux_x.var(dim=0).mean()) / 2


def test_summed_over_numbers_stay_within_the_public_range(table: Dataset) -> None:
    seen, _, ctx = observed(table, batch=4, clients=4)
    public = ctx.aux_x.clone()
    public[:, :2] *= 0.2  # the victims' numbers lie beyond
    images = require(Tabular().run(seen, replace(ctx, aux_x=public)).images)
    low, high = public.aminmax(dim=0)
    assert bool(((images >= low - 1e-6) & (images <= high + 1e-6)).all())


def test_much_noise_leaves_how_frequent_categories_are(table: Dataset) -> None:
    noise = GaussianUpdate(clip_norm=1.0, noise_multiplier=1.0)
    got = attacked(table, noise, batch=4, clients=2, attack=Tabular())
    assert got["mse"] < 1.3 * float(table.aux_x.var(dim=0).mean())


@given(samples=st.integers(1, 3), sizes=st.lists(st.integers(2, 3), min_size=1, max_size=2),
       seed=st.integers(0, 2**31))  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_ways_to_fill_groups_are_summed_as_if_listed(
    samples: int, sizes: list[int], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    groups = [range(sum(sizes[:n]), sum(sizes[: n + 1])) for n in range(len(sizes))]
    public = torch.rand(9, sum(sizes), generator=rng, dtype=torch.float64)
    covers = Covers(groups, samples, public)
    scores = torch.randn(1, 2**samples, sum(sizes), generator=rng, dtype=torch.float64)
    of_column = scores[0] + covers.prior
    total, shares = 0.0, torch.zeros(samples, sum(sizes), dtype=torch.float64)
    for group in groups:
        ways = list(itertools.product(group, repeat=samples))
        each = torch.stack([
            sum(of_column[sum(2**k for k in range(samples) if way[k] == column), column]
                for column in group)
            for way in ways
        ])  # fmt: skip
        total += float(each.logsumexp(dim=0))
        for way, share in zip(ways, each.softmax(dim=0), strict=True):
            for k, column in enumerate(way):
                shares[k, column] += share
    assert float(covers.log_sum(scores)) == pytest.approx(total, rel=1e-9)
    assert torch.allclose(covers.shares(scores)[0], shares)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"batch": 6}, "at most 5 records"),
        ({"local_steps": 2}, "one step of one client"),
        ({"defense": SecureAggregation()}, "one step of one client"),
        ({"model": "mlp3"}, "reads softmax regression"),
        ({"defense": Quantise(how="sign")}, "none tells by itself"),
    ],
)
def test_categories_are_summed_over_for_few_records_of_one_step(
    table: Dataset, more: dict[str, Any], reason: str
) -> None:
    seen, _, _ = observed(table, **{"batch": 4, **more})
    assert reason in str(Tabular().applies(seen))


def test_noise_on_the_bias_alone_is_refused(table: Dataset) -> None:
    seen, _, _ = observed(table, GaussianUpdate(clip_norm=5.0, noise_multiplier=0.1), batch=4)
    (weight, bias) = seen.before
    noises = [
        GaussianNoise(of="update", std=0.1, tensors=names) for names in ((bias,), (weight, bias))
    ]
    known = [{**seen.known, "mechanisms": [noise.to_dict()]} for noise in noises]
    refused, taken = (Tabular().applies(replace(seen, known=k)) for k in known)
    assert "weight or bias alone" in str(refused)
    assert taken is None
