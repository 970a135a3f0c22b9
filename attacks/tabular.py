"""Tabular: records of a table from one step, with their categories summed over.

The gradient of softmax regression over K records is E^T X / K, with E the errors [K, C] p - y. In a
one-hot group each record counts in one column, so that a column holds the sum of the errors of some
records. The attack sums over which records these can be. What is left is a likelihood of the errors
alone, under any law that compares each value by itself. Numeric columns are then linear equations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from attacks.engine.evidence import Evidence
from attacks.engine.observation import (
    Release,
    gradient_estimate,
    lawless,
    parse_view,
    unusable,
)
from attacks.engine.one_hot import DEVIATIONS, find_groups, solve_records
from attacks.engine.optimisers import Phase, minimise
from attacks.engine.samples import build_player, first_layer, standardise
from bench.api import Attack, Context, Quantised, Reconstruction, Seen

_MOST = 5
"""Records of a step: one more triples the ways to fill a column."""
_STARTS = 12
_STAGES = (1.0, 12, 0.1), (0.7, 8, 0.1), (0.4, 4, 0.1), (0.2, 4, 0.1), (0.0, 1, 0.2)
"""How soft the likelihood is, how many starts of a victim go on, and the stage's share of the
budget, in turn."""
_SOFT, _SHARP = 0.3, 1e-3
"""Noise that stands for none at first and at last, in units of the upload's root mean square."""
_FIRST = 0.02
"""Weight of a likelihood at first."""
_PRIOR = 0.05
"""Of squared errors, in units of public ones."""
_NEVER = -1e30
_TINY = 1e-30


