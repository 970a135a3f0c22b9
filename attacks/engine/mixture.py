"""Samples that a first linear layer mixed, told apart like voices at a cocktail party."""

import warnings
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from attacks.engine.observation import gradient_estimate, lawless, parse_view, unusable
from attacks.engine.samples import build_player, first_layer, is_sent_whole, standardise
from bench.api import Context, Reconstruction, Seen

_NOISE_EDGE = 2.5
"""Times the median of the singular values beyond the samples that those of samples are at least."""
_RESOLVED = 1e-8
"""Share of the largest singular value below which float32 tells none."""
_OFTEN = 0.1
"""Share of public samples in which a value is 0, from which it counts as one that may be."""
_ZERO = (1e-3, 1e-4)
"""Below them a value counts as 0, in turn."""
_BEYOND = 1e-3
"""By which a value may leave [0, 1]."""
_PULLS = (0.1, 0.025)
"""What is added to the values whose inverse weighs them, in turn: the less, the more zeros."""
_NEW = 0.03
"""Length of a unit vector's part beyond the span of others, from which it is new."""
_MISFIT = 0.01
"""Share of a sample's own gradient that may lie outside of what was seen."""
_TRIES = 3
"""Directions per sample in which samples with zeros are sought."""


class MixedRows:
    """The rows that a layer's gradient spans, as x = span c for coordinates c with ends c = 1.

    Args:
        grad: Gradient of weight and bias [O, F + 1] in float64.
        samples: Their number.
        scale: See `standardise`.
        shift: See `standardise`.
        public: Public samples [N, *shape].

    Attributes:
        span: Values of samples [F, R] of each coordinate.
        ends: What each coordinate adds to the 1 behind every sample [R].
        seen: What gradients by the layer's outputs span, orthonormal [O, R].
        public: Public samples [N, F].
        shape: Of a sample.
    """

    def __init__(
        self, grad: Tensor, samples: int, scale: Tensor, shift: Tensor, public: Tensor
    ) -> None:
        left, size, right = torch.linalg.svd(grad, full_matrices=False)
        noise = float(size[samples:].median()) if len(size) > samples else 0.0
        rank = int((size[:samples] > max(_NOISE_EDGE * noise, _RESOLVED * float(size[0]))).sum())
        self.ends, self.seen = right[:rank, -1], left[:, :rank]
        self.span = (right[:rank, :-1].T - shift[:, None] * self.ends) / scale[:, None]
        self.public, self.shape = public.flatten(1), tuple(public.shape[1:])

    @property
    def components(self) -> Tensor:
        """Coordinates [R, R], a row each, of the independent components of the differences between
        neighbouring pixels, or of a table's values."""
        from sklearn.decomposition import FastICA

        mixed = self.span
        if len(self.shape) == 3:
            images = mixed.T.unflatten(1, self.shape)
            mixed = torch.cat([images.diff(dim=d).flatten(1) for d in (2, 3)], dim=1).T
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what has not converged is used as far as it is
            ica = FastICA(whiten="unit-variance", max_iter=500, random_state=0)
            spread = torch.from_numpy(ica.fit(mixed.cpu().numpy()).components_).to(mixed)
        return spread / (spread @ self.ends)[:, None]

    @cached_property
    def sparse(self) -> Tensor:
        """Values in [0, 1] that are often 0, bool [F]."""
        low, high = self.public.aminmax(dim=0)
        often = (self.public == 0).double().mean(dim=0) > _OFTEN
        return (low >= 0) & (high <= 1) & often

    @cached_property
    def limits(self) -> dict[str, Any]:
        """What the linear programs of `corner` have in common."""
        rows = self.span[self.sparse].cpu().numpy()
        most = np.repeat([_BEYOND**2, 1 + _BEYOND**2], len(rows))
        ends = self.ends.cpu().numpy()[None]
        return {"A_ub": np.concatenate([-rows, rows]), "b_ub": most, "A_eq": ends, "b_eq": [1.0]}

    def corner(self, slope: Tensor) -> Tensor | None:
        """Coordinates c [R] of least slope @ c for which no sparse value leaves [0, 1]."""
        from scipy.optimize import linprog

        slope = (slope / slope.norm()).cpu().numpy()
        best = linprog(slope, bounds=(None, None), method="highs", **self.limits)
        return torch.from_numpy(best.x).to(self.span) if best.status == 0 else None

    def corner_near(self, c: Tensor | None) -> Tensor | None:
        """One with many of the zeros that the sample of the coordinates c [R] nearly has."""
        rows = self.span[self.sparse]
        for pull in _PULLS:
            if c is not None:
                c = self.corner((1 / ((rows @ c).abs() + pull)) @ rows)
        return c

    def settle(self, c: Tensor | None) -> Tensor | None:
        """Coordinates [R] of the sample near c, as its zeros alone tell them; None where they
        don't."""
        rows = self.span[self.sparse]
        if c is None:
            return None
        for least in _ZERO:
            shown = rows[(rows @ c).abs() < least]
            if len(shown) < len(c):
                return None
            c = torch.linalg.eigh(shown.T @ shown).eigenvectors[:, 0]
            c = c / (c @ self.ends)
        x = rows @ c
        inside = float(x.min()) > -_BEYOND and float(x.max()) < 1 + _BEYOND
        return c if inside and int((x.abs() < _ZERO[0]).sum()) > len(c) + 1 else None


