"""How well an answer explains what was seen: one measure for the answers of all attacks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attacks.engine.joint import best_labels
from attacks.engine.labels import read_labels
from attacks.engine.matching import Matcher, build_matcher, judge_answer, share_unexplained
from attacks.engine.observation import NonFiniteError
from bench.api import Context, Judge, Reconstruction, Seen
from bench.toolkit.batches import class_means


class Likelihood(Judge):
    """Negative log of the likelihood of what was seen times the public prior of samples, as the
    attacks that match have them (see `Matcher.judge`).

    An answer without images is judged by the public class means of its labels; one without labels
    by the labels that suit it best, of several samples by those that are read off the upload.
    Where a value that was seen is not finite, no answer explains it, and none is judged.
    """

    def losses(self, seen: Seen, ctx: Context, answer: Reconstruction) -> Tensor | None:
        """See `Judge.losses`."""
        return self._figures(judge_answer, seen, ctx, answer)

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
        granted = evidence.release.granted
        if granted is not None:
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
