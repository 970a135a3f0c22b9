"""GDBR: how many samples of each class a batch held, where the head's gradient is hidden.

With r the batch's mean of softmax less label, the head's bias gradient, and J_j the gradient of
logit j by any tensor, the tensor's gradient is the mean over samples of sum_j (p_j - [y = j]) J_j:
about sum_j r_j J_j with J_j the mean over public samples. Least squares give r, and r the counts.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from attacks.engine import observation, regression
from attacks.engine.restored import play_public
from attacks.engine.weighed import PublicSamples, public_batches
from bench.api import Attack, Context, Reconstruction, Seen, State
from bench.toolkit.batches import class_means
from bench.toolkit.counts import round_to_total

_SAMPLES = 512
"""Public samples over which logits' gradients are averaged."""
_BATCHES = 60
"""Public batches that show how far each tensor is to be trusted."""
_WIDE = 4096
"""Coordinates of a tensor that are used, evenly spaced."""
_RIDGE = 1e-3
"""Of the least squares, in units of the mean of the normal matrix's diagonal."""
_ROUNDS = 3
"""In which the mean softmax follows the counts."""


class GDBR(Attack):
    """Label counts behind a head that is encrypted or withheld, from the other gradients.

    Every tensor gives an estimate of r; a regression on public batches that the deployed defense
    played combines them, so that noise, a clip and several local steps are weighed too. Counts
    n = K (p - r) follow in three rounds, p being the public samples' mean softmax at the shares
    of the round before. Counts of several releases are averaged.
    Source: Zhang, Chow, Li, arXiv:2412.12640. Departures: mean gradients of the logits, of any
    network and every tensor, in place of mean activities of one layer after another; the
    regression.
    """

    recovers = frozenset({"counts"})
    reads = "all"
    source = "Zhang, Chow, Li, arXiv:2412.12640"

    def applies(self, seen: Seen) -> str | None:
        release = observation.parse_view(seen)[-1]
        if release.soft_labels is not None:
            return "the labels are sent, which ilrg reads"
        return observation.unusable(release) or observation.lawless(release)

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        releases, solved, notes = observation.parse_view(seen), list[Tensor](), list[str]()
        for release in releases:
            weights = observation.network_weights(release, ctx)
            buffers = {n: v.to(ctx.device) for n, v in release.seen.buffers.items()}
            with torch.no_grad():
                logits = ctx.network.apply(weights, ctx.aux_x.to(ctx.device), buffers=buffers)
            softmax, labels = logits.double().softmax(dim=-1).cpu(), ctx.aux_y.cpu()
            r, explained = bias_gradient(release, ctx, softmax, labels)
            classes, total = ctx.network.classes, release.samples
            mean = class_means(softmax, labels, classes=classes)
            counts = total * torch.bincount(labels, minlength=classes) / len(labels)
            for _ in range(_ROUNDS):
                counts = (counts.double() @ mean - total * r).clamp_min(0.0)
                counts = counts * total / counts.sum(dim=1, keepdim=True).clamp_min(1e-300)
            solved.append(counts)
            notes.append(f"{explained:.0%} of public batches' head bias gradients explained")
        return Reconstruction(
            label_counts=round_to_total(torch.stack(solved).mean(dim=0), total=total),
            failed=observation.gradient_estimate(releases[-1]).square.cpu() == 0,
            notes=tuple(notes),
        )


def bias_gradient(
    release: observation.Release, ctx: Context, softmax: Tensor, labels: Tensor
) -> tuple[Tensor, float]:
    """Estimates of r [V, C], and the share of its variance that they explain on public batches.

    softmax: Of the public samples [N, C]. labels: Theirs, int64 [N].
    """
    slopes = _logit_gradients(release, ctx)
    samples = PublicSamples(features=softmax, labels=labels)
    chosen = public_batches(samples, _BATCHES, total=release.samples, rng=ctx.rng)
    each = softmax - torch.nn.functional.one_hot(labels, softmax.shape[1])
    target = each[chosen].mean(dim=1).view(-1, 1)
    estimates = _estimates(play_public(chosen, release, ctx), slopes)
    fitted = regression.fit(
        regression.Features(estimates, group=softmax.shape[1]),
        target,
        judged=torch.ones(len(target), dtype=torch.bool),
        judge=lambda left_out: (left_out - target).square().mean(),
    )
    explained = 1 - fitted.loss / float(target.square().mean())
    return fitted(_estimates([release], slopes), 0).view(-1, softmax.shape[1]), explained


def _logit_gradients(release: observation.Release, ctx: Context) -> dict[str, Tensor]:
    """Mean gradients [C, D] of each logit, less those of all logits' mean, by the tensors sent."""
    leaves = {n: v.detach().clone().requires_grad_() for n, v in release.before.items()}
    logits = ctx.network.apply(
        observation.network_weights(replace(release, before=leaves), ctx),
        ctx.aux_x[:_SAMPLES].to(ctx.device),
        mode=str(release.seen.known["mode"]),
        buffers={n: v.to(ctx.device) for n, v in release.seen.buffers.items()},
    ).mean(dim=0)
    names = list(release.uploads[0].parts)
    rows = [
        torch.autograd.grad(
            logit, [leaves[n] for n in names], retain_graph=True, materialize_grads=True
        )
        for logit in logits - logits.mean()
    ]
    return {
        name: torch.cat([_thin(slope[None]) for slope in slopes]).double().cpu()
        for name, slopes in zip(names, zip(*rows, strict=True), strict=True)
    }


def _estimates(releases: Iterable[observation.Release], slopes: State) -> Tensor:
    """Every tensor's r of every client, [V C, tensors]."""
    rows = []
    for release in releases:
        shown = observation.gradient_estimate(release)
        estimates = []
        for name, slope in slopes.items():
            seen = _thin(shown.present[name]).to(slope)  # [V, D]
            value = _thin(shown.values[name]).to(slope) * seen
            normal = torch.stack([(slope * row) @ slope.T for row in seen])
            size = normal.diagonal(dim1=1, dim2=2).mean(dim=1)
            normal.diagonal(dim1=1, dim2=2).add_(_RIDGE * size[:, None] + 1e-30)
            estimates.append(torch.linalg.solve(normal, value @ slope.T))
        rows.append(torch.stack(estimates, dim=-1).flatten(0, 1))
    return torch.cat(rows)


def _thin(values: Tensor) -> Tensor:
    """Some coordinates [V, D] of tensors [V, ...]."""
    flat = values.flatten(1)
    return flat[:, :: -(-flat.shape[1] // _WIDE)]
