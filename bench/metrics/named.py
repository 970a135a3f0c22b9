"""Names of the metrics, apart from their computation: reports need no torch."""

import math

METRICS = (
    *("ssim", "mse", "psnr", "success"),
    *("leacc", "lnacc", "irec", "label_accuracy"),
    *("attribute_accuracy", "recognised", "exact"),
    *("ssim_anyone", "mse_anyone"),
)
"""success: share of samples with SSIM > 0.9. attribute_accuracy: share of one-hot groups whose
largest entry is right. recognised: share of images that are the nearest to their reconstruction
among 1,000. exact: share of records with every attribute right. ssim_anyone, mse_anyone: where the
answers of all clients are matched one to one with the samples of all of them. Metrics that do
not apply are absent."""
TITLES = {"ssim": "SSIM", "mse": "MSE", "lnacc": "LnAcc"}
"""Of the metrics that have columns of their own."""
FLOOR_SUFFIX = "_class_mean"
"""Of a floor's name where the true labels are given."""


def sign_of(metric: str) -> float:
    """1 where a larger value of the metric is the larger leak; -1 of the MSE, whose smaller is."""
    return -1.0 if metric.startswith("mse") else 1.0


PERFECT = {"mse": 0.0, "mse_anyone": 0.0, "psnr": 100.0}
"""What a perfect copy scores by each metric; 1 by all others."""
RANGES = {
    "mse": (0.0, math.inf),
    "mse_anyone": (0.0, math.inf),
    "psnr": (-math.inf, 100.0),
}
"""Least and largest score of each metric; 0 and 1 of all others. An SSIM may be below 0, which no
answer worth having is."""


def range_of(metric: str) -> tuple[float, float]:
    """Least and largest score of a metric."""
    return RANGES.get(metric, (0.0, 1.0))


def leak(score: float, floor: float, metric: str) -> float:
    """Return the part of the way from its floor to a perfect copy that a score has covered: (score
    - floor) / (perfect - floor), at least 0. It is 0 where the floor itself is perfect."""
    way = PERFECT.get(metric, 1.0) - floor
    return max(0.0, (score - floor) / way) if way else 0.0
