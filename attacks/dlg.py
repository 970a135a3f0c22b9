"""DLG: deep leakage from gradients, image and soft label optimised together."""

from attacks.engine.deep_leakage import DeepLeakage
from attacks.engine.evidence import Evidence
from attacks.engine.labels import labels_by_sample, negative_bias, rank_labels, read_labels
from attacks.engine.observation import lawless, nothing_to_match, parse_view
from attacks.engine.restarts import Labels
from bench.api import Context, Seen


class DLG(DeepLeakage):
    """Matches what was seen by L-BFGS on images and label logits.

    Departures from the paper (strong): public starts, restarts for victims in a local minimum,
    label logits that begin at the likeliest classes, and under noise a Gaussian prior of samples
    fitted on public data, and an answer that is most like draws from the posterior. In both:
    relative stopping and a line search; the update of several local steps is simulated; under noise
    the objective is the likelihood of the defense's public mechanism; smashed data that was seen is
    matched jointly.
    Source: Zhu, Liu, Han, arXiv:1906.08935, Algorithm 1.
    """

    source = "Zhu, Liu, Han, arXiv:1906.08935"

    def applies(self, seen: Seen) -> str | None:
        release = parse_view(seen)[-1]
        return nothing_to_match(release) or lawless(release)

    def labels(self, evidence: Evidence, ctx: Context) -> Labels:
        if evidence.returned is not None:
            return read_labels(evidence, ctx)  # the objective no longer depends on them
        if evidence.uploads is None or evidence.clients.samples > 1 or self.preset == "paper":
            return Labels()
        # The sign rule's, where it holds, then the ranking.
        ranking = rank_labels(evidence, ctx)
        by_sample = labels_by_sample(evidence.release, ctx)
        exact = negative_bias(evidence, ctx) if by_sample is None else by_sample[:, 0]
        if exact is not None:
            later = (ranking != exact[:, None]).long().argsort(dim=1, stable=True)
            ranking = ranking.gather(1, later)
        return Labels(ranking=ranking)
