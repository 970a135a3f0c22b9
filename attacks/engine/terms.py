"""The terms of an objective: what was uploaded, what was smashed, what images look like.

Each term says how badly P candidates explain it, as losses and differentiable outputs with the
losses' derivatives by them, so that one backward pass serves all terms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attacks.engine.clients import Clients, Returned, as_vector
from attacks.engine.observation import ObservedUploads, OwnValues, SplitView
from attacks.engine.optimisers import column
from attacks.engine.orders import Orders
from bench.api import GaussianNoise, Mechanism, Prepared, State, squared_distance
from bench.toolkit.vectors import flatten

_TINY = 1e-30
RESOLVED = 1e-14
"""Share of what was seen below which a squared distance counts as this."""
MIDWAY = 0.5
"""Share of `Uploads.shift` that is supposed at first."""
_LOUD, _QUIET = 1.0, 1e-8
"""Squared noise as shares of |observation|^2, between which a fading prior weighs."""
_SUM, _LOOSE = 1e-5, 0.3
"""Standard deviations that stand for none and for much, in units of a sum's root mean square."""
_HEATS = 0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0
"""Levels of a noise that stands for none, at which answers are judged."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """P candidates: images x [P, K, *shape], soft labels y [P, K, C], the images as the optimiser's
    vectors [P, K * D (+ O)], and behind them what is tried for what their clients kept to
    themselves (see `OwnValues`), [P, O] by itself, or None for what is known of it."""

    x: Tensor
    y: Tensor
    vectors: Tensor
    own: Tensor | None = None


class Misfit(NamedTuple):
    """Losses [P] without a graph, a differentiable output [P, ...], the losses' slope by it."""

    loss: Tensor
    output: Tensor
    slope: Tensor


class Term(Protocol):
    """One summand of an objective."""

    def __call__(self, candidate: Candidate, victims: Tensor, heat: float = 0.0) -> Misfit:
        """The comparison of candidates with the victims they stand for.

        Args:
            candidate: P of them.
            victims: int64 [P].
            heat: How soft it is, 1 where a descent begins and 0 where it ends (see
                `Mechanism.softness`).
        """
        ...


