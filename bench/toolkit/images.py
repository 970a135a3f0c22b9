"""Image distances: images in [0, 1], data range 1, float64, batched."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

WINDOW = 11
_SIGMA = 1.5
_C1, _C2 = 0.01**2, 0.03**2
_LEAST_MSE = 1e-10
_STEPS, _MOST = 25, 384
"""Of the ascent in `most_similar`: its steps, and the images that it sees."""
_CHUNK_PIXELS = 1 << 15
"""Pixels processed at once: four float64 maps of them are 1 MiB and stay in a CPU's cache."""
_DEVICE_CHUNK_PIXELS = 1 << 24
"""On other devices, where few launches matter more: 0.5 GiB a map stack."""


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Mean structural similarity of images [..., C, H, W] in [0, 1], float64 [...].

    Gaussian weights (sigma 1.5, 11x11 pixels), population covariance, data range 1, mean over
    valid windows and channels: scikit-image's structural_similarity(gaussian_weights=True,
    sigma=1.5, use_sample_covariance=False, data_range=1.0), equal to 1e-6. It carries no gradient.
    Source: Wang, Bovik, Sheikh, Simoncelli 2004.

    Raises:
        ValueError: For shapes that differ or sides below 11.
    """
    same_shape(a, b)
    if min(a.shape[-2:]) < WINDOW:
        raise ValueError(
            f"SSIM needs images of at least {WINDOW}x{WINDOW} pixels, got "
            f"{a.shape[-2]}x{a.shape[-1]}."
        )
    x, y = (t.detach().double().reshape(-1, *t.shape[-3:]) for t in (a, b))
    pixels = _CHUNK_PIXELS if a.device.type == "cpu" else _DEVICE_CHUNK_PIXELS
    at_once = max(1, pixels // math.prod(a.shape[-3:]))
    pairs = zip(x.split(at_once), y.split(at_once), strict=True)
    values = [similar_to(two)(one, slice(None)) for one, two in pairs]
    return torch.cat(values).reshape(a.shape[:-3])


def similar_to(x: Tensor) -> Callable[[Tensor, Tensor | slice], Tensor]:
    """SSIM with fixed images x [N, C, H, W] of others, with its gradient, in float64.

    Returns:
        A function of images [S, C, H, W] and of slots, int64 [N]: the SSIM [N] of every image of x
        with that of its slot. What follows from x alone is computed once.
    """
    x = x.double()
    down, across = (_window_matrix(side).to(x.device) for side in x.shape[-2:])

    def blur(maps: Tensor) -> Tensor:
        return down @ maps @ across.T

    mx = blur(x)
    vx = blur(x * x) - mx * mx

    def similar(images: Tensor, slots: Tensor | slice) -> Tensor:
        mean = blur(images)
        variance = (blur(images * images) - mean * mean)[slots]
        mean = mean[slots]
        covariance = blur(images[slots] * x) - mean * mx
        top = (2 * mean * mx + _C1) * (2 * covariance + _C2)
        bottom = (mean * mean + mx * mx + _C1) * (variance + vx + _C2)
        return (top / bottom).mean(dim=(1, 2, 3))

    return similar


def most_similar(x: Tensor, slots: Tensor, start: Tensor) -> Tensor:
    """Return images [count, C, H, W] in [0, 1] of the largest mean SSIM with the images of their
    slots that L-BFGS finds in a few steps.

    Args:
        x: Images [N, C, H, W], of which the first few hundred are used.
        slots: Which of the returned images each of them is compared with, int64 [N].
        start: Where to begin, such as the mean of each slot.
    """
    from scipy.optimize import Bounds, minimize

    similar, slots = similar_to(x[:_MOST]), slots[:_MOST]

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        guess = torch.from_numpy(flat).view(start.shape).requires_grad_()
        value = -similar(guess, slots).mean()
        (slope,) = torch.autograd.grad(value, guess)
        return float(value.detach()), slope.numpy().ravel()

    first = start.double().clamp(0, 1).numpy().ravel()
    optimum = minimize(
        loss, first, jac=True, method="L-BFGS-B", bounds=Bounds(0, 1), options={"maxiter": _STEPS}
    )
    return torch.from_numpy(optimum.x).view(start.shape).to(x.dtype)


def _window_matrix(length: int) -> Tensor:
    """[length - 10, length]: row i holds the Gaussian window from column i on."""
    reach = torch.arange(length)[None] - torch.arange(length - WINDOW + 1)[:, None]
    kernel = torch.exp(-0.5 * ((reach - WINDOW // 2).double() / _SIGMA) ** 2)
    kernel = kernel * ((reach >= 0) & (reach < WINDOW))
    return kernel / kernel.sum(dim=1, keepdim=True)


def mse(a: Tensor, b: Tensor, *, sample_dims: int) -> Tensor:
    """Mean squared error over the last `sample_dims` dimensions, float64."""
    same_shape(a, b)
    return (a.double() - b.double()).square().flatten(-sample_dims).mean(dim=-1)


def psnr(squared_error: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB for data range 1; capped at 100 dB (MSE 1e-10)."""
    return -10 * torch.log10(squared_error.clamp_min(_LEAST_MSE))


def same_shape(a: Tensor, b: Tensor) -> None:
    """Raises ValueError if the shapes differ."""
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {list(a.shape)} and {list(b.shape)}.")
