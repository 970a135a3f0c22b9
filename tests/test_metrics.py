"""Metrics against scikit-image, scipy and brute force."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from bench.contract.attack import Reconstruction
from bench.metrics.recognise import Gallery, exact_matches, share_recognised
from bench.metrics.score import label_values, of_anyone, one_to_one, score
from bench.seeding import generator
from bench.toolkit import images
from bench.toolkit.counts import round_to_total


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [11, 16, 33])
def test_ssim_equals_scikit_image(channels: int, side: int) -> None:
    rng = generator(side, "ssim")
    a = torch.rand(5, channels, side, side, generator=rng)
    b = (a + 0.3 * torch.randn(a.shape, generator=rng)).clamp(0, 1)
    ours = images.ssim(a, b)
    for k in range(5):
        reference = structural_similarity(
            a[k].double().numpy(), b[k].double().numpy(), channel_axis=0, data_range=1.0,
            gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
        )  # fmt: skip
        assert abs(float(ours[k]) - reference) < 1e-6
    assert torch.allclose(images.ssim(a, a), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize(
    "shape",
    [(3, 1, 11, 40), (2, 1, 57, 23), (1, 1, 45, 46), (300, 1, 28, 28), (2, 3, 3, 300, 290)],
    ids=["one row of windows", "tall", "just past two bands", "many chunks", "large and nested"],
)
def test_ssim_of_any_size_and_number_equals_scikit_image(shape: tuple[int, ...]) -> None:
    rng = generator(sum(shape), "ssim sizes")
    a = torch.rand(shape, generator=rng)
    b = (a + 0.3 * torch.randn(a.shape, generator=rng)).clamp(0, 1)
    ours = images.ssim(a, b)
    assert ours.dtype == torch.float64
    assert ours.shape == shape[:-3]
    pairs = zip(a.reshape(-1, *shape[-3:]), b.reshape(-1, *shape[-3:]), strict=True)
    reference = [
        structural_similarity(
            one.double().numpy(), two.double().numpy(), channel_axis=0, data_range=1.0,
            gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
        )
        for one, two in pairs
    ]  # fmt: skip
    assert ours.flatten().tolist() == pytest.approx(reference, abs=1e-6)


def test_ssim_of_no_images_is_empty_and_a_broken_image_spoils_no_other() -> None:
    assert images.ssim(torch.rand(0, 1, 12, 12), torch.rand(0, 1, 12, 12)).shape == (0,)
    a = torch.rand(3, 1, 12, 12, generator=generator(0, "broken"))
    b = a.clone()
    b[1, 0, 5, 5] = torch.nan
    assert torch.isfinite(images.ssim(a, b)).tolist() == [True, False, True]


def test_ssim_leaves_its_arguments_alone() -> None:
    a, b = torch.rand(2, 2, 1, 12, 12, dtype=torch.float64, generator=generator(0, "pure"))
    before = a.clone(), b.clone()
    images.ssim(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


def test_psnr_equals_scikit_image_and_is_capped() -> None:
    rng = generator(0, "psnr")
    a, b = torch.rand(1, 1, 12, 12, generator=rng), torch.rand(1, 1, 12, 12, generator=rng)
    ours = images.psnr(images.mse(a, b, sample_dims=3))
    reference = peak_signal_noise_ratio(a.double().numpy(), b.double().numpy(), data_range=1.0)
    assert abs(float(ours[0]) - reference) < 1e-9
    assert float(images.psnr(torch.zeros(1, dtype=torch.float64))) == 100.0


def test_small_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 11x11 pixels, got 8x8"):
        images.ssim(torch.rand(1, 1, 8, 8), torch.rand(1, 1, 8, 8))


@given(seed=st.integers(0, 10_000), samples=st.integers(2, 5))
@settings(deadline=None, max_examples=30)
def test_matching_is_one_to_one_and_optimal(seed: int, samples: int) -> None:
    rng = generator(seed, "matching")
    guess, truth = (torch.rand(2, samples, 4, generator=rng) for _ in range(2))
    order = one_to_one(guess, truth)
    cost = torch.cdist(truth.double(), guess.double()).square()
    for v in range(2):
        assert sorted(order[v].tolist()) == list(range(samples))
        ours = sum(float(cost[v, k, order[v, k]]) for k in range(samples))
        best = min(
            sum(float(cost[v, k, p[k]]) for k in range(samples))
            for p in itertools.permutations(range(samples))
        )
        assert ours == pytest.approx(best)


def test_label_metrics_on_a_case_done_by_hand() -> None:
    truth = torch.tensor([[2, 1, 0, 1]])
    guess = torch.tensor([[1, 1, 1, 1]])
    assert float(label_values(guess, truth)["leacc"]) == 0.75
    assert float(label_values(guess, truth)["lnacc"]) == 0.5
    assert float(label_values(guess, truth)["irec"]) == 0.75
    everything = torch.full_like(truth, 4)
    assert float(label_values(everything, truth)["irec"]) == 0.25  # naming all gains nothing


@given(values=st.lists(st.floats(0, 50), min_size=1, max_size=12), total=st.integers(0, 500))
def test_rounded_counts_are_whole_and_sum_to_the_total(values: list[float], total: int) -> None:
    rounded = round_to_total(torch.tensor([values], dtype=torch.float64), total=total)[0]
    assert int(rounded.sum()) == total
    assert int(rounded.min()) >= 0
    scale = sum(values)
    if scale > 0:
        exact = torch.tensor(values, dtype=torch.float64) / scale * total
        assert float((rounded - exact).abs().max()) <= 1 + 1e-6


def truth_and_aux() -> dict[str, torch.Tensor]:
    rng = generator(0, "score")
    return {
        "x": torch.rand(3, 2, 1, 12, 12, generator=rng),
        "y": torch.tensor([[0, 1], [1, 1], [2, 0]]),
        "aux_x": torch.rand(9, 1, 12, 12, generator=rng),
        "aux_y": torch.arange(9) % 3,
    }


def test_a_perfect_answer_in_any_order_scores_perfectly() -> None:
    data = truth_and_aux()
    answer = Reconstruction(
        images=data["x"].flip(1),
        labels=data["y"].flip(1),
        label_counts=torch.nn.functional.one_hot(data["y"], 3).sum(1),
    )
    scores = score(answer, x=data["x"], y=data["y"], classes=3, aux_x=data["aux_x"])
    for metric in ("ssim", "success", "leacc", "lnacc", "irec", "label_accuracy"):
        assert scores.values[metric] == pytest.approx([1.0] * 3), metric
    assert scores.values["mse"] == pytest.approx([0.0] * 3)


def test_a_failed_victim_counts_as_the_public_mean_not_as_missing() -> None:
    data = truth_and_aux()
    broken = data["x"].clone()
    broken[1] = torch.nan
    scores = score(
        Reconstruction(images=broken), x=data["x"], y=data["y"], classes=3, aux_x=data["aux_x"]
    )
    mean = data["aux_x"].mean(dim=0).expand_as(data["x"])
    assert scores.failed == 1
    assert len(scores.values["ssim"]) == 3
    assert scores.values["ssim"][1] == pytest.approx(float(images.ssim(mean, data["x"])[1].mean()))


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_that_no_class_has_are_refused(label: int) -> None:
    data = truth_and_aux()
    labels = torch.full_like(data["y"], label)
    with pytest.raises(ValueError, match=rf"labels must lie in 0\.\.2, got {label} to {label}"):
        score(
            Reconstruction(labels=labels), x=data["x"], y=data["y"], classes=3, aux_x=data["aux_x"]
        )


def test_answers_of_the_wrong_shape_are_refused() -> None:
    data = truth_and_aux()
    with pytest.raises(ValueError, match=r"images must be a tensor \[3, 2, 1, 12, 12\], got"):
        score(
            Reconstruction(images=data["x"][:2]), x=data["x"], y=data["y"], classes=3,
            aux_x=data["aux_x"],
        )  # fmt: skip


def test_images_given_to_the_wrong_client_count_as_those_of_anyone() -> None:
    x = torch.rand(4, 1, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    assert of_anyone(x[[1, 2, 3, 0]], x)["ssim_anyone"] == pytest.approx([1.0] * 4)
    # One good guess counts once.
    assert sum(v > 0.99 for v in of_anyone(x[[1, 1, 1, 1]], x)["ssim_anyone"]) == 1
    batches, other = x.view(2, 2, 1, 12, 12), x[[2, 3, 0, 1]].view(2, 2, 1, 12, 12)
    assert of_anyone(other, batches)["ssim_anyone"] == pytest.approx([1.0, 1.0])
    records = x.flatten(2)
    assert of_anyone(records[[1, 0, 3, 2]], records)["mse_anyone"] == [0.0] * 4
    signals = x.flatten(3)
    assert of_anyone(signals, signals) == {}


def gallery(count: int = 40) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.rand(count, 1, 12, 12, generator=rng), torch.arange(count) % 2


def test_an_image_is_recognised_where_the_true_one_is_nearest() -> None:
    x, y = gallery()
    others = Gallery(x, y)
    truth, labels = x[:4, None], y[:4, None]
    paler = 0.3 + 0.2 * truth  # neither brightness nor contrast counts
    wrong = x[[4, 5, 6, 7], None]
    flat = torch.full_like(truth, 0.5)
    half = torch.cat([truth, wrong], dim=1)
    for guess, expected in ((paler, 1.0), (wrong, 0.0), (flat, 0.0)):
        assert share_recognised(guess, truth, labels, others).tolist() == [expected] * 4
    both = torch.cat([truth, truth], dim=1)
    assert share_recognised(half, both, labels.expand(4, 2), others).tolist() == [0.5] * 4


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64)])
def test_perfect_copies_of_large_images_are_recognised(shape: tuple[int, ...]) -> None:
    x, y = torch.rand(60, *shape, generator=torch.Generator().manual_seed(3)), torch.arange(60) % 3
    assert (
        share_recognised(x[:, None], x[:, None], y[:, None], Gallery(x, y)).tolist() == [1.0] * 60
    )


def test_recognition_agrees_with_a_slow_loop() -> None:
    x, y = gallery(60)
    rng = torch.Generator().manual_seed(2)
    guess = x[:20, None] + 1.6 * torch.randn(20, 1, 1, 12, 12, generator=rng)

    def standard(image: Tensor) -> Tensor:
        flat = image.double().flatten()
        return (flat - flat.mean()) / flat.std(unbiased=False)

    slow = []
    for place in range(20):
        far = [float((standard(guess[place]) - standard(one)).square().sum()) for one in x]
        slow.append(float(min(range(60), key=far.__getitem__) == place))
    assert 0 < sum(slow) < 20
    found = share_recognised(guess, x[:20, None], y[:20, None], Gallery(x, y)).tolist()
    assert found == slow


def test_half_of_a_gallery_is_of_the_class_and_it_is_always_the_same() -> None:
    x = torch.arange(4000.0).view(-1, 1, 1, 1) * torch.rand(1, 1, 11, 11) + torch.rand(1, 1, 11, 11)
    y = torch.arange(4000) % 4
    one, again = Gallery(x, y).of(3), Gallery(x, y).of(3)
    assert len(one) == 1000
    assert torch.equal(one, again)
    small = Gallery(x[:10], y[:10])
    assert len(small.of(0)) == 10


def test_a_record_matches_exactly_where_every_attribute_is_right() -> None:
    x = torch.tensor([[[0.2, 1.0, 0.0]], [[0.2, 1.0, 0.0]], [[0.2, 1.0, 0.0]]])
    guess = torch.tensor([[[0.24, 0.6, 0.5]], [[0.24, 0.4, 0.5]], [[0.26, 0.9, 0.1]]])
    assert exact_matches(guess, x, ((1, 3),)).tolist() == [1.0, 0.0, 0.0]