# --- uploads ----------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class Uploads:
    """What the victims uploaded, and what candidates would have.

    Attributes:
        clients: Candidate clients.
        observation: Uploads of V victims as one kind.
        returned: The gradient by returned slopes, which needs no labels, or None.
        clips: Mechanisms whose deterministic part is played, in order.
        law: The mechanism whose likelihood compares, or None for a squared distance.
        bounds: Without a law, the mechanism that tells the interval of every value to which the
            distance is taken, or None.
        orders: Guesses of the samples' order, where it matters and nobody told it, or None.
        own: What the victims kept to themselves, or None.
        unexplained: Standard deviation [V] of what no candidate explains all the same; None where
            nothing is known of it.
        shift: Moves of the victims [V, ...] by name, from somewhere along which steps of all
            samples replace the local steps (see `Evidence`), or None.
    """

    clients: Clients
    observation: ObservedUploads
    returned: Returned | None
    clips: Sequence[Mechanism]
    law: Mechanism | None
    bounds: Mechanism | None = None
    own: OwnValues | None = None
    orders: Orders | None = None
    unexplained: Tensor | None = None
    shift: State | None = None

    def simulate(
        self, x: Tensor, y: Tensor, victims: Tensor | None = None, own: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Uploads [P, ...] before noise in the observation's kind, for the names observed.

        Args:
            x: [P, K, *shape].
            y: [P, K, C].
            victims: int64 [P], whose returned slopes are used in place of the labels, whose order
                of samples is followed, whose own values count, and whose absent coordinates a clip
                leaves out; None: any victim's.
            own: See `Candidate`.
        """
        if self.orders is not None and victims is not None:
            x, y = self.orders.arrange(x, victims), self.orders.arrange(y, victims)
        return self._simulate(x, y, victims, own)

    def vector(self, x: Tensor, y: Tensor, victims: Tensor, own: Tensor | None = None) -> Tensor:
        """As `simulate`, [P, D]."""
        return as_vector(self.simulate(x, y, victims, own), self.names)

    def moves(self, victims: Tensor | None, own: Tensor | None = None) -> State | None:
        """From what was received to where the victims started [P, ...], or None; own: see
        `Candidate`, or the share of `shift` [P, 1], by default half."""
        if self.shift is not None and victims is not None:
            share = torch.full_like(self.values[victims, :1], MIDWAY) if own is None else own
            return {n: column(share[:, 0], s) * s[victims] for n, s in self.shift.items()}
        if self.own is None or victims is None:
            return None
        if own is None and self.own.found is not None:
            own = self.own.found[victims].to(self.values)
        return None if own is None else self.own.moves(own, victims)

    def in_order(self, x: Tensor, y: Tensor, victims: Tensor) -> Tensor:
        """Uploads [P, D] of samples [P, T, *shape] and labels [P, T, C], step after step; 0 where
        nothing was seen."""
        return self.hide(as_vector(self._simulate(x, y, victims), self.names), victims)

    def _simulate(
        self, x: Tensor, y: Tensor, victims: Tensor | None, own: Tensor | None = None
    ) -> dict[str, Tensor]:
        if self.returned is not None and victims is not None:
            gradient = self.returned(x, y, victims)
        else:
            apart = self.clients.apart(x, y, bool(self.clips))
            gradient = self.clients.compute(*apart, self.moves(victims, own))
        if self.clips:
            each = len(next(iter(gradient.values()))) // len(x)  # clients of a candidate
            shown = {
                n: p.any(dim=0, keepdim=True)
                if victims is None
                else p[victims].repeat_interleave(each, dim=0)
                for n, p in self.observation.present.items()
                if not self.whole
            }
            for clip in self.clips:
                gradient = self.clients.apply(gradient, clip, shown)
        gradient = self.clients.join(gradient, len(x))
        return self.clients.as_sent({n: gradient[n] for n in self.names}, self.observation.kind)

    @property
    def names(self) -> list[str]:
        """Of the tensors observed."""
        return list(self.observation.values)

    def prepare(self, values: Tensor, names: Sequence[str], heat: float = 0.0) -> Prepared:
        """Observed values [V, ...] of the tensors `names` as the law compares them."""
        compares = self.law or self.bounds
        if compares is None:
            return squared_distance(values)
        base = {n: self.clients.before[n] for n in names}
        return compares.prepared(values, compares.softness(heat), base=base)

    @cached_property
    def visible(self) -> Tensor:
        """Bool [V, D] of the coordinates."""
        return flatten(self.observation.present)

    @cached_property
    def values(self) -> Tensor:
        """[V, D], 0 where nothing was seen."""
        return torch.where(self.visible, flatten(self.observation.values), 0.0)

    @property
    def weighs(self) -> bool:
        """Whether more noise than the mechanism's can be reckoned with."""
        return self.law is None or isinstance(self.law, GaussianNoise)

    def sureness(self, victims: Tensor) -> Tensor | None:
        """Weight [P, 1] of a likelihood beside which there is more noise than its own, None
        without."""
        more = [] if self.orders is None else [self.orders.std]
        more += [] if self.unexplained is None else [self.unexplained]
        if not more or not self.weighs:
            return None
        variance = torch.stack(more).square().sum(dim=0)
        variance = variance[victims, None].clamp_min(_TINY).to(self.values)
        if self.law is None:
            return 1 / (2 * variance)
        return self.law.variance / (self.law.variance + variance)

    @property
    def known(self) -> Tensor:
        """Variance [V] of what is random by the mechanism and the samples' order."""
        variance = torch.zeros_like(self.values[:, 0])
        if isinstance(self.law, GaussianNoise):
            variance = variance + self.law.variance
        return variance if self.orders is None else variance + self.orders.std.square()

    def misfit(self, x: Tensor, y: Tensor, victims: Tensor, own: Tensor | None = None) -> Tensor:
        """Mean square [P] of what candidates for the victims int64 [P] leave unexplained, in the
        coordinates that were seen; own: see `Candidate`."""
        sent = self.vector(x, y, victims, own)
        if self.bounds is None:
            square = (sent - self.values[victims]).square()
        else:
            square, _ = self.prepare(self.values, self.names)[victims].misfit(sent)
        return self.hide(square, victims).sum(dim=1) / self.sizes[victims].clamp_min(1)

    @cached_property
    def sizes(self) -> Tensor:
        """Coordinates that were seen, [V]."""
        return self.visible.sum(dim=1).to(self.values)

    def surprise(self, x: Tensor, y: Tensor, victims: Tensor, own: Tensor | None = None) -> Tensor:
        """Negative log-likelihood [P] of candidates for the victims int64 [P], up to a constant,
        under the Gaussian noise that suits each best, at least what is known of it; own: see
        `Candidate`.

        Where no candidate explains the upload within the known noise, one that leaves less is
        better, but not by that noise's measure.
        """
        missed, known = self.misfit(x, y, victims, own), self.known[victims]
        variance = torch.maximum(missed, known).clamp_min(_TINY)
        return self.sizes[victims] / 2 * (missed / variance + variance.log())

    def without_noise(self, x: Tensor, y: Tensor, victims: Tensor, pixels: int) -> Tensor | None:
        """What stands for a negative log-likelihood [P] where the law draws nothing and a noise
        that falls stands for none; None where it draws.

        A law that says of exact values which were too small, or too large, to be sent: by the
        squared distance to its intervals, whose spread over so many pixels is the one that suits a
        candidate best. One that says of all how they are bounded: beside the level of that noise
        that suits a candidate best, since what is not exact has a few signs wrong, by which the
        least noise would judge alone.
        """
        law = self.law
        if law is None or law.random or not (law.reads_absent or law.vague):
            return None
        sent = self.vector(x, y, victims)
        if law.reads_absent:
            base = {n: self.clients.before[n] for n in self.names}
            far = law.prepared(self.values, base=base)[victims].misfit(sent)[0].sum(dim=1)
            share = far / self.observation.square.clamp_min(RESOLVED)
            return pixels / 2 * share.clamp_min(RESOLVED).log()
        each = []
        for heat in _HEATS:
            loss, _ = self.prepare(self.values, self.names, heat)[victims].misfit(sent)
            each.append(self.hide(loss, victims).sum(dim=1))
        return torch.stack(each).amin(dim=0)

    def mask(self, victims: Tensor) -> Tensor:
        """1 where a coordinate of the victims was seen, else 0 [P, D]."""
        return self.visible[victims].to(self.values.dtype)

    @cached_property
    def whole(self) -> bool:
        """Whether every coordinate of every victim was seen."""
        return bool(self.visible.all())

    def hide(self, values: Tensor, victims: Tensor) -> Tensor:
        """Values [P, D], 0 where a coordinate of the victims was not seen."""
        return values if self.whole else values * self.mask(victims)


class UploadLikelihood:
    """Negative log-likelihood of the uploads under the public mechanism; the squared distance
    where nothing is random."""

    def __init__(self, uploads: Uploads) -> None:
        self.uploads = uploads
        self.prepared = lru_cache(maxsize=2)(
            lambda heat: uploads.prepare(uploads.values, uploads.names, heat)
        )

    def __call__(self, candidate: Candidate, victims: Tensor, heat: float = 0.0) -> Misfit:
        uploads = self.uploads
        sent = uploads.vector(candidate.x, candidate.y, victims, candidate.own)
        misfit = self.prepared(heat)[victims].misfit(sent.detach())
        loss, slope = (uploads.hide(t, victims) for t in misfit)
        if (sure := uploads.sureness(victims)) is not None:
            loss, slope = loss * sure, slope * sure
        return Misfit(loss.sum(dim=1), sent, slope)


def upload_cosine(uploads: Uploads, share: float) -> Term:
    """1 - cosine of the angle between visible values, times a weight.

    Source: Geiping et al., arXiv:2003.14053, Eq. 4.
    """

    def term(candidate: Candidate, victims: Tensor, heat: float = 0.0) -> Misfit:
        sent = uploads.vector(candidate.x, candidate.y, victims, candidate.own)
        sent = uploads.hide(sent, victims)
        inner, square = (sent * uploads.values[victims]).sum(dim=1), sent.square().sum(dim=1)
        seen = uploads.observation.square[victims].clamp_min(_TINY)
        away = share * (1 - inner / ((square + _TINY) * seen).sqrt())
        return Misfit(away.detach(), away, torch.ones_like(away))

    return term


@dataclass(eq=False, kw_only=True)
class UploadSum:
    """What the next broadcast shows of values that were hidden in every single upload: their mean
    over the victims, who alone took part.

    It speaks of candidates of all victims, in their order, once or several times.

    Attributes:
        uploads: As candidates would have made them.
        covers: The coordinates, bool by name.
        mean: The mean update there, one tensor after another [M].
    """

    uploads: Uploads
    covers: Mapping[str, Tensor]
    mean: Tensor

    def simulate(self, candidate: Candidate) -> Tensor:
        """Updates of candidates there, [P, M]."""
        x, y, orders = candidate.x, candidate.y, self.uploads.orders
        everyone = torch.arange(len(self.uploads.values), device=x.device)
        victims = everyone.repeat(len(x) // len(everyone))
        if orders is not None:
            x, y = orders.arrange(x, victims), orders.arrange(y, victims)
        gradient = self.uploads.clients.compute(x, y, self.uploads.moves(victims, candidate.own))
        sent = self.uploads.clients.as_sent({n: gradient[n] for n in self.covers}, "update")
        return torch.cat([sent[n][:, c] for n, c in self.covers.items()], dim=1)

    @property
    def loosens(self) -> bool:
        """Whether it is loose where heat is high: beside noise alone, for without any, what was
        seen of single uploads is as exact."""
        return self.uploads.law is not None

    def share_unexplained(self, candidate: Candidate) -> Tensor:
        """Share of the mean's square that one candidate for every victim leaves open, a scalar."""
        rest = self.simulate(candidate).mean(dim=0) - self.mean
        return rest.square().sum() / self.mean.square().sum().clamp_min(_TINY)

    def __call__(self, candidate: Candidate, victims: Tensor, heat: float = 0.0) -> Misfit:
        count = len(self.uploads.observation.square)
        if self.loosens:
            std = _SUM * (_LOOSE / _SUM) ** heat * float(self.mean.square().mean().sqrt())
            precision = 1 / (2 * max(std, _TINY) ** 2)
        else:  # as gradients, of which the uploads' squared distances are
            precision = count / self.uploads.clients.step**2
        mean = self.simulate(candidate).unflatten(0, (-1, count)).mean(dim=1)
        rest = mean.detach() - self.mean
        loss = precision * rest.square().sum(dim=1) / count  # every victim's share
        return Misfit(loss.repeat_interleave(count), mean, 2 * precision * rest)


# --- smashed data -----------------------------------------------------------------------------
Law = Callable[[Tensor, float, Tensor], tuple[Tensor, Tensor]]
"""(victims int64 [P], heat, activations before noise [P, B, ...]) -> (losses, their slopes), of
single activations."""


def build_smashed_term(clients: Clients, view: SplitView, law: Law) -> Term:
    """The first step's smashed data, as P candidates would have made it under the mean weights."""

    def term(candidate: Candidate, victims: Tensor, heat: float = 0.0) -> Misfit:
        cut = clients.smash(view, candidate.x)
        both = law(victims, heat, cut.detach())
        loss, slope = (torch.where(view.present[victims], t, 0.0) for t in both)
        return Misfit(loss.flatten(1).sum(dim=1), cut, slope)

    return term


def weigh_distance(view: SplitView, unit: Tensor) -> Law:
    """Squared distance with weights [V, 1, ...]."""

    def law(victims: Tensor, heat: float, cut: Tensor) -> tuple[Tensor, Tensor]:
        rest = cut - view.values[victims]
        weighed = rest * unit[victims]
        return weighed * rest, 2 * weighed

    return law


def joint_distance(view: SplitView, precision: Tensor) -> Law:
    """Half the squared distance under a precision matrix [N, N] of a sample's activations: drawn
    weights move them together, and what they have in common says little of the sample."""

    def law(victims: Tensor, heat: float, cut: Tensor) -> tuple[Tensor, Tensor]:
        rest = (cut - view.values[victims]).flatten(2)
        slope = rest @ precision
        return (slope * rest / 2).view_as(cut), slope.view_as(cut)

    return law


def likelihood(view: SplitView, mechanism: Mechanism) -> Law:
    """Negative log-likelihood under the mechanism that made the smashed data random."""
    prepared = lru_cache(maxsize=2)(
        lambda heat: mechanism.prepared(view.values, mechanism.softness(heat))
    )
    return lambda victims, heat, cut: prepared(heat)[victims].misfit(cut)


# --- what images look like --------------------------------------------------------------------


def prior(candidate: Candidate, victims: Tensor, heat: float = 0.0) -> Misfit:
    """|z|^2 / 2 of vectors relative to the public prior (see `Frame`)."""
    at = candidate.vectors.detach()
    return Misfit(at.square().sum(dim=1) / 2, candidate.vectors, at)


def fading_prior(square: Tensor) -> Term:
    """The prior where a squared distance is to become exact: it weighs as if the observation had
    a noise that falls from heat to heat, and nothing in the end.

    Where the network is trained, an exact distance alone has many local minima. square:
    |observation|^2 [V], the distance's unit.
    """

    def term(candidate: Candidate, victims: Tensor, heat: float = 0.0) -> Misfit:
        noise = _LOUD * (_QUIET / _LOUD) ** (1 - heat) if heat else 0.0
        z, at = candidate.vectors, candidate.vectors.detach()
        weight = (2 * noise / z[0].numel() * square[victims]).to(z)
        return Misfit(weight * at.square().sum(dim=1) / 2, z, weight[:, None] * at)

    return term


def roughness(x: Tensor) -> Tensor:
    """Mean absolute difference [P] of neighbouring pixels of images [P, ..., H, W], across and
    down added."""
    across = (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(dim=1)
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(1).mean(dim=1)
    return across + down


def total_variation(weight: float) -> Term:
    """Anisotropic total variation per pixel of images, times a weight."""

    def term(candidate: Candidate, victims: Tensor, heat: float = 0.0) -> Misfit:
        rough = weight * roughness(candidate.x)
        return Misfit(rough.detach(), rough, torch.ones_like(rough))

    return term
