"""SPEAR: the samples of a batch, read exactly off the gradient of a linear layer before a ReLU.

With A = dL/dz of the layer's outputs [O, B], one column per sample, and the inputs X [B, F], the
layer's weight gradient is dW = A X, of rank B, and its bias gradient is db = A 1. The ReLU makes A
sparse. An SVD gives L [O, B] with orthonormal columns and A = L Q diag(s). A column q of Q is
orthogonal to the rows of L in which its sample is inactive, so sets of B - 1 rows are drawn until
every column was met. The scales s follow from db, and X = (Q diag s)^-1 L^T dW.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from attacks.engine.observation import gradient_estimate, lawless, parse_view, unusable
from attacks.engine.samples import Play, build_player, first_layer, is_sent_whole, standardise
from bench.api import Attack, Context, Reconstruction, Seen

MOST = 25
"""Samples: one more doubles the sets of rows that are needed."""
SETS = 4096
"""Sets of rows that are solved at once, for each gradient evaluation of the budget."""
_NOISE = 12.0
"""Standard deviations of a row's numerical noise below which a value counts as 0."""
_EXACT = 1e-12
"""The same without noise, relative to a column of unit norm."""
_GAP = 4.0
"""Times the next singular value that those of samples are at least."""
_POOL = 8
"""Directions kept per sample."""
_AGREED = 0.998
"""Share of signs from which no more sets are drawn."""
_MISFIT = 0.01
"""Largest error of a sample's own gradient, played again, as a share of its norm."""


@dataclass(frozen=True, kw_only=True)
class Unmixed:
    """A gradient taken apart into its samples.

    Attributes:
        inputs: Of the layer [B, F]; None where rank or sets did not suffice.
        output_grad: Gradient by the layer's outputs, A transposed [B, O].
        rank: Numerical rank of the weight's gradient.
        sets: Sets of rows drawn.
        agreement: Share of cells where A is 0 exactly if the layer's output is not positive.
    """

    inputs: Tensor | None = None
    output_grad: Tensor | None = None
    rank: int
    sets: int = 0
    agreement: float = 0.0


