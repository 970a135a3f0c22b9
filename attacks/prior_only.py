"""The floor: what an attacker gets who reads no message at all."""

import torch
from torch import Tensor

from bench.api import Attack, Context, Reconstruction, Seen
from bench.toolkit.batches import class_means
from bench.toolkit.counts import round_to_total
from bench.toolkit.images import WINDOW, most_similar


class PriorOnly(Attack):
    """Answer with the public image of best mean SSIM and public class frequencies.

    Of each class if labels are granted; of records and signals the mean.

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
            likely = _typical(ctx, 1)[0]
            images = likely.expand(victims, samples, *likely.shape)
        else:
            labels = torch.tensor(granted)
            counts = torch.nn.functional.one_hot(labels, classes).sum(dim=1)
            images = _typical(ctx, classes)[labels]
        return Reconstruction(
            images=images.contiguous(), labels=labels.contiguous(), label_counts=counts.contiguous()
        )


def _typical(ctx: Context, classes: int) -> Tensor:
    """Samples [classes, ...] that are most like the public ones of each class, or of all with 1."""
    x, y = ctx.aux_x.cpu(), ctx.aux_y.cpu() if classes > 1 else torch.zeros_like(ctx.aux_y).cpu()
    means = class_means(x, y, classes=classes)
    if x.ndim < 4 or min(x.shape[-2:]) < WINDOW:
        return means
    return most_similar(x, y, means)
