"""iLRG: how many samples of each class a batch held, from the head's gradient."""

import torch

from attacks.engine.observation import in_the_clear, lawless, parse_view, unusable
from attacks.engine.orders import unite
from attacks.engine.restored import REFINE, SHRINK, restore_counts
from bench.api import Attack, Context, Reconstruction, Seen
from bench.toolkit.settings import check_number


class ILRG(Attack):
    """Instance-wise batch label restoration.

    Per class, weight gradient row / bias gradient is the mean embedding of its samples; their
    softmax probabilities p_j and K grad_b = sum_j n_j p_j - n give a linear system in the
    counts n, solved with the row sum(n) = K in float64, then rounded so that the counts are
    >= 0 and sum to K.
    A class whose expected and true counts agree has a bias gradient near 0, so that its quotient
    is noise; min_e |dW - db e|^2 + (shrink / K)^2 |e - public|^2 is the quotient elsewhere, and
    the public feature in coordinates that were not sent.
    One embedding per class is not enough on a trained network. Batches whose solution is not near
    whole counts are refined and then weighed with other counters, by what these get right on
    batches of public samples (see `engine.weighed`). Of several releases the least doubtful answer
    counts, and the weighing has the counters of all.
    Source: Ma, Sun, Cui, Li, Guo, Xu, ICLR 2023, Eq. 8-12. Departures: shrinkage,
    refinement and weighing (shrink 0 and refine 0 are the paper's), rounding by largest remainder,
    a defense-aware estimate of the gradient (see `gradient_estimate`), partly visible heads (see
    `restore`), and LU in place of the pseudo-inverse, which has the same solution.
    With shared labels that are noised, it decodes the label messages instead.
    Notes say how much of the head was visible, and for how many victims the counts are not to
    be trusted because what was solved is far from whole numbers.

    Args:
        shrink: Pull of the embedding towards the class's mean public feature, in instances.
        refine: Steps of a better embedding (see `counts`) for batches whose solution is not near
            whole counts, before they are weighed; 0 is the paper's attack, without either.
    """

    recovers = frozenset({"counts"})
    reads = "all"
    source = "Ma et al., ICLR 2023 (iLRG)"

    def __init__(self, *, shrink: float = SHRINK, refine: int = REFINE) -> None:
        check_number("shrink", shrink, "instances", least=0)
        check_number("refine", refine, "steps; 0 is the paper's", least=0)
        self.shrink, self.refine = shrink, refine

    def applies(self, seen: Seen) -> str | None:
        release = parse_view(seen)[-1]
        if (sent := release.soft_labels) is not None:
            return "the labels are sent in the clear (disclosed)" if in_the_clear(sent) else None
        reason = unusable(release) or lawless(release)
        head = [u.parts[n] for u in release.uploads for n in seen.network["head"] if n in u.parts]
        if reason is None and not any(bool(part.presence().any()) for part in head):
            reason = "no value of the head's weight or bias was sent in the clear"
        return reason

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        releases = parse_view(seen)
        if (sent := unite(releases[-1], ctx).soft_labels) is not None:
            # Of each sample the largest entry: the likeliest under noise of one variance.
            best = torch.nn.functional.one_hot(sent.argmax(dim=-1), sent.shape[-1])
            notes: tuple[str, ...] = ("decoded from the label messages",)
            return Reconstruction(label_counts=best.sum(dim=1), notes=notes)
        counts, silent, notes = restore_counts(
            releases, ctx, shrink=self.shrink, refine=self.refine
        )
        return Reconstruction(label_counts=counts, failed=silent, notes=notes)