def separate(
    weight_grad: Tensor, bias_grad: Tensor | None, weight: Tensor, bias: Tensor | None, *,
    samples: int, chances: Tensor, sets: int, rng: torch.Generator,
) -> Unmixed:  # fmt: skip
    """Take the gradient of a linear layer before a ReLU apart into its samples.

    Without a bias, each input is found up to a positive factor. Source: Dimitrov et al.,
    arXiv:2403.03945, Alg. 1 and 2. Departures: null vectors by LU; the noise beyond the rank
    decides what counts as 0; a direction is kept if it needs none of its zero rows in particular,
    in place of a threshold on their share; all swaps of one direction are tried.

    Args:
        weight_grad: [O, F] in float64, as are the others.
        bias_grad: [O], or None without a bias.
        weight: [O, F].
        bias: [O], or None.
        samples: Their number.
        chances: By which rows are drawn [O], from 0 to 1.
        sets: Most sets of rows to draw.
        rng: Draws them.
    """
    left, size, right = torch.linalg.svd(weight_grad, full_matrices=False)
    rank = int((size[:samples] > _GAP * size[samples]).sum()) if len(size) > samples else 0
    live = left[:, :rank].norm(dim=1) > _EXACT
    unmixed = Unmixed(rank=rank)
    if rank != samples or int(live.sum()) <= rank:
        return unmixed
    noise = (left[:, rank:] * size[rank:]).norm(dim=1) / max(1, weight.shape[1] - rank) ** 0.5
    left, size, right = left[:, :rank], size[:rank], right[:rank]

    def is_zero(q: Tensor, loose: float = 1.0) -> Tensor:  # [O, N]
        deviation = noise[:, None] * (q / size[:, None]).norm(dim=0)
        return (left @ q).abs() <= loose * (_NOISE * deviation + _EXACT)

    def explain(q: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Agreement [N], inputs in the basis `right` [N, B, B] and scales [N, B] of Q [N, B, B]
        with its zeros [N, B, O]."""
        inverse = torch.linalg.inv_ex(q)[0]
        inputs, outward = inverse * size, weight @ right.T
        if bias_grad is None:
            scale = ((inputs @ outward.T) * ~zero).sum(dim=2).sign()
        else:
            scale = inverse @ (left.T @ bias_grad)
        inputs = inputs / scale[..., None]
        agreed = (inputs @ outward.T + (0 if bias is None else bias) <= 0) == zero
        return agreed.double().mean(dim=(1, 2)), inputs, scale

    pool = left.new_zeros(rank, 0)
    while unmixed.sets < sets and unmixed.agreement < _AGREED:
        before, unmixed = pool, replace(unmixed, sets=unmixed.sets + SETS)
        fresh = _refit(_null_vectors(left[live], chances[live], rng), left, is_zero)
        pool = _merge(pool, fresh, is_zero)
        chosen = _independent(pool)
        if len(chosen) < rank or torch.equal(pool, before):
            continue
        zeros, agreement, better = is_zero(pool).T, 0.0, True
        while better:
            better = False
            for place in range(rank):
                trial = torch.tensor(chosen).repeat(pool.shape[1], 1)
                trial[:, place] = torch.arange(pool.shape[1])
                agreed, inputs, scale = explain(pool.T[trial].mT, zeros[trial])
                best = int(agreed.nan_to_num(0.0).argmax())
                if float(agreed[best]) > agreement:
                    agreement, chosen, better = float(agreed[best]), trial[best].tolist(), True
                    solved = inputs[best] @ right, (left @ pool[:, chosen] * scale[best]).T
        if agreement > unmixed.agreement:
            unmixed = replace(unmixed, agreement=agreement, inputs=solved[0], output_grad=solved[1])
    return unmixed


def _null_vectors(rows: Tensor, chances: Tensor, rng: torch.Generator) -> Tensor:
    """Unit vectors [B, N], each orthogonal to B - 1 rows of [O, B], drawn with these chances [O]
    without replacement."""
    width = rows.shape[1] - 1
    if width == 0:
        return rows.new_ones(1, 1)
    each = max(1, int(float(chances.sum()) / width))
    draws = torch.rand(2, -(-SETS // each), len(rows), generator=rng).to(rows.device)
    kept = draws[0] < chances
    order = (draws[1] + ~kept).argsort(dim=1)[:, : each * width].unflatten(1, (each, width))
    ends = torch.arange(1, each + 1, device=rows.device) * width
    drawn = rows[order[kept.sum(dim=1, keepdim=True) >= ends]]
    last = torch.linalg.solve_ex(drawn[..., :-1], -drawn[..., -1:])[0][..., 0]
    q = torch.cat([last, last.new_ones(len(last), 1)], dim=1).T
    return normalize(q[:, q.isfinite().all(dim=0)], dim=0)


def _refit(q: Tensor, rows: Tensor, is_zero: Callable[..., Tensor]) -> Tensor:
    """Fit directions [B, N] to all rows that they are orthogonal to, and drop those that need one
    of these rows in particular, which most sets give."""
    for loose in (8.0, 2.0):
        live = is_zero(q, loose) & (rows.norm(dim=1) > _EXACT)[:, None]
        enough = live.sum(dim=0) > len(q) if len(q) > 1 else live[0] | True
        shown = live[:, enough].to(rows)
        values, vectors = torch.linalg.eigh(torch.einsum("on,oi,oj->nij", shown, rows, rows))
        q = vectors[..., 0].T
    needed = torch.einsum("oi,nij->noj", rows, vectors[..., 1:]).square()
    leverage = (needed / values[:, None, 1:].clamp_min(1e-300)).sum(dim=2) * shown.T
    return q[:, (leverage < 1 - 1e-6).all(dim=1)]


def _merge(pool: Tensor, q: Tensor, is_zero: Callable[..., Tensor]) -> Tensor:
    """Directions of both, sparsest first, without duplicates, the first of many."""
    q = torch.cat([pool, q], dim=1)
    q = q[:, is_zero(q).sum(dim=0).argsort(descending=True, stable=True)]
    alike = (q.T @ q).abs() > 1 - 1e-6
    return q[:, ~alike.triu(1).any(dim=0)][:, : _POOL * len(q)]


def _independent(q: Tensor) -> list[int]:
    """Places of the first independent directions of [B, N], at most B."""
    chosen: list[int] = []
    rest = q.clone()
    for place in range(q.shape[1]):
        size = rest[:, place].norm()
        if float(size) > 1e-3 and len(chosen) < len(q):
            chosen.append(place)
            axis = rest[:, place] / size
            rest = rest - axis[:, None] * (axis @ rest)
    return chosen


class Spear(Attack):
    """Exact samples of a batch from the gradient of a first linear layer before a ReLU.

    Rows are drawn by the squared share of public samples in which their unit is inactive. Scales
    follow from the bias gradient, or for a layer without a bias from playing each direction with
    each class at many scales. A victim is failed unless the gradient of every sample, played with
    the best class, equals the part of what was seen that belongs to it. Labels are those classes.
    Source: Dimitrov, Baader, Müller, Vechev, arXiv:2403.03945. See `separate` for departures.
    """

    recovers = frozenset({"images", "labels"})
    source = "Dimitrov et al., arXiv:2403.03945"

    def applies(self, seen: Seen) -> str | None:
        release = parse_view(seen)[-1]
        if reason := unusable(release) or lawless(release):
            return reason
        weight, bias = first_layer(seen)
        if not weight or weight == seen.network["head"][0]:
            return "the network does not begin with a hidden linear layer on the sample"
        if release.steps > 1:
            return f"the rank of the update is that of {release.steps} local steps together"
        if release.samples > MOST:
            return f"{release.samples} samples need more sets of rows than can be drawn"
        if any(m.random or m.tells_interval or not m.faithful for m in release.acting):
            return "noise or rounding hides the rank of the gradient"
        if not is_sent_whole(release, weight, bias):
            return "the first layer's gradient was not sent in full"
        return None

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        release = parse_view(seen)[-1]
        (name, bias_name), samples = first_layer(seen), release.samples
        grads = gradient_estimate(release).values
        scale, shift = (t.to(ctx.device) for t in standardise(seen, ctx, first_layer(seen)[0]))
        weight = release.before[name].to(scale)
        bias = release.before[bias_name].to(scale) if bias_name else None
        public = ctx.aux_x.flatten(1).to(scale) * scale + shift
        outputs = public @ weight.T + (0 if bias is None else bias)
        chances = (outputs <= 0).to(scale).mean(dim=0).square().clamp_min(0.02)
        play = build_player(release, ctx, scale, shift)
        images = torch.zeros(len(seen.clients), samples, *ctx.network.shape)
        labels = torch.zeros(images.shape[:2], dtype=torch.int64)
        failed, notes = torch.ones(len(images), dtype=torch.bool), list[str]()
        for victim, client in enumerate(seen.clients):
            by_bias = grads[bias_name][victim].to(scale) if bias_name else None
            unmixed = separate(
                grads[name][victim].to(scale), by_bias, weight, bias,
                samples=samples, chances=chances, sets=ctx.budget * SETS, rng=ctx.rng,
            )  # fmt: skip
            note = f"{client}: rank {unmixed.rank} of {samples}, {unmixed.sets} sets"
            if unmixed.inputs is not None and unmixed.output_grad is not None:
                each = unmixed.output_grad * samples
                x, y, misfit = _fit(play, unmixed.inputs, each, scaled=bias is not None)
                failed[victim] = not bool((misfit < _MISFIT).all())
                if not failed[victim]:
                    x = ((x - shift) / scale).view_as(images[victim])
                    images[victim] = x.clamp(0, 1) if len(ctx.network.shape) == 3 else x
                    labels[victim] = y
                note += f", signs {unmixed.agreement:.2%}, misfit {float(misfit.max()):.1e}"
            notes.append(note)
        return Reconstruction(images=images, labels=labels, failed=failed, notes=tuple(notes))


def _fit(play: Play, inputs: Tensor, output_grad: Tensor, *, scaled: bool) -> tuple[Tensor, ...]:
    """Return inputs [B, F], classes [B] and relative errors [B] that fit the samples' gradients
    [B, O] best. Unless scaled, inputs are known up to factors, and the gradients up to 1 / these.
    """
    if scaled:  # a clip leaves the direction
        alike = cosine_similarity(play(inputs), output_grad[:, None], dim=2)
        best = (1 - alike * alike.abs()).clamp_min(0).sqrt().min(dim=1)
        return inputs, best.indices, best.values
    size = inputs.abs().amax(dim=1, keepdim=True)
    unit, target = inputs / size, (output_grad * size)[:, None, None]
    logs, width = torch.zeros_like(size), 5.0
    for _ in range(6):
        tried = logs + width * torch.linspace(-1, 1, 65).to(unit)  # [B, T]
        played = play((unit[:, None] * tried.exp()[..., None]).flatten(0, 1))
        played = played.unflatten(0, tried.shape) * tried.exp()[..., None, None]
        misfit = (played - target).norm(dim=3) / target.norm(dim=3)
        best = misfit.flatten(1).min(dim=1)
        logs, width = tried.gather(1, (best.indices // misfit.shape[2])[:, None]), width / 24
    return unit * logs.exp(), best.indices % misfit.shape[2], best.values
