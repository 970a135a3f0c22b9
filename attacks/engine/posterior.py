"""Draws of samples from their posterior under noise, and the answer that is most like them.

Under noise the likeliest samples are smoother than any sample is. Around them, what clients would
have sent is close to linear in the samples and the prior is close to Gaussian, so that a draw from
the posterior is a public sample plus a linear correction (Matheron's rule). An attack answers with
what is on average most like the draws.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from attacks.engine.encoding import shrunk_means
from attacks.engine.evidence import Evidence, releases_of
from attacks.engine.matching import Matcher
from attacks.engine.observation import SplitView
from attacks.engine.optimisers import in_chunks
from attacks.engine.restarts import Solution
from attacks.engine.terms import Uploads
from bench.api import Context, GaussianNoise, LaplaceNoise, Mechanism, Prepared, SmashedNoise
from bench.toolkit.images import WINDOW, most_similar

_DIRECTIONS, _DRAWS = 256, 256
"""Of a sample, along which the messages are linearised: those in which public samples differ most.
Draws of a victim's samples."""
_TOGETHER = 512
"""Directions of all of a victim's samples: each costs an evaluation."""
_STEP = 0.01
"""Of the finite differences, in standard deviations of a direction."""
_LARGEST = 1024
"""Numbers of a sample up to which its prior is fitted; photos of 3,072 gained nothing."""
_MOST = 2**27
"""Numbers that a victim's linearised messages may have."""
_RIDGE = 1e-3
"""Share of the mean variance that every direction has at least."""
_NOTHING = 1e-6
"""Mean variance below which samples do not differ."""
_FEWEST = 10
"""Public samples from which they tell anything."""
_HALF = 30
"""Samples of a class from which its own covariance counts half."""
_REACHES = 0, 1, 2
"""Pixels by which copies of images are moved."""


class ClassPrior:
    """Gaussian of each class's images, fitted on public ones and copies of them.

    By how many pixels copies are moved, whether they are mirrored and whether classes have
    covariances of their own: whatever gives a left-out quarter the largest likelihood.

    Args:
        x: Public images [N, C, H, W].
        y: Their labels int64 [N].
        classes: Number of classes C.
    """

    def __init__(self, x: Tensor, y: Tensor, classes: int) -> None:
        self.x, self.y, self.classes = x, y, classes
        ways = list(product(_REACHES, (False, True)))
        kept = math.ceil(0.75 * len(x))
        left_out = x[kept:], y[kept:]
        tried = {way: _Covariances(x[:kept], y[:kept], classes, *way) for way in ways}
        self.way = max(ways, key=lambda way: tried[way].likelihood(*left_out, own=False))
        plain, own = (tried[self.way].likelihood(*left_out, own=own) for own in (False, True))
        self.own = own > plain
        self.covariances = _Covariances(x, y, classes, *self.way)
        self.factor = cache(lambda label: torch.linalg.eigh(self.covariances.of(label)))

    def directions(self, label: int, most: int) -> tuple[Tensor, Tensor]:
        """Directions [D, R] of a class in which its samples differ most, as long as a standard
        deviation, and what gives a difference's coordinates by them [D, R]."""
        values, vectors = self.factor(label if self.own else None)
        values, vectors = values[-most:], vectors[:, -most:]
        return vectors * values.sqrt(), vectors / values.sqrt()

    def draw(self, label: int, rng: torch.Generator) -> Tensor:
        """Public samples of a class [S, D], drawn with replacement; of all without any."""
        rows = (self.y == label).nonzero().squeeze(1)
        rows = rows if len(rows) > 1 else torch.arange(len(self.y), device=self.y.device)
        picks = torch.randint(len(rows), (_DRAWS,), generator=rng).to(rows.device)
        return self.x[rows[picks]].flatten(1)


class _Covariances:
    """Class means and covariances of samples and their moved copies."""

    def __init__(self, x: Tensor, y: Tensor, classes: int, reach: int, mirrored: bool) -> None:
        copies = list(_moved(x, reach, mirrored))
        flat, labels = torch.cat(copies).flatten(1), y.repeat(len(copies))
        self.counts = torch.bincount(y, minlength=classes)
        together = torch.stack(copies).mean(dim=0).flatten(1)
        self.means, by_others = shrunk_means(together, y, classes)
        self.rest, self.labels = flat - by_others.repeat(len(copies), 1), labels
        self.pooled = self.rest.mT @ self.rest / len(flat)

    def of(self, label: int | None) -> Tensor:
        """Covariance [D, D] of a class, in part its own; None: of all classes together."""
        covariance = self.pooled
        count = 0 if label is None else int(self.counts[label])
        if count:
            rest = self.rest[self.labels == label]
            share = count / (count + _HALF)
            covariance = share * (rest.mT @ rest / len(rest)) + (1 - share) * covariance
        ridge = _RIDGE * self.pooled.diagonal().mean().clamp_min(_NOTHING)
        return covariance + ridge * torch.eye(len(covariance)).to(covariance)

    def likelihood(self, x: Tensor, y: Tensor, *, own: bool) -> float:
        """Mean log-likelihood of samples, up to a constant."""
        each = []
        for label in y.unique().tolist() if own else [None]:
            rows = slice(None) if label is None else y == label
            factor = torch.linalg.cholesky(self.of(label))
            away = (x[rows].flatten(1) - self.means[y[rows]]).mT
            square = torch.linalg.solve_triangular(factor, away, upper=False).square().sum(dim=0)
            each.append(-square / 2 - factor.diagonal().log().sum())
        return float(torch.cat(each).mean())


