"""Curvature pairs of many independent problems, and the quasi-Newton steps that they give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CURVATURE = 1e-8
"""Least curvature of a pair that is kept, in units of its lengths."""


@dataclass
class CurvatureMemory:
    """Curvature pairs of P problems in the compact representation.

    The small systems are float64.
    Source: Byrd, Nocedal, Schnabel 1994, Eq. 3.2.

    Attributes:
        pairs: Steps and gradient changes in a ring [P, 2, M, N].
        full: Which slots hold a pair, bool [P, M]; what lies in the others is finite and counts
            as zero.
        place: The next slot, int64 [P].
        across: s_i . y_j by slot [P, M, M], valid where i is not younger than j; 0 for an empty
            slot.
        gram: y_i . y_j by slot [P, M, M], 0 for an empty slot.
        gamma: Scale of the initial inverse Hessian [P], 0 without curvature.
    """

    pairs: Tensor
    full: Tensor
    place: Tensor
    across: Tensor
    gram: Tensor
    gamma: Tensor

    @staticmethod
    def empty(count: int, history: int, like: Tensor) -> CurvatureMemory:
        small = torch.zeros(count, history, history, dtype=torch.float64, device=like.device)
        return CurvatureMemory(
            pairs=like.new_zeros(count, 2, history, like.shape[1]),
            full=torch.zeros(count, history, dtype=torch.bool, device=like.device),
            place=torch.zeros(count, dtype=torch.int64, device=like.device),
            across=small,
            gram=small.clone(),
            gamma=torch.zeros(count, dtype=torch.float64, device=like.device),
        )

    def tensors(self) -> list[Tensor]:
        return [self.pairs, self.full, self.place, self.across, self.gram, self.gamma]

    def to(self, dtype: torch.dtype) -> CurvatureMemory:
        return CurvatureMemory(self.pairs.to(dtype), *self.tensors()[1:])

    def forget(self, which: Tensor) -> None:
        """Empty the memory of those of the first A problems, bool [A]."""
        if _surely_empty(which):
            return
        active = len(which)
        # The pairs stay where they are: they are large, and nothing reads an empty slot.
        for tensor in self.tensors()[1:]:
            tensor[:active].masked_fill_(_column(which, tensor), 0)

    def learn(
        self, moved: Tensor, change: Tensor, accepted: Tensor, gradient: Tensor, first_move: float
    ) -> Tensor:
        """Store the pairs of accepted steps whose curvature passes a relative test, and give
        the next direction of every problem. All of [A, N], for the first A problems."""
        curvature = (moved * change).sum(dim=1)
        lengths = moved.norm(dim=1) * change.norm(dim=1)
        taken = accepted & (curvature > _CURVATURE * lengths)
        if _surely_empty(taken):
            return self.direction(gradient, first_move)
        active = len(moved)
        everyone, slot = torch.arange(active, device=moved.device), self.place[:active]
        pairs, full, place, across, gram, gamma = (t[:active] for t in self.tensors())

        all_taken = _surely_empty(~taken)

        def put(target: Tensor, where: tuple[Tensor | slice | int, ...], value: Tensor) -> None:
            if not all_taken:
                value = torch.where(_column(taken, value), value, target[where])
            target[where] = value

        put(pairs, (everyone, 0, slot), moved)
        put(pairs, (everyone, 1, slot), change)
        full[everyone, slot] |= taken
        # One pass over the memory for both products: it is read from far away.
        products = self._products(torch.stack([change, gradient], dim=-1))
        put(across, (everyone, slice(None), slot), products[:, 0, :, 0])
        put(gram, (everyone, slice(None), slot), products[:, 1, :, 0])
        put(gram, (everyone, slot), products[:, 1, :, 0])
        scale = (curvature / change.square().sum(dim=1)).double()
        gamma.copy_(torch.where(taken, scale, gamma))
        place.copy_(torch.where(taken, (slot + 1) % across.shape[1], place))
        return self._toward(gradient, products[..., 1], first_move)

    def direction(self, gradient: Tensor, first_move: float) -> Tensor:
        """-H g per problem; steepest descent of length `first_move` where there is no curvature
        yet or where -H g does not descend."""
        if not len(gradient):
            return gradient
        products = self._products(gradient[..., None])[..., 0]
        return self._toward(gradient, products, first_move)

    def _products(self, vectors: Tensor) -> Tensor:
        """vectors [A, N, R] -> [A, 2, M, R] in float64, 0 for an empty slot."""
        pairs, full = self.pairs[: len(vectors)], self.full[: len(vectors)]
        # Few rows by a wide transpose: the other way round is a quarter as fast.
        found = vectors.mT.contiguous() @ pairs.flatten(1, 2).mT
        products = found.mT.unflatten(1, pairs.shape[1:3]).double()
        return torch.where(full[:, None, :, None], products, 0.0)

    def _toward(self, gradient: Tensor, products: Tensor, first_move: float) -> Tensor:
        active, size = len(gradient), self.across.shape[1]
        lengths = gradient.norm(dim=1)
        steepest = -gradient * (first_move / lengths.clamp_min(1e-300))[:, None]
        gamma = self.gamma[:active, None]
        if _surely_empty(gamma > 0):
            return steepest
        # Age order, oldest first: there the products s_i . y_j, i <= j, are upper triangular.
        slots = torch.arange(size, device=gradient.device)
        age = (self.place[:active, None] + slots) % size
        across = self._by_age(self.across[:active], age).triu()
        gram = self._by_age(self.gram[:active], age)
        diagonal = across.diagonal(dim1=1, dim2=2)
        across = across + torch.diag_embed((diagonal == 0).to(across))  # makes empty slots inert
        moves = products[:, 0].gather(1, age)
        changes = products[:, 1].gather(1, age)
        u = torch.linalg.solve_triangular(across, moves[..., None], upper=True)
        inner = diagonal * u[..., 0] + gamma * ((gram @ u)[..., 0] - changes)
        top = torch.linalg.solve_triangular(across.mT, inner[..., None], upper=False)
        weights = torch.stack([top[..., 0], -gamma * u[..., 0]], dim=1)
        by_slot = torch.empty_like(weights).scatter_(2, age[:, None].expand_as(weights), weights)
        pairs = self.pairs[:active].flatten(1, 2)
        combined = (by_slot.flatten(1)[:, None].to(gradient) @ pairs).squeeze(1)
        newton = gamma.to(gradient) * gradient + combined
        descends = (newton * gradient).sum(dim=1) > 1e-12 * newton.norm(dim=1) * lengths
        return torch.where(((gamma[:, 0] > 0) & descends)[:, None], -newton, steepest)

    @staticmethod
    def _by_age(matrix: Tensor, age: Tensor) -> Tensor:
        rows = matrix.gather(1, age[:, :, None].expand_as(matrix))
        return rows.gather(2, age[:, None, :].expand_as(matrix))


def _surely_empty(mask: Tensor) -> bool:
    """Whether no entry is set, where the host can know without waiting."""
    return mask.device.type == "cpu" and not bool(mask.any())


def _column(which: Tensor, like: Tensor) -> Tensor:
    """[A] -> [A, 1, ...] with the dimensions of `like`."""
    return which.view(-1, *[1] * (like.ndim - 1))
