"""How well an answer explains what was seen: one measure for the answers of all attacks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.engine.deep_leakage import DeepLeakage
from attacks.engine.evidence import Evidence
from attacks.engine.joint import best_labels
from attacks.engine.labels import read_labels
from attacks.engine.matching import Matcher, build_matcher, judge_answer, share_unexplained
from attacks.engine.observation import NonFiniteError, parse_view
from attacks.engine.posterior import draw_posterior, find_messages, find_noisy_messages
from attacks.engine.restarts import Labels
from bench.api import Context, Judge, Reconstruction, Seen
from bench.toolkit.batches import class_means
from bench.toolkit.images import ssim

_EVALUATIONS = 150
"""Of the descent to the likeliest images, around which the judge draws."""
_SAMPLES = 8
"""Of a victim, up to which it does: that descent for 64 samples takes minutes."""
_EXPLAINED, _WHOLE = 1e-8, 1e-3
"""Share unexplained below which an answer explains everything, and by how much a value of a record
that can only be 0 or 1 may differ from these."""
_SURE = 1e9
"""By how much the loss of records that do falls."""


class Likelihood(Judge):
    """Negative log of the likelihood of what was seen times the public prior of samples, as the
    attacks that match have them (see `Matcher.judge`).

    Under noise the likeliest samples are not those that are nearest to the true ones in the mean.
    So where samples can be drawn from their posterior (see `draw_posterior`), an answer's loss is
    its negative mean SSIM with draws, which are the same for all answers; of a single record it is
    the squared error from the mean over its labels. One that is likelier
    than the samples around which they were drawn shows that these are not the likeliest, and comes
    before all others.

    Where nothing is noised, many answers explain all that batches of records sent. Those whose
    columns are 0 or 1 where they are in all public records come before the others, which no record
    can be.

    An answer without images is judged by the public class means of its labels; one without labels
    by the labels that suit it best, of several samples by those that are read off the upload.
    Where a value that was seen is not finite, no answer explains it, and none is judged.
    """

    def losses(self, seen: Seen, ctx: Context, answer: Reconstruction) -> Tensor | None:
        """See `Judge.losses`."""

        def judge_drawn(matcher: Matcher, images: Tensor, labels: Tensor) -> Tensor:
            losses = judge_answer(matcher, images, labels)
            if not matcher.encoding.image:
                losses = torch.where(_are_records(matcher, images, labels), losses - _SURE, losses)
            for victim, one in enumerate(ctx.once(("posterior",), partial(_draw, seen))):
                if one is not None and losses[victim].isfinite():
                    beyond = float(one.least - losses[victim])
                    likely = 1 + beyond if beyond > 0 else one.similarity(images[victim])
                    losses[victim] = -likely
            return losses

        return self._figures(judge_drawn, seen, ctx, answer)

    def unexplained(self, seen: Seen, ctx: Context, answer: Reconstruction) -> Tensor | None:
        """See `Judge.unexplained`."""
        if answer.images is None:
            return None
        return self._figures(share_unexplained, seen, ctx, answer)

    def _figures(
        self,
        of: Callable[[Matcher, Tensor, Tensor], Tensor | None],
        seen: Seen,
        ctx: Context,
        answer: Reconstruction,
    ) -> Tensor | None:
        """A figure of the answer [V], infinite for victims without one; None where nothing can be
        said."""
        try:
            matcher = build_matcher(seen, ctx)
            if matcher is None:
                return None
            classes, dtype = matcher.encoding.classes, matcher.encoding.dtype
            images = None if answer.images is None else answer.images.to(ctx.device, dtype)
            labels = self._labels(answer, images, matcher, ctx)
            if images is None:
                means = class_means(ctx.aux_x, ctx.aux_y, classes=classes)
                images = means.to(ctx.device, dtype)[labels]
            figures = of(matcher, images, labels)
        except NonFiniteError:
            # Attacks that look at it have failed; an answer that looked at nothing stands.
            return None
        if figures is None or answer.failed is None:
            return None if figures is None else figures.cpu()
        return figures.cpu().masked_fill(answer.failed.cpu(), torch.inf)

    def _labels(
        self, answer: Reconstruction, images: Tensor | None, matcher: Matcher, ctx: Context
    ) -> Tensor:
        """Labels int64 [V, K] to judge the answer with."""
        evidence, samples = matcher.evidence, matcher.encoding.samples
        if (granted := evidence.release.granted) is not None:
            return granted.to(ctx.device)
        if answer.labels is not None:
            return answer.labels.to(ctx.device)
        counts = answer.label_counts
        if counts is not None and bool((counts.sum(dim=1) == samples).all()):
            classes = torch.arange(ctx.network.classes, device=ctx.device)
            return torch.stack([classes.repeat_interleave(row.to(ctx.device)) for row in counts])
        if samples == 1 and images is not None:
            return best_labels(matcher, images)
        read = read_labels(evidence, ctx)
        if read.fixed is not None:
            return read.fixed
        assert read.ranking is not None
        return read.ranking[:, :1]


class Likeliest(DeepLeakage):
    """The likeliest samples, with labels that are read where an upload shows them, as by `idlg`,
    whose edits would otherwise re-key every attack."""

    counts_labels = True

    def labels(self, evidence: Evidence, ctx: Context) -> Labels:
        return Labels() if evidence.uploads is None else read_labels(evidence, ctx)


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Of one victim's samples.

    Attributes:
        draws: From it [S, K, *shape].
        least: Likelihood loss of the likeliest samples that were found.
    """

    draws: Tensor
    least: float

    def similarity(self, images: Tensor) -> float:
        """The mean SSIM with the draws of images [K, *shape], in the order that suits the draws'
        mean; of a record [1, F] the negative squared error from it."""
        if images.ndim == 2:
            return -float((images.cpu() - self.draws.mean(dim=0)).square().mean())
        x, mean = images.cpu(), self.draws.mean(dim=0)
        pairs = x[None].expand(len(x), *x.shape)
        _, order = linear_sum_assignment(-ssim(pairs, mean[:, None].expand_as(pairs)).numpy())
        return float(ssim(x[order].expand_as(self.draws), self.draws).mean())


