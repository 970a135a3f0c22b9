"""Names of the metrics, apart from their computation: reports need no torch."""

METRICS = (
    *("ssim", "mse", "psnr", "success"),
    *("leacc", "lnacc", "irec", "label_accuracy"),
    "attribute_accuracy",
)
"""success: share of samples with SSIM > 0.9. attribute_accuracy: share of one-hot groups whose
largest entry is right. Metrics that do not apply are absent."""
TITLES = {"ssim": "SSIM", "mse": "MSE", "lnacc": "LnAcc"}
"""Of the metrics that have columns of their own."""


def sign_of(metric: str) -> float:
    """1 where a larger value of the metric is the larger leak; -1 of the MSE, whose smaller is."""
    return -1.0 if metric == "mse" else 1.0