class Tabular(Attack):
    """The likeliest errors of a step's records, and by them the records' mean.

    The likelihood of the errors sums over all ways in which the records' categories can fill the
    columns of the one-hot groups, weighed by how frequent they are in public records. It is
    softened at first and climbed from the errors of public records. Categories are answered by
    their probabilities, numeric columns by the mean of a Gaussian fitted to public records under
    the linear equations of the gradient and of the logits that the errors tell, within the public
    range. Of several releases it reads the last; without one-hot columns every victim is failed.
    Source: of tabular leakage, Vero et al., arXiv:2210.01785. Departures: they relax the categories
    and match the gradient of these; here they are summed over, under the defense's law.
    """

    recovers = frozenset({"images", "labels"})
    reads = "last"
    source = "Vero, Balunovic, Dimitrov, Vechev, arXiv:2210.01785"

    def applies(self, seen: Seen) -> str | None:
        release = parse_view(seen)[-1]
        if reason := unusable(release) or lawless(release):
            return reason
        weight, bias = first_layer(seen)
        if len(seen.network["shape"]) > 1 or set(seen.before) != {weight, bias}:
            return "it reads softmax regression with bias on records of a table"
        if release.samples > _MOST or release.steps > 1 or "summed" in seen.known:
            return f"it reads one step of one client, of at most {_MOST} records"
        if not release.uploads or set(release.uploads[0].parts) != {weight, bias}:
            return "weight and bias were not both sent"
        if release.noise and not all(map(release.noise.covers, seen.before)):
            return "noise on weight or bias alone is not reckoned with"
        if any(isinstance(m, Quantised) and m.how == "sign" for m in release.acting):
            return "a sign's law has the mean size of all values, so that none tells by itself"
        return None

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        release = parse_view(seen)[-1]
        scale, shift = (t.to(ctx.device) for t in standardise(seen, ctx, first_layer(seen)[0]))
        public = ctx.aux_x.to(scale).flatten(1) * scale + shift
        play = build_player(release, ctx, scale, shift)
        own = play(public)[torch.arange(len(public)), ctx.aux_y.to(public.device)]
        # By public records alone: under noise no sum tells where a group ends.
        groups = find_groups(public.cpu().numpy(), np.zeros((len(scale), 1)), np.ones(1), 0.0)
        victims = len(release.clients)
        if not groups:
            images = torch.zeros(victims, release.samples, len(scale))
            return Reconstruction(images=images, failed=torch.ones(victims, dtype=torch.bool))
        batch = _Batch(release, ctx, Covers(groups, release.samples, public), own)
        errors, shares, evaluations = batch.solve()
        x = _fill(shares, groups, errors, release, public)
        played = play(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        labels = (played - errors[:, :, None]).square().sum(dim=3).argmin(dim=2)
        images = ((x - shift) / scale).float().cpu()
        return Reconstruction(images=images, labels=labels.cpu(), evaluations=evaluations)


class Covers:
    """Ways in which K records fill one-hot groups, each record one column of every group.

    Subsets of the records are numbers whose k-th bit says whether record k is one of them.

    Attributes:
        sets: Which records the subsets have, 0 or 1 [S, K].
        prior: Log frequency of each column in public records, times a subset's records [S, F].
    """

    def __init__(self, groups: Sequence[range], samples: int, public: Tensor) -> None:
        number = torch.arange(2**samples, device=public.device)
        self.sets = (number[:, None] >> torch.arange(samples, device=public.device) & 1).to(public)
        within = number[:, None] & number == number
        self._rest = torch.where(within, number[:, None] ^ number, 0)
        self._barred = torch.where(within, 0.0, -math.inf).to(public)
        ordered = sorted(groups, key=len, reverse=True)
        self._longer = [sum(len(g) > place for g in ordered) for place in range(len(ordered[0]))]
        columns = [[*g, *[g[0]] * (len(ordered[0]) - len(g))] for g in ordered]
        self._columns = torch.tensor(columns, device=public.device)
        often = (public.sum(dim=0) + 0.5) / (len(public) + 0.5)
        self.prior = self.sets.sum(dim=1)[:, None] * often.clamp(1e-9, 1).log()

    def log_sum(self, scores: Tensor) -> Tensor:
        """Log of the sum [P] over all ways of exp of their scores, each the sum of those
        [P, S, F] of its subsets in its columns."""
        each = (scores + self.prior)[:, :, self._columns].transpose(1, 2)  # [P, G, S, L]
        ends = list[Tensor]()
        filled = torch.full_like(each[..., 0], _NEVER)
        filled = torch.cat([torch.zeros_like(filled[..., :1]), filled[..., 1:]], dim=2)
        for place, longer in enumerate(self._longer):
            ends.append(filled[:, longer:, -1].sum(dim=1))
            filled = filled[:, :longer]
            ways = filled[:, :, self._rest] + each[:, :longer, None, :, place] + self._barred
            filled = ways.logsumexp(dim=3)
        return torch.stack([*ends, filled[:, :, -1].sum(dim=1)]).sum(dim=0)

    def shares(self, scores: Tensor) -> Tensor:
        """Probabilities [P, K, F] that a record is in a column, 0 outside of groups."""
        with torch.enable_grad():
            scores = scores.detach().requires_grad_()
            of_subsets = torch.autograd.grad(self.log_sum(scores).sum(), scores)[0]
        return torch.einsum("psf,sk->pkf", of_subsets, self.sets)


class _Batch:
    """What the victims sent, as a likelihood of their records' errors.

    own: Errors of public records [N, U].
    """

    def __init__(self, release: Release, ctx: Context, covers: Covers, own: Tensor) -> None:
        uploads = Evidence([release], ctx, dtype=torch.float64).uploads
        assert uploads is not None
        self.uploads, self.covers = uploads, covers
        self.budget, self.rng = ctx.budget, ctx.rng
        self.samples, self.victims = release.samples, len(release.clients)
        self.weight, self.bias = map(str, first_layer(release.seen))
        self.unit = own.square().mean().sqrt().clamp_min(_TINY)
        self.public = own / self.unit
        self._prepared = lru_cache(maxsize=1)(
            lambda heat: uploads.prepare(uploads.values, uploads.names, heat)
        )

    def scores(self, errors: Tensor, victims: Tensor, heat: float) -> tuple[Tensor, Tensor]:
        """Log-likelihoods [P, S, F] of what was seen in a column if a subset of the records is in
        it, and [P] of the bias, for errors [P, K, U] of the victims int64 [P]."""
        uploads, sets = self.uploads, self.covers.sets
        sums = torch.einsum("sk,pku->psu", sets, errors) / self.samples
        seen = uploads.observation.values
        gradient = {
            n: v.new_zeros(sums.shape[0] * len(sets), *v.shape[1:]) for n, v in seen.items()
        }
        width = seen[self.weight].shape[2]
        gradient[self.weight] = sums.flatten(0, 1)[..., None].expand(-1, -1, width)
        gradient[self.bias] = sums[:, -1:].expand_as(sums).flatten(0, 1)  # of all records
        as_sent = uploads.clients.as_sent(gradient, uploads.observation.kind)
        sent = torch.cat([as_sent[n].flatten(1) for n in uploads.names], dim=1)
        who = victims.repeat_interleave(len(sets))
        misfit = self._prepared(heat)[who].misfit(sent.detach())
        loss, slope = (uploads.hide(t, who) for t in misfit)
        if uploads.law is None:
            std = _SOFT**heat * _SHARP ** (1 - heat)
            square = uploads.observation.square / uploads.sizes.clamp_min(1)
            factor = 1 / (2 * std**2 * square.clamp_min(_TINY))[who, None]
        else:
            factor = torch.full_like(loss[:, :1], _FIRST**heat)
        loss = factor * (loss + slope * (sent - sent.detach()))
        sizes = [seen[n][0].numel() for n in uploads.names]
        parts = dict(
            zip(uploads.names, loss.unflatten(0, sums.shape[:2]).split(sizes, dim=2), strict=True)
        )
        columns = -parts[self.weight].unflatten(2, (-1, width)).sum(dim=2)
        return columns, -parts[self.bias][:, 0].sum(dim=1)

    def solve(self) -> tuple[Tensor, Tensor, int]:
        """Errors [V, K, U], the probabilities [V, K, F] of columns under them, and evaluations."""
        rng = torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=self.rng)))
        everyone = torch.arange(self.victims, device=self.public.device)
        victims, spent = everyone.repeat_interleave(_STARTS), 0
        picks = torch.randint(len(self.public), (len(victims), self.samples), generator=rng)
        z = self.public[picks.to(self.public.device)].flatten(1)
        for heat, kept, share in _STAGES:

            def evaluate(
                z: Tensor, problems: Tensor, heat: float = heat, victims: Tensor = victims
            ) -> tuple[Tensor, Tensor]:
                with torch.enable_grad():
                    z = z.detach().requires_grad_()
                    errors = z.unflatten(1, (self.samples, -1))
                    columns, bias = self.scores(errors * self.unit, victims[problems], heat)
                    away = (errors - self.public.mean(dim=0)).square().sum(dim=(1, 2))
                    loss = _PRIOR * away - self.covers.log_sum(columns) - bias
                    return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]

            never = z.new_full((len(z),), -math.inf)
            phase = Phase(evaluate=evaluate, stop=never, dtype=z.dtype)
            most = 1 + round(share * self.budget)
            minimum = minimise([phase], z, max_evaluations=most, history=10, least_gain=1e-5)
            spent += int(minimum.evaluations.sum())
            loss = minimum.loss.view(self.victims, -1)
            best = loss.argsort(dim=1, stable=True)[:, :kept] + everyone[:, None] * loss.shape[1]
            z, victims = minimum.x[best.flatten()], victims[best.flatten()]
        errors = z.unflatten(1, (self.samples, -1)) * self.unit
        return errors, self.covers.shares(self.scores(errors, victims, 0.0)[0]), spent


