"""Updates in few bits: what is sent, what it weighs, and what attackers know of it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from attacks.idlg import IDLG
from attacks.judge import Likelihood
from bench.api import Defense, Message, Quantised, Reconstruction
from bench.contract.compose import Composed
from bench.contract.mechanisms.quantised import BLOCK, CODES
from bench.data.dataset import Dataset
from bench.registry import Registry
from bench.seeding import generator
from defenses.noise import GaussianUpdate
from defenses.quantise import Quantise
from defenses.sparsifiers import TopK
from tests.conftest import context_for, network_for, seen_under
from tests.matchers import evidence_for
from tests.test_shipped_plugins_conform import FAST, failures
from tests.uploads import error_of, make_client, one_hot, uploads_of

HOWS = ["qsgd", "sign", "int8", "stochastic", "nf4", "fp4"]


def sent(defense: Defense, *values: Tensor) -> list[Message]:
    client = make_client(rng={"defense": generator(0, "test quantise")})
    return uploads_of(defense, {str(i): v for i, v in enumerate(values)}, client)


def rounded(how: Any, values: Tensor, bits: int | None = None) -> Tensor:
    return sent(Quantise(how=how, bits=bits), values)[0].parts["0"].values


# --- what is sent -----------------------------------------------------------------------------


def test_known_values_on_their_grids() -> None:
    values = torch.tensor([1.27, -0.006, 0.004, 0.5])
    torch.testing.assert_close(rounded("int8", values), torch.tensor([1.27, -0.01, 0.0, 0.5]))
    signs = rounded("sign", torch.tensor([3.0, -1.0, 0.0, 0.0]))  # a mean magnitude of 1
    assert signs.tolist() == [1.0, -1.0, 1.0, 1.0]
    qsgd = rounded("qsgd", torch.tensor([3.0, -1.0, 0.0, 2.0]), bits=3)  # three steps of 1
    assert qsgd.tolist() == [3.0, -1.0, 0.0, 2.0]
    uniform = rounded("stochastic", torch.tensor([-1.0, 0.0, 2.0, 1.0]), bits=2)
    assert uniform.tolist() == [-1.0, 0.0, 2.0, 1.0]


@pytest.mark.parametrize("how", ["qsgd", "stochastic"])
def test_random_rounding_is_right_in_the_mean(how: str) -> None:
    values = torch.tensor([1.0, -1.0, 0.3, -0.45, 0.05])
    law = Quantised(of="update", how=how, bits=2)  # type: ignore[arg-type]
    drawn = law.sample(values.expand(40_000, 5), generator(0, "test mean"))
    # A step is at most 1, so a standard error at most .5 / 200.
    torch.testing.assert_close(drawn.mean(dim=0), values, rtol=0, atol=0.0125)


@pytest.mark.parametrize("how", HOWS)
def test_every_value_takes_its_bits_and_every_tensor_its_grid(how: str) -> None:
    values = torch.randn(1000, generator=generator(0, "test bytes"))
    defense = Quantise(how=how)  # type: ignore[arg-type]
    update, grid = sent(defense, values, values[:16])
    assert update.n_bytes == (1016 * defense.bits + 7) // 8
    ends = {"stochastic": 4, "nf4": 17, "fp4": 17}.get(how, 2)  # 16 blocks and one
    assert grid.n_bytes == 4 * ends
    one_grid = update.parts["0"].values[: BLOCK if how in CODES else None]
    assert len(one_grid.unique()) <= 2**defense.bits


def test_codes_are_those_of_bitsandbytes() -> None:
    """Normal quantiles by its create_normal_map; thresholds of its kernels (csrc/kernels.cu)."""
    quantiles = [stats.norm.ppf(torch.linspace(0.9677083, 0.5, n)[:-1].numpy()) for n in (9, 8)]
    positive, negative = (torch.from_numpy(q).sort().values for q in quantiles)
    expected = torch.cat([-negative.flip(0), torch.zeros(1), positive]) / positive.max()
    codes = {how: torch.tensor(CODES[how]) for how in ("nf4", "fp4")}
    torch.testing.assert_close(codes["nf4"], expected.float())
    middles = {how: (c[1:] + c[:-1]) / 2 for how, c in codes.items()}
    known = [0.0397901, 0.1202553, 0.2035213, 0.2920138, 0.3893125, 0.5016634, 0.6427869, 0.8614784]
    torch.testing.assert_close(middles["nf4"][7:], torch.tensor(known))
    known = [0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333]
    torch.testing.assert_close(middles["fp4"][7:], torch.tensor(known))


@pytest.mark.parametrize("how", ["nf4", "fp4"])
def test_blocks_of_64_values_are_rounded_each_by_its_largest(how: str) -> None:
    """By a loop, of a tensor whose last block is short; half of it is left out before."""
    values = torch.randn(10, 15, generator=generator(0, "test blocks")) * torch.arange(10)[:, None]
    codes = np.array(CODES[how])
    for whole, defense in (
        (values, Quantise(how=how)),  # type: ignore[arg-type]
        (
            torch.where(values.abs() > values.abs().median(), values, 0.0),
            Composed({"top_k": TopK(keep=0.5, feedback=False), "q": Quantise(how=how)}),  # type: ignore[arg-type]
        ),
    ):
        flat, expected = whole.flatten().double().numpy(), np.zeros(150)
        for start in range(0, 150, 64):
            block = flat[start : start + 64]
            size = np.abs(block).max()
            nearest = np.abs(block[:, None] / size - codes).argmin(axis=1)
            expected[start : start + 64] = codes[nearest] * size
        expected[flat == 0] = 0
        part = sent(defense, whole)[0].parts["0"]
        np.testing.assert_allclose(part.values.flatten().numpy(), expected, rtol=1e-6, atol=1e-12)


@FAST
def test_codes_of_blocks_conform(registry: Registry, fast: bool) -> None:
    assert failures(registry, "defense", "quantise", {"how": "nf4"}, fast=fast) == []


def test_what_is_not_sent_is_not_on_the_grid() -> None:
    """A sparse update's zeros neither move the mean magnitude nor get a sign."""
    both = Composed({"top_k": TopK(keep=0.5, feedback=False), "sign": Quantise(how="sign")})
    part = sent(both, torch.tensor([4.0, -2.0, 1.0, 0.5]))[0].parts["0"]
    assert part.values.tolist() == [3.0, -3.0, 0.0, 0.0]
    assert part.n_bytes == 1  # two signs and a bitmap of four bits


