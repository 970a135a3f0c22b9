"""Matching: candidate images and labels whose messages would be what was seen.

`Matcher` adds terms (`terms`) and differentiates their sum by the candidates, which an optimiser
sees as vectors (`encoding`). It knows nothing of what the terms compare. `judge_answer` is one
measure for the answers of all attacks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.engine.encoding import Encoding
from attacks.engine.evidence import Evidence, keeping, releases_of, some_terms
from attacks.engine.observation import lawless, nothing_to_match, parse_view
from attacks.engine.optimisers import Evaluate, Phase, minimise, minimise_in_chunks
from attacks.engine.orders import link
from attacks.engine.private import with_private_parts
from attacks.engine.terms import RESOLVED, Candidate, Term, UploadLikelihood, Uploads
from bench.api import Context, Seen

_NEAR = 0.1
"""Share of a sum's square from which it is not explained, so that less is no better."""
_STEPS = 30
"""Evaluations by which pixels recover from being cut."""
_LITTLE = 0.1
"""Share of |observation|^2 from which an answer explains little."""
_BEYOND = 0.03
"""Root of how far beyond they begin, since at 0 there is no slope."""
_SUITING = 50
"""Evaluations by which own values are found that suit given images."""


class Matcher:
    """The objective over candidate images and soft labels for the victims of one `Seen`.

    beliefs: What images look like, whatever was seen.
    """

    def __init__(
        self, evidence: Evidence, encoding: Encoding, *, beliefs: Sequence[Term] = ()
    ) -> None:
        self.evidence, self.encoding, self.beliefs = evidence, encoding, beliefs

    def evaluator(
        self,
        victims: Tensor,
        labels: Tensor | None = None,
        *,
        heat: float = 0.0,
        releases: float = 1.0,
    ) -> Evaluate:
        """The optimiser's view of P problems: vectors in, losses and gradients out.

        Args:
            victims: int64 [P], whose messages each problem matches, or [P, V]: every problem is
                about all victims, whose vectors follow one another, and counts what is known of
                them together.
            labels: int64 [P, (V,) K] that are held fixed, or None to optimise label logits that
                follow a victim's images in the vector.
            heat: See `Term`.
            releases: Share of the releases that count.
        """
        encoding = self.encoding
        terms = [*some_terms(self.evidence, releases), *self.beliefs]
        if victims.dim() == 2:
            terms += self.evidence.sums

        def evaluate(z: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
            here = victims[problems].flatten()
            held = None if labels is None else labels[problems].flatten(0, -2)
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                candidate = encoding.candidate(z.view(len(here), -1), held)
                losses, outputs, slopes = zip(
                    *(term(candidate, here, heat) for term in terms), strict=True
                )
            # The problems are independent, so one backward pass gives each its own gradient.
            slope = torch.autograd.grad(outputs, z, slopes)[0]
            return _total(losses).view(len(problems), -1).sum(dim=1), slope

        return evaluate

    def losses(self, x: Tensor, y: Tensor, victims: Tensor) -> Tensor:
        """How badly candidates x [P, K, *shape], y [P, K, C] explain what was seen of the victims
        int64 [P]: [P], without any belief."""
        candidate = Candidate(x=x, y=y, vectors=x.flatten(1))
        return _total([term(candidate, victims).loss for term in self.evidence.terms])

    def judge(self, x: Tensor, y: Tensor) -> Tensor:
        """How badly one candidate for every victim explains all that was seen, and how unlike
        public samples it is: comparable between answers of any attack.

        Likelihoods are as soft as where a descent ends (see `Mechanism.softness`). The spread of
        what is compared exactly is not known, and the one that suits the candidate best stands for
        it: a squared distance r of N numbers counts as N/2 log r. So does one beside Gaussian noise
        where it exceeds what the noise explains (see `Uploads.surprise`). Of own values those count
        that were found (see `OwnValues`); see also `Uploads.without_noise`.

        Where all is exact, the prior is not held to its spread either, since a rough answer that
        explains much is nearer than a smooth one that explains little: a squared distance q from
        it counts as N/2 log(1 + q / N).

        Args:
            x: [V, K, *shape].
            y: Labels int64 [V, K].

        Returns:
            [V], the less the better; sums count for every victim alike.
        """
        evidence, encoding = self.evidence, self.encoding
        everyone = torch.arange(len(x), device=x.device)
        hot = torch.nn.functional.one_hot(y, encoding.classes).to(x)
        candidate = Candidate(x=x, y=hot, vectors=x.flatten(1))
        with torch.no_grad():
            each = [self._judge_term(term, candidate, everyone) for term in evidence.terms]
            loss, away = torch.stack(each).sum(dim=0), encoding.frame.distance(x, y)
            own = next((u.own for u in keeping(evidence)), None)
            if own is not None:
                units = own.found
                loss = loss if units is None else loss + units.square().sum(dim=1) / 2
            elif not evidence.noisy:
                share = loss / evidence.square.clamp_min(RESOLVED)
                loss = encoding.pixels / 2 * share.clamp_min(RESOLVED).log()
                away = encoding.pixels / 2 * torch.log1p(2 * away / encoding.pixels)
            for shared in evidence.sums:
                known = min(len(shared.mean), len(x) * encoding.pixels)
                share = shared.share_unexplained(candidate).clamp(RESOLVED, _NEAR)
                loss = loss + known / 2 * share.log() / len(x)
            return loss + away

    def _judge_term(self, term: Term, candidate: Candidate, everyone: Tensor) -> Tensor:
        evidence, encoding = self.evidence, self.encoding
        if isinstance(term, UploadLikelihood):
            uploads, x, y = term.uploads, candidate.x, candidate.y
            exact = uploads.without_noise(x, y, everyone, encoding.pixels)
            if exact is not None:
                return exact
            if uploads.weighs and (evidence.noisy or keeping(evidence)):
                return uploads.surprise(x, y, everyone)
        return term(candidate, everyone).loss

    def reorder(self, x: Tensor, y: Tensor) -> int:
        """Improve the guessed orders of samples, where local epochs hide them, by images x
        [V, K, *shape] with labels y [V, K]; see `Orders.improve`."""
        hot = torch.nn.functional.one_hot(y, self.encoding.classes).to(x)
        bytes_each = 8 * self.working_numbers
        return sum(
            u.orders.improve(u.in_order, u.values, x, hot, bytes_each=bytes_each)
            for u in (one.uploads for one in releases_of(self.evidence))
            if u is not None and u.orders is not None
        )

    @property
    def working_numbers(self) -> int:
        """Estimated numbers that one problem's evaluation holds: gradients and slopes, and
        activations as a multiple of the pixels."""
        variables = sum(v.numel() for v in self.evidence.clients.start.values())
        return 6 * variables + 256 * self.encoding.pixels


def _total(losses: Sequence[Tensor]) -> Tensor:
    """Their sum [P], in the first one's precision."""
    return sum(losses[1:], start=losses[0])


# --- answers of all attacks by one measure -------------------------------------------------------
def build_matcher(seen: Seen, ctx: Context) -> Matcher | None:
    """Return what `judge_answer` needs to know of what was seen; None where no answer counts.

    Raises NonFiniteError for a value that is not finite.
    """
    releases = with_private_parts(link(parse_view(seen), ctx), ctx)
    last = releases[-1]
    if nothing_to_match(last) is not None or lawless(last) is not None:
        return None
    arranged = last.granted is not None
    evidence = Evidence(releases, ctx, dtype=torch.float64, arranged=arranged)
    encoding = Encoding(ctx, samples=evidence.clients.samples, dtype=evidence.dtype, framed=True)
    return Matcher(evidence, encoding)


def judge_answer(matcher: Matcher, images: Tensor, labels: Tensor) -> Tensor:
    """Return judged losses [V] of images [V, K, *shape] with labels int64 [V, K].

    Images are of the matcher's precision. Losses are infinite where none is finite; see
    `Matcher.judge`.
    """
    images = _arrange(matcher, images, labels)
    if keeping(matcher.evidence):
        suit(matcher, images, labels)
    return matcher.judge(images, labels).nan_to_num(torch.inf, posinf=torch.inf)


def share_unexplained(matcher: Matcher, images: Tensor, labels: Tensor) -> Tensor | None:
    """Squared distance [V] of what was seen from what the images would give, as a share of the
    square of what was seen; None under noise, and where clients kept values to themselves."""
    evidence = matcher.evidence
    if evidence.noisy or keeping(evidence):
        return None
    images = _arrange(matcher, images, labels)
    hot = torch.nn.functional.one_hot(labels, matcher.encoding.classes).to(images)
    everyone = torch.arange(len(images), device=images.device)
    with torch.no_grad():
        share = matcher.losses(images, hot, everyone) / evidence.square
    return share.nan_to_num(torch.inf, posinf=torch.inf)


def _arrange(matcher: Matcher, images: Tensor, labels: Tensor) -> Tensor:
    """Return the images as they explain most, see `_uncut`, and let local epochs, where they hide
    the samples' order, use it as suits them best; what a wrong order counts as noise is the same
    for all answers."""
    if not matcher.evidence.noisy and matcher.encoding.image:
        images = _uncut(matcher.evidence, images, labels)
    hidden = [one.orders for one in releases_of(matcher.evidence) if one.orders is not None]
    noises = [orders.std for orders in hidden]
    matcher.reorder(images, labels)
    for orders, std in zip(hidden, noises, strict=True):
        orders.std = std
    return images


def _uncut(evidence: Evidence, images: Tensor, labels: Tensor) -> Tensor:
    """Return images [V, K, *shape] whose black and white pixels lie below 0 and above 1 where that
    explains more.

    Answers are cut to [0, 1], which leaves more unexplained than the images did that they were cut
    from: their attacks would be run at twice their budget, and no later one would spare their
    victims. An answer that explains little is left as it is.
    """
    encoding = Encoding(evidence.ctx, samples=evidence.clients.samples, dtype=evidence.dtype)
    matcher = Matcher(evidence, encoding)
    hot = torch.nn.functional.one_hot(labels, encoding.classes).to(images)
    with torch.no_grad():
        losses = matcher.losses(images, hot, torch.arange(len(images), device=images.device))
    explained = (losses < _LITTLE * evidence.square).nonzero().squeeze(1)
    if not len(explained):
        return images
    evaluate = matcher.evaluator(explained, labels[explained])
    plain = encoding.vectors_of(images[explained], labels[explained])
    beyond = (plain >= 1).to(plain) - (plain <= 0).to(plain)  # which way a pixel was cut

    def evaluate_cut(z: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        way = beyond[problems]
        loss, gradient = evaluate(plain[problems] + way * z.square(), problems)
        return loss, gradient * 2 * way * z

    stop = torch.zeros_like(plain[:, 0])
    phase = Phase(evaluate=evaluate_cut, stop=stop, dtype=encoding.dtype)
    minimum = minimise([phase], torch.full_like(plain, _BEYOND), max_evaluations=_STEPS)
    moved = plain + beyond * minimum.x.square()
    better = minimum.loss < evaluate(plain, torch.arange(len(plain), device=plain.device))[0]
    uncut = images.clone()
    uncut[explained] = encoding.images(
        torch.where(better[:, None], moved, plain), labels[explained]
    )
    return uncut


def suit(matcher: Matcher, images: Tensor, labels: Tensor) -> None:
    """Find the own values that suit given images [V, K, *shape] and labels [V, K] best, under the
    noise that suits both (see `Uploads.surprise`)."""
    uploads, encoding = keeping(matcher.evidence), matcher.encoding
    y = torch.nn.functional.one_hot(labels, encoding.classes).to(images)
    start = images.new_zeros(len(images), count_own_values(uploads))

    def evaluate(z: Tensor, victims: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            x, hot = images[victims], y[victims]
            losses = [u.surprise(x, hot, victims, z) for u in uploads]
            loss = torch.stack(losses).sum(dim=0) + z.square().sum(dim=1) / 2
            return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]

    units, _, _ = minimise_in_chunks(
        evaluate, start, numbers_each=matcher.working_numbers, evaluations=_SUITING
    )
    set_own_values(uploads, units)


def count_own_values(uploads: Sequence[Uploads]) -> int:
    """Of own values of a victim."""
    return next((sum(u.own.sizes.values()) for u in uploads if u.own is not None), 0)


def set_own_values(uploads: Sequence[Uploads], units: Tensor) -> None:
    for one in uploads:
        if one.own is not None:
            one.own.found = units
