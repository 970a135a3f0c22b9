"""The cocktail party attack: samples that a first linear layer mixed, told apart like voices."""

from attacks.engine.mixture import not_mixed, unmix_samples
from attacks.engine.observation import parse_view
from attacks.engine.records import one_hot_groups, unmix_records
from attacks.engine.samples import first_layer
from bench.api import Attack, Context, Reconstruction, Seen

_PARTLY = "the first layer's gradient was not sent in full"
"""The reason of `not_mixed` that is none where a part was sent."""


class CocktailParty(Attack):
    """Samples that a first linear layer mixed, told apart by what samples are like.

    With A = dL/dz of the layer's outputs [O, K] and its inputs X [K, F], the layer's weight
    gradient is A X and its bias gradient A 1, whatever the layers behind it, and sums over local
    steps and clients stay such products. So the rows of (X, 1) span the row space of both, and the
    1 fixes the scale of each. Images are independent components of the differences between
    neighbouring pixels. Where public samples are often exactly 0, the private ones are corners of
    what the row space has in [0, 1] that lie near the components, with as many zeros as a linear
    program finds; after one step, only those whose own gradient, played with the best class, lies
    in what was seen. Records of a table have a single 1 in every one-hot group. A gradient of which
    a part is missing is completed by its rank, or samples are read off units that are live for one
    of them only (see `records`). What the gradient doesn't tell of a sample is answered with its
    likeliest values, other samples with the public mean.
    Source: Kariyappa et al., arXiv:2209.05578. Departures: the bias in place of a search for signs
    and scales, FastICA on differences in place of total variation, zeros, one-hot groups, and parts
    of gradients.
    """

    recovers = frozenset({"images", "labels"})
    source = "Kariyappa et al., arXiv:2209.05578"

    def applies(self, seen: Seen) -> str | None:
        reason = not_mixed(seen)
        if reason != _PARTLY:
            return reason
        layer = set(first_layer(seen))
        parts = [u.parts for u in parse_view(seen)[-1].uploads]
        return None if parts and all(layer <= set(p) for p in parts) else reason

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        groups = one_hot_groups(ctx.aux_x)
        if groups or not_mixed(seen):
            return unmix_records(seen, ctx, groups)
        return unmix_samples(seen, ctx)