# --- what attackers know ----------------------------------------------------------------------

NUMBERS = st.lists(st.floats(-3, 3, width=32), min_size=3, max_size=12).filter(
    lambda v: max(map(abs, v)) > 0.1
)


@given(values=NUMBERS, how=st.sampled_from(HOWS))
@settings(max_examples=50)
def test_the_law_allows_what_the_defense_sends_and_no_value_far_from_it(
    values: list[float], how: str
) -> None:
    true = torch.tensor(values)
    seen = rounded(how, true).double()[None]
    law = Quantise(how=how).law  # type: ignore[arg-type]
    loss, _ = law.misfit(true.double()[None], seen)
    assert bool((loss < 20).all())  # float32 ends of grids stand within 1e-7 of a step
    far = true.double()[None] - seen.sign() * 10
    apart, _ = law.misfit(far, seen)
    assert bool((apart[seen != 0] > 20).all())


@pytest.mark.parametrize("bits", [2, 4])
def test_the_law_of_random_rounding_is_its_chance(bits: int) -> None:
    law = Quantised(of="update", how="qsgd", bits=bits)
    value = torch.tensor([[0.23, 1.0]], dtype=torch.float64)
    drawn = law.sample(value.expand(40_000, 2), generator(0, "test chance"))[:, 0]
    for point in drawn.unique():
        share = float((drawn == point).double().mean())
        loss, _ = law.misfit(value, torch.tensor([[float(point), 1.0]], dtype=torch.float64))
        assert share == pytest.approx(float((-loss[0, 0]).exp()), abs=0.0125)


