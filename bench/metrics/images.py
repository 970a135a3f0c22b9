"""Image distances: images in [0, 1], data range 1, float64, batched."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 11
_SIGMA = 1.5
_C1, _C2 = 0.01**2, 0.03**2
_LEAST_MSE = 1e-10


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Mean structural similarity of images a, b [..., C, H, W] in [0, 1] -> float64 [...].

    Gaussian weights (sigma 1.5, 11x11 pixels), population covariance, data range 1, mean over
    valid windows and channels: scikit-image's structural_similarity(gaussian_weights=True,
    sigma=1.5, use_sample_covariance=False, data_range=1.0), equal to 1e-6.
    Raises ValueError for shapes that differ or sides below 11.
    Source: Wang, Bovik, Sheikh, Simoncelli 2004.
    """
    _same(a, b)
    if min(a.shape[-2:]) < WINDOW:
        raise ValueError(
            f"SSIM needs images of at least {WINDOW}x{WINDOW} pixels, got "
            f"{a.shape[-2]}x{a.shape[-1]}."
        )
    lead = a.shape[:-3]
    x = a.double().reshape(-1, 1, *a.shape[-2:])
    y = b.double().reshape(-1, 1, *b.shape[-2:])
    stacked = torch.cat([x, y, x * x, y * y, x * y])
    mx, my, xx, yy, xy = _blur(stacked).chunk(5)
    vx, vy, vxy = xx - mx * mx, yy - my * my, xy - mx * my
    top = (2 * mx * my + _C1) * (2 * vxy + _C2)
    bottom = (mx * mx + my * my + _C1) * (vx + vy + _C2)
    return (top / bottom).mean(dim=(1, 2, 3)).reshape(*lead, a.shape[-3]).mean(dim=-1)


def _blur(images: Tensor) -> Tensor:
    """Separable Gaussian window over the valid region, [N, 1, H, W]."""
    reach = torch.arange(WINDOW, dtype=torch.float64, device=images.device) - WINDOW // 2
    kernel = torch.exp(-0.5 * (reach / _SIGMA) ** 2)
    kernel = kernel / kernel.sum()
    rows = torch.nn.functional.conv2d(images, kernel.view(1, 1, -1, 1))
    return torch.nn.functional.conv2d(rows, kernel.view(1, 1, 1, -1))


def mse(a: Tensor, b: Tensor, *, sample_dims: int) -> Tensor:
    """Mean squared error over the last `sample_dims` dimensions, float64."""
    _same(a, b)
    return (a.double() - b.double()).square().flatten(-sample_dims).mean(dim=-1)


def psnr(squared_error: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB for data range 1; capped at 100 dB (MSE 1e-10)."""
    return -10 * torch.log10(squared_error.clamp_min(_LEAST_MSE))


def _same(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {list(a.shape)} and {list(b.shape)}.")
