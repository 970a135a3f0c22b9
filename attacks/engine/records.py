"""Records of a table that a first linear layer mixed, told apart by their one-hot columns, and
samples of gradients of which a part is missing, completed by their rank.

The layer's gradient by weight and bias is A (X, 1), with A the gradients by its outputs, so its row
space holds every record X. Few other vectors there have a single 1 in every one-hot group. Where a
part of the gradient is missing, many units are live for one record only and tell a part of it.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from attacks.engine.mixture import MixedRows, unmix
from attacks.engine.observation import gradient_estimate, parse_view
from attacks.engine.one_hot import find_groups
from attacks.engine.samples import build_player, first_layer, standardise
from bench.api import Context, Reconstruction, Seen

_CLEAR = 12.0
"""Standard deviations of noise that 0 and 1 are apart, at least; half of them may be missed."""
_KEPT = 10_000
"""Most records of some groups that are tried with the categories of another."""
_LEAST = 1e-8
"""Noise in units of the largest singular value, at least: float32's rounding."""
_FAR, _STILL = 10.0, 1e-6
"""Deviations from the public mean that are implausible, and the least deviation."""
_NEW, _ALIKE = 0.03, 1e-3
"""Length of a unit vector's part beyond the span of others, from which it is new, and deviations
from each other up to which values are the same."""
_OPEN, _STARTS, _SWEEPS = 64, 16, 16
"""Records whose numbers are searched where categories don't tell them, starts of each, and rounds,
of which each looks 0.7 times as far."""
_TINY = 1e-30
_GUESSES, _BEST, _TURNS, _ROUNDS, _EXACT = 64, 4, 40, 20, 1e-7
"""Starts of completing a gradient, and how many go on after some turns; most rounds of these turns,
and relative misfit at which they end."""
_LEVELS, _WHOLE, _VALUES = 255, 0.01, 5
"""Most levels of a pixel, how far from a whole number its multiple may be, and fewest values that
differ, by which a unit's pixels are told from chance."""
_RIDGE = 0.01
"""Added to the variance of public samples."""
_PULL, _SURE = 1e-10, 1e-6
"""What the diagonal of its equations gains, in units of their mean, and the least eigenvalue, in an
orthonormal basis, of equations that tell a row."""


def one_hot_groups(public: Tensor) -> list[range]:
    """The one-hot groups of public records [N, F]; none for images."""
    if public.dim() > 2:
        return []
    return find_groups(public.cpu().numpy(), np.zeros((public.shape[1], 1)), np.ones(1), 0.0)


