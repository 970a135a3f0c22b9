"""iDLG: labels are read off the head's gradient, then the images are matched."""

from attacks.engine.deep_leakage import DeepLeakage
from attacks.engine.evidence import Evidence
from attacks.engine.labels import read_labels
from attacks.engine.observation import lawless, parse_view, unusable
from attacks.engine.restarts import Labels
from bench.api import Context, Seen


class IDLG(DeepLeakage):
    """Reads the labels, then matches the images alone.

    A single sample's label is the one class whose head gradient points against the others (the
    paper's rule; with a bias, the only negative bias gradient). Under noise that rule reads
    single coordinates, so the likeliest classes are tried instead, one per start, and the one
    that explains the upload best is kept; a record is the mean over them. Of several samples,
    which the paper leaves out, the label counts are restored as by `ilrg`. Settings as for `dlg`.
    Source: Zhao, Mopuri, Bilen, arXiv:2001.02610, Eq. 4-5.
    """

    counts_labels = True
    source = "Zhao, Mopuri, Bilen, arXiv:2001.02610"

    def applies(self, seen: Seen) -> str | None:
        release = parse_view(seen)[-1]
        return unusable(release) or lawless(release)

    def labels(self, evidence: Evidence, ctx: Context) -> Labels:
        return read_labels(evidence, ctx)
