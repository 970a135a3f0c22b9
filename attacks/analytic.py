"""Analytic: the input of a first linear layer, or a transformer's patches, read off gradients.

A linear layer's weight gradient is outer(db, x), and db is its bias gradient, so
log|dW_ji| = log|db_j| + log x_i. Cells in the open that are joined by rows and columns fix their
terms up to one factor (`complete_inputs`). Some defenses have clients list coordinates by falling
magnitude in plain sight, to agree on what to encrypt (MaskCrypt's priority lists). The order of
many such sums fixes their terms too (additive conjoint measurement, Luce and Tukey 1964; see
`inputs_by_rank`). The factor follows from public samples. Several records with one-hot columns are
separated (see `one_hot`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.sparse import block_array, csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from attacks.engine import one_hot
from attacks.engine.observation import Release, gradient_estimate, lawless, parse_view, unusable
from attacks.engine.position_table import find_table, solve_patches
from attacks.engine.samples import build_player, first_layer, samples_of, standardise
from bench.api import Attack, Context, Reconstruction, Seen
from bench.toolkit.batches import soft_cross_entropy

Pair = tuple[Tensor, Tensor]
RANK_ROUNDS = 60
"""Of fitting the terms and the magnitudes that stand for the ranks in turn."""
_PUBLIC = 64
"""Public samples whose gradients tell how far log magnitudes spread."""
_SWEEPS = 500
"""Of least squares by turns where few cells join the rest."""
_RIDGE = 0.01
"""Added to the variance of public inputs."""
_TIES = 8
"""More coordinates in order at a list's end are no accident (1 in 8! lists)."""
_TINY = 1e-30
_ROUNDING = 1e-6
"""Relative error of values in float32 that were added up."""


def rankings(seen: Seen) -> dict[str, dict[str, Tensor]]:
    """By client, a list of its coordinates that it sent: int64 ranks by name, 1 for the first and 0
    for what is not listed. Only clients that sent the numbers 1 to n, each once, are in it."""
    lists = {}
    for message in seen.messages:
        ranks = {n: p.values for n, p in message.parts.items()}
        if message.sender not in seen.clients or set(ranks) != set(seen.before):
            continue
        if any(r.dtype != torch.int64 for r in ranks.values()):  # a mask, or values
            continue
        flat = torch.cat([r.flatten() for r in ranks.values()])
        listed = flat[flat != 0].sort().values
        if len(listed) > 1 and torch.equal(listed, torch.arange(1, len(listed) + 1).to(listed)):
            lists[message.sender] = ranks
    return lists


