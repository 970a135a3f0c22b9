"""Candidate images and labels as vectors of an optimiser."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from attacks.engine.prior import Frame
from attacks.engine.terms import Candidate
from bench.api import Context


class Encoding:
    """Vectors [P, K * D (+ O) (+ K * C)]: images, then what their clients kept to themselves, then
    label logits unless labels are held.

    Args:
        ctx: The attack's.
        samples: Per problem.
        dtype: Of all tensors, on the context's device.
        framed: Whether image vectors are relative to the public prior (see `Frame`), else plain.
        bounded: Whether plain images stay in [0, 1] by a cosine of the vector.
        own: Numbers O that say what a client kept (see `OwnValues`).
    """

    def __init__(
        self,
        ctx: Context,
        *,
        samples: int,
        dtype: torch.dtype,
        framed: bool = False,
        bounded: bool = False,
        own: int = 0,
    ) -> None:
        self.ctx, self.samples, self.dtype, self.framed = ctx, samples, dtype, framed
        self.shape, self.classes = tuple(ctx.network.shape), ctx.network.classes
        self.bounded, self.own = bounded and self.image, own

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
        return Frame.fit(aux_x, ctx.aux_y.to(ctx.device), self.classes)

    def candidate(self, z: Tensor, held: Tensor | None) -> Candidate:
        """What the vectors z stand for, with labels int64 [P, K] held or read off z."""
        if held is None:
            y = self.labels_in(z)
        else:
            y = torch.nn.functional.one_hot(held, self.classes).to(z)
        vectors = z[..., : self.pixels + self.own]
        x = self._decoded(vectors[..., : self.pixels], held)
        own = vectors[..., self.pixels :] if self.own else None
        return Candidate(x=x, y=y, vectors=vectors, own=own)

    def images(self, z: Tensor, held: Tensor | None) -> Tensor:
        """Vectors [P, N] -> images [P, K, *shape]."""
        return self._decoded(z.to(self.dtype)[..., : self.pixels], held)

    def vectors(self, x: Tensor) -> Tensor:
        """Plain images [P, K * D] as vectors."""
        if not self.bounded:
            return x
        return torch.arccos(1 - 2 * x.clamp(0.001, 0.999)) / math.pi

    def vectors_of(self, x: Tensor, held: Tensor | None) -> Tensor:
        """Images [P, K, *shape] as vectors [P, K * D]; inverse of `images`."""
        if not self.framed:
            return self.vectors(x.flatten(1))
        return self.frame.relative(x, held).flatten(1)

    def labels_in(self, z: Tensor) -> Tensor:
        """[..., N] -> soft labels [..., K, C] from the logits behind the images."""
        logits = z[..., self.pixels + self.own :].reshape(*z.shape[:-1], self.samples, self.classes)
        return torch.softmax(logits, dim=-1)

    def _decoded(self, vectors: Tensor, held: Tensor | None) -> Tensor:
        x = vectors.reshape(len(vectors), self.samples, -1)
        if self.framed and held is None:
            x = x @ self.frame.total.mT + self.frame.mean
        elif self.framed:
            x = x @ self.frame.within.mT + self.frame.class_means[held]
        elif self.bounded:
            x = (1 - torch.cos(math.pi * x)) / 2
        return x.contiguous().reshape(len(vectors), self.samples, *self.shape)
