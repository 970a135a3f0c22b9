"""Scores of a reconstruction per victim."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bench.contract.attack import Reconstruction
from bench.metrics.answers import validate_answer
from bench.metrics.named import METRICS
from bench.metrics.recognise import Gallery, exact_matches, share_recognised
from bench.toolkit import images
from bench.toolkit.images import same_shape


def one_to_one(guess: Tensor, truth: Tensor) -> Tensor:
    """Order of the guesses that minimises the total squared error.

    Every guess is used once: the best match per image would let one good guess count many times.

    Args:
        guess: Guessed samples [V, K, ...].
        truth: Private samples [V, K, ...].

    Returns:
        int64 [V, K]; guess[v, order[v, k]] belongs to truth[v, k].
    """
    same_shape(guess, truth)
    victims, samples = guess.shape[:2]
    if samples == 1:
        return torch.zeros(victims, 1, dtype=torch.int64)
    flat = guess.double().flatten(2), truth.double().flatten(2)
    cost = torch.cdist(flat[1], flat[0]).square().cpu().numpy()
    return torch.stack([torch.from_numpy(linear_sum_assignment(c)[1]) for c in cost])


MOST_MATCHED = 512
"""Samples of all clients together that are matched one to one."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What an answer scores: one figure per victim, by metric. failed: victims without a usable
    answer, scored as the mean public image, which an attacker would fall back to. images: as
    matched."""

    values: dict[str, list[float]]
    failed: int
    images: Tensor | None


def score(
    answer: Reconstruction,
    *,
    x: Tensor,
    y: Tensor,
    classes: int,
    aux_x: Tensor,
    categorical: Sequence[tuple[int, int]] = (),
    gallery: Gallery | None = None,
) -> Scores:
    """Score an attack's answer against the truth.

    Non-finite images make their victim failed.

    Args:
        answer: The attack's answer.
        x: The private samples [V, K, ...].
        y: Their labels [V, K].
        classes: Their number.
        aux_x: Public samples [N, ...].
        categorical: Groups of one-hot columns of tabular data.
        gallery: Other images, for `recognised`; None: not measured.

    Raises:
        ValueError: For an answer of the wrong shape, dtype or range.
    """
    victims, samples = y.shape
    answer = validate_answer(answer, tuple(x.shape), classes)
    values: dict[str, Tensor] = {}
    failed = torch.zeros(victims, dtype=torch.bool)
    matched = None
    order = torch.arange(samples).expand(victims, -1)
    if answer.failed is not None:
        failed |= answer.failed.bool()
    if answer.images is not None:
        guess = answer.images.float()
        failed |= ~torch.isfinite(guess).flatten(1).all(dim=1)
        fallback = aux_x.mean(dim=0).expand_as(x)
        guess = torch.where(failed.view(-1, *[1] * (x.ndim - 1)), fallback, guess)
        if x.ndim == 5:
            guess = guess.clamp(0, 1)
        order = one_to_one(guess, x)
        matched = guess[torch.arange(victims)[:, None], order]
        values |= image_values(matched, x, categorical)
        if gallery is not None and x.ndim == 5:
            values["recognised"] = share_recognised(matched, x, y, gallery)
    if answer.label_counts is not None:
        values |= label_values(answer.label_counts, counts_of(y, classes))
    if answer.labels is not None:
        values["label_accuracy"] = (answer.labels.gather(1, order) == y).double().mean(dim=1)
    return Scores(
        values={k: v.tolist() for k, v in values.items()}, failed=int(failed.sum()), images=matched
    )


def image_values(
    guess: Tensor, x: Tensor, categorical: Sequence[tuple[int, int]]
) -> dict[str, Tensor]:
    """Metrics of matched samples [V, K, ...], each the mean over a victim's samples."""
    values = {"mse": images.mse(guess, x, sample_dims=x.ndim - 2).mean(dim=1)}
    if x.ndim == 5:
        for name, metric in METRICS.items():
            if metric.of_images is not None:
                values[name] = metric.of_images(guess, x).double().mean(dim=1)
        similar = images.ssim(guess, x)
        values["ssim"] = similar.mean(dim=1)
        values["success"] = (similar > 0.9).double().mean(dim=1)
    if categorical:
        right = [
            guess[..., a:b].argmax(dim=-1) == x[..., a:b].argmax(dim=-1) for a, b in categorical
        ]
        values["attribute_accuracy"] = torch.stack(right).double().mean(dim=(0, 2))
    if x.ndim == 3:
        values["exact"] = exact_matches(guess, x, tuple(categorical))
    return values


def of_anyone(guess: Tensor, x: Tensor) -> dict[str, list[float]]:
    """Return `ssim_anyone` of images or `mse_anyone` of records [V, K, ...]: the answers of all
    clients matched one to one with the samples of all of them. Sums over clients show that without
    the client of each sample. Empty for other samples and for more than MOST_MATCHED."""
    victims, samples = x.shape[:2]
    if x.ndim not in (3, 5) or victims * samples > MOST_MATCHED:
        return {}
    all_, truth = guess.flatten(0, 1), x.flatten(0, 1)
    order = one_to_one(all_[None], truth[None])[0]
    if x.ndim == 5:
        name, figures = "ssim_anyone", images.ssim(all_[order], truth)
    else:
        name, figures = "mse_anyone", images.mse(all_[order], truth, sample_dims=1)
    return {name: figures.view(victims, samples).mean(dim=1).tolist()}


def label_values(guess: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Metrics of label counts int64 [V, C], float64 [V].

    leacc: share of all C classes whose presence is right; print the chance floor beside it.
    lnacc: share of all C classes whose count is exactly right, of absent ones too.
    irec: share of the batch's labels recovered, sum_c min(guess_c, truth_c) / K. A guess of more
    than K labels is divided by their number, so that naming all gains nothing.
    Source: iLRG.

    Raises:
        ValueError: If the shapes differ.
    """
    same_shape(guess, truth)
    named = torch.maximum(guess.sum(dim=-1), truth.sum(dim=-1)).clamp_min(1)
    return {
        "leacc": ((guess > 0) == (truth > 0)).double().mean(dim=-1),
        "lnacc": (guess == truth).double().mean(dim=-1),
        "irec": torch.minimum(guess, truth).sum(dim=-1) / named.double(),
    }


def counts_of(y: Tensor, classes: int) -> Tensor:
    """Labels [V, K] as counts [V, C]."""
    return torch.nn.functional.one_hot(y, classes).sum(dim=1)