def _moved(x: Tensor, reach: int, mirrored: bool) -> Iterator[Tensor]:
    """Images, and copies moved by up to `reach` pixels in all, whose edges are repeated, and
    mirrored."""
    wide = torch.nn.functional.pad(x, (reach,) * 4, mode="replicate")
    height, width = x.shape[-2:]
    for down, right in product(range(2 * reach + 1), repeat=2):
        if abs(down - reach) + abs(right - reach) <= reach:
            copy = wide[..., down : down + height, right : right + width]
            yield copy
            if mirrored:
                yield copy.flip(-1)


@dataclass(frozen=True, kw_only=True)
class NoisyMessages:
    """Messages under Gaussian or Laplace noise.

    Attributes:
        send: What candidates x [P, K, *shape] with labels y [P, K, C] of victims int64 [P] send,
            [P, M].
        misfit: Negative log-likelihoods of what they send, and their slopes [P, M].
        information: Fisher information of every number sent about its mean, [V, M].
    """

    send: Callable[[Tensor, Tensor, Tensor], Tensor]
    misfit: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    information: Tensor


def find_messages(matcher: Matcher) -> list[NoisyMessages] | None:
    """Return the messages by which samples can be drawn; None for records, signals, images without
    SSIM or of too many numbers, and where `find_noisy_messages` finds none."""
    shape, public = matcher.encoding.shape, matcher.encoding.ctx.aux_y
    sized = len(shape) == 3 and min(shape[1:]) >= WINDOW and math.prod(shape) <= _LARGEST
    return find_noisy_messages(matcher.evidence) if sized and len(public) >= _FEWEST else None


def find_noisy_messages(evidence: Evidence) -> list[NoisyMessages] | None:
    """Return all that tells of the samples; None where a part of it has another distribution, or
    tells of something else too."""
    messages: list[NoisyMessages] = []
    for one in releases_of(evidence):
        if one.sums or one.spread is not None:
            return None
        if one.uploads is not None:
            if one.uploads.own is not None or not _is_located(one.uploads.law):
                return None
            messages.append(_noisy_upload(one.uploads))
        if one.view is not None:
            if len(one.view.noises) != 1 or not _is_located(one.view.noises[0]):
                return None
            messages.append(_noisy_smashed(one, one.view))
    return messages or None


def _is_located(law: Mechanism | None) -> bool:
    return isinstance(law, GaussianNoise | SmashedNoise | LaplaceNoise)


def _noised(
    law: Mechanism, prepared: Prepared, factor: Tensor, send: Callable[..., Tensor]
) -> NoisyMessages:
    """Messages under a law, of which every number counts by a factor [V, M]."""

    def misfit(sent: Tensor, victims: Tensor) -> tuple[Tensor, Tensor]:
        loss, slope = prepared[victims].misfit(sent)
        return loss * factor[victims], slope * factor[victims]

    information = (2.0 if isinstance(law, LaplaceNoise) else 1.0) / law.variance
    return NoisyMessages(send=send, misfit=misfit, information=factor * information)


def _noisy_upload(uploads: Uploads) -> NoisyMessages:
    assert uploads.law is not None
    everyone = torch.arange(len(uploads.values), device=uploads.values.device)
    factor = torch.ones_like(uploads.values)
    for one in (uploads.mask(everyone), uploads.sureness(everyone)):
        factor = factor if one is None else factor * one
    prepared = uploads.prepare(uploads.values, uploads.names)
    return _noised(uploads.law, prepared, factor, uploads.vector)


def _noisy_smashed(evidence: Evidence, view: SplitView) -> NoisyMessages:
    noise, present = view.noises[0], view.present.flatten(1).to(view.values)
    prepared = noise.prepared(view.values.flatten(1), noise.softness(0.0))

    def send(x: Tensor, y: Tensor, victims: Tensor) -> Tensor:
        return evidence.clients.smash(view, x).flatten(1)

    return _noised(noise, prepared, present, send)


def answer_by_posterior(matcher: Matcher, solution: Solution, ctx: Context) -> None:
    """Replace a solution's images by those of the largest mean SSIM with draws from the posterior
    around it; a victim without draws keeps its images."""
    rng = torch.Generator().manual_seed(0)
    for victim, draws in enumerate(draw_posterior(matcher, solution, ctx, rng)):
        if draws is not None:
            slots = torch.arange(draws.shape[1]).repeat(len(draws))
            nearest = most_similar(draws.flatten(0, 1), slots, draws.mean(dim=0))
            solution.images[victim] = nearest.to(solution.images)