def unmix(
    mixture: MixedRows, misfit: Callable[[Tensor], Tensor] | None, rng: torch.Generator
) -> tuple[Tensor, int]:
    """Samples [R, F] of a mixture, and how many of them are told by their own zeros.

    Args:
        mixture: The mixture.
        misfit: How badly samples [N, F] suit it [N], of which those below `_MISFIT` count; None
            where nobody knows: those with the most zeros count.
        rng: Draws directions.
    """
    spread = mixture.components
    chosen, basis = list[Tensor](), mixture.ends.new_zeros(0, len(spread))

    def add(c: Tensor) -> None:
        nonlocal basis
        rest = c / c.norm() - basis.T @ (basis @ (c / c.norm()))
        if float(rest.norm()) > _NEW:
            chosen.append(c)
            basis = torch.cat([basis, (rest / rest.norm())[None]])

    def add_settled(corners: Iterable[Tensor | None]) -> None:
        settled = [s for s in map(mixture.settle, corners) if s is not None]
        if not settled:
            return
        x = torch.stack(settled) @ mixture.span.T
        zeros = (x[:, mixture.sparse].abs() < _ZERO[0]).sum(dim=1)
        fits = zeros > 0 if misfit is None else misfit(x) < _MISFIT
        for place in zeros.argsort(descending=True, stable=True).tolist():
            if fits[place]:
                add(settled[place])

    if int(mixture.sparse.sum()) > 2 * len(spread):
        slopes = torch.randn(_TRIES * len(spread), len(spread), generator=rng).to(basis)
        corners = [*map(mixture.corner_near, spread)]
        if misfit is None:
            corners += map(mixture.corner, slopes)
        add_settled(corners)
        for slope in slopes:
            if len(chosen) < len(spread):
                add_settled([mixture.corner(slope - basis.T @ (basis @ slope))])
    exact = len(chosen)
    units = spread / spread.norm(dim=1, keepdim=True)
    for _ in range(len(spread) - exact):
        add(spread[int((units - units @ basis.T @ basis).norm(dim=1).argmax())])
    return torch.stack(chosen) @ mixture.span.T, exact


def not_mixed(seen: Seen) -> str | None:
    """Why `unmix_samples` cannot be used, or None."""
    release = parse_view(seen)[-1]
    if reason := unusable(release) or lawless(release):
        return reason
    weight, bias = first_layer(seen)
    if not weight or bias is None:
        return "the network does not begin with a linear layer with bias on the sample"
    if release.samples > len(seen.before[bias]):
        return f"{release.samples} samples are mixed in {len(seen.before[bias])} rows"
    if any(m.tells_interval or not m.faithful for m in release.acting):
        return "rounding hides the rank of the gradient"
    if not is_sent_whole(release, weight, bias):
        return "the first layer's gradient was not sent in full"
    return None


def unmix_samples(seen: Seen, ctx: Context) -> Reconstruction:
    """The samples of every victim, with the labels whose gradients are most like theirs; the public
    mean in place of those that the gradient does not tell."""
    release = parse_view(seen)[-1]
    name, bias = first_layer(seen)
    grads = gradient_estimate(release).values
    scale, shift = (t.to(ctx.device) for t in standardise(seen, ctx, name))
    play = build_player(release, ctx, scale, shift)
    public, count = ctx.aux_x.to(scale), release.samples
    answers = public.mean(dim=0).expand(len(seen.clients), count, *ctx.network.shape).clone()
    labels = ctx.aux_y.mode().values.to(ctx.device).expand(answers.shape[:2]).clone()
    failed, notes = torch.zeros(len(answers), dtype=torch.bool), list[str]()
    for victim, client in enumerate(seen.clients):
        grad = torch.cat([grads[name][victim], grads[str(bias)][victim][:, None]], dim=1)
        grad = grad.to(scale)
        mixture = MixedRows(grad, count, scale, shift, public)
        rank = len(mixture.ends)
        failed[victim] = rank == 0
        if failed[victim]:
            notes.append(f"{client}: nothing is mixed in the gradient")
            continue

        def misfit(x: Tensor, seen: Tensor = mixture.seen) -> Tensor:
            own = play(x * scale + shift)
            beyond = own - own @ seen @ seen.T
            return (beyond.norm(dim=2) / own.norm(dim=2)).amin(dim=1)

        checked = release.steps == 1 and not any(m.random for m in release.acting)
        x, exact = unmix(mixture, misfit if checked else None, ctx.rng)
        answers[victim, : len(x)] = x.view(-1, *ctx.network.shape)
        inputs = x * scale + shift
        own = torch.linalg.pinv(torch.cat([inputs, torch.ones_like(x[:, :1])], dim=1)).T
        alike = cosine_similarity(play(inputs), (own @ grad.T)[:, None], dim=2)
        labels[victim, : len(x)] = alike.argmax(dim=1)
        notes.append(f"{client}: rank {rank} of {count}, {exact} by their zeros")
    low, high = public.aminmax(dim=0)
    bounded = answers.clamp(0, 1) if len(ctx.network.shape) == 3 else answers.clamp(low, high)
    return Reconstruction(
        images=bounded.float().cpu(), labels=labels.cpu(), failed=failed, notes=tuple(notes)
    )