def without_ties(ranks: dict[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """The ranks without the zeros at the end of a list, which stand in the order of the coordinates
    since all are alike; and whether there were any, so that the list has all values but zeros."""
    flat = torch.cat([r.flatten() for r in ranks.values()])
    order = flat.argsort()[int((flat == 0).sum()) :]  # coordinates by rank
    falls = (order[1:] < order[:-1]).nonzero()
    last = int(falls.max()) + 1 if len(falls) else 0
    ties = len(order) - last > _TIES
    return {n: torch.where(r > last, 0, r) for n, r in ranks.items()} if ties else dict(ranks), ties


def inputs_by_rank(
    weight: Tensor, bias: Tensor, magnitudes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Magnitudes [F] of the layer's input; 0 for inputs of which no weight is listed.

    Args:
        weight: Ranks of the weight's gradient [O, F], 0 for what is not listed.
        bias: Ranks of the bias's gradient [O].
        magnitudes: Logs of magnitudes to begin with, falling, one for each that is listed.
    """
    table = torch.cat([weight, bias[:, None]], dim=1).cpu().numpy()  # the bias's input is 1
    listed = table > 0
    place = np.argsort(np.argsort(table[listed]))
    values = np.zeros(table.shape)
    values[listed] = magnitudes[: len(place)][place]
    spread = magnitudes.std()
    for _ in range(RANK_ROUNDS):
        db, x = _terms(values, listed, rounds=4)
        fitted = np.empty(len(place))
        fitted[place] = (db[:, None] + x)[listed]
        steps = isotonic_regression(fitted, increasing=False).x
        steps = (steps - steps.mean()) * spread / max(steps.std(), _TINY) + magnitudes.mean()
        values[listed] = steps[place]
    sizes = np.exp(x - x[-1])
    return np.where(listed.any(axis=0), sizes, 0.0)[:-1]


def complete_inputs(
    gradient: NDArray[np.float64], present: NDArray[np.bool_], public: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Input [F] of the layer from the cells of its gradient that were sent without noise, or None.

    Cells that are not 0 give the inputs of their columns up to a factor, cells that are 0 in a row
    that has others give inputs of 0. The factor, where no bias is among the cells, and the inputs
    that no cell tells are the likeliest under a Gaussian fitted to public inputs.

    Args:
        gradient: Weight's and, as the last column, bias's [O, F + 1].
        present: Which of it was sent.
        public: Inputs of public samples [N, F].
    """
    cells = present & (gradient != 0)
    rows = len(gradient)
    joined = block_array([[None, csr_array(cells)], [csr_array(cells.T), None]])
    _, part = connected_components(joined, directed=False)
    largest = np.bincount(part).argmax()
    cells &= (part[:rows] == largest)[:, None] & (part[rows:] == largest)
    if cells.sum() < 2:
        return None
    logs = np.log(np.where(cells, np.abs(gradient), 1.0))
    x = _terms(logs, cells, rounds=_SWEEPS)[1]
    live = cells.any(axis=1)
    told, zero = cells.any(axis=0), (present[live] & (gradient[live] == 0)).any(axis=0)
    absolute, told, zero = bool(told[-1]), told[:-1], (zero & ~told)[:-1]
    sizes = np.where(told, np.exp(x[:-1] - (x[-1] if absolute else x[:-1][told].max())), 0.0)
    known = told | zero
    mean, spread = public.mean(axis=0), np.cov(public.T) + _RIDGE * np.eye(public.shape[1])
    inverse = np.linalg.inv(spread[np.ix_(known, known)])

    def misfit(factor: float) -> float:
        rest = factor * sizes[known] - mean[known]
        return float(rest @ inverse @ rest) / 2 - int(told.sum()) * math.log(factor)

    factor = 1.0 if absolute else min(np.geomspace(0.02, public.max(), 64), key=misfit)
    answer = factor * sizes
    rest = inverse @ (answer[known] - mean[known])
    answer[~known] = mean[~known] + spread[np.ix_(~known, known)] @ rest
    return answer


def _terms(
    values: NDArray[np.float64], cells: NDArray[np.bool_], rounds: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Terms of rows and columns whose sums are nearest to the values in these cells."""
    rows, columns = (np.maximum(cells.sum(axis=a), 1) for a in (1, 0))
    x = np.zeros(cells.shape[1])
    for _ in range(rounds):  # least squares by turns
        db = ((values - x) * cells).sum(axis=1) / rows
        x = ((values - db[:, None]) * cells).sum(axis=0) / columns
    return db, x


def public_magnitudes(
    seen: Seen, ctx: Context, names: tuple[str, str], count: int, *, whole: bool
) -> NDArray[np.float64]:
    """Logs of magnitudes in a layer's gradient [count], falling: the mean over public samples.

    Args:
        names: Of the layer's weight and bias.
        whole: Whether `count` values are all that are not 0, else the largest of them.
    """
    state = {n: v.to(ctx.device) for n, v in seen.before.items()}
    buffers = {n: v.to(ctx.device) for n, v in seen.buffers.items()}
    x, y = ctx.aux_x[:_PUBLIC].to(ctx.device), ctx.aux_y[:_PUBLIC].to(ctx.device)
    targets = torch.nn.functional.one_hot(y, ctx.network.classes).float()

    def loss(held: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        logits = ctx.network.apply({**state, **held}, sample[None], buffers=buffers)
        return soft_cross_entropy(logits, target[None])

    held = {n: state[n] for n in names}
    grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(held, x, targets)
    each = torch.cat([grads[n].flatten(1).abs() for n in names], dim=1).double().cpu().numpy()
    falling = [-np.sort(-np.log(row[row > 0])) for row in each if (row > 0).any()]
    if not whole:
        falling = [row[:count] for row in falling]
    at = np.linspace(0, 1, count)
    return np.mean([np.interp(at, np.linspace(0, 1, len(r)), r) for r in falling], axis=0)


ROUNDS = 6
"""Rounds of deciding between the two signs of a weight, where signs are perturbed."""
MANY_ROWS = 16
"""Rows from which an answer that explains every sign cannot be an accident."""


class Analytic(Attack):
    """x = sum_j db_j dW_j / sum_j db_j^2, exact where one sample was used and nothing is random.

    A linear layer's weight gradient is outer(db, x): every row whose bias gradient is not zero
    holds the sample, and least squares over the rows of all releases uses all of them. A clip
    cancels. Rows and coordinates that were not sent leave their equations. Under noise of known
    variance the answer is the posterior mean of a Gaussian prior per coordinate, fitted on public
    data: with S = sum_j db_j^2 less its expected noise, it moves from the quotient to the public
    mean as S falls to the noise. A victim without a visible gradient (all its units dead) is
    failed. Several records of a table are decoded with their labels (see `one_hot`); a victim is
    failed unless they reproduce what was seen.
    Source: Phong, Aono, Hayashi, Wang, Moriai 2018 (IEEE TIFS), Sec. III; Geiping et al.,
    arXiv:2003.14053, Prop. 3.1. Departures: least squares over the rows, and the shrinkage.
    """

    recovers = frozenset({"images"})
    reads = "all"
    source = "Phong et al. 2018, IEEE TIFS 13(5); Geiping et al., arXiv:2003.14053, Prop. 3.1"

    def applies(self, seen: Seen) -> str | None:
        release = parse_view(seen)[-1]
        if reason := (None if rankings(seen) else unusable(release)) or lawless(release):
            return reason
        weight, bias = first_layer(seen)
        weight, beside = find_table(seen) or (weight, bias)
        if beside is None:
            return "the network does not begin with a linear layer with bias on the sample"
        if release.samples > 1 and (reason := one_hot.why_not(release)) is not None:
            return reason
        if not release.uploads or not {weight, beside} <= set(release.uploads[0].parts):
            return f"the first layer's weight and {'bias' if bias else 'table'} were not both sent"
        if bias is None and (release.noise is not None or release.bounds is not None):
            return "a position table's equations need gradients without noise or rounding"
        return None

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        releases = parse_view(seen)
        if (table := find_table(seen)) is not None:
            x, ranks, tokens = solve_patches(releases, *table)
            scale, shift = standardise(seen, ctx, table[0])
            images = samples_of((x.cpu() - shift) / scale, ctx)
            note = f"position table: rank {int(ranks.min())} for {tokens} patches"
            return Reconstruction(images=images, failed=(ranks < tokens).cpu(), notes=(note,))
        layer = LayerGradient.stack([_layer_gradient(one) for one in releases])
        scale, shift = standardise(seen, ctx, first_layer(seen)[0])
        public = ctx.aux_x.flatten(1).double().cpu() * scale + shift
        x, visible = layer.solve(mean=public.mean(dim=0), variance=public.var(dim=0))
        rows = int(visible.sum(dim=1).min())
        notes = () if rows == visible.shape[1] else (f"{rows} rows of the first layer in use",)
        solved = visible.any(dim=1)
        decoded = decode_records(releases, layer, ctx, public)
        if releases[-1].samples > 1:
            images = torch.zeros(len(x), releases[-1].samples, len(scale))
            labels = torch.zeros(images.shape[:2], dtype=torch.int64)
            for victim, (records, classes) in decoded.items():
                images[victim], labels[victim] = records, classes
            failed = torch.tensor([victim not in decoded for victim in range(len(x))])
            return Reconstruction(images=images, labels=labels, failed=failed)
        more = {victim: records[0] for victim, (records, _) in decoded.items()}
        if bool((public >= 0).all()):  # only magnitudes follow, so signs must be known
            more |= complete_rows(releases[-1], layer, public) | _by_rank(seen, ctx)
        for victim, inputs in more.items():
            exact = (layer.present[victim] & visible[victim][:, None]).any(dim=0)
            x[victim] = torch.where(exact, x[victim], inputs.to(x))
            solved[victim] = True
        images = samples_of((x - shift) / scale, ctx)
        return Reconstruction(images=images, failed=~solved.cpu(), notes=notes)


def decode_records(
    releases: Sequence[Release], layer: LayerGradient, ctx: Context, public: Tensor
) -> dict[int, tuple[Tensor, Tensor]]:
    """Records [K, F] and classes [K] by victim, from sums over several of them or a part of one's
    gradient, of those that reproduce what was seen."""
    last = releases[-1]
    (name, bias), samples = first_layer(last.seen), last.samples
    sent = torch.cat([layer.weight[0], layer.bias[0][..., None]], dim=2)
    told = torch.cat([layer.weight_present, layer.bias_present[..., None]], dim=2)
    if (samples == 1 and bool(told.all())) or one_hot.why_not(last) is not None:
        return {}
    layers = [torch.cat([r.before[name], r.before[str(bias)][:, None]], dim=1) for r in releases]
    weights = torch.stack(layers).double().cpu().numpy()
    noise = one_hot.DEVIATIONS * max(float(v.max()) for v in layer.variances) ** 0.5
    rounding = _ROUNDING * (float(sent.abs().max()) + np.abs(weights).max() / last.step)
    tolerance = samples * (noise + rounding)
    players = [build_player(r, ctx, torch.ones(1).double(), torch.zeros(1)) for r in releases]
    records, lists = {}, rankings(last.seen) if samples == 1 else {}
    for victim, client in enumerate(last.clients):
        ranks = without_ties(lists[client])[0][name].amax(dim=0) if client in lists else None
        listed = None if ranks is None else ranks.cpu().numpy() > 0
        gradient, seen = samples * sent[victim].T.cpu(), told[victim].T.cpu()
        decoded = one_hot.decode(
            gradient.numpy(), seen.numpy(), public.numpy(), samples, tolerance,
            weights if name == ctx.network.head[0] else None, listed,
        )  # fmt: skip
        for x, errors in (map(torch.from_numpy, solution) for solution in decoded):
            played = torch.stack([play(x) for play in players], dim=2).flatten(2)  # [K, C, U]
            labels = (played - errors[:, None]).abs().amax(dim=2).argmin(dim=1)
            again = x.T @ played[torch.arange(samples), labels]
            missed = torch.where(seen[:-1], again - gradient[:-1], 0.0).abs().max()
            if missed <= tolerance * samples * (1 + x.abs().max()):
                records[victim] = x, labels
                break
    return records


def complete_rows(release: Release, layer: LayerGradient, public: Tensor) -> dict[int, Tensor]:
    """Inputs [F] of the first layer by victim where the gradient is without noise but for a part
    that is encrypted or withheld, from the cells in the open."""
    if release.acting:
        return {}
    inputs = {}
    for victim, message in enumerate(release.uploads):
        part = message.parts[first_layer(release.seen)[0]]
        if part.present is None or part.absent == "zero":
            continue
        table = torch.cat([layer.weight[0][victim], layer.bias[0][victim][:, None]], dim=1)
        shown, beside = layer.weight_present[victim], layer.bias_present[victim][:, None]
        present = torch.cat([shown, beside], dim=1)
        completed = complete_inputs(table.cpu().numpy(), present.cpu().numpy(), public.numpy())
        if completed is not None:
            inputs[victim] = torch.from_numpy(completed)
    return inputs


def _by_rank(seen: Seen, ctx: Context) -> dict[int, Tensor]:
    """Magnitudes [F] of the first layer's inputs by victim, for those that sent the order of their
    gradient's magnitudes in plain sight."""
    weight, bias = map(str, first_layer(seen))
    inputs = {}
    for client, ranks in rankings(seen).items():
        nonzero, whole = without_ties(ranks)
        rows, db = nonzero[weight], nonzero[bias]
        count = int((rows > 0).sum() + (db > 0).sum())
        if bool((db > 0).any()) and count > len(db):
            public = public_magnitudes(seen, ctx, (weight, bias), count, whole=whole)
            inputs[seen.clients.index(client)] = torch.from_numpy(inputs_by_rank(rows, db, public))
    return inputs


@dataclass(frozen=True, kw_only=True)
class LayerGradient:
    """What was seen of a linear layer's gradient.

    Attributes:
        weight: Candidates of the weight's gradient [V, O, F], two where signs were perturbed.
        bias: Candidates of the bias's [V, O].
        weight_present: Which of the weight's was seen, bool [V, O, F].
        bias_present: Which of the bias's, bool [V, O].
        variances: Of the noise of the first candidates, weight's and bias's.
        decided_variances: The same once the signs are decided.
    """

    weight: tuple[Tensor, ...]
    bias: tuple[Tensor, ...]
    weight_present: Tensor
    bias_present: Tensor
    variances: Pair
    decided_variances: Pair

    @staticmethod
    def stack(parts: Sequence[LayerGradient]) -> LayerGradient:
        """The rows of all releases below one another."""

        def rows(values: Sequence[Any]) -> Any:
            if isinstance(values[0], Tensor):
                return torch.cat(list(values), dim=1)
            return tuple(rows(each) for each in zip(*values, strict=True))

        return LayerGradient(**{n: rows([vars(p)[n] for p in parts]) for n in vars(parts[0])})

    @property
    def present(self) -> Tensor:
        """Cells [V, O, F] of the weight's that were seen with their row's bias."""
        return self.weight_present & self.bias_present[..., None]

    def solve(self, *, mean: Tensor, variance: Tensor) -> Pair:
        """Inputs [V, F] of their prior [F], and which rows told something, bool [V, O].

        Where signs are open, the candidates that the present answer explains better are taken
        and the answer is found anew, from two starts (the prior's mean and the first candidates'
        answer), of which the better explained wins.
        """
        prior = (mean, variance)
        x, visible = self._invert(self.weight[0], self.bias[0], self.variances, prior)
        if len(self.weight) == 1:
            return x, visible
        one, other = (self._settle(start, prior) for start in (x, mean.expand_as(x)))
        first = one[1] < other[1]
        settled = torch.where(first[:, None], one[0], other[0])
        # Deciding signs reinforces itself. What keeps it honest is a prior that is not centred
        # at 0 (images), or an answer that explains everything with rows to spare.
        signed = bool(mean.square().sum() > variance.sum() / 10)
        explained = torch.minimum(one[1], other[1]) < 1e-2
        trusted = (explained & (self.present.shape[1] >= MANY_ROWS)) | signed
        return torch.where(trusted[:, None], settled, x), visible

    def _settle(self, x: Tensor, prior: Pair) -> Pair:
        """(answer, how badly it explains the candidates [V])."""
        rest = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        weight = self.weight[0]
        for _ in range(ROUNDS):
            shown = torch.where(self.present, weight, 0.0) * x[:, None]
            slope = shown.sum(dim=2)
            slope = slope / (self.present * x[:, None].square()).sum(dim=2).clamp_min(1e-12)
            bias = _nearest(self.bias, slope)
            expected = bias[..., None] * x[:, None]
            weight = _nearest(self.weight, expected)
            gap = torch.where(self.present, weight - expected, 0.0).square().sum(dim=(1, 2))
            rest = gap / expected.square().sum(dim=(1, 2)).clamp_min(1e-30)
            x, _ = self._invert(weight, bias, self.decided_variances, prior)
        return x, rest

    def _invert(self, weight: Tensor, bias: Tensor, variances: Pair, public: Pair) -> Pair:
        """`solve` of decided gradients [V, O, F] and [V, O] with noise of these variances.

        public: Mean and variance [F] of the inputs' prior. Coordinates that no row tells are its
        mean.
        """
        present, (_, bias_variance), (mean, variance) = self.present, variances, public
        weight, weight_variance = (torch.where(present, t, 0.0) for t in (weight, variances[0]))
        bias = torch.where(present.any(dim=2), bias, 0.0)
        square, shown = bias.square(), present.to(bias)
        over_rows = partial(torch.einsum, "vo,vof->vf")
        strength = (over_rows(square, shown) - over_rows(bias_variance, shown)).clamp_min(0)
        of_bias = over_rows(square * bias_variance, shown) * (mean.square() + variance)
        spread = over_rows(square, weight_variance) + of_bias
        # Exact where nothing is random: the prior then has no say, however small the gradient.
        prior = variance.clamp_min(1e-12)
        gain = torch.where(spread > 0, prior * strength / (prior * strength.square() + spread), 0.0)
        exact = (spread == 0) & (strength > 0)
        gain = torch.where(exact, 1 / torch.where(exact, strength, 1.0), gain)
        # What is left of S under pure noise is chance: it counts by how far it exceeds its own
        # error.
        error = 2 * over_rows(bias_variance.square(), shown)
        gain = torch.where(error > 0, gain * strength.square() / (strength.square() + error), gain)
        answer = mean + gain * (over_rows(bias, weight) - strength * mean)
        return answer, present.any(dim=2) & (bias != 0)


def _layer_gradient(release: Release) -> LayerGradient:
    """Of one release: candidates, two where signs are perturbed, and the variance of their noise
    under the public mechanisms, before and after the signs are decided."""
    estimate, step = gradient_estimate(release), release.step
    candidates: list[tuple[Tensor, ...]] = []
    undecided: list[Tensor] = []
    decided: list[Tensor] = []
    names = [str(name) for name in first_layer(release.seen)]
    for name in names:
        value, base = estimate.values[name], release.before[name].double()
        acting = [m for m in release.acting if m.covers(name)]
        unlike = [m for m in acting if not m.faithful]
        each = unlike[-1].candidates(value, base=base, step=step) if unlike else (value,)
        candidates.append(each)
        for known, variances in ((False, undecided), (True, decided)):
            total = torch.zeros_like(value)
            for mechanism in acting:
                total = total + mechanism.gradient_variance(
                    each[0], base=base, step=step, decided=known
                )
            variances.append(total)
    return LayerGradient(
        weight=candidates[0],
        bias=candidates[1],
        weight_present=estimate.present[names[0]],
        bias_present=estimate.present[names[1]],
        variances=(undecided[0], undecided[1]),
        decided_variances=(decided[0], decided[1]),
    )


def _nearest(candidates: tuple[Tensor, ...], target: Tensor) -> Tensor:
    chosen = candidates[0]
    for other in candidates[1:]:
        chosen = torch.where((chosen - target).abs() <= (other - target).abs(), chosen, other)
    return chosen
