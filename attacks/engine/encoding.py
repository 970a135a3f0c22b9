"""Candidate images and labels as vectors of an optimiser, relative to what public data says about a
sample before any message is read."""

import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import torch
from torch import Tensor

from attacks.engine.terms import Candidate
from bench.api import Context

_FEWEST, _NOTHING, _BROAD = 10, 1e-6, 0.3
"""Samples that a covariance needs, what is no difference between them, and a pixel's standard
deviation without them."""


class Frame:
    """Gaussian prior of samples, fitted on public data, as a change of variables.

    x = mean + factor z with z ~ N(0, I): in z the prior's Hessian is the identity, so the prior
    weighs against the likelihood by itself (the more noise, the more it counts) and L-BFGS is
    well conditioned. Covariances are shrunk (Ledoit-Wolf), diagonal above 4096 dimensions.

    Args:
        aux_x: Public samples [N, ...].
        aux_y: Their labels int64 [N].
        classes: Number of classes C.

    Attributes:
        mean: Of all samples [D].
        class_means: Of each class [C, D].
        total: Factor [D, D] of all samples' covariance.
        within: Factor [D, D] of the covariance given the class.
    """

    def __init__(self, aux_x: Tensor, aux_y: Tensor, classes: int) -> None:
        flat = aux_x.flatten(1)
        self.mean = flat.mean(dim=0)
        self.class_means, by_others = shrunk_means(flat, aux_y, classes)
        self.total, self.within = _factor(flat - self.mean), _factor(flat - by_others)

    def relative(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Samples [V, K, *shape] as z [V, K, D]; labels: their classes [V, K], if known."""
        centre = self.mean if labels is None else self.class_means[labels]
        factor = self.total if labels is None else self.within
        away = (x.flatten(2) - centre).mT
        return torch.linalg.solve_triangular(factor, away, upper=False).mT

    def distance(self, x: Tensor, labels: Tensor) -> Tensor:
        """|z|^2 / 2 of labelled samples, summed over a victim's [V]."""
        return self.relative(x, labels).square().sum(dim=(1, 2)) / 2


def shrunk_means(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Means of classes [C, D], and of each sample's class as the others tell it [N, D].

    Means are drawn to the mean of all, the more the fewer samples a class has and the less classes
    differ: the posterior means of classes that are normal around it (empirical Bayes).

    Args:
        x: Samples [N, D].
        y: Their labels int64 [N].
        classes: Number of classes C.
    """
    everyone, counts = x.mean(dim=0), torch.bincount(y, minlength=classes).to(x)
    away = x - everyone
    sums = x.new_zeros(classes, x.shape[1]).index_add(0, y, away)
    plain = sums / counts.clamp_min(1)[:, None]
    present = counts[counts > 0]
    if len(present) == len(x):
        return everyone.expand_as(plain), everyone.expand_as(x)
    within = (away - plain[y]).square().sum() / (len(x) - len(present))
    between = plain.square().sum() / len(present) - within * (1 / present).mean()
    needed = (within / between.clamp_min(_NOTHING * within)).nan_to_num(1)  # that count half
    means = everyone + sums / (counts + needed)[:, None]
    by_others = everyone + (sums[y] - away) / (counts[y] - 1 + needed).clamp_min(_NOTHING)[:, None]
    return means, by_others


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


@dataclass(eq=False)
class Encoding:
    """Vectors [P, K * D (+ O) (+ K * C)]: images, then what their clients kept to themselves, then
    label logits unless labels are held.

    Args:
        ctx: The attack's.
        samples: Per problem.
        dtype: Of all tensors, on the context's device.
        framed: Whether image vectors are relative to the public prior (see `Frame`), else plain.
        own: Numbers O that say what a client kept (see `OwnValues`).
    """

    ctx: Context
    _: KW_ONLY
    samples: int
    dtype: torch.dtype
    framed: bool = False
    own: int = 0

    def __post_init__(self) -> None:
        self.shape, self.classes = tuple(self.ctx.network.shape), self.ctx.network.classes

    @property
    def image(self) -> bool:
        """Whether samples are images, not tabular records."""
        return len(self.shape) == 3

    @property
    def pixels(self) -> int:
        """Numbers in one problem's images."""
        return self.samples * math.prod(self.shape)

    @cached_property
    def frame(self) -> Frame:
        """The prior; costly above a thousand dimensions, so made when first needed."""
        ctx = self.ctx
        aux_x = ctx.aux_x.to(dtype=self.dtype, device=ctx.device)
        return Frame(aux_x, ctx.aux_y.to(ctx.device), self.classes)

    def candidate(self, z: Tensor, held: Tensor | None) -> Candidate:
        """What the vectors z stand for, with labels int64 [P, K] held or read off z."""
        if held is None:
            y = self.labels_in(z)
        else:
            y = torch.nn.functional.one_hot(held, self.classes).to(z)
        vectors = z[..., : self.pixels + self.own]
        own = vectors[..., self.pixels :] if self.own else None
        return Candidate(x=self.images(z, held), y=y, vectors=vectors, own=own)

    def images(self, z: Tensor, held: Tensor | None) -> Tensor:
        """Vectors [P, N] -> images [P, K, *shape]."""
        x = z.to(self.dtype)[..., : self.pixels].reshape(len(z), self.samples, -1)
        if self.framed and held is None:
            x = x @ self.frame.total.mT + self.frame.mean
        elif self.framed:
            x = x @ self.frame.within.mT + self.frame.class_means[held]
        return x.contiguous().reshape(len(z), self.samples, *self.shape)

    def vectors_of(self, x: Tensor, held: Tensor | None) -> Tensor:
        """Images [P, K, *shape] as vectors [P, K * D]; inverse of `images`."""
        if not self.framed:
            return x.flatten(1)
        return self.frame.relative(x, held).flatten(1)

    def labels_in(self, z: Tensor) -> Tensor:
        """[..., N] -> soft labels [..., K, C] from the logits behind the images."""
        logits = z[..., self.pixels + self.own :].reshape(*z.shape[:-1], self.samples, self.classes)
        return torch.softmax(logits, dim=-1)
