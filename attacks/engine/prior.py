"""What public data says about a sample before any message is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.toolkit.batches import class_means

_FEWEST, _NOTHING, _BROAD = 10, 1e-6, 0.3
"""Samples that a covariance needs, what is no difference between them, and a pixel's standard
deviation without them."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Gaussian prior of samples, fitted on public data, as a change of variables.

    x = mean + factor z with z ~ N(0, I): in z the prior's Hessian is the identity, so the prior
    weighs against the likelihood by itself (the more noise, the more it counts) and L-BFGS is
    well conditioned. Covariances are shrunk (Ledoit-Wolf), diagonal above 4096 dimensions.

    Attributes:
        mean: Of all samples [D].
        class_means: Of each class [C, D].
        total: Factor [D, D] of all samples' covariance.
        within: Factor [D, D] of the covariance given the class.
    """

    mean: Tensor
    class_means: Tensor
    total: Tensor
    within: Tensor

    @staticmethod
    def fit(aux_x: Tensor, aux_y: Tensor, classes: int) -> Frame:
        """From public samples [N, ...] and their labels [N]."""
        flat = aux_x.flatten(1)
        mean = flat.mean(dim=0)
        means = class_means(flat, aux_y, classes=classes)
        return Frame(
            mean=mean,
            class_means=means,
            total=_factor(flat - mean),
            within=_factor(flat - means[aux_y]),
        )

    def relative(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Samples [V, K, *shape] as z [V, K, D]; labels: their classes [V, K], if known."""
        centre = self.mean if labels is None else self.class_means[labels]
        factor = self.total if labels is None else self.within
        away = (x.flatten(2) - centre).mT
        return torch.linalg.solve_triangular(factor, away, upper=False).mT

    def distance(self, x: Tensor, labels: Tensor) -> Tensor:
        """|z|^2 / 2 of labelled samples, summed over a victim's [V]."""
        return self.relative(x, labels).square().sum(dim=(1, 2)) / 2


def _factor(centred: Tensor) -> Tensor:
    """Square root [D, D] of the shrunk covariance of centred samples [N, D]; of fewer than ten, or
    of copies of one, which tell too little, that of independent values."""
    if len(centred) < _FEWEST or float(centred.abs().max()) < _NOTHING:
        return _BROAD * torch.eye(centred.shape[1]).to(centred)
    if centred.shape[1] > 4096:
        return torch.diag(centred.std(dim=0).clamp_min(1e-3))
    from sklearn.covariance import ledoit_wolf

    # The estimator's class would invert it as well, which takes most of the time.
    covariance, _ = ledoit_wolf(centred.double().cpu().numpy(), assume_centered=True)
    scaled = torch.from_numpy(covariance)
    ridge = 1e-6 * scaled.diagonal().mean() * torch.eye(len(scaled), dtype=scaled.dtype)
    return torch.linalg.cholesky(scaled + ridge).to(centred)