def draw_posterior(
    matcher: Matcher, solution: Solution, ctx: Context, rng: torch.Generator
) -> list[Tensor | None]:
    """Draw every victim's samples from their posterior around a solution.

    Returns:
        Draws [S, K, *shape] in [0, 1] of each victim; None where `find_messages` finds nothing to
        draw by, and where `draw_samples` draws none.
    """
    messages, encoding = find_messages(matcher), matcher.encoding
    each: list[Tensor | None] = [None] * len(solution.failed)
    if messages is None:
        return each

    def fit(ctx: Context) -> ClassPrior:
        x = ctx.aux_x.to(ctx.device, encoding.dtype)
        return ClassPrior(x, ctx.aux_y.to(ctx.device), encoding.classes)

    prior = ctx.once(("class prior", str(encoding.dtype)), fit)
    for victim in (~solution.failed).nonzero().squeeze(1).tolist():
        x, labels = solution.images[victim].to(encoding.dtype), solution.labels[victim]
        draws, spent = draw_samples(
            messages, prior, x, labels, victim, rng, numbers_each=matcher.working_numbers
        )
        solution.evaluations += spent
        each[victim] = None if draws is None else draws.clamp(0, 1).cpu()
    return each


def draw_samples(
    messages: Sequence[NoisyMessages],
    prior: ClassPrior,
    x: Tensor,
    labels: Tensor,
    victim: int,
    rng: torch.Generator,
    *,
    numbers_each: int,
) -> tuple[Tensor | None, int]:
    """Draw a victim's samples from their posterior, with the messages linearised around an answer.

    The posterior is Gaussian in coordinates along each sample's directions, in which the prior is
    N(0, I). A draw is a public sample, moved by the Newton step of the messages' likelihood from it
    and by noise of the likelihood's information.

    Args:
        messages: All that tells of the samples.
        prior: Of samples.
        x: The answer [K, *shape].
        labels: Its labels int64 [K].
        victim: Whose messages these are.
        rng: Draws public samples and noise.
        numbers_each: Numbers that a candidate's messages take in memory.

    Returns:
        Draws [S, K, *shape], and evaluations. None where the draws' mean explains the messages
        worse than the answer does, by more nats than the messages tell coordinates: the model is
        not linear there.
    """
    samples, size = len(x), x[0].numel()
    numbers = max(samples * size, *(m.information.shape[1] for m in messages))
    count = min(_DIRECTIONS, size, max(1, min(_TOGETHER, _MOST // numbers) // samples))
    along, by = zip(*(prior.directions(int(k), count) for k in labels), strict=True)
    moves = x.new_zeros(samples, count, samples, size)
    for k in range(samples):
        moves[k, :, k] = along[k].mT
    moves = moves.view(-1, *x.shape)
    y = torch.nn.functional.one_hot(labels, prior.classes).to(x)
    whose = torch.full((1,), victim, device=x.device)
    bytes_each = x.element_size() * numbers_each

    def send(message: NoisyMessages, some: Tensor) -> Tensor:
        parts: list[Tensor] = []

        def work(part: slice) -> None:
            rows = some[part]
            with torch.no_grad():
                y_rows = y.expand(len(rows), *y.shape)
                parts.append(message.send(rows, y_rows, whose.expand(len(rows))))

        in_chunks(work, len(some), bytes_each=bytes_each, device=x.device)
        return torch.cat(parts)

    def misfit(candidate: Tensor) -> float:
        return sum(float(m.misfit(send(m, candidate[None]), whose)[0].sum()) for m in messages)

    information, slope = x.new_zeros(len(moves), len(moves)), x.new_zeros(len(moves))
    for message in messages:
        base = send(message, x[None])
        changes = (send(message, x + _STEP * moves) - base) / _STEP
        slope -= changes @ message.misfit(base, whose)[1][0]
        information += (changes * message.information[victim]) @ changes.mT
    public = torch.stack([prior.draw(int(k), rng) for k in labels], dim=1)
    away = x.flatten(1) - public
    apart = torch.cat([away[:, k] @ by[k] for k in range(samples)], dim=1)
    values, vectors = torch.linalg.eigh(information)
    values = values.clamp_min(0)
    noise = torch.randn(apart.shape, generator=rng).to(apart)
    push = slope @ vectors + (apart @ vectors) * values + noise * values.sqrt()
    steps = (push / (1 + values) @ vectors.mT).split(count, dim=1)
    moved = torch.stack([s @ a.mT for s, a in zip(steps, along, strict=True)], dim=1)
    draws = (public + moved).view(-1, *x.shape)
    told = float((values / (1 + values)).sum())
    holds = misfit(draws.mean(dim=0)) <= misfit(x) + told
    return draws if holds else None, 1 + len(moves)
