"""Ridge inverter: the best linear map from what was seen to the image, in closed form."""

from attacks.engine.batches import invert_batch
from attacks.engine.channel import no_sample_channel
from attacks.engine.inverter import inverter_of, reconstruction
from attacks.engine.observation import Release, parse_view, unusable
from bench.api import Attack, Context, Reconstruction, Seen
from bench.toolkit.settings import check_number


class Ridge(Attack):
    """Linear map from what was seen to the image, fitted on public images.

    The pairs are made by playing the deployed defense on public images (`ctx.shadow`), so that
    it adapts to any defense. Penalty, feature set and weights are chosen by leave-one-image-out on
    public images. Smashed data that lies on a grid over the image is also inverted place by place,
    with the same weights everywhere: of tokens, a hundred public images are enough.
    Applies to smashed data and to updates of one step; of several samples it tells each by its
    place in the batch (see `invert_batch`).
    Source: Hoerl, Kennard 1970; of batches Wu et al., arXiv:2210.10880.

    Args:
        rows: Pairs per regression, public images times plays (mirrored images, or draws of the
            defense's randomness), or batches.
    """

    recovers = frozenset({"images", "labels"})
    reads = "all"
    source = "ridge regression, leakbench's closed-form inverter"

    def __init__(self, *, rows: int = 800) -> None:
        check_number("rows", rows, "training pairs per regression", least=1)
        self.rows = rows

    def applies(self, seen: Seen) -> str | None:
        return None if _batch(seen) else no_sample_channel(seen)

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        if (release := _batch(seen)) is not None:
            return invert_batch(release, ctx, rows=self.rows)
        inverter = inverter_of(seen, ctx, rows=self.rows)
        images, loss = inverter.predict()
        return reconstruction(images, loss, inverter)


def _batch(seen: Seen) -> Release | None:
    """The round, if an update of one step is all that shows its samples, and they are several."""
    release = parse_view(seen)[-1]
    alone = release.by_sample or release.samples == 1 or release.steps > 1 or unusable(release)
    return None if alone else release