@pytest.mark.parametrize("softness", [0.1, 1.0])
@pytest.mark.parametrize("how", HOWS)
def test_the_slope_of_the_law_is_its_derivative(how: str, softness: float) -> None:
    law = Quantise(how=how).law  # type: ignore[arg-type]
    values = torch.tensor([[1.0, -0.8, 0.33, 0.02, -0.1]], dtype=torch.float64)
    seen = law.sample(values, generator(0, "test slope"))
    at = values + torch.tensor([[0.3, -0.02, 0.01, -0.4, 0.15]])
    step = 1e-6 * torch.eye(5, dtype=torch.float64)
    up, down = (
        law.misfit(at + s, seen.expand(5, 5), softness)[0].sum(dim=1) for s in (step, -step)
    )
    torch.testing.assert_close(
        law.misfit(at, seen, softness)[1][0], (up - down) / 2e-6, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("softness", [0.001, 0.1, 1.0])
def test_of_signs_the_right_size_is_likelier_than_ever_smaller_values(softness: float) -> None:
    """Of values with a few wrong signs; signs alone are least wrong at 0."""
    law = Quantise(how="sign").law
    base = {"weight": torch.zeros(60), "bias": torch.zeros(40)}
    values = torch.randn(1, 100, generator=generator(0, "test size"), dtype=torch.float64)
    values[:, 60:] *= 10  # a tensor of its own has a size of its own
    seen = law.sample(values, generator(0, "test size"), base=base)
    near = values + 0.05 * values.abs().mean() * torch.randn(
        values.shape, generator=generator(1, "test size"), dtype=torch.float64
    )
    assert bool((near.sign() != values.sign()).any())
    right, small, large = (
        float(law.misfit(share * near, seen, softness, base=base)[0].sum())
        for share in (1.0, 0.01, 100.0)
    )
    assert right < small
    assert right < large


def test_what_was_not_sent_has_no_part_in_the_size() -> None:
    law = Quantise(how="sign").law
    values = torch.tensor([[2.0, -2.0, 5.0]], dtype=torch.float64)
    seen = torch.tensor([[2.0, -2.0, 0.0]], dtype=torch.float64)
    loss, slope = law.misfit(values, seen, 0.1)
    assert bool((loss[:, :2] < 1e-3).all())
    assert float(slope[0, 2]) == 0


@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_the_nearest_step_or_code_is_an_interval_that_the_true_samples_hit(
    digits: Dataset, how: Any
) -> None:
    network, defense = network_for(digits), Quantise(how=how)
    seen, truth = seen_under(digits, network, defense, protocol="fedsgd", clients=2)
    context = context_for(digits, network, defense)
    uploads = evidence_for(seen, context, dtype=torch.float64).uploads
    assert uploads is not None
    assert uploads.bounds is not None
    x, y = truth.x.double(), one_hot(truth)
    missed = [uploads.misfit(one, y, torch.arange(2)).detach() for one in (x, 1 - x)]
    assert bool((missed[0] < 1e-4 * missed[1]).all())


@pytest.mark.parametrize(("how", "least"), [("qsgd", 0.9), ("sign", 0.8)])
def test_two_bits_or_one_hide_no_digit_from_an_attack_that_knows_the_rounding(
    digits: Dataset, how: str, least: float
) -> None:
    """By squared distance alone neither is rebuilt."""
    network = network_for(digits)
    defense = Quantise(how=how, bits=2 if how == "qsgd" else 1)  # type: ignore[arg-type]
    seen, truth = seen_under(digits, network, defense, protocol="fedsgd", clients=4)
    context = context_for(digits, network, defense, budget=60)
    spread = float((truth.x - truth.x.mean()).square().mean())
    assert error_of(IDLG(), seen, truth, context) < (1 - least) * spread


def test_noise_before_and_after_rounding_runs_and_is_told(digits: Dataset) -> None:
    network = network_for(digits, "mlp_spm")
    noise = GaussianUpdate(noise_multiplier=0.1, clip_norm=1.0)
    for members in (
        {"gaussian": noise, "quantise": Quantise()},
        {"quantise": Quantise(), "gaussian": noise},
    ):
        seen, _ = seen_under(digits, network, Composed(members), clients=2)
        assert {m["kind"] for m in seen.known["mechanisms"]} == {
            "Clip", "GaussianNoise", "Quantised",
        }  # fmt: skip


@pytest.mark.parametrize(
    "defense",
    [TopK(keep=0.1), Quantise(how="sign"), Quantise(how="int8"), Quantise(how="nf4"), Quantise()],
    ids=["top_k", "sign", "int8", "nf4", "qsgd"],
)
def test_the_judge_prefers_what_is_closer_to_the_truth(digits: Dataset, defense: Defense) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, defense, protocol="fedsgd", clients=2)
    ctx = context_for(digits, network, defense)
    noise = torch.randn(truth.x.shape, generator=generator(0, "test judge"))
    losses = []
    for level in (0.0, 0.02, 0.2):
        images = (truth.x + level * noise).clamp(0, 1)
        loss = Likelihood().losses(seen, ctx, Reconstruction(images=images, labels=truth.y))
        assert loss is not None
        losses.append(loss)
    assert bool((losses[0] < losses[1]).all())
    assert bool((losses[1] < losses[2]).all())
