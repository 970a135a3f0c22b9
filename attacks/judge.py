"""How well an answer explains what was seen: one measure for the answers of all attacks."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.engine.encoding import Encoding
from attacks.engine.evidence import Evidence
from attacks.engine.labels import known_labels, read_labels
from attacks.engine.matching import Matcher
from attacks.engine.observation import lawless, nothing_to_match
from attacks.engine.private import with_private_parts
from bench.api import Context, Judge, Reconstruction, Seen
from bench.toolkit.batches import class_means


class Likelihood(Judge):
    """Negative log of the likelihood of what was seen times the public prior of samples, as the
    attacks that match have them (see `Matcher.judged`).

    An answer without images is judged by the public class means of its labels; one without labels
    by the labels that suit it best, of several samples by those that are read off the upload.
    """

    def losses(self, seen: Seen, ctx: Context, answer: Reconstruction) -> Tensor | None:
        seen = with_private_parts(seen, ctx)
        if nothing_to_match(seen) is not None or lawless(seen) is not None:
            return None
        evidence = Evidence(seen, ctx, dtype=torch.float64)
        encoding = Encoding(
            ctx, samples=evidence.clients.samples, dtype=evidence.dtype, framed=True
        )
        matcher = Matcher(evidence, encoding)
        tried = self._labels(answer, evidence, ctx)
        each = [self._losses(matcher, answer.images, y, ctx) for y in tried]
        losses = torch.stack(each).nan_to_num(torch.inf, posinf=torch.inf).amin(dim=0).cpu()
        if answer.failed is not None:
            losses = losses.masked_fill(answer.failed.cpu(), torch.inf)
        return losses

    def _labels(self, answer: Reconstruction, evidence: Evidence, ctx: Context) -> list[Tensor]:
        """Labels int64 [V, K] to judge the answer with."""
        victims, samples = len(evidence.seen.clients), evidence.clients.samples
        granted = known_labels(evidence.seen, ctx.device)
        if granted is not None:
            return [granted]
        if answer.labels is not None:
            return [answer.labels.to(ctx.device)]
        classes = torch.arange(ctx.network.classes, device=ctx.device)
        if answer.label_counts is not None and bool((answer.label_counts.sum(1) == samples).all()):
            counts = answer.label_counts.to(ctx.device)
            return [torch.stack([classes.repeat_interleave(row) for row in counts])]
        if samples == 1:
            return [c.expand(victims, 1) for c in classes]
        read = read_labels(evidence, ctx).fixed
        assert read is not None  # of several samples
        return [read]

    def _losses(
        self, matcher: Matcher, images: Tensor | None, labels: Tensor, ctx: Context
    ) -> Tensor:
        encoding = matcher.encoding
        if images is None:
            means = class_means(ctx.aux_x, ctx.aux_y, classes=encoding.classes)
            images = means.to(ctx.device)[labels]
        return matcher.judged(images.to(dtype=encoding.dtype, device=ctx.device), labels)
