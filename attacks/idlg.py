"""iDLG: the label is read off the head's gradient, then the image is matched."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from attacks.dlg import DLG
from attacks.engine.matching import Matcher, unusable
from bench.api import Context, Reconstruction, Seen


class IDLG(DLG):
    """Reads the label of a single sample, then matches the image alone.

    Without noise the label is the one class whose head gradient points against the others
    (the paper's rule; with a bias, the only negative bias gradient). Under noise that rule
    reads single coordinates, so the label is chosen by likelihood instead: the class whose
    mean public image would have sent the head tensors most like those observed. Settings as
    for `dlg`.
    Source: Zhao, Mopuri, Bilen, arXiv:2001.02610, Eq. 4-5.
    """

    source = "Zhao, Mopuri, Bilen, arXiv:2001.02610"

    def applies(self, seen: Seen) -> str | None:
        reason = unusable(seen)
        samples = int(seen.known["batch"]) * int(seen.known["local_steps"])
        if reason is None and samples > 1:
            reason = f"the label of one sample is read, but {samples} were used"
        return reason

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        matcher = Matcher(seen, ctx, dtype=self.dtype)
        granted = seen.known.get("truth_labels")
        if granted is not None:
            return self._with_labels(matcher, ctx, torch.tensor(granted))
        visible = [n for n in ctx.network.head if n in matcher.observation.values]
        if matcher.noise is None and ctx.network.head[1] in visible:
            labels = _negative_bias(matcher, ctx.network.head[1])
        else:
            labels = _likeliest(matcher, ctx, visible)
        return self._with_labels(matcher, ctx, labels[:, None])



def _negative_bias(matcher: Matcher, bias: str) -> Tensor:
    """[V] class of the smallest bias gradient: p_c - 1 < 0 for the label, p_c > 0 elsewhere."""
    values = matcher.observation.values[bias]
    sign = 1.0 if matcher.observation.kind == "gradient" else -1.0
    if matcher.observation.kind == "weights":
        values = values - matcher.start[bias]
    return (sign * values).argmin(dim=1)


def _likeliest(matcher: Matcher, ctx: Context, names: list[str]) -> Tensor:
    """[V] class whose mean public image explains the observed head tensors best."""
    if not names:
        names = list(matcher.observation.values)
    aux_y = ctx.aux_y.to(matcher.device)
    aux_x = ctx.aux_x.to(dtype=matcher.dtype, device=matcher.device)
    present = [c for c in range(matcher.classes) if bool((aux_y == c).any())]
    means = torch.stack([aux_x[aux_y == c].mean(dim=0) for c in present])[:, None]
    targets = torch.eye(matcher.classes, dtype=matcher.dtype, device=matcher.device)
    expected = vmap(matcher.sent)(means, targets[present][:, None])
    scores = []
    for k in range(len(present)):
        total = torch.zeros(len(matcher.observation.square), device=matcher.device)
        for name in names:
            value = matcher.observation.values[name]
            misfit = matcher.misfit(expected[name][k].expand_as(value), value)
            visible = matcher.observation.present[name]
            total = total + torch.where(visible, misfit, 0.0).flatten(1).sum(dim=1)
        scores.append(total)
    return torch.tensor(present, device=matcher.device)[torch.stack(scores).argmin(dim=0)]
