"""iDLG: the label is read off the head's gradient, then the image is matched."""

from __future__ import annotations

from attacks.dlg import DLG
from attacks.engine.labels import negative_bias, rank_labels
from attacks.engine.matching import Matcher, unusable
from attacks.engine.restarts import Labels
from bench.api import Context, Seen


class IDLG(DLG):
    """Reads the label of a single sample, then matches the image alone.

    Without noise the label is the one class whose head gradient points against the others (the
    paper's rule; with a bias, the only negative bias gradient). Under noise that rule reads
    single coordinates, so the likeliest classes are tried instead, one per start, and the one
    that explains the upload best is kept. Settings as for `dlg`.
    Source: Zhao, Mopuri, Bilen, arXiv:2001.02610, Eq. 4-5.
    """

    source = "Zhao, Mopuri, Bilen, arXiv:2001.02610"

    def applies(self, seen: Seen) -> str | None:
        reason = unusable(seen)
        samples = int(seen.known["batch"]) * int(seen.known["local_steps"])
        if reason is None and samples > 1:
            reason = f"the label of one sample is read, but {samples} were used"
        return reason

    def _labels(self, matcher: Matcher, ctx: Context) -> Labels:
        bias, observation = ctx.network.head[1], matcher.observation
        visible = bias in observation.values and bool(observation.present[bias].all())
        if matcher.noise is None and visible:
            return Labels(fixed=negative_bias(matcher, bias)[:, None])
        return Labels(ranking=rank_labels(matcher, ctx), hold=True)