def _fill(
    shares: Tensor, groups: Sequence[range], errors: Tensor, release: Release, public: Tensor
) -> Tensor:
    """Records [V, K, F]: the probabilities of their columns, and numeric columns by the equations
    of the gradient, with the noise that its one-hot columns show."""
    weight, bias = map(str, first_layer(release.seen))
    estimate, low_high = gradient_estimate(release), public.aminmax(dim=0)
    values = release.samples * estimate.values[weight].mT.to(shares)  # [V, F, C]
    told = torch.cat([estimate.present[weight].mT, estimate.present[bias][:, None]], dim=1)
    head = torch.cat([release.before[weight], release.before[bias][:, None]], dim=1)
    numbers = public.cpu().numpy()
    filled, columns = shares.clone(), torch.tensor([c for g in groups for c in g])
    for victim, each in enumerate(shares):
        seen = told[victim, columns].to(shares)
        rest = seen * (values[victim] - each.T @ errors[victim])[columns]
        std = float((rest.square().sum() / seen.sum().clamp_min(1)).sqrt())
        places = [(g, each[:, list(g)].argmax(dim=1).cpu().numpy()) for g in groups]
        _, solved = solve_records(
            places, values[victim].cpu().numpy(), told[victim].cpu().numpy(), numbers,
            errors[victim].cpu().numpy(), DEVIATIONS * std, head[None].double().cpu().numpy(),
        )  # fmt: skip
        answer = torch.from_numpy(solved).to(each).clamp(*low_high)
        answer[:, columns] = each[:, columns]
        filled[victim] = answer
    return filled
