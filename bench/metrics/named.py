"""The metrics, an entry of `METRICS` each. A new metric of images is one entry with a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What scores, reports and comparisons know of a metric.

    Attributes:
        title: Its name for readers.
        sign: 1 where a larger value is the larger leak, -1 where a smaller one is.
        least: The least score.
        most: The largest score.
        perfect: What a perfect copy scores.
        of_images: (reconstructions, true images), both [V, K, C, H, W], values in [0, 1], matched
            one to one -> scores [V, K], of which a victim's figure is the mean. It imports torch
            itself, since reports need none. None: `metrics/score.py` makes the scores.
    """

    title: str
    sign: float = 1.0
    least: float = 0.0
    most: float = 1.0
    perfect: float = 1.0
    of_images: Callable[[Tensor, Tensor], Tensor] | None = None


def _psnr(guess: Tensor, truth: Tensor) -> Tensor:
    from bench.toolkit import images

    return images.psnr(images.mse(guess, truth, sample_dims=3))


METRICS: dict[str, Metric] = {
    "ssim": Metric(title="SSIM"),
    "mse": Metric(title="MSE", sign=-1.0, most=math.inf, perfect=0.0),
    "psnr": Metric(title="psnr", least=-math.inf, most=100.0, perfect=100.0, of_images=_psnr),
    "success": Metric(title="success"),
    "leacc": Metric(title="leacc"),
    "lnacc": Metric(title="LnAcc"),
    "irec": Metric(title="irec"),
    "label_accuracy": Metric(title="label_accuracy"),
    "attribute_accuracy": Metric(title="attribute_accuracy"),
    "recognised": Metric(title="recognised"),
    "exact": Metric(title="exact"),
    "ssim_anyone": Metric(title="ssim_anyone"),
    "mse_anyone": Metric(title="mse_anyone", sign=-1.0, most=math.inf, perfect=0.0),
}
"""success: share of samples with SSIM > 0.9. attribute_accuracy: share of one-hot groups whose
largest entry is right. recognised: share of images that are the nearest to their reconstruction
among 1,000. exact: share of records with every attribute right. ssim_anyone, mse_anyone: where the
answers of all clients are matched one to one with the samples of all of them. Metrics that do
not apply are absent. An SSIM may be below 0, which no answer worth having is."""
FLOOR_SUFFIX = "_class_mean"
"""Of a floor's name where the true labels are given."""


def sign_of(metric: str) -> float:
    """Return 1 where a larger value of the metric is the larger leak, -1 where a smaller one is."""
    return METRICS[metric.removesuffix(FLOOR_SUFFIX)].sign


def range_of(metric: str) -> tuple[float, float]:
    """Return the least and largest score of a metric."""
    return METRICS[metric].least, METRICS[metric].most


def leak(score: float, floor: float, metric: str) -> float:
    """Return the part of the way from its floor to a perfect copy that a score has covered: (score
    - floor) / (perfect - floor), at least 0. It is 0 where the floor itself is perfect."""
    way = METRICS[metric].perfect - floor
    return max(0.0, (score - floor) / way) if way else 0.0
