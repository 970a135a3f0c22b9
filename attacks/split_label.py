"""Labels from the gradient that a client returns at the cut before its private head."""

from attacks.engine.labels import labels_by_slope
from attacks.engine.observation import FEATURES_GRADIENT, parse_view
from attacks.engine.orders import unite
from bench.api import Attack, Context, Reconstruction, Seen

_DOUBTFUL = 0.25
"""Doubt above which a label counts as uncertain: half as far from the nearest class as from the
second."""


class SplitLabel(Attack):
    """Reads every label off the returned feature gradient and the broadcast head.

    With private labels the server's features go down to the client's head, and the gradient of
    each sample's loss by them, W'(p - y) / B, comes back. The server knows features and head,
    so the label is the class whose slope is nearest; exact without a defense of that channel.
    Where a defense draws the head at random its mean stands for it. Notes count labels that
    are nearly as near to a second class.
    Source: the returned gradient as a label channel, e.g. Li et al., arXiv:2102.08504 (for one
    output); the nearest-slope rule is leakbench's.
    """

    recovers = frozenset({"labels", "counts"})
    source = "Li et al., arXiv:2102.08504, for C classes"

    def applies(self, seen: Seen) -> str | None:
        if not seen.clients:
            return "no client took part in the observed round"
        if FEATURES_GRADIENT not in parse_view(seen)[-1].by_sample:
            return "no gradient by features returns to the server"
        return None

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        labels, doubt = labels_by_slope(unite(parse_view(seen)[-1], ctx), ctx)
        counts = labels.new_zeros(len(labels), ctx.network.classes)
        counts.scatter_add_(1, labels, labels.new_ones(labels.shape))
        doubtful = int((doubt > _DOUBTFUL).sum())
        notes = (f"{doubtful} of {labels.numel()} labels uncertain",) if doubtful else ()
        return Reconstruction(
            labels=labels.cpu(),
            label_counts=counts.cpu(),
            loss=doubt.mean(dim=1).cpu(),
            notes=notes,
        )
