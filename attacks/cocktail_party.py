"""The cocktail party attack: samples that a first linear layer mixed, told apart like voices."""

from attacks.engine.mixture import not_mixed, unmix_samples
from bench.api import Attack, Context, Reconstruction, Seen


class CocktailParty(Attack):
    """Samples that a first linear layer mixed, told apart by independent component analysis.

    With A = dL/dz of the layer's outputs [O, K] and its inputs X [K, F], the layer's weight
    gradient is A X and its bias gradient A 1, whatever the layers behind it, and sums over local
    steps and clients stay such products. So the rows of (X, 1) span the row space of both, and the
    1 fixes the scale of each. Components are those of the differences between neighbouring pixels.
    Where public samples are often exactly 0, the private ones are corners of what the row space
    has in [0, 1] that lie near the components, with as many zeros as a linear program finds; after
    one step, only those whose own gradient, played with the best class, lies in what was seen.
    Samples that the gradient doesn't tell are answered with the public mean.
    Source: Kariyappa et al., arXiv:2209.05578. Departures: the bias in place of a search for signs
    and scales, FastICA on differences in place of total variation, and zeros.
    """

    recovers = frozenset({"images", "labels"})
    source = "Kariyappa et al., arXiv:2209.05578"

    def applies(self, seen: Seen) -> str | None:
        return not_mixed(seen)

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        return unmix_samples(seen, ctx)