def find_core(told: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Rows bool [O] and columns bool [F] of a matrix that have more cells `told` in one another
    than the rank, so that these cells can tell the others."""
    rows, columns = told.any(dim=1), told.any(dim=0)
    while True:
        cells = told & rows[:, None] & columns
        kept = cells.sum(dim=1) > rank, cells.sum(dim=0) > rank
        if torch.equal(kept[0], rows) and torch.equal(kept[1], columns):
            return rows, columns
        rows, columns = kept


def weigh(told: Tensor, by: Tensor) -> Tensor:
    """Normal matrices [S, N, R, R] of rows that are told in part [N, M] by columns [S, M, R]."""
    return torch.einsum("nm,sma,smb->snab", told, by, by)


def solve(told: Tensor, values: Tensor, by: Tensor) -> Tensor:
    """Coefficients [S, N, R] of rows [N, M], told in part, by columns [S, M, R]: least squares."""
    left = weigh(told, by)
    size = left.diagonal(dim1=2, dim2=3).mean(dim=2).clamp_min(_TINY)
    left.diagonal(dim1=2, dim2=3).add_(_PULL * size[..., None])
    return torch.linalg.solve(left, torch.einsum("nm,sma->sna", told * values, by))


def complete(
    grad: Tensor, told: Tensor, rank: int, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient [O, F] of this rank from its cells `told`, by alternating least squares from
    several random starts, and for which rows bool [O] and columns bool [F] these suffice. All
    others are 0, and so is everything where the last column, the bias's, is not among them."""

    def suffices(told: Tensor, by: Tensor) -> Tensor:
        by = torch.linalg.qr(by)[0]
        return torch.linalg.eigvalsh(weigh(told, by[None])[0])[:, 0] > _SURE

    if told.all():
        return grad, told.all(dim=1), told.all(dim=0)
    rows, columns = find_core(told, rank)
    rows, columns = rows & columns[-1], columns & columns[-1]
    whole, all_told = torch.zeros_like(grad), told.to(grad)
    live = told & (grad != 0) & rows[:, None] & columns
    up, along = live.any(dim=1), live.any(dim=0)  # all else is 0 where it is told
    told = told[up][:, along]
    if not told.any():
        return whole, rows, columns
    weight, grad = told.to(grad), grad[up][:, along] * told
    length = (grad.square().sum(dim=1) / weight.sum(dim=1)).sqrt()[:, None]
    values = grad / length.clamp_min(_TINY)  # small rows count as much as large ones
    by_row = torch.randn(_GUESSES, len(grad), rank, generator=rng).to(grad)
    for _ in range(_ROUNDS):
        for _ in range(_TURNS):
            by_column = solve(weight.T, values.T, torch.linalg.qr(by_row)[0])
            by_row = solve(weight, values, by_column)
        fits = by_row @ by_column.mT
        missed = (weight * fits - values).flatten(1).norm(dim=1) / values.norm()
        order = missed.argsort(stable=True)[:_BEST]
        fits, by_row, by_column = fits[order], by_row[order], by_column[order]
        if float(missed.min()) < _EXACT:
            break
    whole[up[:, None] & along] = torch.where(told, grad, length * fits[0]).flatten()
    rows = rows & suffices(all_told[:, along], by_column[0])
    columns = columns & suffices(all_told[up].T, by_row[0])
    return whole * rows[:, None] * columns, rows, columns


def find_records(
    mixture: MixedRows, error: Tensor, groups: Sequence[range]
) -> tuple[Tensor, Tensor]:
    """Coordinates [N, R] of all that is one-hot in every group, that of least noise first, and
    directions [D, R] that change numbers, by one public standard deviation, and no category. Along
    these a record stands where its noise is least, or at the public mean if that is far away.

    Group by group, what fits so far is tried with every category. The 0s and 1s of the columns are
    linear equations in the coordinates, of which there are soon more than coordinates.

    Args:
        mixture: The row space.
        error: Standard deviation of values per unit of each coordinate [R].
        groups: The groups.
    """
    rows, wanted = mixture.ends[None], mixture.ends.new_ones(1, 1)
    for group in sorted(groups, key=len, reverse=True):
        rows = torch.cat([rows, mixture.span[list(group)]])
        each = torch.eye(len(group)).to(wanted).repeat(len(wanted), 1)
        wanted = torch.cat([wanted.repeat_interleave(len(group), dim=0), each], dim=1)
        weighed = rows / error  # of coordinates in units of noise
        c = wanted @ torch.linalg.pinv(weighed, atol=_CLEAR, rtol=0.0).T
        noise = c.norm(dim=1)
        missed = (c @ weighed.T - wanted).abs().amax(dim=1)
        order = noise.argsort(stable=True)
        order = order[(missed < noise * _CLEAR / 2)[order]][:_KEPT]
        wanted, c = wanted[order], c[order]
    _, size, right = torch.linalg.svd(weighed)
    free = right[int((size > _CLEAR).sum()) :] / error
    others = sorted(set(range(len(mixture.span))).difference(*groups))
    deviation = mixture.public[:, others].std(dim=0).clamp_min(_STILL)
    numbers = mixture.span[others] / deviation[:, None]
    left, size, moves = torch.linalg.svd(free @ numbers.T, full_matrices=False)
    clear = size > _CLEAR
    free = (left.T[clear] @ free) / size[clear, None]
    mean = mixture.public[:, others].mean(dim=0) / deviation
    away = (mean - c / error @ numbers.T) @ moves[clear].T
    return c / error + torch.where(away.abs() > _FAR, away, 0.0) @ free, free


def read_units(
    grad: Tensor, told: Tensor, groups: Sequence[range], public: Tensor
) -> tuple[Tensor, Tensor]:
    """What units that are live for a single record tell of it: values [N, F], and which [N, F].

    In one-hot columns their gradients [O, F] are 0 or one value, of which those in other columns
    are multiples by the record's numbers.
    """
    columns = [column for group in groups for column in group]
    hot = grad[:, columns] * told[:, columns]
    unit = hot.gather(1, hot.abs().argmax(dim=1, keepdim=True))
    ones = (hot / unit).round() == 1
    single = ((hot / unit - ones.to(hot)).abs() < _ALIKE).all(dim=1)
    x, told = torch.where(told, grad / unit, 0.0)[single], told[single]
    x[:, columns] = ones[single].to(x)
    away = (x - public.mean(dim=0)).abs() / public.std(dim=0).clamp_min(_STILL)
    away[:, columns] = 0
    fits = (away < _FAR).logical_or(~told).all(dim=1)
    for group in groups:
        categories = x[:, list(group)].sum(dim=1, keepdim=True)
        told[:, list(group)] |= categories > 0
        fits &= categories[:, 0] < 2
    return x[fits], told[fits]


def read_pixels(grad: Tensor, told: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    """What units that are live for a single image tell of it: pixels [N, F], and which [N, F].

    Where pixels are whole multiples of the least one, which public images show, some multiple of
    such a unit's gradients [O, F] is whole too.
    """
    least = public[public > 0].min()
    levels = torch.arange(1, min(float(public.max() / least), _LEVELS) + 0.5).to(grad)
    x = torch.zeros_like(grad)
    for pixels, values in zip(x, torch.where(told, grad, 0.0), strict=True):
        live = values != 0
        tried = levels[:, None] * values[live] / values[values.abs().argmax()]
        rounded = tried.round()
        whole = ((tried - rounded).abs() < _WHOLE).all(dim=1) & (rounded > 0).all(dim=1)
        if whole.any() and len(rounded[whole][0].unique()) >= _VALUES:
            pixels[live] = rounded[whole][0] * least
    found = x.any(dim=1)
    return x[found], told[found]


def fill_in(x: Tensor, told: Tensor, public: Tensor) -> Tensor:
    """Samples [N, F] of which this is told, with the likeliest values of all else under a Gaussian
    fitted to public samples."""
    mean, spread = public.mean(dim=0), public.T.cov()
    spread.diagonal().add_(_RIDGE)
    filled = x.clone()
    for row, known in zip(filled, told, strict=True):
        beside = torch.linalg.solve(spread[known][:, known], (row - mean)[known])
        row[~known] = mean[~known] + spread[~known][:, known] @ beside
    return filled


def join_alike(
    x: Tensor, told: Tensor, public: Tensor, count: int, first: int
) -> tuple[Tensor, Tensor]:
    """Join records [N, F], told in part [N, F], that agree in all that both tell, while what two
    have in common is rarer among public records than one in `count`. The rarest goes first.

    Returns:
        The joined records and what is told of each: those of the `first` given ones, then others by
        how many were joined.
    """
    near = _ALIKE * public.std(dim=0).clamp_min(_STILL)
    parts = torch.ones(len(x))
    parts[:first] = math.inf

    def agree(one: int) -> Tensor:
        both, same = told & told[one], (x - x[one]).abs() <= near
        share = ((public - x[one]).abs() <= near).to(x).mean(dim=0).clamp_min(1 / len(public))
        shared = (both & same).to(x) @ -share.log()
        shared[(both & ~same).any(dim=1)] = shared[one] = -math.inf
        return shared

    shared = torch.stack([agree(one) for one in range(len(x))])
    while float(shared.max()) > math.log(count):
        one, other = sorted(divmod(int(shared.argmax()), len(x)))
        x[one] = torch.where(told[one], x[one], x[other])
        told[one] |= told[other]
        parts[one] += parts[other]
        parts[other] = told[other] = 0
        shared[one] = shared[:, one] = agree(one)
        shared[other] = shared[:, other] = -math.inf
    order = parts.argsort(descending=True, stable=True)[: int((parts > 0).sum())]
    return x[order], told[order]


def settle_numbers(
    c: Tensor, free: Tensor, misfit: Callable[[Tensor], Tensor], rng: torch.Generator
) -> Tensor:
    """Coordinates [N, R] of records whose categories leave directions [D, R] open, from several
    starts each, moved along these to where the misfit [N] is least."""
    c = c[:_OPEN].repeat_interleave(_STARTS, dim=0)
    far = torch.randn(len(c), len(free), generator=rng).to(c)
    far[::_STARTS] = 0
    c = c + 2 * far @ free
    steps = torch.linspace(-1, 1, 9).to(c)
    for sweep in range(_SWEEPS):
        for direction in free:
            tried = c + (2 * 0.7**sweep * steps)[:, None, None] * direction
            best = misfit(tried.flatten(0, 1)).view(len(steps), -1).argmin(dim=0)
            c = tried[best, torch.arange(len(c), device=c.device)]
    return c


def unmix_records(seen: Seen, ctx: Context, groups: Sequence[range]) -> Reconstruction:
    """The samples of every victim, told apart by one-hot groups, or as `unmix` does where there are
    none, with the classes whose gradients are most like theirs. Of what the gradient does not
    tell, the likeliest values; the public mean in place of samples of which it tells nothing.

    More vectors than records can be one-hot. After one step, those whose own gradient lies best in
    what was seen are taken; after several, those of least noise. Where a part of the gradient is
    missing, what single units tell of further records comes after them.
    """
    release = parse_view(seen)[-1]
    (name, bias), count = first_layer(seen), release.samples
    estimate = gradient_estimate(release)
    scale, shift = (t.to(ctx.device) for t in standardise(seen, ctx, name))
    play = build_player(release, ctx, scale, shift)
    public = ctx.aux_x.flatten(1).to(scale)
    mean = public.mean(dim=0)
    answers = mean.repeat(len(seen.clients), count, 1)
    labels = ctx.aux_y.mode().values.to(ctx.device).repeat(answers.shape[:2])

    def tell_apart(grad: Tensor, mixture: MixedRows, units: Tensor, known: Tensor) -> Tensor:
        """The records or images [N, F] that the row space tells, the likeliest first."""
        size = torch.linalg.svdvals(grad)
        # Rounding leaves rows and columns of zeros as they are.
        beyond = [max(int((grad != 0).any(dim=d).sum()) - count, 1) for d in (0, 1)]
        noise = float(size[count:].square().sum() / math.prod(beyond)) ** 0.5
        error = max(noise, _LEAST * float(size[0])) / size[: len(mixture.ends)]

        def values(c: Tensor) -> Tensor:
            return torch.where(known[:-1], c @ mixture.span.T, mean)

        def misfit(x: Tensor) -> Tensor:
            own = play(x * scale + shift) * units
            beside = own - own @ mixture.seen @ mixture.seen.T
            return (beside.norm(dim=2) / own.norm(dim=2).clamp_min(_TINY)).amin(dim=1)

        one_step = release.steps == 1
        if groups:
            c, free = find_records(mixture, error, groups)
        else:
            checked = one_step and bool(known.all()) and not any(m.random for m in release.acting)
            x, _ = unmix(mixture, misfit if checked else None, ctx.rng)
            c, free = x @ torch.linalg.pinv(mixture.span).T, x[:0]
        if one_step and len(c):
            if len(free):
                c = settle_numbers(c, free, lambda c: misfit(values(c)), ctx.rng)
            c = c[misfit(values(c)).argsort(stable=True)]
        chosen, basis = list[int](), c.new_zeros(0, c.shape[1])
        for place, unit in enumerate(c / c.norm(dim=1, keepdim=True)):
            rest = unit - basis.T @ (basis @ unit)
            if float(rest.norm()) > _NEW:
                chosen.append(place)
                basis = torch.cat([basis, (rest / rest.norm())[None]])
        return values(c[chosen])

    found = list[int]()
    for victim in range(len(answers)):
        sent, told = (
            torch.cat([part[name][victim], part[str(bias)][victim][:, None]], dim=1).to(ctx.device)
            for part in (estimate.values, estimate.present)
        )
        grad, units, known = complete(sent, told, count, ctx.rng)
        shown = torch.where(known[:-1], public, 1.0)  # no zeros elsewhere
        mixture = MixedRows(grad, count, scale, shift, shown.view(ctx.aux_x.shape))
        x = mean.new_zeros(0, len(mean))
        if len(mixture.ends) and known[-1]:
            x = tell_apart(grad, mixture, units, known)
        sure = known[:-1].expand_as(x)
        if not told.all():
            inputs = (sent[:, :-1] - shift * sent[:, -1:]) / scale
            plain = told[:, :-1] & (told[:, -1:] | (shift == 0))
            if groups:
                own, by_own = read_units(inputs, plain, groups, public)
            else:
                own, by_own = read_pixels(inputs, plain, public)
            if len(own):
                x, sure, own = torch.cat([x, own]), torch.cat([sure, by_own]), x
                x, sure = join_alike(x, sure, public, count, len(own))
        x = fill_in(x[:count], sure[:count], public)
        found.append(len(x))
        if len(x):
            inputs = torch.cat([x * scale + shift, torch.ones_like(x[:, :1])], dim=1)
            own = play(inputs[:, :-1]) * told.any(dim=1)
            mixed = solve(told.to(grad), sent, inputs.T[None])[0].T
            labels[victim, : len(x)] = cosine_similarity(own, mixed[:, None], dim=2).argmax(1)
            answers[victim, : len(x)] = x
    answers = answers.clamp(0, 1) if len(ctx.network.shape) == 3 else answers
    return Reconstruction(
        images=answers.view(*labels.shape, *ctx.network.shape).float().cpu(),
        labels=labels.cpu(),
        failed=torch.tensor([n == 0 for n in found]),
        notes=(f"samples told apart: {sum(found)} of {count * len(found)}",),
    )
