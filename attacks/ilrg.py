"""iLRG: how many samples of each class a batch held, from the head's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.engine.estimate import gradient_estimate
from attacks.engine.matching import unusable
from bench.api import Attack, Context, Reconstruction, Seen
from bench.toolkit.batches import class_means
from bench.toolkit.counts import round_to_total


class ILRG(Attack):
    """Instance-wise batch label restoration.

    Per class, weight gradient row / bias gradient is the mean embedding of its samples; their
    softmax probabilities p_j and K grad_b = sum_j n_j p_j - n give a linear system in the
    counts n, solved with the row sum(n) = K by pseudo-inverse in float64, then rounded so that
    the counts are >= 0 and sum to K. Only visible rows enter.
    shrink: pull of the embedding towards the class's mean public feature, in instances. A class
    whose expected and true counts agree has a bias gradient near 0, so that its quotient is
    noise; min_e |dW - db e|^2 + (shrink / K)^2 |e - public|^2 is the quotient elsewhere.
    Source: Ma, Sun, Cui, Li, Guo, Xu, arXiv:2207.02160, Eq. 8-12. Departures: that shrinkage (0
    is the paper's), rounding by largest remainder, and a defense-aware estimate of the gradient
    (see `gradient_estimate`).
    """

    recovers = frozenset({"counts"})
    source = "Ma et al., arXiv:2207.02160"

    def __init__(self, *, shrink: float = 0.1) -> None:
        if not shrink >= 0:
            raise ValueError(f"shrink must be >= 0 (instances), got {shrink}.")
        self.shrink = shrink

    def applies(self, seen: Seen) -> str | None:
        reason = unusable(seen)
        if reason is None:
            sent = seen.of(seen.clients[0], str(seen.upload_kind()))[0].parts
            if not set(seen.network["head"]) <= set(sent):
                reason = "the head's weight and bias were not both sent"
        return reason

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        estimate = gradient_estimate(seen)
        weight, bias = ctx.network.head
        rows = estimate.present[bias] & estimate.present[weight].all(dim=-1)
        head = {n: seen.before[n].double() for n in (weight, bias)}
        total = int(seen.known["batch"]) * int(seen.known["local_steps"])
        counts = restore(
            weight_grad=estimate.values[weight],
            bias_grad=estimate.values[bias],
            visible=rows,
            weight=head[weight],
            bias=head[bias],
            total=total,
            public=_class_features(seen, ctx),
            shrink=self.shrink,
        )
        seen_rows = int(rows.sum(dim=1).min())
        notes = () if seen_rows == len(head[bias]) else (f"{seen_rows} head rows visible",)
        return Reconstruction(label_counts=counts.cpu(), notes=notes)


def _class_features(seen: Seen, ctx: Context) -> Tensor:
    """Mean head input of the public samples of each class (of all, where there is none)."""
    params = {n: v.to(ctx.device) for n, v in seen.before.items()}
    const = {n: v.to(ctx.device) for n, v in seen.const.items()}
    buffers = {n: v.to(ctx.device) for n, v in seen.buffers.items()}
    weights = ctx.defense.mean_realize(ctx.defense.receive(params, const), const)
    with torch.no_grad():
        features = ctx.network.features(weights, ctx.aux_x.to(ctx.device), buffers=buffers)
    return class_means(features.double().cpu(), ctx.aux_y.cpu(), classes=ctx.network.classes)


def restore(
    *,
    weight_grad: Tensor,
    bias_grad: Tensor,
    visible: Tensor,
    weight: Tensor,
    bias: Tensor,
    total: int,
    public: Tensor,
    shrink: float,
) -> Tensor:
    """Label counts int64 [V, C] of V batches of `total` samples.

    weight_grad [V, C, F], bias_grad [V, C]: mean gradients of the head; visible: bool [V, C];
    weight [C, F], bias [C]: the broadcast head; public [C, F]: mean features that embeddings
    are shrunk to. A row that is not visible gives no equation.
    """
    classes = bias_grad.shape[1]
    pull = (shrink / total) ** 2
    # The floor matters for shrink = 0 alone, where a vanishing bias gradient has no quotient.
    square = (bias_grad.square() + pull).clamp_min(1e-300)[..., None]
    embedding = (weight_grad * bias_grad[..., None] + pull * public) / square
    logits = embedding @ weight.T + bias
    # A class that is absent may have a meaningless, huge embedding: keep the softmax finite.
    probability = torch.softmax(logits.nan_to_num(0.0, posinf=1e30, neginf=-1e30), dim=-1)
    eye = torch.eye(classes, dtype=weight.dtype, device=weight.device)
    equations = (probability - eye).mT  # row i: sum_j n_j p_j[i] - n_i
    equations = torch.where(visible[..., None], equations, 0.0)
    right = torch.where(visible, total * bias_grad, 0.0)
    ones = torch.ones_like(equations[:, :1])
    system = torch.cat([equations, ones], dim=1)
    right = torch.cat([right, torch.full_like(right[:, :1], total)], dim=1)
    solved = (torch.linalg.pinv(system) @ right[..., None]).squeeze(-1)
    return round_to_total(solved.clamp_min(0), total=total)
