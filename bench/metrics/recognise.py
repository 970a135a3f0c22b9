"""Whether a reconstruction is nearest to the image that it is of, among others like it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.seeding import numpy_generator

OTHERS = 999
"""Most images that a reconstruction is compared with beside the true one."""
EXACT = 0.05
"""Largest error of a numeric column of a record that counts as the same value, in standard
deviations."""

_SAME = 1e-9
"""Largest squared error, as a share of an image's squared length, of a copy of it."""


@dataclass(frozen=True, eq=False)
class Gallery:
    """Images of a data set with which reconstructions are compared.

    Attributes:
        x: Images [N, C, H, W].
        y: Their labels [N].
    """

    x: Tensor
    y: Tensor

    def of(self, label: int) -> Tensor:
        """Return up to 1,000 standardised images [M, D], half of them of a class; always the same
        ones."""
        labels = self.y.cpu().numpy()
        order = numpy_generator(0, "gallery", label).permutation(len(labels))
        mine = labels[order] == label
        same = order[mine][: (OTHERS + 1) // 2]
        different = order[~mine][: OTHERS + 1 - len(same)]
        chosen = torch.from_numpy(np.sort(np.concatenate([same, different])))
        return _standardise(self.x[chosen].cpu())


def share_recognised(guess: Tensor, x: Tensor, y: Tensor, gallery: Gallery) -> Tensor:
    """Return per victim the share of samples whose true image is the nearest to its reconstruction.

    Nearest by squared error of images that are each standardised (mean 0, variance 1), so that
    neither brightness nor contrast counts, among the true image and at most 999 others of the data
    set, half of them of its class. Copies of the true image are no others. A tie is no recognition.

    Args:
        guess: Reconstructions [V, K, C, H, W], matched with the truth.
        x: The true images.
        y: Their labels [V, K].
        gallery: The others.

    Returns:
        float64 [V], from 0 to 1.
    """
    guessed, true = (_standardise(t.cpu().flatten(0, 1)) for t in (guess, x))
    labels = y.cpu().flatten()
    own = (guessed - true).square().sum(dim=1)
    hits = torch.zeros(len(guessed), dtype=torch.float64)
    for label in labels.unique().tolist():
        of = (labels == label).nonzero()[:, 0]
        others = gallery.of(int(label))
        far = torch.cdist(guessed[of], others).square()
        # Relative to D, the squared length of a standardised image: cdist rounds.
        far[torch.cdist(true[of], others).square() < _SAME * true.shape[1]] = torch.inf
        hits[of] = (own[of] < far.min(dim=1).values - 1e-9).double()
    return hits.view(y.shape).mean(dim=1)


def exact_matches(guess: Tensor, x: Tensor, categorical: tuple[tuple[int, int], ...]) -> Tensor:
    """Return per victim the share of records whose every attribute is right.

    Of one-hot groups the largest entry, of numeric columns the value up to EXACT.

    Args:
        guess: Reconstructions [V, K, D], matched with the truth.
        x: The true records.
        categorical: Groups of one-hot columns, as (first, last + 1).

    Returns:
        float64 [V], from 0 to 1.
    """
    numeric = torch.ones(x.shape[-1], dtype=torch.bool)
    right = torch.ones(x.shape[:2], dtype=torch.bool)
    for first, last in categorical:
        numeric[first:last] = False
        right &= guess[..., first:last].argmax(-1) == x[..., first:last].argmax(-1)
    right &= ((guess - x)[..., numeric].abs() <= EXACT).all(dim=-1)
    return right.double().mean(dim=1)


def _standardise(images: Tensor) -> Tensor:
    """Return images [N, ...] as float64 [N, D] of mean 0 and variance 1; constant ones are 0."""
    flat = images.double().flatten(1)
    flat = flat - flat.mean(dim=1, keepdim=True)
    return flat / flat.std(dim=1, unbiased=False, keepdim=True).clamp_min(1e-12)
