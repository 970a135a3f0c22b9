"""Names of the metrics, apart from their computation: reports need no torch."""

METRICS = (
    "ssim", "mse", "psnr", "success", "leacc", "lnacc", "irec", "label_accuracy",
    "attribute_accuracy",
)  # fmt: skip
"""success: share of samples with SSIM > 0.9. attribute_accuracy: share of one-hot groups whose
largest entry is right. Metrics that do not apply are absent."""
