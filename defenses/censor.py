"""CENSOR: in place of the gradient, a random direction that is orthogonal to it."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import one_hot

from bench.api import (
    Base,
    Client,
    Defense,
    Event,
    Facts,
    Local,
    Mechanism,
    Message,
    Prepared,
    State,
    Unprotected,
    sizes_of,
)
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import change_uploads, gaussian_like, replace_values

Variant = Literal["printed", "orthogonal"]
NEAR = 1e-4
"""Error of a tensor's norm, and of the cosine, that an attack reckons with."""
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class Turned(Mechanism):
    """Each tensor of a gradient is turned at random: its norm stays, its direction goes.

    Attributes:
        orthogonal: Whether what is sent is orthogonal to the gradient, tensor by tensor.
    """

    orthogonal: bool
    faithful = False

    def gradient_variance(
        self, estimate: Tensor, *, base: Tensor, step: float, decided: bool = False
    ) -> Tensor:
        return estimate.square().mean().expand_as(estimate)

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        """The norm of each tensor and, where it is orthogonal, a cosine of 0."""
        law = partial(_misfit, sizes=sizes_of(base, seen), orthogonal=self.orthogonal)
        return Prepared(law, (seen,))


def _misfit(
    sent: Tensor, seen: Tensor, *, sizes: list[int], orthogonal: bool
) -> tuple[Tensor, Tensor]:
    sent, seen = torch.broadcast_tensors(sent, seen)
    shape, sent, seen = sent.shape, *(t.reshape(-1, sum(sizes)) for t in (sent, seen))

    def loss(sent: Tensor) -> Tensor:
        """Of single values [P, D], each with an equal share of its tensor's."""
        shares = []
        for one, two in zip(sent.split(sizes, dim=1), seen.split(sizes, dim=1), strict=True):
            length = (two.square().sum(dim=1) + _TINY).sqrt()
            off = ((one.square().sum(dim=1) + _TINY).sqrt() / length - 1).square()
            if orthogonal:
                off = off + ((one * two).sum(dim=1) / length.square()).square()
            shares.append((off / (2 * NEAR**2 * one.shape[1]))[:, None].expand_as(one))
        return torch.cat(shares, dim=1)

    with torch.enable_grad():
        each = loss(sent := sent.detach().requires_grad_())
        slope = torch.autograd.grad(each.sum(), sent)[0]
    return each.detach().view(shape), slope.view(shape)


@dataclass(kw_only=True, eq=False)
class Censor(Defense):
    """Sends, tensor by tensor, a random direction orthogonal to the gradient, of its norm.

    Of several such directions it is the one after a small step along which the loss of the
    client's data is least.

    Args:
        variant: `orthogonal`, r - (<r, g> / |g|^2) g of a random r; `printed`, r - (<r, g> / |g|) g
            of a random r of norm 1, as in the paper and its code, which is orthogonal for norms
            of 1 alone.
        tries: Directions to choose from.
        step: Of the step.

    Departures: the direction replaces the mean gradient of all local steps, and the loss is that of
    all of a client's data. Under split protocols, where a client cannot compute its loss, the first
    direction is sent. The released code sends plain gradients from the eleventh epoch on: an
    attack on these is one on `none`.
    Source: Zhang et al., arXiv:2501.15718, NDSS 2025 (CENSOR), and its released code.
    """

    strength = None  # it has no setting that trades accuracy for protection
    source = "Zhang et al., arXiv:2501.15718 (CENSOR)"
    variant: Variant = "printed"
    tries: Annotated[int, Limits("directions to choose from", least=1, most=1000)] = 20
    step: Annotated[float, Limits("by which a direction is tried", above=0)] = 1e-4

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        def turn(gradient: Message) -> Message:
            plain = {n: p.values for n, p in gradient.parts.items()}
            turned = {n: self._turn(g, client.rng["defense"]) for n, g in plain.items()}
            return replace_values(gradient, self._choose(turned, local, client))

        return change_uploads(messages, "gradient", local, turn)

    def _turn(self, gradient: Tensor, rng: torch.Generator) -> Tensor:
        """Directions [tries, ...] of the gradient's norm."""
        g = gradient.flatten()
        r = gaussian_like(g.expand(self.tries, -1), std=1.0, rng=rng)
        r = r / r.norm(dim=1, keepdim=True)
        unit = g / g.norm().clamp_min(_TINY)  # 0 where nothing flows back
        u = r - (r @ unit)[:, None] * (g if self.variant == "printed" else unit)
        u = u * (g.norm() / u.norm(dim=1, keepdim=True).clamp_min(_TINY))
        return u.view(self.tries, *gradient.shape)

    def _choose(self, turned: State, local: Local, client: Client) -> State:
        if client.cut is not None or client.loss is None:
            return {n: u[0] for n, u in turned.items()}
        loss, start = client.loss, local.start
        classes = list(loss.outputs(start, client.x[:1]).values())[-1].shape[-1]
        y = one_hot(client.y, classes).to(client.x)

        def after(moves: State) -> Tensor:
            stepped = {n: start[n] - self.step * u for n, u in moves.items()}
            return loss({**start, **stepped}, client.x, y)

        best = int(vmap(after, chunk_size=1)(dict(turned)).argmin())
        return {n: u[best] for n, u in turned.items()}

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (Turned(of="gradient", orthogonal=self.variant == "orthogonal"),)

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (Unprotected(what="the norm of every tensor", why="it is that of the gradient"),)
