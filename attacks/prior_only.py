"""The floor: what an attacker gets who reads no message at all."""

from __future__ import annotations

import torch

from bench.api import Attack, Context, Reconstruction, Seen
from bench.toolkit.batches import class_means
from bench.toolkit.counts import round_to_total


class PriorOnly(Attack):
    """Mean public image and public class frequencies; class-mean images if labels are granted.

    An attack that does not beat this learnt nothing about the images; one between the floor and
    that of an answer which is told the labels (both printed beside every attack) learnt the
    label, not the image.
    """

    recovers = frozenset({"images", "labels", "counts"})
    is_floor = True
    source = "leakbench's floor"

    def applies(self, seen: Seen) -> str | None:
        return None if seen.clients else "no client took part in the observed round"

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        samples = int(seen.known["samples"])
        victims, classes = len(seen.clients), ctx.network.classes
        frequency = torch.bincount(ctx.aux_y.cpu(), minlength=classes).double()
        granted = seen.known.get("truth_labels")
        if granted is None:
            counts = round_to_total(frequency[None], total=samples).expand(victims, -1)
            labels = torch.repeat_interleave(torch.arange(classes), counts[0]).expand(victims, -1)
            mean = ctx.aux_x.mean(dim=0).cpu()
            images = mean.expand(victims, samples, *mean.shape)
        else:
            labels = torch.tensor(granted)
            counts = torch.nn.functional.one_hot(labels, classes).sum(dim=1)
            images = class_means(ctx.aux_x, ctx.aux_y, classes=classes).cpu()[labels]
        return Reconstruction(
            images=images.contiguous(), labels=labels.contiguous(), label_counts=counts.contiguous()
        )