def _are_records(matcher: Matcher, x: Tensor, labels: Tensor) -> Tensor:
    """bool [V]: victims whose samples [V, K, F] explain all that was seen and have whole columns
    where public samples have."""
    unexplained, public = share_unexplained(matcher, x, labels), matcher.encoding.ctx.aux_x.to(x)
    whole = ((public == 0) | (public == 1)).all(dim=0)
    if unexplained is None or not bool(whole.any()):
        return torch.zeros(len(x), dtype=torch.bool, device=x.device)
    away = torch.where(whole, (x - x.round()).abs(), 0.0).flatten(1).amax(dim=1)
    return (unexplained <= _EXPLAINED) & (away <= _WHOLE)


def _draw(seen: Seen, ctx: Context) -> list[Posterior | None]:
    """Draws of each victim's samples around the likeliest ones, or a record's mean over its labels;
    None where `draw_posterior` draws none."""
    judging = build_matcher(seen, ctx)
    if judging is None or judging.encoding.samples > _SAMPLES:
        return []
    record = not judging.encoding.image and judging.encoding.samples == 1
    if (find_noisy_messages(judging.evidence) if record else find_messages(judging)) is None:
        return []
    releases, ctx = parse_view(seen), replace(ctx, budget=_EVALUATIONS)
    matcher, solution, _ = Likeliest().solve(releases, ctx)
    if record:
        return [Posterior(draws=x[None].cpu(), least=-torch.inf) for x in solution.images]
    likeliest = judge_answer(judging, solution.images.to(torch.float64), solution.labels)
    rng = torch.Generator().manual_seed(1)
    each = draw_posterior(matcher, solution, ctx, rng)
    return [
        None if draws is None else Posterior(draws=draws, least=float(least))
        for draws, least in zip(each, likeliest, strict=True)
    ]
